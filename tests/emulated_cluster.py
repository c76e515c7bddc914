"""Emulated engines and their router within a test's process; transfers stay in it too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.engine.control.surroundings import LIVE, Surroundings
from dualpath.engine.passes.device import Device
from dualpath.engine.settings import EngineSettings
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.storage.contract import BlockStorage
from dualpath.transport.contract import Transport
from dualpath.transport.in_process import InProcessFabric
from dualpath_lab.emulated.process import EmulatedEngine, emulated_engine
from dualpath_lab.emulated.router_server import emulated_router
from dualpath_lab.emulated.settings import EmulatedSettings, block_geometry
from dualpath_sim.simulator.settings import DecodeCosts, ModelCosts, PrefillCosts
from tests.control_network import Arrivals
from tests.guard import GUARD_S
from tests.ranked_harness import CountingTransport

COSTS = ModelCosts(
    name="small",
    layers=5,
    kv_bytes_per_token=5 * 16.0,
    prefill=PrefillCosts(batch_s=1e-3, attention_token_s=1e-5, pair_s=1e-7),
    decode=DecodeCosts(step_s=1e-3),
    prefill_tokens_per_s=1e5,
)
GEOMETRY = block_geometry(COSTS.layers, 4, COSTS.kv_bytes_per_token)


class Cluster:
    """A running cluster: its endpoint, router service and engines."""

    def __init__(
        self,
        endpoint: str,
        service: RouterService,
        http: aiohttp.ClientSession,
        storage: Callable[[BlockStorage], BlockStorage] = lambda opened: opened,
    ) -> None:
        self.fabric = InProcessFabric()
        self.surroundings = Surroundings(
            open_transport=self._open_transport,
            open_storage=lambda *where: storage(LIVE.open_storage(*where)),
        )
        self.endpoint = endpoint
        self.service = service
        self.arrivals = Arrivals(service)
        self.http = http
        self.engines: dict[str, EmulatedEngine] = {}
        #: Those of all ranks, by their agents' names.
        self.transports: dict[str, CountingTransport] = {}

    def _open_transport(self, agent: str, settings: EngineSettings, device: Device) -> Transport:
        self.transports[agent] = CountingTransport(agent, self.fabric)
        return self.transports[agent]

    async def post(self, prompt: Sequence[int], tokens: int, **more: Any) -> tuple[int, Any]:
        """Return status and body of a completion."""
        body = {"prompt": list(prompt), "max_tokens": tokens, **more}
        url = f"{self.endpoint}/v1/completions"
        async with asyncio.timeout(GUARD_S), self.http.post(url, json=body) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def ask(self, prompt: Sequence[int], tokens: int, **more: Any) -> tuple[list[int], int]:
        """Return (generated tokens, hit tokens)."""
        status, body = await self.post(prompt, tokens, **more)
        assert status == 200, body
        hits = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return body["choices"][0]["token_ids"], hits

    async def stored(self) -> None:
        """Wait until all blocks are stored."""
        for engine in self.engines.values():
            assert await asyncio.to_thread(engine.plane.manager.persister.drain, GUARD_S)

    def counts(self, column: int) -> int:
        """Sum of verified (0) or wrong (1) Layer Blocks over all engines and places."""
        engines = self.engines.values()
        return sum(c[column] for e in engines for c in e.plane.verifier.counts().values())

    async def idle(self) -> None:
        """Wait until no engine has a request or holds buffer or HBM, and the scheduler knows it."""
        await self.arrivals.until(self._idle, GUARD_S)

    def _idle(self) -> bool:
        scheduler = self.service.scheduler
        if scheduler.releases.held or not scheduler.dispatch.idle():
            return False
        managers = [engine.plane.manager for engine in self.engines.values()]
        capacities = [(0, m.buffer_tokens, m.hbm_tokens) for m in managers]
        loads = [m.report().load for m in managers]
        return capacities == [
            (r.unfinished_requests, r.free_buffer_tokens, r.free_hbm_tokens) for r in loads
        ]


def engine_settings(
    role: Role, engine_id: str, control: str, storage: Path | str, mode: Mode, **changes: Any
) -> EmulatedSettings:
    """Return settings of a small engine; ``changes`` go to whichever settings have the field.

    With more ``kv_heads`` than ``GEOMETRY`` has words its blocks are larger.
    """
    heads = changes.get("kv_heads", 1)
    geometry = block_geometry(COSTS.layers, 4, COSTS.kv_bytes_per_token, heads)
    engine = EngineSettings(
        role=role,
        engine_id=engine_id,
        router=control,
        api_url="",
        storage=str(storage),
        mode=mode,
        buffer_bytes=128 * geometry.full_block_bytes,
    )
    settings = EmulatedSettings(
        engine=engine,
        geometry=geometry,
        costs=COSTS,
        speedup=10.0,
        hbm_bytes=128 * geometry.full_block_bytes,
        batch_cap_tokens=16,
        max_model_len=512,
    )
    own = {k: v for k, v in changes.items() if k in EngineSettings.__struct_fields__}
    others = {k: v for k, v in changes.items() if k not in own}
    return msgspec.structs.replace(
        settings, engine=msgspec.structs.replace(engine, **own), **others
    )


@contextlib.asynccontextmanager
async def cluster(
    storage: Path | str,
    mode: Mode,
    prefill: int = 1,
    decode: int = 1,
    *,
    router: RouterSettings | None = None,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    wrap_storage: Callable[[BlockStorage], BlockStorage] = lambda opened: opened,
    own: Mapping[str, dict[str, Any]] | None = None,
    **changes: Any,
) -> AsyncIterator[Cluster]:
    """Run a cluster in the block; ``prefill_tp`` and ``decode_tp`` are ranks of an engine.

    ``own`` are changes of single engines, by name.
    """
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        settings = router or RouterSettings(mode=mode)
        endpoint, service = await stack.enter_async_context(
            emulated_router(settings, "127.0.0.1", 0)
        )
        made = Cluster(endpoint, service, http, wrap_storage)
        for role, count, ranks in (
            (Role.PREFILL, prefill, prefill_tp),
            (Role.DECODE, decode, decode_tp),
        ):
            for index in range(count):
                name = f"{role.value}-{index}"
                chosen = engine_settings(
                    *(role, name, service.scheduler.server.address, storage, mode),
                    **(changes | {"tensor_parallel_size": ranks} | (own or {}).get(name, {})),
                )
                made.engines[name] = await stack.enter_async_context(
                    emulated_engine(chosen, made.surroundings)
                )
        await service.wait_ready(prefill, decode, GUARD_S)
        yield made
