"""The router with real traffic managers, buffers and control links; only the model is a toy."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, ToyEngine, kv_bytes
from tests.guard import GUARD_S
from tests.unit.router_cluster import WatchedService

from dualpath.core import control, transfers
from dualpath.core.blocks import StoreNamespace, block_keys
from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun
from dualpath.engine.control.link import ControlLink, ZmqRouterConnection
from dualpath.engine.threads import LEAVE_S, OS_THREADS, TimeLimit
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings

NAMESPACE = StoreNamespace(model="toy", dtype="u8", layout="toy", geometry=GEOMETRY)


def keys_of(tokens: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(block_keys(tokens, GEOMETRY.block_tokens))


def _defect(reason: str) -> None:
    raise AssertionError(reason)


class LinkedEngine:
    """A toy engine behind the control link a vLLM engine uses."""

    def __init__(self, engine: ToyEngine, role: Role, mode: Mode, router: str) -> None:
        self.engine, self.role, self.mode = engine, role, mode
        manager = engine.manager
        self.link = ControlLink(
            ZmqRouterConnection(router),
            self._hello,
            manager.report,
            manager.handle,
            manager.end_session,
            manager.tick,
            _defect,
        )
        self.closing = threading.Event()
        self.forwarder = threading.Thread(target=self._forward, daemon=True)
        self.forwarder.start()
        self.link.start()

    def _hello(self, registration: int) -> control.Register:
        manager = self.engine.manager
        return control.Register(
            version=control.PROTOCOL_VERSION,
            address=manager.address(self.engine.epoch),
            namespace=NAMESPACE,
            api_url="http://unused",
            node=self.role.value,
            group=self.role.value,
            mode=self.mode.value,
            hbm_tokens=manager.hbm_tokens,
            buffer_tokens=manager.buffer_tokens,
            registration=registration,
        )

    def _forward(self) -> None:
        while (message := self.engine.outbox.get()) is not None:
            assert isinstance(message, control.EngineMessage)
            self.link.send(message)

    def close(self) -> None:
        self.engine.outbox.put(None)  # type: ignore[arg-type]  # ends the forwarder
        self.forwarder.join(GUARD_S)
        self.link.close(control.Deregister(reason="test over"), TimeLimit(OS_THREADS, LEAVE_S))


class ToyCalls:
    """Forward passes and H2D copies of the toy cluster, one at a time; bytes are checked."""

    def __init__(self, toys: ToyCluster) -> None:
        self._toys = toys
        self._one = asyncio.Lock()
        self.hits: list[tuple[int, frozenset[Role]]] = []

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: transfers.PrefillTransfer
    ) -> TokenEvent:
        self.hits.append(
            (prefill_transfer.hit_blocks, frozenset(run.side for run in prefill_transfer.hits))
        )
        keys = self._keys(job)
        chunk = BlockRun(prefill_transfer.hit_blocks, len(keys) - prefill_transfer.hit_blocks)
        assert self._toys.pe.manager.take_call(prefill_transfer)
        async with self._one:
            failures = await asyncio.to_thread(
                self._toys.forward, [(prefill_transfer, keys, chunk, range(len(keys)))]
            )
        assert not failures
        self._toys.pe.outbox.put(self._toys.pe.manager.sent(prefill_transfer.request_id, None))
        return TokenEvent(token_ids=(1,), finish_reason="length")

    async def answers(self, engine: EngineInfo) -> None:
        pass

    async def open_calls(self, engine: EngineInfo) -> None:
        return None

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: transfers.DecodeTransfer,
        prior: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        keys = self._keys(job)
        async with self._one:
            loop = asyncio.get_running_loop()
            copied: asyncio.Future[str | None] = loop.create_future()

            def over(error: str | None) -> None:
                loop.call_soon_threadsafe(copied.set_result, error)

            self._toys.de.manager.fill_hbm(decode_transfer, range(len(keys)), over)
            assert await copied is None
            for block, key in enumerate(keys):
                for layer in range(GEOMETRY.layers):
                    assert self._toys.de.hbm[layer][block].tobytes() == kv_bytes(key, layer)
        yield TokenEvent(token_ids=(2,), finish_reason="length")

    @staticmethod
    def _keys(job: Job) -> list[bytes]:
        partial = job.prompt_tokens % GEOMETRY.block_tokens
        return [*job.keys, *([b"partial" + job.request_id.encode()] if partial else [])]


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.ROUND_ROBIN, Mode.DUALPATH, Mode.SPLIT])
async def test_two_turns_of_eight_agents_reach_the_decode_engine_byte_by_byte(mode: Mode) -> None:
    toys = ToyCluster(mode=mode, buffer_blocks=7)
    calls = ToyCalls(toys)
    service = WatchedService(RouterSettings(), calls)
    await service.start()
    links = [
        LinkedEngine(toys.pe, Role.PREFILL, mode, service.scheduler.server.address),
        LinkedEngine(toys.de, Role.DECODE, mode, service.scheduler.server.address),
    ]
    try:
        await service.wait_ready(1, 1, GUARD_S)
        for turn in (1, 2):
            agents = [[agent] * (9 * turn + 1) for agent in range(8)]
            async with asyncio.timeout(GUARD_S):
                answers = await asyncio.gather(
                    *(answer(service, f"{turn}-{i}", tokens) for i, tokens in enumerate(agents))
                )
            assert answers == [[1, 2]] * 8
            await asyncio.to_thread(toys.de.manager.persister.drain, GUARD_S)
        assert [blocks for blocks, _ in calls.hits[8:]] == [2] * 8
        sides = set().union(*(sides for _, sides in calls.hits[8:]))
        assert sides == ({Role.PREFILL} if mode is Mode.BASIC else set(Role))
        await emptied(service, toys)
        assert service.scheduler.releases.held == 0
    finally:
        for link in links:
            await asyncio.to_thread(link.close)
        await service.stop()
        toys.close()


async def answer(service: RouterService, request_id: str, tokens: list[int]) -> list[int]:
    job = Job(
        request_id=request_id,
        prompt_token_ids=tuple(tokens),
        max_new_tokens=2,
        keys=keys_of(tokens),
        keys_for=keys_of,
    )
    return [t for event in [e async for e in service.submit(job)] for t in event.token_ids]


async def emptied(service: WatchedService, toys: ToyCluster) -> None:
    """Wait until the engines' own reports say that nothing is left on them."""
    whole = {e.manager.settings.engine_id: e.manager.buffer_tokens for e in (toys.pe, toys.de)}

    def empty() -> bool:
        engines = service.status()["engines"]
        return {e["engine_id"]: e["free_buffer_tokens"] for e in engines if not e["seq"]} == whole

    await service.arrivals.until(empty, GUARD_S)
