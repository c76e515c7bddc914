"""The fenced blocks of the documentation, their marks, and the commands in them.

A mark is an HTML comment on the line above a block:

    <!-- not run: REASON -->         checked as far as that goes without running it
    <!-- run with: OPTIONS -->       run with OPTIONS appended to every command, to make it small
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_MARK = re.compile(r"^<!-- (not run|run with): (.+) -->$")
_FENCE = re.compile(r"^\s*```(\w*)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins (line of the fence, from 1), its language, text and marks."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str = ""
    run_with: str = ""

    @property
    def place(self) -> str:
        """Page and line, as a reader and a test's name want them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of `page`, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
        mark = _MARK.match(lines[number - 1]) if number else None
        yield Block(
            page=page,
            line=number + 1,
            language=fence[1],
            text="\n".join(lines[number + 1 : end]) + "\n",
            not_run=mark[2] if mark and mark[1] == "not run" else "",
            run_with=mark[2] if mark and mark[1] == "run with" else "",
        )
        number = end + 1


def marks(page: Path) -> int:
    """Return how many lines of `page` look like a mark, whether they stand above a block or not."""
    text = page.read_text(encoding="utf-8")
    return len(re.findall(r"<!-- (?:not run|run with)\b", text))


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a console or shell block.

    In a console block a command begins with ``$`` and other lines are output; in a shell block
    every line is one. A command goes on after a backslash and inside quotes. Commands joined
    with ``&&`` count one by one.

    Raises:
        ValueError: a quotation that is never closed.
    """
    found: list[list[str]] = []
    prompt = "$ " if block.language == "console" else ""
    lines = iter(block.text.splitlines())
    for line in lines:
        if not line.startswith(prompt):
            continue
        command = line[len(prompt) :]
        while True:
            if command.endswith("\\"):
                command = command[:-1] + next(lines)
                continue
            try:
                found += _joined(shlex.split(command, comments=True))
                break
            except ValueError:
                more = next(lines, None)
                if more is None:
                    raise
                command += "\n" + more
    return found


def _joined(words: list[str]) -> Iterator[list[str]]:
    """Yield the commands that `words` join with ``&&``; none for a comment or an empty line."""
    while "&&" in words:
        end = words.index("&&")
        yield words[:end]
        words = words[end + 1 :]
    if words:
        yield words
