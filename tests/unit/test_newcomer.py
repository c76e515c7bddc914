"""README's commands run unchanged: each is known, succeeds, and does what README says."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs_blocks import ROOT

from dualpath_lab.benchmarks.newcomer.__main__ import (
    STEPS,
    CommandFailedError,
    Terminal,
    main,
    typed,
)

GUARD_S = 60.0


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    created = Terminal(tmp_path, dict(os.environ), lambda line: None)
    yield created
    created.close()


def test_the_steps_are_exactly_the_commands_of_readme() -> None:
    assert {one.step for one in typed(ROOT / "README.md")} == set(STEPS)


def test_make_runs_it_with_a_python_that_has_nothing_installed() -> None:
    python = f"PYTHON={Path(sys.base_prefix, 'bin', 'python3')}"
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "newcomer", python, "NEWCOMER=--help"],
        env=without,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "first hour" in shown.stdout


def test_an_unknown_command_is_named_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A\n\n```console\n$ dualpath fly\n```\n")
    with pytest.raises(LookupError, match=r"README.md:3: 'dualpath fly'"):
        typed(page)


def test_a_terminal_has_the_same_state_between_commands(terminal: Terminal) -> None:
    terminal.run("HERE=there; cd /", GUARD_S)
    assert terminal.run("echo $HERE; pwd", GUARD_S) == "there\n/\n"


def test_a_failing_command_is_reported_with_exit_code_and_output(terminal: Terminal) -> None:
    with pytest.raises(CommandFailedError, match=r"exit code  3: last words"):
        terminal.run("echo last words; (exit 3)", GUARD_S)


def test_a_server_ends_on_ctrl_c_and_must_succeed(terminal: Terminal) -> None:
    serve = """python3 -c "
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit({}))
print('endpoint', flush=True)
signal.pause()
" """
    assert terminal.begin(serve.format(0), "endpoint", GUARD_S) == "endpoint\n"
    terminal.interrupt(GUARD_S)
    terminal.begin(serve.format(1), "endpoint", GUARD_S)
    with pytest.raises(CommandFailedError, match="exit code  1"):
        terminal.interrupt(GUARD_S)


def test_a_server_that_ends_early_is_a_failure(terminal: Terminal) -> None:
    with pytest.raises(CommandFailedError, match="ended before it printed 'endpoint': no model"):
        terminal.begin("echo no model", "endpoint", GUARD_S)


def test_readme_at_small_scale(capsys: pytest.CaptureFixture[str]) -> None:
    """The steps without installation and cluster; `make newcomer` runs all."""
    assert main(["--quick", "--here"]) == 0
    assert "all as in README" in capsys.readouterr().out
