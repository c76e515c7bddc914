"""What commands print beside reports: JSON, progress, shares and bytes as text."""

import sys

import msgspec

TEXT = "text"
JSON = "json"
FORMATS = (TEXT, JSON)


def print_json(value: object) -> None:
    """Print plain data or structs as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def say(text: str) -> None:
    """Report progress on standard error, where it is in no result's way."""
    print(f"dualpath: {text}", file=sys.stderr, flush=True)


def percent(share: float, digits: int = 1) -> str:
    """Return a signed percentage."""
    return f"{share * 100:+.{digits}f} %"


def gigabytes(amount: float) -> str:
    """Return bytes (or bytes/s) in GB with three significant digits, whole from 100 on."""
    value = amount / 1e9
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
