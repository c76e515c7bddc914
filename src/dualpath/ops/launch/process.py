"""Processes of this machine, and the supervisor that stops processes in order.

Used by local clusters, nodes of a lab, benchmarks and tests.  Every process leads its own session,
so that a Ctrl-C at the terminal reaches only the supervisor, which then stops the others in order.
A process dies with its parent unless ``ends_with_parent`` is None.
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
#: Opened at import: libraries must not be loaded between fork and exec.
_libc = ctypes.CDLL(None)


def die_with_parent(number: int, parent: int) -> None:
    """Make the kernel send this process a signal when the thread that started it ends.

    ``parent`` is the process of that thread; if it has exited already, the signal is sent now.
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
    """A process of this machine that leads a process group."""

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
        """Wait for an orderly exit of its whole group, then kill what is left of it."""
        deadline_s = time.monotonic() + timeout_s
        self.wait(timeout_s)
        while self._group_lives() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        self.kill()
        self.wait(timeout_s)

    def _group_lives(self) -> bool:
        """Whether any process of its group runs; zombies do not count."""
        return any(stat.group == self.pid and not stat.is_zombie for _, stat in all_processes())


def local(process: ManagedProcess) -> LocalProcess:
    """Return the process as a ``LocalProcess``; it must run on this machine."""
    assert isinstance(process, LocalProcess), f"{process.name} runs elsewhere"
    return process


class SpawnedProcess(LocalProcess):
    """A command line, executed as it is."""

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
        """Start ``argv`` with exactly this ``environment``, in ``folder`` or the current one.

        ``ends_with_parent``: the signal sent when the thread that started it ends; None: none.

        ``pipes``: its standard input and output are ``stdin`` and ``stdout`` of this object, and
        only its standard error goes to the log; otherwise its standard input is empty.  Without a
        ``log`` it inherits this process's output, and ``output`` returns nothing.
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
        """Ask it to exit: by closing its standard input if that is a pipe, else with SIGTERM."""
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
    """Prepare a new process: signals that drain it must be neither ignored nor blocked."""
    # Background commands of a shell ignore SIGINT, and their children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Workers of Ray block signals, and their children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if ends_with_parent is not None:
        die_with_parent(ends_with_parent, parent)


_Process = TypeVar("_Process", bound=ManagedProcess)


class Supervisor:
    """Processes that stop together; a context manager that stops them, killing after an error."""

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
        """Add a process; it replaces one of its name that has exited, whose children are killed.

        ``ends_last``: the others depend on it, so that it is stopped after them.
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
        """Remove a process that has exited as expected."""
        del self._processes[process.name]

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """All processes, in the order of their start."""
        return tuple(self._processes.values())

    def process(self, name: str) -> ManagedProcess:
        """Return the process of that name."""
        return self._processes[name]

    def check_alive(self, awaited: ManagedProcess | None = None) -> None:
        """Raise ``EngineLostError`` with the end of its log if a process has exited.

        ``awaited`` may have exited with code 0.
        """
        for process in self._processes.values():
            fine = (None, 0) if process is awaited else (None,)
            if process.exit_code not in fine:
                raise EngineLostError(process.exit_report())

    def wait_until_ready(
        self,
        missing: Callable[[], str],
        timeout_s: float,
        awaited: ManagedProcess | None = None,
    ) -> None:
        """Poll until ``missing`` returns an empty text; otherwise it describes what is missing.

        ``awaited`` is a process that may exit with code 0 meanwhile.  Raises ``EngineLostError`` if
        another exits, ``DeadlineError`` after ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while state := missing():
            self.check_alive(awaited)
            if time.monotonic() > deadline_s:
                if awaited is not None:
                    see = f"the end of its log:\n{awaited.log_tail()}"
                else:
                    folders = {str(process.log.parent) for process in self.processes}
                    see = f"see the logs in {', '.join(sorted(folders))}"
                raise DeadlineError(f"{state} after {timeout_s:g} s; {see}")
            time.sleep(POLL_S)

    def end(self, *, hard: bool = False, interrupt: bool = False) -> None:
        """Stop all processes, killing them if ``hard``; idempotent.

        ``interrupt``: send SIGINT, so that running requests end with an error.  No SIGTERM follows:
        it would ask a stopping server to drain.  And if two signals reach a vLLM engine core within
        a millisecond, the kernel delivers one to a thread on which Python does not handle it; vLLM
        would then wait for ``--shutdown-timeout`` and kill the core.
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
