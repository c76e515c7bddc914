"""A process under test tells the campaign that it has reached a step, and waits there.

Messages are lines of JSON over a Unix socket.  The campaign arms one step; the process that passes
it for the asked-for time stands still, at that very place, until the campaign has done what it
wants (killed it, stopped it, cut a connection) and says ``Go``.
"""

import os
import socket
import threading
from pathlib import Path

import msgspec

from dualpath.laboratory.chaos.matrix import Fault, Step

#: A campaign that has died must not hold a process for ever.
_MOST_WAIT_S = 15.0


class Here(msgspec.Struct, frozen=True, tag=True):
    """A process says who it is."""

    process: str
    pid: int


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A process stands at the step that was armed under this ticket."""

    ticket: int


class Arm(msgspec.Struct, frozen=True, tag=True):
    """Stop at ``step`` when it is passed for the ``passes``-th time from now."""

    ticket: int
    step: Step
    passes: int


class Go(msgspec.Struct, frozen=True, tag=True):
    """Go on; where the step was not reached yet, forget it."""

    ticket: int


class Disk(msgspec.Struct, frozen=True, tag=True):
    """From now on the storage misbehaves like this, in ``share`` of all calls; None: not at all."""

    fault: Fault | None = None
    share: float = 1.0
    delay_s: float = 0.0


ToCampaign = Here | Reached
ToProcess = Arm | Go | Disk


def line(message: ToCampaign | ToProcess) -> bytes:
    """Return a message as it is sent."""
    return msgspec.json.encode(message) + b"\n"


class Gate:
    """The end of a process under test; ``reached`` may be called from any thread.

    ``socket_path`` is where the campaign listens.  Children that are forked connect anew.
    """

    def __init__(self, socket_path: Path, process: str) -> None:
        self._path = str(socket_path)
        self._process = process
        self.disk = Disk()
        self._armed: Arm | None = None
        self._left = 0
        self._lock = threading.Lock()
        self._go = threading.Event()
        self._connect()
        os.register_at_fork(after_in_child=self._connect)

    def rename(self, process: str) -> None:
        """This process is another than the one that it was forked from."""
        self._process = process
        self._socket.sendall(line(Here(process, os.getpid())))

    def reached(self, step: Step) -> None:
        """Wait here if the campaign wants a fault at this step."""
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
        self._go.wait(_MOST_WAIT_S)

    def expects(self, step: Step) -> bool:
        """Whether a fault is to come at this step."""
        armed = self._armed
        return armed is not None and armed.step is step

    def _connect(self) -> None:
        self._armed = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(self._path)
        self._socket.sendall(line(Here(self._process, os.getpid())))
        threading.Thread(target=self._listen, name="chaos-gate", daemon=True).start()

    def _listen(self) -> None:
        decoder = msgspec.json.Decoder(ToProcess)
        with self._socket.makefile("rb") as lines:
            for received in lines:
                self._take(decoder.decode(received))
        self._go.set()

    def _take(self, message: ToProcess) -> None:
        match message:
            case Disk():
                self.disk = message
            case Go():
                self._armed = None
                self._go.set()
            case Arm():
                with self._lock:
                    self._go.clear()
                    self._left = message.passes
                    self._armed = message
