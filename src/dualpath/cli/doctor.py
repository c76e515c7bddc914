"""`dualpath doctor`: checks the node it runs on, and says what to fix."""

import argparse
import textwrap
from typing import TYPE_CHECKING

from dualpath.cli.output import FORMATS, JSON, TEXT, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath.ops.doctor.examination import Wanted
    from dualpath.ops.doctor.finding import Finding

MIB = 1 << 20
EXIT_ERRORS = 1
_WIDTH = 100
_EPILOG = """\
dualpath doctor
dualpath doctor --storage kv --storage-mib 1024 --ports 8001 --control tcp://10.0.0.1:5700
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a node for everything that engines need, and say what to fix",
        description="Checks the node it runs on: software, compute network, memory and limits; "
        "storage, ports and the router's address if they are given. Writes nothing but a temporary "
        "file on the storage. Exit code 1 if an engine could not serve.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--storage", default="", metavar="PATH", help="measure this storage")
    parser.add_argument(
        "--storage-mib", type=int, default=256, metavar="N", help="size of the temporary file"
    )
    parser.add_argument(
        "--snic-mb-per-s", type=float, default=0.0, metavar="N", help="reads should reach this rate"
    )
    parser.add_argument(
        "--buffer-mib", type=int, default=1024, metavar="N", help="PE or DE buffer of an engine"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where the ports are to be listened on")
    parser.add_argument(
        "--ports", type=int, nargs="+", default=[], metavar="PORT", help="should be free"
    )
    parser.add_argument(
        "--control", default="", metavar="TCP-ADDRESS", help="the router's; should be reachable"
    )
    parser.add_argument(
        "--interface", default="", metavar="NAME", help="of the compute network; default: by route"
    )
    parser.add_argument(
        "--skip", nargs="+", choices=("vllm", "nixl"), default=[], help="leave out these imports"
    )
    parser.add_argument("--format", choices=FORMATS, default=TEXT, help="what to print")


def run(args: argparse.Namespace) -> int:
    """Check and print; returns 1 if a check failed.

    Raises:
        ConfigError: a size that is no size.
    """
    from dualpath.ops.doctor.examination import examine
    from dualpath.ops.doctor.finding import has_errors
    from dualpath.ops.doctor.node import Node

    findings = list(examine(_wanted(args), Node()))
    if args.format == JSON:
        print_json(findings)
    else:
        print("\n".join(table(findings)))
    return EXIT_ERRORS if has_errors(findings) else 0


def _wanted(args: argparse.Namespace) -> "Wanted":
    from dualpath.ops.doctor.examination import Wanted

    return Wanted(
        storage=args.storage,
        storage_bytes=args.storage_mib * MIB,
        storage_bytes_per_s=args.snic_mb_per_s * 1e6,
        buffer_bytes=args.buffer_mib * MIB,
        host=args.host,
        ports=tuple(args.ports),
        control=args.control,
        interface=args.interface,
        skip=frozenset(args.skip),
    ).checked()


def table(findings: "Sequence[Finding]") -> list[str]:
    """Return the lines of the table: status, check, what was found; below it what to do."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{finding.status.value:7}  {finding.check:{width}}  "
        needed = f" (needed: {finding.limit})" if finding.limit else ""
        lines += _wrapped(head, finding.found + needed)
        if finding.remedy:
            lines += _wrapped(" " * len(head) + "-> ", finding.remedy)
    counts = [f.status.value for f in findings]
    lines.append(f"{counts.count('error')} errors, {counts.count('warning')} warnings")
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False
    )
