"""Frames to a router's control address: strangers', and nonsense of engines that have joined.

The whole router is behind it, but for HTTP: what a frame sets off is set off.  Engines are names
here, each of which has greeted; frames with other names are left out but for a few, since a router
remembers every engine that ever joined.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from dualpath.core import addresses, control, envelopes, request_messages, transfers
from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError, IncompatibleError
from dualpath.laboratory.chaos.fuzz.inputs import Inputs
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusals
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.transport.cluster_secret import ClusterSecret

ENGINES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
#: Greets again after every so many frames: nonsense may have thrown it out.
_GREETS_EVERY = 64
_GUARD_S = 10.0
_NAMESPACE = StoreNamespace(
    model="fuzzed",
    dtype="float32",
    layout="none",
    geometry=BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=64),
)


def hello(engine_id: str, registration: int = 1) -> control.Register:
    """Return an honest registration."""
    return control.Register(
        version=control.PROTOCOL_VERSION,
        address=addresses.EngineAddress(
            engine_id=engine_id,
            epoch=f"{engine_id}-1",
            role=ENGINES.get(engine_id, Role.PREFILL),
            agents=(
                addresses.AgentAddress(
                    engine_id,
                    b"metadata",
                    (addresses.RegionAddress("buffer", 4096, 128, 64, 16),),
                ),
            ),
        ),
        namespace=_NAMESPACE,
        api_url="http://127.0.0.1:1",
        node=engine_id,
        group=ENGINES.get(engine_id, Role.PREFILL).value,
        mode="dualpath",
        hbm_tokens=1000,
        buffer_tokens=1000,
        limits={"max_model_len": 1000, "vocab_size": 1009},
        registration=registration,
        node_dram=control.NodeDramShare("a-1", 400),
    )


def messages(registration: control.Register) -> list[control.EngineMessage]:
    """Return one of each honest message that the engine of a registration may send."""
    return [
        registration,
        control.Report(1, 0, 0, 0, 0, 100, 100, counters={"storage_read_bytes": 3.0}),
        control.CacheUpdate((b"8 bytes.",), (b"of a key",), in_node=True),
        control.ConfirmedDead(writer=registration.address.writer),
        control.LookupDone(call_id=1, hit_blocks=2),
        control.Synced(call_id=1),
        request_messages.Reserved(request_id="a", slots=(0, 1), wait_s=0.0),
        request_messages.ReadDone("a", 1, None, 64, 0.0, 0.0, (0, 1)),
        request_messages.PrefillDone(request_id="a"),
        request_messages.KvInHbm(request_id="a", h2d_s=0.0),
        request_messages.Released(request_id="a"),
        request_messages.Failed(request_id="a", reason="no"),
        control.Deregister(reason="bye"),
    ]


def frame(inputs: Inputs, registration: control.Register, session: str = "") -> bytes:
    """Return noise, or an honest message of that engine with something wrong in it."""
    message = inputs.one_of(messages(registration))
    number = inputs.one_of((0, 0, 1, 2, 3, 1 << 40))
    envelope = envelopes.Envelope(session, number, inputs.one_of((0, 0, 1, 1 << 40)), message)
    return inputs.msgpack(msgspec.msgpack.decode(envelopes.encode(envelope)))


class _NoCalls:
    """``EngineCalls`` to engines that are names only."""

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: transfers.PrefillTransfer
    ) -> TokenEvent:
        raise EngineLostError(f"engine {engine.engine_id} is a name")

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: transfers.DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        for _ in prior_tokens:
            yield TokenEvent((), None)
        raise EngineLostError(f"engine {engine.engine_id} is a name")

    async def answers(self, engine: EngineInfo) -> None:
        raise EngineLostError(f"engine {engine.engine_id} is a name")


class InMemorySocket:
    """A ``ControlSocket`` that is fed by hand; what the router sends must be well-formed."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, str] = {}
        self.refusals = ControlRefusals()
        self._arrived: asyncio.Queue[tuple[bytes, Sequence[bytes]]] = asyncio.Queue()
        self._wanted = asyncio.Event()

    async def feed(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Hand a message over; returns when it has been dealt with."""
        self._wanted.clear()
        self._arrived.put_nowait((identity, frames))
        await asyncio.wait_for(self._wanted.wait(), _GUARD_S)

    async def open(
        self, host: str, port: int, secret: ClusterSecret | None, refusals: ControlRefusals
    ) -> str:
        """Nothing to open."""
        self.refusals = refusals
        return "fed"

    async def receive(self) -> tuple[bytes, Sequence[bytes]]:
        """Return what was fed."""
        if self._arrived.empty():
            self._wanted.set()
        return await self._arrived.get()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Look at what is sent."""
        envelope = envelopes.decode_router_message(frame)
        if isinstance(envelope.message, control.Registered):
            self.sessions[identity] = envelope.session

    async def close(self) -> None:
        """Nothing to close."""


class ControlSubject:
    """The router of this process."""

    pid: int | None = None

    def __init__(self) -> None:
        self._greeting = 1
        self._played = 0

    async def __aenter__(self) -> Self:
        self._socket = InMemorySocket()
        self._service = RouterService(RouterSettings(), _NoCalls(), control_socket=self._socket)
        await self._service.start()
        await self._greet()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._service.stop()

    def input(self, inputs: Inputs) -> tuple[bytes, list[bytes]]:
        """Return who sends and the parts of a message, nearly always one."""
        sender = inputs.one_of((*ENGINES, "stranger")).encode()
        session = self._socket.sessions.get(sender, "")
        parts = inputs.one_of((0, 2, 3)) if inputs.chance(0.02) else 1

        def one() -> bytes:
            return frame(inputs, hello(inputs.one_of(tuple(ENGINES))), session)

        return sender, [one() for _ in range(parts)]

    async def play(self, given: Any) -> str:  # noqa: ANN401 - what ``input`` returns
        """Feed it."""
        sender, parts = given
        self._played += 1
        if self._played % _GREETS_EVERY == 0:
            await self._greet()
        try:
            decoded = envelopes.decode_engine_message(parts[-1] if parts else b"")
        except IncompatibleError:
            outcome = "malformed"
        else:
            if _is_new_engine(decoded.message) and self._played % 1000:
                return "left out"
            outcome = type(decoded.message).__name__
        await self._socket.feed(sender, parts)
        return outcome

    async def still_works(self) -> None:
        """All engines are welcomed and alive."""
        self._socket.sessions.clear()
        await self._greet()
        async with asyncio.timeout(_GUARD_S):
            while not set(self._socket.sessions) >= {name.encode() for name in ENGINES}:
                await asyncio.sleep(0.01)
        alive = {info.engine_id for info in self._service.registry.alive()}
        if not alive >= set(ENGINES):
            raise AssertionError(f"of {set(ENGINES)} only {alive} live")

    async def _greet(self) -> None:
        self._greeting += 1
        for name in ENGINES:
            # A registration of a process that has restarted, so that nonsense in its name is over.
            registration = hello(name, self._greeting)
            address = msgspec.structs.replace(
                registration.address, epoch=f"{name}-{self._greeting}"
            )
            anew = msgspec.structs.replace(registration, address=address)
            await self._socket.feed(name.encode(), [envelopes.encode(envelopes.unnumbered(anew))])
        await asyncio.sleep(0)


def _is_new_engine(message: control.EngineMessage) -> bool:
    return isinstance(message, control.Register) and message.address.engine_id not in ENGINES
