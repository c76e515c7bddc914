"""Interface of a supervised process, wherever it runs: log, signals, exit."""

import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path

from dualpath.core.errors import DeadlineError, EngineLostError

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
