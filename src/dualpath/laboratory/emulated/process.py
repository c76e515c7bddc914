"""Runs one emulated engine as a process: data plane, emulated GPU and HTTP server."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dualpath.core.cluster import Role
from dualpath.engine.surroundings import LIVE, Surroundings
from dualpath.laboratory.emulated.data_plane import DataPlane
from dualpath.laboratory.emulated.decode import DecodeEngine
from dualpath.laboratory.emulated.follow import follow, start_thread_ranks
from dualpath.laboratory.emulated.group import join_group
from dualpath.laboratory.emulated.prefill import PrefillEngine
from dualpath.laboratory.emulated.rank_processes import rank_processes
from dualpath.laboratory.emulated.ranks import LeaderRank
from dualpath.laboratory.emulated.server import EngineServer
from dualpath.laboratory.emulated.settings import EmulatedSettings
from dualpath.router.http.server import serving_app, until_signal
from dualpath.router.requests.limits import allow_many_streams
from dualpath.transport.process_memory import ProcessMemoryTransport


class EmulatedEngine:
    """A running engine; ``api_url`` is the URL of its HTTP server."""

    def __init__(self, plane: DataPlane, api_url: str) -> None:
        self.plane = plane
        self.api_url = api_url


@asynccontextmanager
async def emulated_engine(
    settings: EmulatedSettings,
    surroundings: Surroundings = LIVE,
    ranks: LeaderRank | None = None,
) -> AsyncIterator[EmulatedEngine]:
    """Run an engine in the block; it registers with the router in the background.

    ``ranks`` connects to its other ranks; without it, they are threads of this process.  Raises
    ``ConfigError`` (value, limit, remedy) if it cannot be started with these settings,
    ``EngineLostError`` if one of its ranks cannot be started.
    """
    leading = ranks or start_thread_ranks(settings, surroundings)
    try:
        plane = await asyncio.to_thread(DataPlane, settings, surroundings, leading)
    except BaseException:
        leading.end()
        raise
    prefills = settings.engine.role is Role.PREFILL
    engine: PrefillEngine | DecodeEngine = PrefillEngine(plane) if prefills else DecodeEngine(plane)
    try:
        app = EngineServer(plane, engine).app()
        async with serving_app(app, settings.host, settings.port) as port:
            api_url = settings.engine.api_url or f"http://{settings.host}:{port}"
            engine.start()
            dp = await asyncio.to_thread(join_group, settings)
            plane.membership.join(api_url, dp=dp)
            try:
                yield EmulatedEngine(plane, api_url)
            finally:
                await asyncio.to_thread(engine.close)
    finally:
        await asyncio.to_thread(plane.close)


async def drain(plane: DataPlane) -> None:
    """Stop accepting requests; return when all have ended, or after ``drain_timeout_s``."""
    loop, drained = asyncio.get_running_loop(), asyncio.Event()

    def on_drained() -> None:
        loop.call_soon_threadsafe(drained.set)

    plane.membership.drain("its process got SIGTERM", on_drained)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(plane.settings.engine.drain_timeout_s):
            await drained.wait()


def run_engine(settings: EmulatedSettings) -> None:
    """Run an engine until SIGINT, or until it has drained after SIGTERM.

    Its other ranks are forked as processes, so this process must have no threads yet.  Raises what
    ``emulated_engine`` raises.
    """
    surroundings = LIVE
    if settings.transport == "memory":
        surroundings = Surroundings(
            open_transport=lambda agent, _: ProcessMemoryTransport(
                agent, LIVE.this_process(), LIVE.has_exited
            )
        )
    follower = functools.partial(follow, settings, surroundings=surroundings)
    with rank_processes(settings.tensor_parallel_size, follower) as ranks:
        asyncio.run(_serve(settings, surroundings, ranks))


async def _serve(settings: EmulatedSettings, surroundings: Surroundings, ranks: LeaderRank) -> None:
    allow_many_streams()
    async with emulated_engine(settings, surroundings, ranks) as engine:
        name, role = settings.engine.engine_id, settings.engine.role.value
        print(
            f"dualpath emulated {role} engine {name}: {engine.api_url}, buffer of "
            f"{engine.plane.manager.buffer_tokens} tokens, HBM of "
            f"{engine.plane.manager.hbm_tokens}",
            flush=True,
        )
        await until_signal(functools.partial(drain, engine.plane))
