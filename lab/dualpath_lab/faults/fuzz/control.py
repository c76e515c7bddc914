"""Frames to a router's control address, from unregistered peers and from registered engines.

The whole router except for HTTP handles them.  Engines are only names here, each of which has
registered; nearly all frames that would register other names are left out, since a router remembers
every engine that has ever joined.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from dualpath.core import cluster, control, transfers
from dualpath.core import control as envelopes
from dualpath.core import control as request_messages
from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError, IncompatibleError
from dualpath.node.cluster_secret import ClusterSecret
from dualpath.router.engine_calls import Job, OpenCalls, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusals
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath_lab.faults.fuzz.inputs import Inputs

ENGINES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
#: Engines re-register after this many frames, as malformed ones may have made them lost.
_REGISTER_EVERY = 64
_GUARD_S = 10.0
_NAMESPACE = StoreNamespace(
    model="fuzzed",
    dtype="float32",
    layout="none",
    geometry=BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=64),
)


def valid_registration(engine_id: str, registration: int = 1) -> control.Register:
    """Return a valid registration."""
    return control.Register(
        version=control.PROTOCOL_VERSION,
        address=cluster.EngineAddress(
            engine_id=engine_id,
            epoch=f"{engine_id}-1",
            role=ENGINES.get(engine_id, Role.PREFILL),
            agents=(
                cluster.AgentAddress(
                    engine_id,
                    b"metadata",
                    (cluster.RegionAddress("buffer", 4096, 128, 64, 16),),
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
    """Return one valid message of each kind that the engine of a registration may send."""
    return [
        registration,
        control.Report(1, control.Load(0, 0, 0, 100, 100), {"storage_read_bytes": 3.0}),
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
    """Return noise, or a message of that engine with something wrong in it."""
    message = inputs.one_of(messages(registration))
    number = inputs.one_of((0, 0, 1, 2, 3, 1 << 40))
    envelope = envelopes.Envelope(session, number, inputs.one_of((0, 0, 1, 1 << 40)), message)
    return inputs.msgpack(msgspec.msgpack.decode(envelopes.encode(envelope)))


class _NoCalls:
    """``EngineCalls`` to engines that are only names."""

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: transfers.PrefillTransfer
    ) -> TokenEvent:
        raise EngineLostError(f"engine {engine.engine_id} has no process")

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: transfers.DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        for _ in prior_tokens:
            yield TokenEvent((), None)
        raise EngineLostError(f"engine {engine.engine_id} has no process")

    async def answers(self, engine: EngineInfo) -> None:
        raise EngineLostError(f"engine {engine.engine_id} has no process")

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        raise EngineLostError(f"engine {engine.engine_id} has no process")


class InMemorySocket:
    """A ``ControlSocket`` in memory; frames that the router sends must be well-formed."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, str] = {}
        self.refusals = ControlRefusals()
        self._arrived: asyncio.Queue[tuple[bytes, Sequence[bytes]]] = asyncio.Queue()
        self._wanted = asyncio.Event()

    async def feed(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Deliver a message; returns when the router has handled it."""
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
        """Return the next delivered message."""
        if self._arrived.empty():
            self._wanted.set()
        return await self._arrived.get()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Decode a sent frame."""
        envelope = envelopes.decode_router_message(frame)
        if isinstance(envelope.message, control.Registered):
            self.sessions[identity] = envelope.session

    async def close(self) -> None:
        """Nothing to close."""


class ControlSubject:
    """The router of this process."""

    pid: int | None = None

    def __init__(self) -> None:
        self._registration = 1
        self._count = 0

    async def __aenter__(self) -> Self:
        self._socket = InMemorySocket()
        self._service = RouterService(RouterSettings(), _NoCalls(), control_socket=self._socket)
        await self._service.start()
        await self._register_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._service.stop()

    def input(self, inputs: Inputs) -> tuple[bytes, list[bytes]]:
        """Return the sender and the frames of a message, nearly always one."""
        sender = inputs.one_of((*ENGINES, "stranger")).encode()
        session = self._socket.sessions.get(sender, "")
        parts = inputs.one_of((0, 2, 3)) if inputs.chance(0.02) else 1

        def one() -> bytes:
            return frame(inputs, valid_registration(inputs.one_of(tuple(ENGINES))), session)

        return sender, [one() for _ in range(parts)]

    async def run_input(self, given: Any) -> str:  # noqa: ANN401 - what ``input`` returns
        """Deliver it."""
        sender, parts = given
        self._count += 1
        if self._count % _REGISTER_EVERY == 0:
            await self._register_all()
        try:
            decoded = envelopes.decode_engine_message(parts[-1] if parts else b"")
        except IncompatibleError:
            outcome = "malformed"
        else:
            if _is_new_engine(decoded.message) and self._count % 1000:
                return "left out"
            outcome = type(decoded.message).__name__
        await self._socket.feed(sender, parts)
        return outcome

    async def still_works(self) -> None:
        """All engines can register and are alive."""
        self._socket.sessions.clear()
        await self._register_all()
        async with asyncio.timeout(_GUARD_S):
            while not set(self._socket.sessions) >= {name.encode() for name in ENGINES}:
                await asyncio.sleep(0.01)
        alive = {info.engine_id for info in self._service.registry.alive()}
        if not alive >= set(ENGINES):
            raise AssertionError(f"only {alive} of {set(ENGINES)} are alive")

    async def _register_all(self) -> None:
        self._registration += 1
        for name in ENGINES:
            # As a restarted process, which ends the effects of frames under its name.
            registration = valid_registration(name, self._registration)
            address = msgspec.structs.replace(
                registration.address, epoch=f"{name}-{self._registration}"
            )
            restarted = msgspec.structs.replace(registration, address=address)
            frame = envelopes.encode(envelopes.unnumbered(restarted))
            await self._socket.feed(name.encode(), [frame])
        await asyncio.sleep(0)


def _is_new_engine(message: control.EngineMessage) -> bool:
    return isinstance(message, control.Register) and message.address.engine_id not in ENGINES
