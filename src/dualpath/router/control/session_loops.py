"""The loops behind an address where sessions come in: of engines, or of front ends."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from dualpath.node.cluster_secret import ClusterSecret
from dualpath.router.control.control_socket import ControlSocket
from dualpath.router.refusals import ControlRefusals

logger = logging.getLogger(__name__)

#: How soon who spoke learns that it was heard, if there is nothing else to say.
ACKNOWLEDGE_S = 0.1
#: So many times in a time-out is looked who was silent for it.
LOOKS_IN_A_TIMEOUT = 10


class SessionLoops:
    """Receives, sends, and looks at things from time to time; ``handle`` gets what comes in.

    Neither a message nor a look that fails ends a loop.
    """

    def __init__(
        self, socket: ControlSocket, handle: Callable[[bytes, Sequence[bytes]], None]
    ) -> None:
        self._socket = socket
        self._handle = handle
        self.tasks: list[asyncio.Task[None]] = []

    async def start(
        self,
        host: str,
        port: int,
        secret: ClusterSecret | None,
        refusals: ControlRefusals,
        looks: Mapping[Callable[[], None], float],
    ) -> str:
        """Bind and run; return the endpoint to connect to.  ``looks`` have their seconds between.

        Raises ``ConfigError`` if the address cannot be bound, or other machines could reach it and
        there is no secret.
        """
        address = await self._socket.open(host, port, secret, refusals)
        loops = [
            self._receive(),
            *(self._repeat(look, gap_s) for look, gap_s in looks.items()),
        ]
        self.tasks = [asyncio.create_task(loop, name=f"control at {address}") for loop in loops]
        return address

    def post(self, identity: bytes, frame: bytes) -> None:
        """Send a frame after those before it."""
        self._socket.send(identity, frame)

    async def stop(self) -> None:
        """Take up nothing more; close; idempotent, also while it does."""
        tasks, self.tasks = self.tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._socket.close()

    async def _receive(self) -> None:
        while True:
            identity, frames = await self._socket.receive()
            try:
                self._handle(identity, frames)
            except Exception:
                # One message must never take the scheduler down with it.
                logger.exception("control message from %s failed", identity.hex())

    async def _repeat(self, look: Callable[[], None], gap_s: float) -> None:
        while True:
            await asyncio.sleep(gap_s)
            try:
                look()
            except Exception:
                # Nobody would be found silent any more, or be told that it was heard.
                logger.exception("a look at sessions failed")


class OwnStalls:
    """How long an event loop itself did not run, between looks with ``gap_s`` between.

    That is nobody's silence: what came meanwhile is still unread.
    """

    def __init__(self, now_s: float, gap_s: float) -> None:
        self._looked_s = now_s
        self._gap_s = gap_s

    def late_s(self, now_s: float) -> float:
        """Return by how much this look is late; 0 if by less than the time between two."""
        late_s = now_s - self._looked_s - self._gap_s
        self._looked_s = now_s
        return late_s if late_s > self._gap_s else 0.0
