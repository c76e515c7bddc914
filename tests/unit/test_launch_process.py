"""The supervisor of processes: waiting, exit reports, and orderly stops."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.guard import GUARD_S, ends

from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.launch.process import SpawnedProcess, Supervisor, die_with_parent

STAY = "sleep 1000 & while :; do wait; done"
#: Prints a word when it is ready, and one for every signal to drain or stop.
POLITE = f"trap 'echo drained' HUP; trap 'echo asked; exit 0' TERM; echo up; {STAY}"


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.end(hard=True)


def shell(folder: Path, script: str, name: str = "shell", *, pipes: bool = True) -> SpawnedProcess:
    """A shell with its log as standard output, unless ``pipes``."""
    script = f"exec >&2; {script}" if pipes else script
    return SpawnedProcess(name, ("sh", "-c", script), folder / f"{name}.log", pipes=pipes)


def test_waiting_for_a_line_needs_the_complete_line(supervisor: Supervisor, tmp_path: Path) -> None:
    process = supervisor.add(shell(tmp_path, "printf 'serving at '; read x; echo here; read x"))
    assert process.find_line("serving") is None
    assert process.stdin is not None
    process.stdin.write(b"go on\n")
    process.stdin.flush()
    assert process.wait_for_line("serving", GUARD_S) == "serving at here"


def test_lines_of_a_previous_process_do_not_count(supervisor: Supervisor, tmp_path: Path) -> None:
    shell(tmp_path, "echo up").wait(GUARD_S)
    again = supervisor.add(shell(tmp_path, "read x"))
    assert again.find_line("up") is None
    assert again.output() == ""
    assert (tmp_path / "shell.log").read_text() == "up\n"


def test_waiting_for_a_line_of_an_exited_process_raises_with_its_log(
    tmp_path: Path,
) -> None:
    process = shell(tmp_path, "echo no such device; exit 3")
    with pytest.raises(EngineLostError, match=r"shell exited with code 3.*\n.*no such device"):
        process.wait_for_line("up", GUARD_S)
    with pytest.raises(DeadlineError, match="has not written 'up' within 0 s"):
        shell(tmp_path, "read x").wait_for_line("up", 0)


def test_waiting_ends_when_another_process_exits(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(shell(tmp_path, "echo out of memory; exit 1", "engine"))
    awaited = supervisor.add(shell(tmp_path, "exit 0", "client"))
    with pytest.raises(EngineLostError, match=r"engine exited with code 1(.|\n)*out of memory"):
        supervisor.wait_until_ready(lambda: "no answer", GUARD_S, awaited)


def test_a_timeout_names_what_was_missing(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(shell(tmp_path, "read x"))
    with pytest.raises(DeadlineError, match=rf"1 of 2 engines up after 0 s.*{tmp_path}"):
        supervisor.wait_until_ready(lambda: "1 of 2 engines up", 0)
    supervisor.wait_until_ready(lambda: "", 0)


def test_one_process_is_drained_by_a_signal_and_restarted(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    process = supervisor.add(shell(tmp_path, POLITE, pipes=False))
    process.wait_for_line("up", GUARD_S)
    process.send_signal(signal.SIGHUP)
    process.wait_for_line("drained", GUARD_S)
    process.terminate()
    assert process.wait(GUARD_S) == 0
    assert process.output().split() == ["up", "drained", "asked"]
    with pytest.raises(EngineLostError):
        supervisor.check_alive()
    again = supervisor.add(shell(tmp_path, POLITE, pipes=False))
    supervisor.check_alive()
    assert supervisor.processes == (again,)


def test_processes_that_others_depend_on_are_stopped_last(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with Supervisor() as supervisor:
        for name in ("router", "engine"):
            script = (
                f"trap 'echo {name} >> {asked}; exit 0' TERM; echo up; while :; do read x; done"
            )
            process = shell(tmp_path, script, name, pipes=False)
            supervisor.add(process, ends_last=name == "router").wait_for_line("up", GUARD_S)
    assert asked.read_text().split() == ["engine", "router"]
    assert supervisor.processes == ()


class Recorded(SpawnedProcess):
    """Records the signals sent to it."""

    sent: tuple[int, ...] = ()

    def send_signal(self, number: int) -> None:
        self.sent += (number,)
        super().send_signal(number)


def test_an_interrupted_process_gets_no_sigterm(tmp_path: Path) -> None:
    """A vLLM engine core that got both signals at once was killed after five seconds."""
    supervisor = Supervisor()
    process = supervisor.add(Recorded("sleep", ("sleep", "1000"), tmp_path / "log"))
    supervisor.end(interrupt=True)
    assert process.sent == (signal.SIGINT,)
    assert process.exit_code == -signal.SIGINT


def test_children_of_a_process_end_with_it(tmp_path: Path) -> None:
    child = "sh -c 'trap \"\" TERM; echo child $$; exec sleep 1000'"
    process = shell(tmp_path, f"{child} & wait", pipes=False)
    child_id = int(process.wait_for_line("child", GUARD_S).split()[1])
    process.kill()
    assert process.wait(GUARD_S) == -signal.SIGKILL
    assert ends(child_id)


def test_a_process_ends_with_its_parent_unless_configured_otherwise(tmp_path: Path) -> None:
    starter = f"""
import sys
from pathlib import Path
from dualpath.launch.process import SpawnedProcess
processes = [
    SpawnedProcess("one", ("sleep", "1000"), Path({str(tmp_path / "log")!r}), ends_with_parent=by)
    for by in (9, None)
]
print("started", *[process.pid for process in processes], file=sys.stderr)
input()
"""
    source = str(Path(__file__).parents[2] / "src")
    parent = SpawnedProcess(
        "parent",
        (sys.executable, "-c", starter),
        tmp_path / "parent.log",
        {**os.environ, "PYTHONPATH": source},
        pipes=True,
    )
    try:
        line = parent.wait_for_line("started", GUARD_S)
        dies, stays = (int(word) for word in line.split()[1:])
    finally:
        parent.send_signal(signal.SIGKILL)
    try:
        assert ends(dies)
        os.kill(stays, 0)
    finally:
        os.kill(stays, signal.SIGKILL)


def test_a_process_does_not_start_after_its_parent_has_exited() -> None:
    someone_else = os.getppid()
    orphan = subprocess.Popen(
        ("sleep", "1000"), preexec_fn=partial(die_with_parent, signal.SIGKILL, someone_else)
    )
    assert orphan.wait(GUARD_S) == -signal.SIGKILL
