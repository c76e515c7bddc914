"""The campaign's end of all gates: arms steps in processes, hears that they are reached."""

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Self

import msgspec

from dualpath.laboratory.chaos.gate import (
    Arm,
    Disk,
    Go,
    Here,
    Reached,
    ToCampaign,
    ToProcess,
    line,
)
from dualpath.laboratory.chaos.matrix import Step


class _Visitor:
    """One connected process life."""

    def __init__(self, here: Here, writer: asyncio.StreamWriter) -> None:
        self.process = here.process
        self.pid = here.pid
        self._writer = writer

    def close(self) -> None:
        """Let the process go on its own."""
        self._writer.close()

    def tell(self, message: ToProcess) -> None:
        """Send something; nothing if the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(line(message))


class Standing:
    """A process that stands at the step asked for; ``go_on`` lets it go on if it can."""

    def __init__(self, pid: int, visitor: _Visitor, ticket: int) -> None:
        self.pid = pid
        self._visitor = visitor
        self._ticket = ticket

    def go_on(self) -> None:
        """Let it go on."""
        self._visitor.tell(Go(self._ticket))


class Watch:
    """Listens at ``socket_path`` within ``async with``; lives in one event loop."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._visitors: dict[int, _Visitor] = {}
        self._tickets = itertools.count()
        self._awaited: dict[int, asyncio.Future[Standing]] = {}
        self._disk = Disk()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for visitor in self._visitors.values():
            visitor.close()

    async def reach(
        self, process: str, step: Step, passes: int, timeout_s: float
    ) -> Standing | None:
        """Wait until a process stands at a step; None if it does not get there in time."""
        ticket = next(self._tickets)
        visitors = [v for v in self._visitors.values() if v.process == process]
        standing: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        self._awaited[ticket] = standing
        for visitor in visitors:
            visitor.tell(Arm(ticket, step, passes))
        reached: Standing | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reached = await standing
        except TimeoutError:
            pass
        finally:
            del self._awaited[ticket]
            for visitor in visitors:
                if reached is None or visitor.pid != reached.pid:
                    visitor.tell(Go(ticket))
        return reached

    def trouble(self, disk: Disk) -> None:
        """Let the storage of all processes behave like this, also of those to come."""
        self._disk = disk
        for visitor in self._visitors.values():
            visitor.tell(disk)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visitor: _Visitor | None = None
        try:
            async for received in reader:
                message = msgspec.json.decode(received, type=ToCampaign)
                if isinstance(message, Here):
                    visitor = self._visitors[message.pid] = _Visitor(message, writer)
                    visitor.tell(self._disk)
                elif visitor is not None:
                    self._note(visitor, message)
        except (ConnectionError, asyncio.CancelledError):
            pass  # killed, or the event loop ends
        finally:
            if visitor is not None and self._visitors.get(visitor.pid) is visitor:
                del self._visitors[visitor.pid]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _note(self, visitor: _Visitor, reached: Reached) -> None:
        standing = self._awaited.get(reached.ticket)
        if standing is None or standing.done():
            visitor.tell(Go(reached.ticket))  # too late: nobody waits for it any more
        else:
            standing.set_result(Standing(visitor.pid, visitor, reached.ticket))
