"""Tables and remarks of the commands that compute: aligned text, the same on every terminal."""

from collections.abc import Sequence

TEXT = "text"
JSON = "json"
FORMATS = (TEXT, JSON)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their columns: the first column to the left, the others to the right."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for number, line in enumerate(lines):
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def percent(share: float, digits: int = 1) -> str:
    """Return a signed percentage."""
    return f"{share * 100:+.{digits}f} %"


def gigabytes(amount: float) -> str:
    """Return bytes (or bytes/s) in GB with three significant digits, whole from 100 on."""
    value = amount / 1e9
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
