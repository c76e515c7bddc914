"""The command's entry point: fast help, and an exit code and one clear line for every failure."""

import importlib
import logging
import os
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from tests.guard import GUARD_S

from dualpath import __version__
from dualpath.cli.main import command_module, main, subcommands
from dualpath.core.errors import ConfigError


@pytest.fixture
def replay(monkeypatch):
    """Stand-in for the module of `dualpath replay`; its `run` is set by the test."""
    module: Any = ModuleType("dualpath.cli.replay")

    def add_parser(subparsers):
        subparsers.add_parser("replay").add_argument("--agents", type=int, default=1)

    module.add_parser = add_parser
    module.run = lambda args: 0
    monkeypatch.setitem(sys.modules, "dualpath.cli.replay", module)
    return module


def test_the_subcommand_gets_its_arguments_and_returns_the_exit_code(replay):
    seen = []

    def run(args):
        seen.append((args.subcommand, args.agents))
        return 7

    replay.run = run
    assert main(["replay", "--agents", "3"]) == 7
    assert seen == [("replay", 3)]


def test_a_dualpath_error_is_one_line_and_exit_code_2(replay, capsys):
    def run(args):
        raise ConfigError("port 80 is in use;\n  choose another with --port")

    replay.run = run
    assert main(["replay"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "dualpath: port 80 is in use; choose another with --port\n"
    assert captured.out == ""


def test_an_interrupt_is_exit_code_130_without_a_traceback(replay, capsys):
    def run(args):
        raise KeyboardInterrupt

    replay.run = run
    assert main(["replay"]) == 130
    assert capsys.readouterr().err == ""


def test_a_defect_has_its_traceback_and_exit_code_1(replay, capsys):
    def run(args):
        raise ZeroDivisionError("a defect")

    replay.run = run
    assert main(["replay"]) == 1
    assert "ZeroDivisionError: a defect" in capsys.readouterr().err


def test_log_lines_of_commands_have_time_and_level(replay, monkeypatch, capsys):
    def run(args):
        logging.getLogger("dualpath.router.control").info("engine pe-0 joined")
        logging.getLogger("asyncio").info("of interest to nobody")
        logging.getLogger("asyncio").error("a socket is lost")
        return 0

    replay.run = run
    with monkeypatch.context() as patched:
        patched.setattr(logging.getLogger(), "handlers", [])  # pytest's, which a user has not
        assert main(["replay"]) == 0
    first, second = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(f"{time} INFO dualpath.router.control: engine pe-0 joined", first)
    assert re.fullmatch(f"{time} ERROR asyncio: a socket is lost", second)


def test_unknown_arguments_are_refused_by_name(replay, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["replay", "--agent-smith", "3"])
    assert refused.value.code == 2
    assert capsys.readouterr().err == (
        "dualpath: --agent-smith is unknown; did you mean --agents?; see `dualpath replay --help`\n"
    )


def test_an_unknown_subcommand_is_refused_with_the_choices(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["dance"])
    assert refused.value.code == 2
    message = capsys.readouterr().err
    assert "'dance'" in message
    assert all(name in message for name in subcommands())


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_subcommand_and_imports_none(arguments, capsys, monkeypatch):
    def refuse(name):
        raise AssertionError(f"{name} was imported for the help")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in subcommands())


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"dualpath {__version__}\n"


def test_help_and_model_help_load_no_heavy_package():
    program = (
        "import sys\n"
        "from dualpath.cli.main import main\n"
        "for arguments in (['--help'], ['model', '--help']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'zmq', 'aiohttp'} & set(sys.modules)))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=GUARD_S,
    )
    assert finished.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", [name for name in subcommands()])
def test_every_subcommand_has_its_module_and_help(name, capsys):
    module = command_module(name)
    assert module is not None
    assert callable(module.run)
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    assert f"dualpath {name}" in capsys.readouterr().out


def test_a_model_that_cannot_be_written_is_reported(tmp_path, capsys):
    (tmp_path / "notes.txt").touch()
    assert main(["model", "tiny-qwen2", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path) in message
    assert "remove it or choose another" in message
