"""When a process counts as dead: on positive evidence of the kernel, never because it is unseen."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from dualpath.core.cluster import HostProcess
from dualpath.node import host_process
from dualpath.node.host_process import THIS_MACHINE, Sight, has_exited, this_process


class Table:
    """A process table with answers as set; its machine is ``here``."""

    def __init__(self, sight: Sight, start_ticks: int | None, host: str = "here") -> None:
        self._host, self._sight, self._start_ticks = host, sight, start_ticks

    def host(self) -> str:
        return self._host

    def sight(self, pid: int) -> Sight:
        return self._sight

    def start_ticks(self, pid: int) -> int | None:
        return self._start_ticks


PROCESS = HostProcess("here", pid=7, start_ticks=70)


@pytest.mark.parametrize(
    ("table", "dead"),
    [
        (Table(Sight.ABSENT, None), True),
        (Table(Sight.EXITED, 70), True),
        (Table(Sight.ALIVE, 70), False),
        (Table(Sight.ALIVE, 71), True),  # its number was used again
        (Table(Sight.ALIVE, None), False),  # hidden: perhaps used again, perhaps not
        (Table(Sight.UNKNOWN, None), False),
        (Table(Sight.UNKNOWN, 71), False),
        (Table(Sight.ABSENT, None, host="elsewhere"), False),
        (Table(Sight.ABSENT, None, host=""), False),  # the table of another namespace
    ],
)
def test_only_positive_evidence_proves_a_death(table: Table, dead: bool) -> None:
    assert has_exited(PROCESS, table) == dead


def test_an_unidentified_process_is_never_proven_dead() -> None:
    absent = Table(Sight.ABSENT, None, host="")
    assert not has_exited(HostProcess(), absent)
    for pid in (0, -1):
        assert not has_exited(HostProcess("here", pid, 1), Table(Sight.ABSENT, None))


def test_an_engine_is_dead_when_each_of_its_ranks_is() -> None:
    class OneAlive(Table):
        def sight(self, pid: int) -> Sight:
            return Sight.ALIVE if pid == 8 else Sight.ABSENT

    engine = HostProcess("here", 7, 70, ranks=(HostProcess("here", 8, 70),))
    assert not has_exited(engine, OneAlive(Sight.ABSENT, 70))
    assert has_exited(engine, Table(Sight.ABSENT, None))


# ------------------------------------------------------------------------------ the kernel's table


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def identity(pid: int) -> HostProcess:
    started = THIS_MACHINE.start_ticks(pid)
    assert started is not None
    return HostProcess(this_process().host, pid, started)


def test_a_child_is_dead_from_its_exit_on_before_and_after_it_is_waited_for(
    child: subprocess.Popen[str],
) -> None:
    known = identity(child.pid)
    assert not has_exited(known)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert has_exited(known)
    child.wait()
    assert has_exited(known)


def test_a_process_with_another_start_time_is_a_later_one(child: subprocess.Popen[str]) -> None:
    known = identity(child.pid)
    assert has_exited(HostProcess(known.host, known.pid, known.start_ticks - 1))


def test_without_pidfd_signal_0_decides(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    known = identity(child.pid)
    assert not has_exited(known)
    child.kill()
    child.wait()
    assert has_exited(known)


# ------------------------------------------------------------------------- what /proc may not show

#: In a mount namespace of its own: another user asks about its live parent.
_HIDDEN = """
    import os, subprocess
    from dualpath.core.cluster import HostProcess
    from dualpath.node.host_process import has_exited, this_process
    subprocess.check_call(["mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"])
    alive = this_process()
    ended = subprocess.Popen(["true"])
    ended.wait()
    if os.fork():
        os.wait()
    else:
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
        shown = os.path.exists(f"/proc/{alive.pid}")
        dead = HostProcess(alive.host, ended.pid, 1)
        print(shown, has_exited(alive), has_exited(dead), flush=True)
        os._exit(0)
"""
#: In a PID namespace of its own with the /proc of another one.
_FOREIGN = """
    from dualpath.core.cluster import HostProcess
    from dualpath.node.host_process import THIS_MACHINE, this_process
    print(this_process() == HostProcess(), THIS_MACHINE.host() == "")
"""


def unshared(tmp_path, script: str, *flags: str) -> str:
    """Run a script in new namespaces; skip the test where they are not permitted."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    tmp_path.chmod(0o755)
    command = ["unshare", *flags, sys.executable, str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if ran.returncode:
        pytest.skip(f"no namespaces here: {ran.stderr.strip()[-200:]}")
    return ran.stdout.strip()


def test_a_live_process_that_proc_hides_is_not_dead_and_a_dead_one_is(tmp_path) -> None:
    assert unshared(tmp_path, _HIDDEN, "--mount") == "False False True"


def test_a_process_with_the_proc_of_another_namespace_knows_nothing(tmp_path) -> None:
    assert unshared(tmp_path, _FOREIGN, "--pid", "--fork") == "True True"


def test_files_of_two_boots_of_one_machine_have_two_owners(tmp_path, monkeypatch) -> None:
    owners = set()
    for boot in ("first", "second"):
        (tmp_path / boot).write_text(boot)
        monkeypatch.setattr(host_process, "_BOOT_ID", str(tmp_path / boot))
        owners.add(host_process.file_owner_host())
    assert len(owners) == 2
