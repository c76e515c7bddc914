"""Runs the light router as a process, or a light front end linked to a remote scheduler."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dualpath.laboratory.emulated.engine_client import EngineClient
from dualpath.laboratory.emulated.front_door import emulated_router, served
from dualpath.router.api_keys import ApiKeys, engine_headers, warn_if_open
from dualpath.router.collector import collect_seldom
from dualpath.router.http.server import until_signal
from dualpath.router.http.shared_port import SharedPort
from dualpath.router.links.service import LinkedFrontEnd
from dualpath.router.links.settings import LinkSettings
from dualpath.router.requests.limits import allow_many_streams
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.router.token_api.client import TokenApiClient


@asynccontextmanager
async def emulated_front_end(
    settings: RouterSettings,
    link: LinkSettings,
    host: str,
    port: int,
    shared: SharedPort | None = None,
) -> AsyncIterator[tuple[str, LinkedFrontEnd]]:
    """Serve in the block, linked to a remote scheduler; yields the endpoint and the service.

    Raises ``ConfigError`` for an address that is in use or invalid.
    """
    warn_if_open(host, ApiKeys(settings.api_keys))
    async with AsyncExitStack() as stack:
        calls = EngineClient(TokenApiClient(engine_headers()))
        stack.push_async_callback(calls.aclose)
        service = LinkedFrontEnd(settings, link, calls)
        stack.push_async_callback(service.stop)
        await service.start()
        endpoint = await served(service, host, port, stack, shared)
        yield endpoint, service


async def run_emulated_router(settings: RouterSettings, host: str, port: int) -> None:
    """Run a light router until SIGINT, or until it has drained after SIGTERM.

    Raises ``ConfigError`` for an address in use.
    """
    allow_many_streams()
    async with emulated_router(settings, host, port) as (endpoint, service):
        collect_seldom()
        print(
            f"dualpath emulated router: token ids at {endpoint}/v1, engines register at "
            f"{service.control_address}{_front_ends(service)}",
            flush=True,
        )
        await until_signal(service.drain)


async def run_emulated_front_end(
    settings: RouterSettings, link: LinkSettings, host: str, port: int
) -> None:
    """Run a light front end, linked to a remote scheduler, until SIGINT or until drained."""
    allow_many_streams()
    shared = SharedPort() if link.share_port else None
    async with emulated_front_end(settings, link, host, port, shared) as (endpoint, service):
        collect_seldom()
        print(
            f"dualpath emulated front end: token ids at {endpoint}/v1, scheduler at "
            f"{service.scheduler_address}",
            flush=True,
        )
        await until_signal(lambda: shared.leave(service) if shared else service.drain())


def _front_ends(service: RouterService) -> str:
    address = service.front_ends_address
    return f", front ends at {address}" if address else ""
