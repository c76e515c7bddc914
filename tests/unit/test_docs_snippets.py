"""What the documentation asks a reader to type is accepted, and run where that is cheap.

Each console and Python block of README.md and docs/ is run in a folder with a small cluster, model
and trace, or says in a comment above it why not. Blocks that are not run are still checked: Python
compiles, `dualpath` commands are parsed by the real parsers, `make` targets and scripts exist.
"""

import argparse
import functools
import lzma
import re
import shutil
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.docs_blocks import PAGES, ROOT, Block, blocks, commands, marks
from tests.tls_authority import tls_files

from dualpath.cli.main import command_module, main, subcommands
from dualpath_sim.cli.experiments import LazyParser

BLOCKS = [block for page in PAGES for block in blocks(page)]
CONSOLE = [block for block in BLOCKS if block.language in ("console", "bash", "sh", "shell")]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SERVING = [block for block in CONSOLE if "$ dualpath serve" in block.text]

#: Subcommands that end by themselves and write nothing outside the working directory.
SAFE = {"table1", "bounds", "workingset", "simulate", "plan", "qos", "config"}

#: Words that stand for a reader's own numbers.
NUMBERS = {"ALPHA": "1", "BETA": "1"}


def place(block: Block) -> str:
    return block.place


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    log = ROOT / "tests" / "parity" / "recorded" / "dualpath.jsonl.xz"
    Path("events.jsonl").write_bytes(lzma.decompress(log.read_bytes()))
    Path("storage.key").write_text("0" * 64)
    Path("storage.key").chmod(0o600)
    for name in ("sql", "chat"):
        Path("mnt", "adapters", name).mkdir(parents=True)
        Path("mnt", "adapters", name, "adapter_config.json").write_text("{}")
    if find_spec("cryptography") is not None:
        tls = tls_files(tmp_path)
        Path(tls.certificate).rename("cert.pem")
        Path(tls.key).rename("key.pem")
    return tmp_path


def here(words: list[str]) -> list[str]:
    """Return a command's words with a reader's own numbers, and with /mnt below this directory."""
    return [NUMBERS.get(word, word).replace("/mnt/", f"{Path.cwd()}/mnt/") for word in words]


@functools.cache
def subparser(name: str) -> argparse.ArgumentParser:
    """The real parser of a subcommand."""
    assert name in subcommands(), f"no subcommand {name!r}"
    subparsers = argparse.ArgumentParser(prog="dualpath").add_subparsers()
    module = command_module(name)
    assert module is not None
    module.add_parser(subparsers)
    return subparsers.choices[name]


def refused(words: list[str]) -> bool:
    """Whether the parser of a `dualpath` command refuses its arguments."""
    try:
        subparser(words[1]).parse_args([NUMBERS.get(word, word) for word in words[2:]])
    except SystemExit as error:
        return error.code != 0
    return False


def check(words: list[str], where: str) -> None:
    """Fail if the command could not be started as it is written."""
    if words[0] == "dualpath":
        assert not refused(words), f"{where}: refused: {' '.join(words)}"
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in words[1:]:
            known = "=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE)
            assert known, f"{where}: {target}"
    if words[0].endswith("python"):
        for script in (word for word in words[1:2] if word.endswith(".py")):
            assert (ROOT / script).exists(), f"{where}: {script}"


def run_python(text: str, block: Block) -> None:
    exec(compile(text, block.place, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_accepted(page):
    for block in (block for block in CONSOLE if block.page == page):
        found = commands(block)
        assert found, f"{block.place}: no command: in a console block begin commands with '$ '"
        for words in found:
            check(words, block.place)


@pytest.mark.parametrize("block", [b for b in CONSOLE if not b.not_run], ids=place)
def test_commands_run(block, folder, capsys):
    for words in commands(block):
        if words[:2] == ["python", "-c"]:
            run_python(words[2], block)
            continue
        assert words[0] == "dualpath", f"say above the block why {words[0]!r} is not run"
        safe = words[1] in SAFE or {"--dry-run", "--help"} & set(words)
        assert safe, f"say above the block why 'dualpath {words[1]}' is not run"
        assert main([*here(words[1:]), *block.run_with.split()]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("block", SERVING, ids=place)
def test_a_page_that_serves_starts_commands_that_can_be_printed(block, folder, capsys):
    for words in commands(block):
        # The lines of the page on GPUs name devices, which few machines have.
        if words[:2] == ["dualpath", "serve"] and "--devices" not in words:
            free = [] if "--port" in words else ["--port", "0"]  # that of the page may be taken
            assert main(["serve", "--dry-run", *free, *here(words[2:])]) == 0
            assert "dualpath router" in capsys.readouterr().out


def test_python_compiles():
    for block in PYTHON:
        compile(block.text, block.place, "exec")


@pytest.mark.parametrize("block", [b for b in PYTHON if not b.not_run], ids=place)
def test_python_runs(block, folder, capsys):
    run_python(block.text, block)
    assert capsys.readouterr().out


def test_every_mark_stands_right_above_a_block_and_names_tests_that_exist():
    for page in PAGES:
        marked = [b for b in BLOCKS if b.page == page and (b.not_run or b.run_with)]
        assert len(marked) == marks(page), page
    for block in BLOCKS:
        for name in re.findall(r"tests/[\w/]+\.py", block.not_run):
            text = (ROOT / name).read_text(encoding="utf-8")
            typed = block.page.name in text or "/test_pages_" not in name
            assert typed, f"{block.place}: {name} does not type this page"


def option_names(parser, words):
    """Options of a parser and of its subcommands that ``words`` name; of all where a word stands
    for any of them.
    """
    if isinstance(parser, LazyParser):
        parser.complete()
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            named = [child for name, child in action.choices.items() if name in words]
            for child in named or action.choices.values():
                yield from option_names(child, words)


def test_commands_named_in_the_text_exist_with_their_options():
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for span in re.findall(r"`dualpath ([^`]+)`", prose):
            name, *rest = span.split()
            if name == "SUBCOMMAND":
                continue
            options = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert options <= set(option_names(subparser(name), rest)), f"{page}: {span}"


def test_the_cluster_that_is_described_is_the_example():
    (shown,) = (b for b in BLOCKS if b.page.name == "simulate.md" and b.language == "toml")
    example = (ROOT / "examples" / "cluster.toml").read_text(encoding="utf-8")
    assert tomllib.loads(shown.text) == tomllib.loads(example)
