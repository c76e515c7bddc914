"""What commands print beside reports: JSON, progress, shares and bytes as text."""

import argparse
import sys

from dualpath.report.files import as_json, require_writable, undrawn, write_file

_STANDARD_OUTPUT = "-"


def add_json_argument(parser: argparse.ArgumentParser, what: str = "the same") -> None:
    """Add ``--json``."""
    parser.add_argument(
        "--json",
        metavar="FILE.json",
        help=f"write {what} as data; {_STANDARD_OUTPUT}: print that and nothing else",
    )


def require_json_writable(args: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for a file that cannot be written: now, not after a long run."""
    require_writable("--json", None if args.json == _STANDARD_OUTPUT else args.json)


def wrote_json(args: argparse.Namespace, document: object) -> bool:
    """Write a document where ``--json`` says; return whether nothing else is to be printed.

    Raises ``ConfigError`` for a file that cannot be written.
    """
    if args.json == _STANDARD_OUTPUT:
        print(as_json(document).decode(), end="")
        return True
    if args.json is not None:
        write_file(args.json, as_json(document))
    return False


def say(text: str) -> None:
    """Report progress on standard error, where it is in no result's way."""
    print(f"dualpath: {text}", file=sys.stderr, flush=True)


def say_if_undrawn(path: object) -> None:
    """Say before a long run that what is written to ``path`` will lack its plots, if so."""
    if path and (why := undrawn()):
        say(f"{path}: {why}")


def percent(share: float, digits: int = 1) -> str:
    """Return a signed percentage."""
    return f"{share * 100:+.{digits}f} %"


def gigabytes(amount: float) -> str:
    """Return bytes (or bytes/s) in GB with three significant digits, whole from 100 on."""
    value = amount / 1e9
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
