"""The tables of the page on sizes are what the commands above them print."""

import re

import pytest
from tests.docs_blocks import ROOT, Block, blocks, commands

from dualpath.cli.main import main

PAGE = ROOT / "docs" / "how-to" / "size.md"
TABLES = [b for b in blocks(PAGE) if "workingset" in b.text and "--agents-per-s" not in b.text]


@pytest.mark.parametrize("block", TABLES, ids=lambda block: block.place)
def test_the_table_below_a_command_is_what_it_prints(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    (words,) = commands(block)
    assert main(words[1:]) == 0
    printed = capsys.readouterr().out.split("\n\n")[0].splitlines()
    rows = [cells(line, "[│┃]") for line in printed if re.search("[│┃]", line)]
    below = PAGE.read_text(encoding="utf-8").splitlines()[block.line + 2 :]
    table = [line.strip("|") for line in below[: len(rows) + 2] if line.startswith("|")]
    assert [cells(line, r"\|") for line in table if "---" not in line] == rows


def test_both_tables_are_compared_and_have_a_row_for_each_model() -> None:
    assert len(TABLES) == 2
    for block in TABLES:
        (words,) = commands(block)
        assert len(words[words.index("--model") + 1].split(",")) == 7


def cells(line: str, border: str) -> list[str]:
    return [cell.strip() for cell in re.split(border, line)]
