"""Output of commands beside reports: JSON, progress, formatted percentages and bytes."""

import argparse
import sys
from typing import TYPE_CHECKING

from dualpath.cli.main import OutputPath
from dualpath.report.files import as_json, no_plots_reason, write_file

if TYPE_CHECKING:
    from dualpath.workload.formats.lines import SkippedLines

_STANDARD_OUTPUT = "-"


def add_json_argument(parser: argparse.ArgumentParser, content: str = "the output") -> None:
    """Add ``--json``; ``content`` describes the document in the help."""
    parser.add_argument(
        "--json",
        type=OutputPath,
        metavar="FILE.json",
        help=f"write {content} as JSON; {_STANDARD_OUTPUT}: print only the JSON",
    )


def wrote_json(args: argparse.Namespace, document: object) -> bool:
    """Write a document as ``--json`` requests; return whether it replaces the printed output.

    Raises ``ConfigError`` for a file that cannot be written.
    """
    if args.json == _STANDARD_OUTPUT:
        print(as_json(document).decode(), end="")
        return True
    if args.json is not None:
        write_file(args.json, as_json(document))
    return False


def print_progress(text: str) -> None:
    """Print progress to standard error, apart from results."""
    print(f"dualpath: {text}", file=sys.stderr, flush=True)


def print_skipped(skipped: "SkippedLines") -> None:
    """Print to standard error which lines of a trace were left out."""
    for line in skipped.report():
        print(line, file=sys.stderr)


def warn_if_no_plots(path: object) -> None:
    """Warn before a long run if the report at ``path`` will have no plots."""
    if path and (why := no_plots_reason()):
        print_progress(f"{path}: {why}")


def percent(share: float, digits: int = 1) -> str:
    """Return a signed percentage."""
    return f"{share * 100:+.{digits}f} %"


def gigabytes(amount: float) -> str:
    """Return bytes (or bytes/s) in GB with three significant digits, integers from 100 on."""
    value = amount / 1e9
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
