"""Failpoints: a process under test reports that it has reached a step, and pauses there.

Messages are lines of JSON over a Unix socket.  The campaign arms one step; the process that passes
it for the given time pauses there until the campaign has injected its fault (killed or stopped the
process, reset a connection) and sends ``Resume``.
"""

import os
import socket
import threading
from pathlib import Path

import msgspec

from dualpath.laboratory.chaos.matrix import Fault, Step

#: A campaign that has died must not pause a process for ever.
_MOST_WAIT_S = 15.0


class Identify(msgspec.Struct, frozen=True, tag=True):
    """A process identifies itself."""

    process: str
    pid: int


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A process has paused at the step that was armed with this ticket."""

    ticket: int


class Arm(msgspec.Struct, frozen=True, tag=True):
    """Pause at ``step`` when it is passed for the ``passes``-th time from now."""

    ticket: int
    step: Step
    passes: int


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Continue; if the step was not reached yet, disarm it."""

    ticket: int


class DiskFault(msgspec.Struct, frozen=True, tag=True):
    """The storage has this fault from now on, in ``share`` of its calls; None: no fault."""

    fault: Fault | None = None
    share: float = 1.0
    delay_s: float = 0.0


ToCampaign = Identify | Reached
ToProcess = Arm | Resume | DiskFault


def line(message: ToCampaign | ToProcess) -> bytes:
    """Encode a message."""
    return msgspec.json.encode(message) + b"\n"


class FailpointClient:
    """The connection of a process under test; ``reached`` may be called from any thread.

    ``socket_path`` is where the campaign listens.  Forked children open their own connection.
    """

    def __init__(self, socket_path: Path, process: str) -> None:
        self._path = str(socket_path)
        self._process = process
        self.disk = DiskFault()
        self._armed: Arm | None = None
        self._left = 0
        self._lock = threading.Lock()
        self._resume = threading.Event()
        self._connect()
        os.register_at_fork(after_in_child=self._connect)

    def rename(self, process: str) -> None:
        """Identify as another process than the one that this one was forked from."""
        self._process = process
        self._socket.sendall(line(Identify(process, os.getpid())))

    def reached(self, step: Step) -> None:
        """Pause here if the campaign has armed this step."""
        armed = self._armed
        if armed is None or armed.step is not step:
            return
        with self._lock:
            if armed is not self._armed:
                return
            self._left -= 1
            if self._left > 0:
                return
            self._armed = None
        self._socket.sendall(line(Reached(armed.ticket)))
        self._resume.wait(_MOST_WAIT_S)

    def expects(self, step: Step) -> bool:
        """Whether this step is armed."""
        armed = self._armed
        return armed is not None and armed.step is step

    def _connect(self) -> None:
        self._armed = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(self._path)
        self._socket.sendall(line(Identify(self._process, os.getpid())))
        threading.Thread(target=self._listen, name="failpoints", daemon=True).start()

    def _listen(self) -> None:
        decoder = msgspec.json.Decoder(ToProcess)
        with self._socket.makefile("rb") as lines:
            for received in lines:
                self._take(decoder.decode(received))
        self._resume.set()

    def _take(self, message: ToProcess) -> None:
        match message:
            case DiskFault():
                self.disk = message
            case Resume():
                self._armed = None
                self._resume.set()
            case Arm():
                with self._lock:
                    self._resume.clear()
                    self._left = message.passes
                    self._armed = message
