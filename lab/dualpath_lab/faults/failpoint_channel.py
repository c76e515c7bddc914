"""Failpoints: a process under test reports that it has reached a step, and pauses there.

Messages are lines of JSON over a Unix socket.  The campaign arms one step; the process that passes
it for the given time pauses there until the campaign has injected its fault (killed or stopped the
process, reset a connection) and sends ``Resume``.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import threading
from pathlib import Path
from typing import Self

import msgspec

from dualpath_lab.faults.matrix import Fault, Step

#: A campaign that hangs must not pause a process for ever.
_MOST_WAIT_S = 60.0


class Identify(msgspec.Struct, frozen=True, tag=True):
    """A process identifies itself."""

    process: str
    pid: int


class Reached(msgspec.Struct, frozen=True, tag=True):
    """A thread of a process has paused at the step that was armed with this ticket."""

    ticket: int
    thread: str


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
            resumed = self._paused[armed.ticket] = threading.Event()
        self._socket.sendall(line(Reached(armed.ticket, threading.current_thread().name)))
        resumed.wait(_MOST_WAIT_S)

    def expects(self, step: Step) -> bool:
        """Whether this step is armed."""
        armed = self._armed
        return armed is not None and armed.step is step

    def _connect(self) -> None:
        self._armed = None
        #: Of paused threads by ticket; a thread that hangs is no obstacle to the next fault.
        self._paused: dict[int, threading.Event] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(self._path)
        self._socket.sendall(line(Identify(self._process, os.getpid())))
        threading.Thread(target=self._listen, name="failpoints", daemon=True).start()

    def _listen(self) -> None:
        decoder = msgspec.json.Decoder(ToProcess)
        with self._socket.makefile("rb") as lines:
            for received in lines:
                self._take(decoder.decode(received))
        for ticket in [*self._paused]:
            self._resume(ticket)

    def _take(self, message: ToProcess) -> None:
        match message:
            case DiskFault():
                self.disk = message
            case Resume():
                self._resume(message.ticket)
            case Arm():
                with self._lock:
                    self._left = message.passes
                    self._armed = message

    def _resume(self, ticket: int) -> None:
        with self._lock:
            if self._armed is not None and self._armed.ticket == ticket:
                self._armed = None
            resumed = self._paused.pop(ticket, None)
        if resumed is not None:
            resumed.set()


# ------------------------------------------------------------------------------------------- watch
# The campaign's end of all failpoints: arms steps in processes and waits until one is reached.


class _Connection:
    """The connection of one process."""

    def __init__(self, here: Identify, writer: asyncio.StreamWriter) -> None:
        self.process = here.process
        self.pid = here.pid
        self._writer = writer

    def close(self) -> None:
        """Close the connection, which lets the process continue."""
        self._writer.close()

    def send(self, message: ToProcess) -> None:
        """Send a message; nothing if the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(line(message))


class PausedProcess:
    """A process of which a thread has paused at the armed step, until ``resume``."""

    def __init__(self, pid: int, thread: str, connection: _Connection, ticket: int) -> None:
        self.pid = pid
        self.thread = thread
        self._connection = connection
        self._ticket = ticket

    def resume(self) -> None:
        """Let it continue; nothing if it has ended."""
        self._connection.send(Resume(self._ticket))


class FailpointServer:
    """Listens at ``socket_path`` within ``async with``; lives in one event loop."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._connections: dict[int, _Connection] = {}
        self._tickets = itertools.count()
        self._awaited: dict[int, asyncio.Future[PausedProcess]] = {}
        self._disk = DiskFault()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for connection in self._connections.values():
            connection.close()

    async def pause_at(
        self, process: str, step: Step, passes: int, timeout_s: float
    ) -> PausedProcess | None:
        """Wait until a process has paused at a step; None if it is not reached in time."""
        ticket = next(self._tickets)
        connections = [v for v in self._connections.values() if v.process == process]
        paused: asyncio.Future[PausedProcess] = asyncio.get_running_loop().create_future()
        self._awaited[ticket] = paused
        for connection in connections:
            connection.send(Arm(ticket, step, passes))
        reached: PausedProcess | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reached = await paused
        except TimeoutError:
            pass
        finally:
            del self._awaited[ticket]
            for connection in connections:
                if reached is None or connection.pid != reached.pid:
                    connection.send(Resume(ticket))
        return reached

    def set_disk_fault(self, disk: DiskFault) -> None:
        """Give the storage of all processes, future ones included, this fault."""
        self._disk = disk
        for connection in self._connections.values():
            connection.send(disk)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: _Connection | None = None
        try:
            async for received in reader:
                message = msgspec.json.decode(received, type=ToCampaign)
                if isinstance(message, Identify):
                    connection = self._connections[message.pid] = _Connection(message, writer)
                    connection.send(self._disk)
                elif connection is not None:
                    self._on_reached(connection, message)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the process was killed, or the event loop ends
        finally:
            if connection is not None and self._connections.get(connection.pid) is connection:
                del self._connections[connection.pid]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _on_reached(self, connection: _Connection, reached: Reached) -> None:
        paused = self._awaited.get(reached.ticket)
        if paused is None or paused.done():
            connection.send(Resume(reached.ticket))  # the wait for it has timed out
        else:
            paused.set_result(
                PausedProcess(connection.pid, reached.thread, connection, reached.ticket)
            )
