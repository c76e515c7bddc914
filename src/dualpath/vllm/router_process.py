"""The router's process: starts and stops service, engine client and HTTP front end in order.

The order matters: a wrong setting or an address in use is reported before anything else is started,
and at shutdown requests are failed first, so that clients do not wait for engines that are no
longer read.  A standby router (``router.standby``) loads everything and binds its addresses when it
becomes the leader.
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

from dualpath.core.addresses import http_url
from dualpath.core.errors import ConfigError
from dualpath.router.api_keys import ApiKeys, engine_headers, warn_if_open
from dualpath.router.http.shared_port import SharedPort
from dualpath.router.linked_front_end import LinkedFrontEnd
from dualpath.router.requests.limits import allow_many_streams
from dualpath.router.scheduler.leadership import STANDS_BY, bound, open_leadership, stop_when_lost
from dualpath.router.service import RouterService
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath.vllm.app import add_cluster_routes, make_app, serve_app
from dualpath.vllm.engine_arguments import join_vllm_logging
from dualpath.vllm.engine_config import (
    adapter_paths,
    bind_listen_socket,
    make_engine_config,
    parse_front_end_arguments,
)
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath.vllm.frontend import ClientFrontEnd, DualPathLLM
from dualpath.vllm.generate_client import GenerateClient


async def run_router(settings: RouterSettings, front_end: FrontEndSettings) -> None:
    """Run a router until SIGINT or SIGTERM.

    Raises ``ConfigError`` (value, limit, remedy) if it cannot be started with these settings.
    """
    args = client_arguments(settings, front_end)
    settings = with_tracing(settings, args)
    async with AsyncExitStack() as stack:
        turn = open_leadership(settings)
        stack.push_async_callback(turn.release)
        if turn.contended:
            _refuse_ephemeral_ports(settings, args)
        else:
            listener = bind_clients(args, stack)
        config = make_engine_config(args)
        calls = engine_client(config, settings, stack)
        service = RouterService(settings, calls, adapter_paths=adapter_paths(args))
        stack.push_async_callback(service.stop)
        app = await client_app(config, service, front_end, args, stack)
        add_cluster_routes(app, service.scheduler)
        if turn.contended:
            # vLLM looks through the whole heap as it begins to serve, which takes half a second of
            # CPU. What was looked through before its turn it then passes over.
            freeze_gc_heap()
            print(STANDS_BY, flush=True)
            await turn.acquired()
            service.scheduler.is_leader = lambda: turn.held
            await stop_when_lost(turn, stack, service.stop)
            listener = await bound(turn, partial(_bind_again, args, stack))
        await bound(turn, service.start)
        listener.listen()
        print(
            f"dualpath router: OpenAI endpoint {_endpoint(args)}/v1, "
            f"engines register at {service.scheduler.server.address}{_front_ends(service)}",
            flush=True,
        )
        await serve_app(app, args, listener)


def _endpoint(args: Namespace) -> str:
    return http_url(args.host, args.port, tls=bool(args.ssl_certfile))


def _front_ends(service: RouterService) -> str:
    address = service.scheduler.front_ends.address
    return f", front ends at {address}" if address else ""


def client_arguments(settings: RouterSettings, front_end: FrontEndSettings) -> Namespace:
    """Configure this process to serve clients and return vLLM's arguments.

    Raises ``ConfigError`` for invalid settings.
    """
    allow_many_streams()
    limit_samples(settings.max_samples)
    refuse_guessable_request_ids()
    args = parse_front_end_arguments(front_end)
    configure_logging_from_args(args)
    join_vllm_logging()
    set_api_keys(args, settings)
    warn_if_open(args.host or "", ApiKeys(args.api_key or ()))
    return args


def engine_client(
    config: VllmConfig, settings: RouterSettings, stack: AsyncExitStack
) -> GenerateClient:
    """Return the client that calls engines; ``stack`` closes it."""
    calls = GenerateClient(
        config.model_config.max_logprobs,
        engine_headers(),
        config.scheduler_config.stream_interval,
        settings.engine_ca_file,
    )
    stack.push_async_callback(calls.aclose)
    return calls


async def client_app(
    config: VllmConfig,
    service: ClientFrontEnd,
    front_end: FrontEndSettings,
    args: Namespace,
    stack: AsyncExitStack,
) -> FastAPI:
    """Return the OpenAI application for a service; ``stack`` closes vLLM's part of it."""
    llm = _make_llm(config, service, front_end, args)
    stack.push_async_callback(llm.aclose)
    return await make_app(llm, service, args)


def bind_clients(
    args: Namespace, stack: AsyncExitStack, *, share_port: bool = False
) -> socket.socket:
    """Return the socket bound for clients; ``stack`` closes it."""
    listener = bind_listen_socket(args, share_port=share_port)
    stack.callback(listener.close)
    args.port = listener.getsockname()[1]
    return listener


async def _bind_again(args: Namespace, stack: AsyncExitStack) -> socket.socket:
    return bind_clients(args, stack)


def _refuse_ephemeral_ports(settings: RouterSettings, args: Namespace) -> None:
    """Raise ``ConfigError`` for ports that differ between the leader and its standby routers."""
    if settings.front_ends_port == 0:
        raise ConfigError(
            "{front_ends_port} is 0; a leader and its standby routers ({standby_lock}, "
            "{standby_lease}) need the same port, give a number above 0"
        )
    if not (args.port and settings.control_port):
        raise ConfigError(
            f"{{port}} is {args.port} and {{control_port}} is {settings.control_port}; a leader "
            "and its standby routers ({standby_lock}, {standby_lease}) need the same ports, give "
            "each a number above 0"
        )


def with_tracing(settings: RouterSettings, args: Namespace) -> RouterSettings:
    """Use an OTLP endpoint given to either side for both: without one vLLM drops trace headers."""
    endpoint = settings.otlp_traces_endpoint or args.otlp_traces_endpoint or ""
    args.otlp_traces_endpoint = endpoint or None
    return msgspec.structs.replace(settings, otlp_traces_endpoint=endpoint)


def set_api_keys(args: Namespace, settings: RouterSettings) -> None:
    """Give vLLM's middleware the API keys of the settings; without any, vLLM's own are used."""
    if settings.api_keys:
        args.api_key = [*settings.api_keys]


def limit_samples(most: int) -> None:
    """Make vLLM refuse a larger ``n``, unless its own environment variable is set."""
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(most))


def refuse_guessable_request_ids() -> None:
    """Raise ``ConfigError`` if vLLM would use clients' request ids without randomizing them.

    Without the random suffix, a client could give its request the id of another client's request
    and receive that request's messages and blocks.
    """
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        raise ConfigError(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set: a client could give its request the id "
            "of another client's request; unset it"
        )


def _make_llm(
    config: VllmConfig, service: ClientFrontEnd, front_end: FrontEndSettings, args: Namespace
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


# -------------------------------------------------------------------------------- frontend process
# The process of a separate front end: the OpenAI endpoint, linked to a remote scheduler.


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
            settings,
            link,
            engine_client(config, settings, stack),
            adapter_paths=adapter_paths(args),
        )
        stack.push_async_callback(service.stop)
        app = await client_app(config, service, front_end, args, stack)
        await service.start()
        listener.listen()
        print(
            f"dualpath frontend: OpenAI endpoint {_endpoint(args)}/v1, scheduler at "
            f"{link.scheduler}",
            flush=True,
        )
        await serve_app(app, args, listener, shared)
