"""The page of error texts matches the code: every error has its line, every text exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dualpath.core import errors
from dualpath.core.errors import DualPathError
from dualpath.router.token_api.statuses import status_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text(encoding="utf-8")
#: What stands on the page for a value, and takes its place in messages of the source below.
GAP = "…"
#: No answer to a client carries it.
NOWHERE = "\u2013"

ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, DualPathError) and kind is not DualPathError
}


def rows(head: str) -> list[list[str]]:
    """Cells of the rows of all tables with a first column of this name."""
    found = []
    for table in re.findall(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        found += [line.strip("| \n").split(" | ") for line in table.splitlines()]
    return found


TEXTS = [cells[0].strip("`") for cells in rows("text")]


def test_every_error_has_a_line_with_the_status_that_a_client_sees() -> None:
    lines = {cells[0].strip("`"): cells[1] for cells in rows("error")}
    assert set(lines) == set(ERRORS)
    for name, status in lines.items():
        kind = ERRORS[name]
        error = kind("reason", "why") if name == "EngineRefusedError" else kind("why")
        assert status in (NOWHERE, str(status_of(error))), name
    assert {name for name, status in lines.items() if status == NOWHERE} == {
        "ConfigError", "TraceError", "StorageError", "EngineRefusedError", "HitLostError",
    }  # fmt: skip


def test_every_text_occurs_in_the_code() -> None:
    assert len(TEXTS) > 40
    assert [text for text in TEXTS if not is_in_the_code(text)] == []


def is_in_the_code(text: str) -> bool:
    parts = [re.escape(part.strip()) for part in text.split(GAP) if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(message) for message in messages())


#: Packages with messages for clients and operators; a lab's messages are not on the page.
SPEAKERS = (
    *(
        "cli",
        "core",
        "engine",
        "launch",
        "node",
        "policy",
        "router",
        "storage",
        "transport",
        "vllm",
    ),
)


@cache
def messages() -> tuple[str, ...]:
    """All texts of the system but docstrings, with a gap for each value that is put in."""
    found: list[str] = []
    for folder in SPEAKERS:
        for file in sorted((ROOT / "src" / "dualpath" / folder).rglob("*.py")):
            found += texts(ast.parse(file.read_text(encoding="utf-8")))
    return tuple(found)


def texts(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in child.values)
            yield "".join(map(str, parts))
        elif isinstance(child, ast.Constant):
            if isinstance(child.value, str) and not isinstance(node, ast.Expr):
                # What logging puts in is a gap as well.
                yield re.sub(r"%[sdrg]|%\.\d[fg]", GAP, child.value)
        else:
            yield from texts(child)
