"""`dualpath doctor`: checks the node it runs on and prints remedies."""

import argparse
import textwrap
from typing import TYPE_CHECKING

from dualpath.cli.output import add_json_argument, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.launch.doctor.checks import CheckSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath.launch.doctor.finding import Finding

EXIT_ERRORS = 1
_WIDTH = 100
#: Statuses counted in the last line.
_COUNTED = ("error", "warning")
_EPILOG = """\
dualpath doctor
dualpath doctor --storage kv --storage-bytes 1GiB --ports 8001 --router tcp://10.0.0.1:5700
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a node for everything that engines need, and print remedies",
        description="Checks the node it runs on: software, compute network, memory and limits; "
        "storage, ports and the router's address if they are given. Writes only a temporary "
        "file on the storage. Exit code 1 if an engine could not serve.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_json_argument(parser)
    add_settings(parser, CheckSettings)


def run(args: argparse.Namespace) -> int:
    """Check and print; returns 1 if a check failed.

    Raises:
        ConfigError: an invalid size.
    """
    from dualpath.launch.doctor.checks import examine
    from dualpath.launch.doctor.finding import has_errors
    from dualpath.launch.doctor.node import Node

    findings = list(examine(flag_settings(args, CheckSettings), Node()))
    if not wrote_json(args, findings):
        print("\n".join(table(findings)))
    return EXIT_ERRORS if has_errors(findings) else 0


def table(findings: "Sequence[Finding]") -> list[str]:
    """Return the lines of the table: status, check, finding; below it the remedy."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{finding.status.value:7}  {finding.check:{width}}  "
        needed = f" (needed: {finding.limit})" if finding.limit else ""
        lines += _wrapped(head, finding.found + needed)
        if finding.remedy:
            lines += _wrapped(" " * len(head) + "-> ", finding.remedy)
    counts = [f.status.value for f in findings]
    lines.append(", ".join(_counted(counts.count(status), status) for status in _COUNTED))
    return lines


def _counted(number: int, status: str) -> str:
    return f"{number} {status}" if number == 1 else f"{number} {status}s"


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False
    )
