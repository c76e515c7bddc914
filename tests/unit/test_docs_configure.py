"""The page on settings shows what `dualpath config check` says of its file and variables."""

import re
from pathlib import Path

import pytest
from tests.docs_blocks import ROOT, blocks, commands

from dualpath.cli.main import main

PAGE = [*blocks(ROOT / "docs" / "how-to" / "configure.md")]


def test_the_rows_of_the_page_are_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (file,) = (block for block in PAGE if block.language == "toml")
    Path("cluster.toml").write_text(file.text)
    (shown,) = (block for block in PAGE if "config check --config" in block.text)
    (words,) = commands(shown)
    assert main(words[1:]) == 0
    printed = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    rows = [re.sub(" +", " ", line) for line in shown.text.splitlines()[1:]]
    assert len(rows) > 3
    assert [line for line in printed if line in rows] == rows


def test_the_variables_of_the_page_are_settings_of_engines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shell,) = (block for block in PAGE if "$ export" in block.text)
    variables = dict(word.split("=", 1) for words in commands(shell) for word in words[1:])
    assert len(variables) == 4
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "check"]) == 0
    origins = re.findall(r"environment: (\w+)$", capsys.readouterr().out, re.MULTILINE)
    assert sorted(origins) == sorted(variables)
