"""A terminal: one shell, into which commands are typed and whose output is read."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

#: Printed by the shell after each command, with its exit code.
_DONE = "@@ended"


class CommandFailedError(Exception):
    """A command did not do what README states; the message has the end of its output."""


class Terminal:
    """A shell in ``folder``; ``show`` is called with each line of output."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], show: Callable[[str], None]
    ) -> None:
        self._show = show
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must not reach this process
        )
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, command: str, limit_s: float) -> str:
        """Type a command and return its output; raises ``CommandFailedError``."""
        self._type(command)
        output, code = self._until(_DONE, limit_s)
        if code != f"{_DONE} 0":
            raise CommandFailedError(f"exit code {code.removeprefix(_DONE)}: {_end(output)}")
        return output

    def begin(self, command: str, word: str, limit_s: float) -> str:
        """Type a command that serves; return its output up to a line with ``word``."""
        self._type(command)
        output, line = self._until(word, limit_s)
        if line.startswith(_DONE):
            raise CommandFailedError(f"it ended before it printed {word!r}: {_end(output)}")
        return f"{output}{line}\n"

    def interrupt(self, limit_s: float) -> str:
        """Press Ctrl-C; return the output; raises if the command then fails."""
        os.killpg(self._shell.pid, signal.SIGINT)
        output, code = self._until(_DONE, limit_s)
        if code != f"{_DONE} 0":
            raise CommandFailedError(f"Ctrl-C: exit code {code.removeprefix(_DONE)}")
        return output

    def close(self) -> None:
        """End the shell with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGTERM)
        self._shell.wait()

    def _type(self, command: str) -> None:
        assert self._shell.stdin is not None
        # The shell itself must survive Ctrl-C, as an interactive one does.
        self._shell.stdin.write(f"trap : INT\n{command}\necho {_DONE} $?\n".encode())
        self._shell.stdin.flush()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self._lines.put(line.decode(errors="replace").rstrip("\r\n"))
        self._lines.put(None)

    def _until(self, word: str, limit_s: float) -> tuple[str, str]:
        """Return the output up to the line with ``word`` or to the command's end, and that line."""
        until_s, output = time.monotonic() + limit_s, ""
        while True:
            try:
                line = self._lines.get(timeout=max(until_s - time.monotonic(), 0))
            except queue.Empty:
                raise CommandFailedError(f"not done within {limit_s:g} s: {_end(output)}") from None
            if line is None:
                raise CommandFailedError(f"the shell ended: {_end(output)}")
            if word in line or line.startswith(_DONE):
                return output, line
            self._show(line)
            output += f"{line}\n"


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-15:])
