"""Processes of this machine, and the supervisor that stops processes in order.

Used by local clusters, nodes of a lab, benchmarks and tests.  Every process leads its own session,
so that a Ctrl-C at the terminal reaches only the supervisor, which then stops the others in order.
A process dies with its parent unless ``ends_with_parent`` is None.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol, Self, TypeVar

from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.node.host_process import ProcessStat, process_stat
from dualpath.node.private_folder import open_log

# --------------------------------------------------------------------------------- managed process
# Interface of a supervised process, wherever it runs: log, signals, exit.

POLL_S = 0.05
#: Time for an orderly exit: an engine writes queued blocks and deregisters first.
END_S = 20.0
_LOG_TAIL_LINES = 15


class ManagedProcess(ABC):
    """A process; its output is appended to ``log``, a file of this machine."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._log_begin = log.stat().st_size if log.exists() else 0

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """Wait until it exits; return the exit code, None after the timeout."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Send a signal to the process only; does nothing if it has exited."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the whole process group."""

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self.exit_code is None

    def terminate(self) -> None:
        """Ask it to exit with SIGTERM; it stops its own children."""
        self.send_signal(signal.SIGTERM)

    def end(self, timeout_s: float = END_S) -> None:
        """Wait for an orderly exit, then kill what is left of the process group."""
        self.wait(timeout_s)
        self.kill()
        self.wait(timeout_s)

    def output(self) -> str:
        """Return its output so far."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_begin)
                return file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"

    def find_line(self, text: str) -> str | None:
        """Return the first complete line of its output that contains ``text``, or None."""
        lines = self.output().split("\n")[:-1]
        return next((line for line in lines if text in line), None)

    def wait_for_line(self, text: str, timeout_s: float) -> str:
        """Wait until a complete line of its output contains ``text``; return the line.

        Raises ``EngineLostError`` if it exits first, ``DeadlineError`` after ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            exited = not self.alive  # checked first, so that the last output is searched below
            if (line := self.find_line(text)) is not None:
                return line
            if exited:
                raise EngineLostError(self.exit_report())
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"{self.name} has not written {text!r} within {timeout_s:g} s; the end of its "
                    f"log:\n{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.output().splitlines()[-_LOG_TAIL_LINES:])

    def exit_report(self) -> str:
        """Return its exit code and the end of its log, as text."""
        return (
            f"{self.name} exited with code {self.exit_code}; the end of its log:\n{self.log_tail()}"
        )


# ---------------------------------------------------------------------------------------- restarts
# Restarts processes that exit on their own, with exponential backoff.
#
# A process that ran for long is restarted immediately.  One that exits soon after every start is
# restarted after growing pauses, as a restart is unlikely to help; every exit is logged with the
# end of the process's log.
#
# Ranks of a data-parallel group are a unit: if one exits, the others must exit too, as vLLM cannot
# restart a single rank.  Idle ranks would not notice, so they are sent SIGINT.

log = logging.getLogger(__name__)

#: A process that ran for this long is restarted immediately.
LONG_LIFE_S = 60.0
#: Pauses before other restarts: the first one, doubled each time up to the last.  The first ones
#: are short, because a cluster serves nothing while its scheduler restarts.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.25, 30.0
#: A drain that takes longer is ended by force.
DRAIN_GUARD_S = 3600.0
#: Time for the other processes of a unit to exit before they are killed.
OTHERS_END_S = 15.0


class RestartableProcess(Protocol):
    """Interface of a process for ``Restarts``."""

    @property
    def name(self) -> str:
        """Its name, the same after a restart."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        ...

    def exit_report(self) -> str:
        """Return its exit code and the end of its log, as text."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal to it."""
        ...

    def kill(self) -> None:
        """Kill it and its children."""
        ...


class Restarts:
    """Restarts *units*: processes that stop and start together, usually one.

    ``start`` starts all processes of a unit; ``units`` maps processes to units (default: a unit of
    the process's own name).  Exits and restarts are logged.
    """

    def __init__(
        self,
        start: Callable[[str], None],
        units: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._start = start
        self._units = units
        self._since_s: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}

    def expect_exit(self, unit: str, now_s: float) -> None:
        """Expect the next exit of a unit: it is not a failure, and it is restarted immediately."""
        self._asked_s[unit] = now_s

    def poll(self, processes: Iterable[RestartableProcess], now_s: float) -> None:
        """Check all processes; call it periodically."""
        by_unit: dict[str, list[RestartableProcess]] = {}
        for process in processes:
            by_unit.setdefault(self._units.get(process.name, process.name), []).append(process)
        for unit, together in by_unit.items():
            ended = next((process for process in together if not process.alive), None)
            if now_s >= self._asked_s.get(unit, now_s) + DRAIN_GUARD_S:
                self._kill(together)
            if ended is None:
                self._since_s.setdefault(unit, now_s)
            elif unit not in self._due_s:
                self._ended(unit, ended, now_s)
                self._end_others(together)
            if unit in self._due_s and now_s >= self._due_s[unit]:
                self._start_when_ended(unit, together, now_s)

    def _start_when_ended(
        self, unit: str, together: Sequence[RestartableProcess], now_s: float
    ) -> None:
        """Start a unit once all its processes have exited; kill them after a timeout."""
        alive = [process for process in together if process.alive]
        if not alive:
            del self._due_s[unit]
            self._start(unit)
        elif now_s >= self._due_s[unit] + OTHERS_END_S:
            self._kill(alive)

    @staticmethod
    def _kill(together: Sequence[RestartableProcess]) -> None:
        for process in together:
            if process.alive:
                process.kill()

    def _end_others(self, together: Sequence[RestartableProcess]) -> None:
        for process in together:
            if process.alive:
                process.send_signal(signal.SIGINT)

    def _ended(self, unit: str, process: RestartableProcess, now_s: float) -> None:
        lived_s = now_s - self._since_s.pop(unit, now_s)
        if self._asked_s.pop(unit, None) is not None:
            self._due_s[unit] = now_s
            log.info("%s has exited as requested and is restarted", unit)
            return
        before_s = self._pause_s.get(unit, 0.0)
        pause_s = min(max(2 * before_s, FIRST_PAUSE_S), LAST_PAUSE_S)
        self._pause_s[unit] = pause_s = 0.0 if lived_s >= LONG_LIFE_S else pause_s
        self._due_s[unit] = now_s + pause_s
        when = f"in {pause_s:g} s" if pause_s else "now"
        log.warning("%s", process.exit_report())
        log.info("%s is restarted %s", unit, when)


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
        with open(os.devnull if log is None else open_log(log), "ab") as file:
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
        """Add a process; one of its name that has exited is replaced and its children are killed.

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
