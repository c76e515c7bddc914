"""What a supervisor asks of a process, wherever it runs: its log, its signals, its end."""

import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path

from dualpath.core.errors import DeadlineError, EngineLostError

POLL_S = 0.05
#: An engine writes what is queued and leaves the cluster before it ends.
END_S = 20.0
_LOG_TAIL_LINES = 15


class ManagedProcess(ABC):
    """A process: its name, the file of this machine its output is appended to, how it ends."""

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
        """Wait for its end; return the exit code, None after the timeout."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone; nothing if it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """End it and everything it has started: the whole process group, at once."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.exit_code is None

    def terminate(self) -> None:
        """Ask it to end; it ends what it has started itself."""
        self.send_signal(signal.SIGTERM)

    def end(self, timeout_s: float = END_S) -> None:
        """Wait for an orderly end, then kill what is left of it."""
        self.wait(timeout_s)
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
            time.sleep(POLL_S)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.output().splitlines()[-_LOG_TAIL_LINES:])

    def ending(self) -> str:
        """Say how it ended, with the end of its log."""
        return (
            f"{self.name} ended with exit code {self.exit_code}; the end of its log:\n"
            f"{self.log_tail()}"
        )
