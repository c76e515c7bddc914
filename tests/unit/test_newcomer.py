"""README is typed as it stands: each command is known, ends well, and does what is said of it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.newcomer.__main__ import main
from benchmarks.newcomer.steps import STEPS, typed
from benchmarks.newcomer.terminal import CommandFailedError, Terminal
from tests.docs_blocks import ROOT

GUARD_S = 60.0


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path, dict(os.environ), lambda line: None)
    yield made
    made.close()


def test_every_command_of_readme_is_known_and_nothing_else_is() -> None:
    assert {one.step for one in typed(ROOT / "README.md")} == set(STEPS)


def test_a_command_nobody_knows_is_named_with_its_place(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A\n\n```console\n$ dualpath fly\n```\n")
    with pytest.raises(LookupError, match=r"README.md:3: 'dualpath fly'"):
        typed(page)


def test_what_is_typed_in_one_terminal_holds_for_the_next_command(terminal: Terminal) -> None:
    terminal.run("HERE=there; cd /", GUARD_S)
    assert terminal.run("echo $HERE; pwd", GUARD_S) == "there\n/\n"


def test_a_command_that_fails_says_how(terminal: Terminal) -> None:
    with pytest.raises(CommandFailedError, match=r"exit code  3: last words"):
        terminal.run("echo last words; (exit 3)", GUARD_S)


def test_what_serves_ends_by_ctrl_c_and_has_to_end_well(terminal: Terminal) -> None:
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


def test_what_ends_instead_of_serving_is_a_failure(terminal: Terminal) -> None:
    with pytest.raises(CommandFailedError, match="ended before it said 'endpoint': no model"):
        terminal.begin("echo no model", "endpoint", GUARD_S)


def test_readme_at_small_scale(capsys: pytest.CaptureFixture[str]) -> None:
    """What needs neither an installation nor a cluster; `make newcomer` types all."""
    assert main(["--quick", "--here"]) == 0
    assert "all as README says" in capsys.readouterr().out
