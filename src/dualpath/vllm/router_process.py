"""The router's process: service, calls to engines and HTTP front end, put together and taken apart.

The order matters: a wrong setting or a taken address ends the start before anything else exists,
and at the end requests are failed first, so that nobody waits for engines nobody listens to.  A
router that stands by (``router.standby``) loads everything, and binds its addresses at its turn.
"""

import os
import socket
from argparse import Namespace
from contextlib import AsyncExitStack
from functools import partial

import msgspec
from fastapi import FastAPI
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import configure_logging_from_args
from vllm.utils.gc_utils import freeze_gc_heap

from dualpath.core.errors import ConfigError
from dualpath.router.api_keys import ApiKeys, engine_headers, warn_if_open
from dualpath.router.requests.limits import allow_many_streams
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.router.standby.open_turn import open_turn
from dualpath.router.standby.turn import STANDS_BY, bound, ended_when_lost
from dualpath.vllm.app import FrontEndOfClients, add_cluster_calls, make_app, serve_app
from dualpath.vllm.engine_arguments import join_vllm_logging
from dualpath.vllm.engine_config import (
    adapter_paths,
    bind_listen_socket,
    make_engine_config,
    parse_front_end_arguments,
)
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath.vllm.frontend import DualPathLLM
from dualpath.vllm.generate_client import GenerateClient


async def run_router(settings: RouterSettings, front_end: FrontEndSettings) -> None:
    """Run a router until SIGINT or SIGTERM.

    Raises ``ConfigError`` (value, limit, remedy) if it cannot be started as asked.
    """
    args = client_arguments(settings, front_end)
    settings = with_tracing(settings, args)
    async with AsyncExitStack() as stack:
        turn = open_turn(settings)
        stack.push_async_callback(turn.over)
        if turn.others:
            _refuse_chance_ports(settings, args)
        else:
            listener = bind_clients(args, stack)
        config = make_engine_config(args)
        calls = engine_client(config, stack)
        service = RouterService(settings, calls, adapter_paths=adapter_paths(args))
        stack.push_async_callback(service.stop)
        app = await client_app(config, service, front_end, args, stack)
        add_cluster_calls(app, service)
        if turn.others:
            # vLLM looks through the whole heap as it begins to serve, which takes half a second of
            # CPU. What was looked through before its turn it then passes over.
            freeze_gc_heap()
            print(STANDS_BY, flush=True)
            await turn.taken()
            service.cluster.fence(lambda: turn.held)
            await ended_when_lost(turn, stack, service.stop)
            listener = await bound(turn, partial(_bind_again, args, stack))
        await bound(turn, service.start)
        listener.listen()
        print(
            f"dualpath router: OpenAI endpoint http://{args.host}:{args.port}/v1, "
            f"engines register at {service.control_address}{_front_ends(service)}",
            flush=True,
        )
        await serve_app(app, args, listener)


def _front_ends(service: RouterService) -> str:
    address = service.front_ends_address
    return f", front ends at {address}" if address else ""


def client_arguments(settings: RouterSettings, front_end: FrontEndSettings) -> Namespace:
    """Return vLLM's arguments, after this process was made fit to serve clients.

    Raises ``ConfigError`` for what cannot be.
    """
    allow_many_streams()
    limit_samples(settings.max_samples)
    refuse_guessable_request_ids()
    args = parse_front_end_arguments(front_end)
    configure_logging_from_args(args)
    join_vllm_logging()
    guard_clients(args, settings)
    warn_if_open(args.host or "", ApiKeys(args.api_key or ()))
    return args


def engine_client(config: VllmConfig, stack: AsyncExitStack) -> GenerateClient:
    """Return what calls engines, which is closed at the end."""
    calls = GenerateClient(
        config.model_config.max_logprobs,
        engine_headers(),
        config.scheduler_config.stream_interval,
    )
    stack.push_async_callback(calls.aclose)
    return calls


async def client_app(
    config: VllmConfig,
    service: FrontEndOfClients,
    front_end: FrontEndSettings,
    args: Namespace,
    stack: AsyncExitStack,
) -> FastAPI:
    """Return the OpenAI application over a service; what it needs of vLLM ends with ``stack``."""
    llm = _make_llm(config, service, front_end, args)
    stack.push_async_callback(llm.aclose)
    return await make_app(llm, service, args)


def bind_clients(
    args: Namespace, stack: AsyncExitStack, *, share_port: bool = False
) -> socket.socket:
    """Return the bound socket, which is closed at the end."""
    listener = bind_listen_socket(args, share_port=share_port)
    stack.callback(listener.close)
    args.port = listener.getsockname()[1]
    return listener


async def _bind_again(args: Namespace, stack: AsyncExitStack) -> socket.socket:
    return bind_clients(args, stack)


def _refuse_chance_ports(settings: RouterSettings, args: Namespace) -> None:
    """Raise ``ConfigError`` if clients or engines could not find the next router."""
    if settings.front_ends_port == 0:
        raise ConfigError(
            "{front_ends_port} is 0; routers that take turns ({standby_lock}, {standby_lease}) "
            "need the same one, give a number above 0"
        )
    if not (args.port and settings.control_port):
        raise ConfigError(
            f"{{port}} is {args.port} and {{control_port}} {settings.control_port}; routers that "
            "take turns ({standby_lock}, {standby_lease}) need the same ones, give each a number "
            "above 0"
        )


def with_tracing(settings: RouterSettings, args: Namespace) -> RouterSettings:
    """Let either side's endpoint count for both: vLLM drops trace headers if it has none."""
    endpoint = settings.otlp_traces_endpoint or args.otlp_traces_endpoint or ""
    args.otlp_traces_endpoint = endpoint or None
    return msgspec.structs.replace(settings, otlp_traces_endpoint=endpoint)


def guard_clients(args: Namespace, settings: RouterSettings) -> None:
    """Let vLLM's middleware ask for the settings' keys; without any its own arguments count."""
    if settings.api_keys:
        args.api_key = [*settings.api_keys]


def limit_samples(most: int) -> None:
    """Let vLLM refuse a larger ``n``; its own variable wins, if an operator has set it."""
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(most))


def refuse_guessable_request_ids() -> None:
    """Raise ``ConfigError`` if vLLM would take clients' request ids for its own.

    It adds random characters to them, without which one client could name its request like
    another's, whose messages and blocks would then be taken for its own.
    """
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        raise ConfigError(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set, so that a client could give its request "
            "the id of another client's; unset it"
        )


def _make_llm(
    config: VllmConfig, service: FrontEndOfClients, front_end: FrontEndSettings, args: Namespace
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
