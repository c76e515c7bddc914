"""Processes of this machine, and the supervisor of these and others: all end in order.

Local clusters, nodes of a lab, benchmarks and tests start their processes here.  Every process
leads a session of its own, so that a Ctrl-C at the terminal reaches only the supervisor, which then
ends the others in order; it dies with whoever started it, unless it is to outlive that.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.ops.launch.managed_process import END_S, POLL_S, ManagedProcess
from dualpath.storage.host_process import ProcessStat, process_stat

_PR_SET_PDEATHSIG = 1
#: Opened once: between fork and exec nothing may be loaded.
_libc = ctypes.CDLL(None)


def die_with_parent(number: int, parent: int) -> None:
    """Let this process get a signal when the thread that started it ends, however it ends.

    ``parent`` is the process of that thread; if it is gone already, the signal comes now.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def all_processes() -> Iterator[tuple[int, ProcessStat]]:
    """Yield the processes of this machine by id."""
    for entry in Path("/proc").glob("[0-9]*"):
        if (stat := process_stat(int(entry.name))) is not None:
            yield int(entry.name), stat


class LocalProcess(ManagedProcess):
    """A process of this machine, which leads a process group."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id; also the id of its process group."""

    def send_signal(self, number: int) -> None:
        """See the base class."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """See the base class."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, timeout_s: float = END_S) -> None:
        """Wait for an orderly end of its whole group, then kill what is left of it."""
        deadline_s = time.monotonic() + timeout_s
        self.wait(timeout_s)
        while self._group_lives() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        self.kill()
        self.wait(timeout_s)

    def _group_lives(self) -> bool:
        """Whether one of its group runs; what has ended and nobody has waited for does not."""
        return any(stat.group == self.pid and not stat.is_zombie for _, stat in all_processes())


def local(process: ManagedProcess) -> LocalProcess:
    """Return a process that was started on this machine, as such."""
    assert isinstance(process, LocalProcess), f"{process.name} runs elsewhere"
    return process


class SpawnedProcess(LocalProcess):
    """A command, executed as typed."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path | None,
        environment: Mapping[str, str] = os.environ,
        *,
        folder: Path | None = None,
        pipes: bool = False,
        ends_with_parent: int | None = signal.SIGKILL,
    ) -> None:
        """Start ``argv`` with ``environment`` and no other, in ``folder`` or this one.

        ``ends_with_parent``: the signal it gets when the thread that started it ends; None: none.

        ``pipes``: its standard input and output are ``stdin`` and ``stdout`` of this object, and
        only its standard error goes to the log; without, it reads nothing.  Without a ``log`` it
        writes where this process does, and nothing of that can be asked for.
        """
        super().__init__(name, log or Path(os.devnull))
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else file if log else None,
                stderr=file if log else None,
                env=environment,
                cwd=folder,
                start_new_session=True,
                preexec_fn=partial(_begin, ends_with_parent, os.getpid()),
            )
        self.stdin, self.stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """See the base class."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """See the base class."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """See the base class."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask it to end: by the end of its input, if that is a pipe."""
        if self.stdin is None:
            super().terminate()
        else:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()

    def end(self, timeout_s: float = END_S) -> None:
        """See the base class."""
        super().end(timeout_s)
        if self.stdout is not None:
            self.stdout.close()


def _begin(ends_with_parent: int | None, parent: int) -> None:
    """Begin a new process, which ignores nothing that may be sent to drain it."""
    # A shell's background commands ignore it, and so do all that they start.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Workers of Ray block it, and so would all that they start.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if ends_with_parent is not None:
        die_with_parent(ends_with_parent, parent)


_Process = TypeVar("_Process", bound=ManagedProcess)


class Supervisor:
    """Processes that end together; a context manager that ends them, at once after an error."""

    def __init__(self) -> None:
        self._processes: dict[str, ManagedProcess] = {}
        self._last: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(hard=error is not None)

    def add(self, process: _Process, *, ends_last: bool = False) -> _Process:
        """Take charge of a process; one of its name that has ended goes, with all it left running.

        ``ends_last``: others lean on it, so that it is asked to end when they have ended.
        """
        old = self._processes.get(process.name)
        if old is not None:
            assert not old.alive, f"{process.name} runs already"
            old.kill()
        self._processes[process.name] = process
        if ends_last:
            self._last.add(process.name)
        return process

    def release(self, process: ManagedProcess) -> None:
        """Let go of a process that has ended as it should."""
        del self._processes[process.name]

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """All of them, first started first."""
        return tuple(self._processes.values())

    def process(self, name: str) -> ManagedProcess:
        """Return the process of that name."""
        return self._processes[name]

    def check_alive(self, awaited: ManagedProcess | None = None) -> None:
        """Raise ``EngineLostError`` with the end of its log if a process has ended.

        ``awaited`` may have ended well.
        """
        for process in self._processes.values():
            fine = (None, 0) if process is awaited else (None,)
            if process.exit_code not in fine:
                raise EngineLostError(process.ending())

    def wait_until_ready(
        self,
        missing: Callable[[], str],
        timeout_s: float,
        awaited: ManagedProcess | None = None,
    ) -> None:
        """Poll until nothing is ``missing``, which says in words what is.

        ``awaited`` is the process that it takes, if it takes one, and may have ended well.  Raises
        ``EngineLostError`` if another ends meanwhile, ``DeadlineError`` after ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while what := missing():
            self.check_alive(awaited)
            if time.monotonic() > deadline_s:
                if awaited is not None:
                    see = f"the end of its log:\n{awaited.log_tail()}"
                else:
                    folders = {str(process.log.parent) for process in self.processes}
                    see = f"see the logs in {', '.join(sorted(folders))}"
                raise DeadlineError(f"{what} after {timeout_s:g} s; {see}")
            time.sleep(POLL_S)

    def end(self, *, hard: bool = False, interrupt: bool = False) -> None:
        """End all, by force at once if ``hard``; idempotent.

        ``interrupt``: what is under way ends with an error.  No SIGTERM follows then: it would ask
        a server that is ending to drain, and of two signals that come to a vLLM engine core within
        a millisecond the kernel gives one to a thread on which Python does not look at it, so that
        vLLM would wait for ``--shutdown-timeout`` and kill the core.
        """
        if interrupt:
            for process in self.processes:
                process.send_signal(signal.SIGINT)
        for last in (False, True):
            together = [p for p in self.processes if (p.name in self._last) is last]
            for process in together:
                if hard:
                    process.kill()
                elif not interrupt:
                    process.terminate()
            for process in together:
                process.end()
        self._processes = {}
