"""The campaign's end of all failpoints: arms steps in processes and waits until one is reached."""

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Self

import msgspec

from dualpath.laboratory.chaos.gate import (
    Arm,
    DiskFault,
    Identify,
    Reached,
    Resume,
    ToCampaign,
    ToProcess,
    line,
)
from dualpath.laboratory.chaos.matrix import Step


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
    """A process that has paused at the armed step, until ``resume``."""

    def __init__(self, pid: int, connection: _Connection, ticket: int) -> None:
        self.pid = pid
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
            paused.set_result(PausedProcess(connection.pid, connection, reached.ticket))
