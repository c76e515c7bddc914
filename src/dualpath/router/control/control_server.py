"""The router's end of the control plane: one connection per engine (``control_socket``).

What can go wrong with an engine ends here as one event, ``on_lost``: it says goodbye, it greets
again with a new epoch (its former process is then certainly dead), or it falls silent.  A silent
engine that turns out to live is welcomed again without ceremony.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dualpath.core import control
from dualpath.core.errors import EngineRefusedError, IncompatibleError
from dualpath.router.control.control_socket import ControlSocket, ZmqControlSocket
from dualpath.router.control.registry import EngineInfo, EngineState, Registry
from dualpath.router.requests.refusals import ControlRefusal, ControlRefusals
from dualpath.transport.cluster_secret import ClusterSecret

logger = logging.getLogger(__name__)


class ControlListener(Protocol):
    """What the server reports to its owner; called from the event loop, must not block."""

    def on_joined(self, info: EngineInfo) -> None:
        """An engine may be used from now on."""

    def on_lost(self, info: EngineInfo, reason: str, certain: bool) -> None:
        """An engine is gone; ``certain`` if its process can no longer write anywhere."""

    def on_message(self, info: EngineInfo, message: control.EngineMessage) -> None:
        """A registered engine sent something else than ``Hello`` or ``Goodbye``."""


class ControlServer:
    """Owns the socket and the liveness of engines; the ``Registry`` holds what it learns.

    Without ``socket`` it is ZMQ's.
    """

    def __init__(
        self,
        registry: Registry,
        listener: ControlListener,
        clock: Callable[[], float],
        engine_timeout_s: float,
        socket: ControlSocket | None = None,
    ) -> None:
        self._registry = registry
        self._listener = listener
        self._clock = clock
        self._timeout_s = engine_timeout_s
        self._outbox: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._refusals = ControlRefusals()
        self._proofs: dict[str, list[asyncio.Future[bool]]] = {}
        self._checked_s = clock()
        self._socket = socket or ZmqControlSocket()
        self.address = ""

    async def start(self, host: str, port: int, secret: ClusterSecret | None = None) -> None:
        """Bind and serve; ``address`` is then the endpoint engines connect to.

        Raises ``ConfigError`` if the address cannot be bound, or other machines could reach it
        and there is no secret.
        """
        self.address = await self._socket.open(host, port, secret, self._refusals)
        self._tasks = [
            asyncio.create_task(loop(), name=f"control {name}")
            for name, loop in (
                ("receive", self._receive),
                ("send", self._send_all),
                ("watch", self._watch),
            )
        ]

    def refusals(self) -> Mapping[ControlRefusal, int]:
        """Return how often what came here was refused, by reason."""
        return self._refusals.totals()

    async def stop(self) -> None:
        """Send what is queued, then close; idempotent."""
        if not self._tasks:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._outbox.join(), timeout=1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._socket.close()

    def send(self, engine_id: str, message: control.RouterMessage) -> None:
        """Queue a message; messages to one engine arrive in order.

        A silent engine is sent its messages too: should it only have been slow, it learns what
        has been released meanwhile.
        """
        if (engine := self._registry.get(engine_id)) is not None:
            self._outbox.put_nowait((engine.identity, control.encode(message)))

    def declare_lost(self, engine_id: str, reason: str, certain: bool) -> None:
        """Treat a live engine as gone; does nothing for one that is not alive."""
        engine = self._registry.get(engine_id)
        if engine is None or not engine.alive:
            return
        engine.alive = False
        self._lost(engine.info, reason, certain)

    def proof_of_life(self, engine_id: str) -> asyncio.Future[bool]:
        """Return a future: True at the engine's next message, False when it is lost."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        engine = self._registry.get(engine_id)
        if engine is None or not engine.alive:
            future.set_result(False)
        else:
            self._proofs.setdefault(engine_id, []).append(future)
        return future

    def check_liveness(self) -> None:
        """Declare engines lost that were silent too long.

        Time in which this loop itself did not run is nobody's silence: reports that came
        meanwhile are still unread.
        """
        now_s = self._clock()
        late_s = now_s - self._checked_s - self._interval_s
        self._checked_s = now_s
        if late_s > self._interval_s:
            for engine in self._registry.all():
                engine.heard_s = min(engine.heard_s + late_s, now_s)
        for info in self._registry.silent(now_s, self._timeout_s):
            reason = f"silent for more than {self._timeout_s:g} s"
            self.declare_lost(info.engine_id, reason, certain=False)

    @property
    def _interval_s(self) -> float:
        return self._timeout_s / 10

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.check_liveness()

    async def _send_all(self) -> None:
        while True:
            identity, frame = await self._outbox.get()
            try:
                await self._socket.send(identity, frame)
            finally:
                self._outbox.task_done()

    async def _receive(self) -> None:
        while True:
            identity, frames = await self._socket.receive()
            try:
                self._handle(identity, frames)
            except Exception:
                # One message must never take the router down with it.
                logger.exception("control message from %s failed", identity.hex())

    def _handle(self, identity: bytes, frames: Sequence[bytes]) -> None:
        engine = self._registry.by_identity(identity)
        try:
            message = control.decode_engine_message(frames[-1] if frames else b"")
        except IncompatibleError as error:
            self._malformed(identity, engine, error)
            return
        if isinstance(message, control.Hello):
            self._hello(identity, message)
        elif engine is None:
            self._refusals.count(ControlRefusal.UNKNOWN_ENGINE)
            self._refuse(
                identity,
                f"{control.UNKNOWN_ENGINE}: this connection is not registered, perhaps because the "
                "router has restarted; send Hello",
            )
        else:
            self._heard(engine, message)

    def _heard(self, engine: EngineState, message: control.EngineMessage) -> None:
        engine.heard_s = self._clock()
        if isinstance(message, control.Goodbye):
            # It stops its transfers before it says so.
            engine.left = True
            self.declare_lost(engine.info.engine_id, f"left: {message.reason}", certain=True)
            return
        if not engine.alive:
            if isinstance(message, control.Released):
                # Late, but still its word that it writes no more.
                self._listener.on_message(engine.info, message)
            if engine.left or not isinstance(message, control.Report):
                return
            engine.alive = True
            self._welcome(engine.info, announce=True)
        if isinstance(message, control.Report):
            engine.report = message
        self._resolve_proofs(engine.info.engine_id, alive=True)
        self._listener.on_message(engine.info, message)

    def _hello(self, identity: bytes, hello: control.Hello) -> None:
        try:
            admission = self._registry.admit(hello, identity, self._clock())
        except EngineRefusedError as error:
            logger.warning("engine refused: %s", error)
            self._refusals.count(ControlRefusal(error.reason))
            self._refuse(identity, str(error))
            return
        if (former := admission.replaced) is not None:
            if admission.replaced_was_alive:
                self._lost(former, f"restarted as epoch {admission.info.epoch}", certain=True)
            else:
                self._notify_peers_down(former, certain=True)
        self._welcome(admission.info, announce=admission.new)

    def _welcome(self, info: EngineInfo, *, announce: bool) -> None:
        peers = tuple(p.address for p in self._others(info))
        self.send(info.engine_id, control.Welcome(peers=peers))
        if not announce:
            return
        logger.info("%s engine %s joined (epoch %s)", info.role.value, info.engine_id, info.epoch)
        for peer in self._others(info):
            self.send(peer.engine_id, control.PeerUp(address=info.address))
        self._listener.on_joined(info)

    def _lost(self, info: EngineInfo, reason: str, certain: bool) -> None:
        logger.warning("%s engine %s lost: %s", info.role.value, info.engine_id, reason)
        self._notify_peers_down(info, certain)
        self._resolve_proofs(info.engine_id, alive=False)
        self._listener.on_lost(info, reason, certain)

    def _notify_peers_down(self, info: EngineInfo, certain: bool) -> None:
        down = control.PeerDown(engine_id=info.engine_id, epoch=info.epoch, certain=certain)
        for peer in self._others(info):
            self.send(peer.engine_id, down)

    def _others(self, info: EngineInfo) -> list[EngineInfo]:
        return [peer for peer in self._registry.alive() if peer.role is not info.role]

    def _resolve_proofs(self, engine_id: str, *, alive: bool) -> None:
        for future in self._proofs.pop(engine_id, ()):
            if not future.done():
                future.set_result(alive)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._outbox.put_nowait((identity, control.encode(control.Refused(reason=reason))))

    def _malformed(
        self, identity: bytes, engine: EngineState | None, error: IncompatibleError
    ) -> None:
        self._refusals.count(ControlRefusal.MALFORMED)
        if not self._refusals.complain(identity):
            return
        name = engine.info.engine_id if engine else f"unregistered peer {identity.hex()}"
        logger.warning("%s sent a malformed frame, further ones are only counted: %s", name, error)
        if engine is None:
            self._refuse(identity, str(error))
