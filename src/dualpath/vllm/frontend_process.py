"""The process of a separate front end: the OpenAI endpoint, linked to a remote scheduler."""

from contextlib import AsyncExitStack

from dualpath.router.http.shared_port import SharedPort
from dualpath.router.links.service import LinkedFrontEnd
from dualpath.router.links.settings import LinkSettings
from dualpath.router.settings import RouterSettings
from dualpath.vllm.app import serve_app
from dualpath.vllm.engine_config import adapter_paths, make_engine_config
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath.vllm.router_process import (
    bind_clients,
    client_app,
    client_arguments,
    engine_client,
    with_tracing,
)


async def run_front_end(
    settings: RouterSettings, front_end: FrontEndSettings, link: LinkSettings
) -> None:
    """Run a front end until SIGINT or SIGTERM; the scheduler may restart meanwhile.

    Raises ``ConfigError`` (value, limit, remedy) if it cannot be started with these settings.
    """
    args = client_arguments(settings, front_end)
    settings = with_tracing(settings, args)
    async with AsyncExitStack() as stack:
        shared = SharedPort() if link.share_port else None
        listener = bind_clients(args, stack, share_port=link.share_port)
        config = make_engine_config(args)
        service = LinkedFrontEnd(
            settings, link, engine_client(config, stack), adapter_paths=adapter_paths(args)
        )
        stack.push_async_callback(service.stop)
        app = await client_app(config, service, front_end, args, stack)
        await service.start()
        listener.listen()
        print(
            f"dualpath frontend: OpenAI endpoint http://{args.host}:{args.port}/v1, scheduler at "
            f"{link.scheduler}",
            flush=True,
        )
        await serve_app(app, args, listener, shared)
