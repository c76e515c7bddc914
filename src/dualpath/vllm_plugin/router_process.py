"""The router's process: service, calls to engines and HTTP front end, put together and taken apart.

The order matters: a wrong setting or a taken address ends the start before anything else exists,
and at the end requests are failed first, so that nobody waits for engines nobody listens to.
"""

import os
from argparse import Namespace
from contextlib import AsyncExitStack

from vllm.config import VllmConfig

from dualpath.core.errors import ConfigError
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.vllm_plugin.app import make_app, serve_app
from dualpath.vllm_plugin.engine_config import (
    bind_listen_socket,
    make_engine_config,
    parse_front_end_arguments,
)
from dualpath.vllm_plugin.front_end_settings import FrontEndSettings
from dualpath.vllm_plugin.frontend import DualPathLLM
from dualpath.vllm_plugin.generate_client import ENGINE_KEY_VARIABLE, GenerateClient
from dualpath.vllm_plugin.logs import join_vllm_logging


async def run_router(settings: RouterSettings, front_end: FrontEndSettings) -> None:
    """Run a router until SIGINT or SIGTERM.

    Raises ``ConfigError`` (value, limit, remedy) if it cannot be started as asked.
    """
    join_vllm_logging()
    args = parse_front_end_arguments(front_end)
    async with AsyncExitStack() as stack:
        listener = bind_listen_socket(args)
        stack.callback(listener.close)
        args.port = listener.getsockname()[1]
        config = make_engine_config(args)
        calls = GenerateClient(config.model_config.max_logprobs, _engine_headers())
        stack.push_async_callback(calls.aclose)
        service = RouterService(settings, calls)
        stack.push_async_callback(service.stop)
        await service.start()
        llm = _make_llm(config, service, front_end, args)
        stack.push_async_callback(llm.aclose)
        app = await make_app(llm, service, args)
        listener.listen()
        print(
            f"dualpath router: OpenAI endpoint http://{args.host}:{args.port}/v1, "
            f"engines register at {service.control_address}",
            flush=True,
        )
        await serve_app(app, args, listener)


def _engine_headers() -> dict[str, str]:
    """Return what engines started with ``--api-key`` want to see."""
    key = os.environ.get(ENGINE_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _make_llm(
    config: VllmConfig, service: RouterService, front_end: FrontEndSettings, args: Namespace
) -> DualPathLLM:
    try:
        return DualPathLLM(
            config,
            service,
            block_tokens=front_end.block_tokens,
            log_stats=not args.disable_log_stats,
            log_requests=args.enable_log_requests,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer of model {front_end.model!r} cannot be used: "
            f"{' '.join(str(error).split())[:300]}; put its files beside config.json or name them "
            "with --vllm-args --tokenizer"
        ) from error
