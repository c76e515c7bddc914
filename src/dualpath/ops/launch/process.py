"""Processes under a supervisor: started with a log each, watched, waited for and ended in order.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.storage.host_process import ProcessStat, process_stat

_PR_SET_PDEATHSIG = 1
#: Opened once: between fork and exec nothing may be loaded.
_libc = ctypes.CDLL(None)
_LOG_TAIL_LINES = 15
_POLL_S = 0.05
#: An engine writes what is queued and leaves the cluster before it ends.
_END_S = 20.0


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


class ManagedProcess(ABC):
    """A running process: its name, the file its output is appended to, how it ends."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._log_begin = log.stat().st_size if log.exists() else 0

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id; also the id of its process group."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; return the exit code, None after the timeout."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.exit_code is None

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end; it ends what it has started itself."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything it has started: the whole process group, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, timeout_s: float = _END_S) -> None:
        """Wait for an orderly end of its whole group, then kill what is left of it."""
        deadline_s = time.monotonic() + timeout_s
        self.wait(timeout_s)
        while self._group_lives() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self.kill()
        self.wait(timeout_s)

    def output(self) -> str:
        """Return what it has written to its log so far."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_begin)
                return file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"

    def find_line(self, text: str) -> str | None:
        """Return the first whole line of its output that contains ``text``, or None."""
        lines = self.output().split("\n")[:-1]
        return next((line for line in lines if text in line), None)

    def wait_for_line(self, text: str, timeout_s: float) -> str:
        """Wait until a whole line of its output contains ``text``; return the line.

        Raises ``EngineLostError`` if it ends without, ``DeadlineError`` after ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            over = not self.alive  # asked first: what it wrote before its end is found below
            if (line := self.find_line(text)) is not None:
                return line
            if over:
                raise EngineLostError(self.ending())
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"{self.name} has not written {text!r} within {timeout_s:g} s; the end of its "
                    f"log:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.output().splitlines()[-_LOG_TAIL_LINES:])

    def ending(self) -> str:
        """Say how it ended, with the end of its log."""
        return (
            f"{self.name} ended with exit code {self.exit_code}; the end of its log:\n"
            f"{self.log_tail()}"
        )

    def _group_lives(self) -> bool:
        """Whether one of its group runs; what has ended and nobody has waited for does not."""
        return any(stat.group == self.pid and not stat.is_zombie for _, stat in all_processes())


class SpawnedProcess(ManagedProcess):
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
        outlives_parent: bool = False,
    ) -> None:
        """Start ``argv`` with ``environment`` and no other, in ``folder`` or this one.

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
                preexec_fn=partial(_begin, None if outlives_parent else os.getpid()),
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

    def end(self, timeout_s: float = _END_S) -> None:
        """See the base class."""
        super().end(timeout_s)
        if self.stdout is not None:
            self.stdout.close()


def _begin(parent: int | None) -> None:
    """Begin a new process, which ignores nothing that may be sent to drain it."""
    # A shell's background commands ignore it, and so do all that they start.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if parent is not None:
        die_with_parent(signal.SIGKILL, parent)


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
            time.sleep(_POLL_S)

    def end(self, *, hard: bool = False) -> None:
        """End all, by force at once if ``hard``; idempotent."""
        for last in (False, True):
            together = [p for p in self.processes if (p.name in self._last) is last]
            for process in together:
                if hard:
                    process.kill()
                else:
                    process.terminate()
            for process in together:
                process.end()
        self._processes = {}
