"""Writes the two tables of a session into the reference of the control protocol.

python docs/generate_control_protocol.py          write docs/reference/control-protocol.md
python docs/generate_control_protocol.py --check  exit with 1 if it is not current
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualpath.core.sessions import ENGINE_TABLE, ROUTER_TABLE, Transition

PAGE = Path(__file__).parent / "reference" / "control-protocol.md"
_MARK = "<!-- generated: {} -->\n"


def table(rows: Sequence[Transition[Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| state | what happens | what it does | then |", "|---|---|---|---|"]
    for row in rows:
        actions = "; ".join(row.actions) or "-"
        lines.append(f"| {row.state} | {row.event} | {actions} | {row.next_state} |")
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """Return the page with its tables as the code has them."""
    for name, rows in (("engine", ENGINE_TABLE), ("router", ROUTER_TABLE)):
        head, _, rest = page.partition(_MARK.format(name))
        _, end, tail = rest.partition(_MARK.format("end"))
        page = f"{head}{_MARK.format(name)}\n{table(rows)}\n{end}{tail}"
    return page


def main(arguments: Sequence[str]) -> int:
    """Write or check the page; return the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    current = with_tables(page)
    if "--check" in arguments:
        return int(page != current)
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
