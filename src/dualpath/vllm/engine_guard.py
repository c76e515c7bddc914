"""Access control of an engine's own HTTP server: the outermost ASGI middleware.

An engine is a complete vLLM server, but by default it serves only the router:

- If the server has API keys, all but a few paths require one (``router.api_keys``); without keys,
  requests that a foreign web page may have sent are refused (``router.foreign_pages``).
- Behind another proxy (setting ``two_leg_scheduler``) it serves the legs of that proxy's requests
  as well (``two_leg_server``).
- The layers of a *prefill engine* share memory regions: without a transfer that moves each layer's
  KV out in time, the answer would be garbage with status 200.  So requests for computation are
  refused, except calls of the router's token API with a prefill transfer.
- Connections and heads are bounded as at a router, since vLLM's server keeps each one for ever.
- Routes that change weights or move KV memory are refused unless the setting ``rollouts`` is set:
  then the engine leaves the cluster for as long as a trainer uses them (``weight_updates``).

A decode engine has separate regions for all layers.  If a client sends it a request directly, it
computes the prompt itself, stores nothing, and its answer is correct.

``SchedulerSide`` fails requests that reach a PE's scheduler without passing this middleware.
"""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, IncompatibleError
from dualpath.core.transfers import PrefillTransfer, from_transfer_params
from dualpath.core.weights import checked_version
from dualpath.engine.settings import EngineSettings
from dualpath.router.api_keys import ApiKeys, engine_keys, server_hosts
from dualpath.router.asgi import App, Message, Receive, Send, json_answer, own_path, send_all
from dualpath.router.connections import Connections, uvicorn_protocol
from dualpath.router.foreign_pages import AllowedHosts
from dualpath.router.requests.limits import refusal, server_limits
from dualpath.router.token_api.open_calls import (
    CALL_HEADER,
    OPEN_CALLS_PATH,
    OpenCallList,
    named_call,
)
from dualpath.router.token_api.wire import GENERATE_PATH
from dualpath.vllm.core_requests import lost_calls
from dualpath.vllm.drain_on_sigterm import drain_engine_core, drain_on_sigterm
from dualpath.vllm.engine_arguments import CONNECTOR, engine_settings, engine_values
from dualpath.vllm.two_leg_server import LEG_PATHS, MISDIRECTED, QUERY_PATH, TwoLegServer

BAD_REQUEST = 400
UNAUTHORIZED = 401
FORBIDDEN = 403

#: Methods that start no computation.
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
#: Paths that may be posted to a prefill engine besides the token API: they compute no KV.
_WITHOUT_KV = frozenset(
    {
        "/inference/v1/abort_requests",
        "/tokenize",
        "/detokenize",
        "/ping",
        "/start_profile",
        "/stop_profile",
    }
)
#: vLLM's routes for trainers that change weights or unmap KV memory of a running engine.
_TRAINS = frozenset(
    {
        "/collective_rpc",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/release_kv_cache_memory",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
    }
)
#: Further routes for trainers; they compute nothing.
_PAUSES = frozenset(
    {
        "/abort_requests",
        "/pause",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
    }
)
_FOR_TRAINERS = _TRAINS | _PAUSES
#: vLLM's other routes that change weights or memory of a running engine.
_CHANGES_ENGINE = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/scale_elastic_ep"}
)

#: Calls that name the weights of an engine.
_NAMES_WEIGHTS = frozenset({"/finish_weight_update", "/update_weight_version"})

_ASK_ROUTER = "its layers share memory and it serves only the router: send requests to the router"


class _TransferField(msgspec.Struct):
    """The only field of a request that is decoded; all others, tokens included, are skipped."""

    kv_transfer_params: dict[str, Any] | None = None


class _NamedWeights(msgspec.Struct):
    """The field of vLLM's calls that name weights; all others are skipped."""

    weight_version: str | None = None
    new_version: str | None = None


class EngineGuard:
    """The middleware; it reads the server's arguments from ``scope["app"].state.args``."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._known: tuple[Role | None, ApiKeys] | None = None
        self._calls = OpenCallList()
        self._legs: TwoLegServer | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward the call or refuse it."""
        if scope["type"] == "lifespan":
            self._drain_on_sigterm(scope["app"].state.args)
            _bound_connections(scope["app"].state)
            await self._lifespan(scope, receive, send)
            return
        role, keys = self._engine(scope)
        path = own_path(scope)
        method = scope.get("method", "")  # a web socket has no method
        refused: tuple[int, str] | None = None
        if not keys.admit_call(scope):
            refused = _no_key(path)
        elif role is not None:
            refused = keys.foreign_call(scope)
        may_compute = method not in _READING
        if refused is None and may_compute:
            for_trainers = role is not None and path in _FOR_TRAINERS
            trains = for_trainers and _trains(scope["app"].state.args)
            refused = _refused_path(role, path, takes_legs=self._legs is not None, trains=trains)
        if refused is not None:
            await _refuse(scope, send, *refused)
        elif path == OPEN_CALLS_PATH and role is not None:
            lost = await self._lost_calls(scope)
            await send_all(send, json_answer(HTTPStatus.OK, self._calls.body(without=lost)))
        elif path == QUERY_PATH and method == "GET" and self._legs is not None:
            await self._legs.answer_query(send)
        elif may_compute and self._legs is not None and path in LEG_PATHS:
            if (body := await _body(receive)) is not None:
                await self._legs.serve(scope, body, receive, send)
        elif may_compute and path == GENERATE_PATH:
            await self._listed(role, scope, receive, send)
        elif may_compute and role is not None and path in _NAMES_WEIGHTS:
            await self._names_weights(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _lost_calls(self, scope: Message) -> set[str]:
        client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        return set() if client is None else await lost_calls(client, self._calls.listed())

    async def _lifespan(self, scope: Message, receive: Receive, send: Send) -> None:
        """Run vLLM's lifespan, and the link to the scheduler of an engine that takes legs."""
        args = scope["app"].state.args
        settings = _settings(args) if _role(args) is not None else None
        if settings is not None and settings.two_leg_scheduler:
            self._legs = TwoLegServer(self._app, settings)
            self._legs.start()
        try:
            await self._app(scope, receive, send)
        finally:
            if self._legs is not None:
                await self._legs.stop()

    async def _listed(
        self, role: Role | None, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Forward a call of the token API, and list it as open once its body has arrived."""
        with contextlib.ExitStack() as listed:
            sent: Callable[[], None] | None = None
            name = dict(scope["headers"]).get(CALL_HEADER.lower().encode())

            async def received() -> Message:
                nonlocal sent
                message = await receive()
                whole = message["type"] == "http.request" and not message.get("more_body", False)
                if whole and name is not None and sent is None:
                    sent = listed.enter_context(self._calls.open(named_call(name)))
                return message

            async def sending(message: Message) -> None:
                await send(message)
                if sent is not None and message.get("body"):
                    sent()

            if role is Role.PREFILL:
                await self._token_api(scope, received, sending)
            else:
                await self._app(scope, received, sending)

    def _engine(self, scope: Message) -> tuple[Role | None, ApiKeys]:
        """Return the engine's role, None if it is not a DualPath engine, and its API keys."""
        if self._known is None:
            args = scope["app"].state.args
            self._known = _role(args), engine_keys(args.api_key or (), _hosts(args))
        return self._known

    @staticmethod
    def _drain_on_sigterm(args: Any) -> None:  # noqa: ANN401 - vLLM's parsed command line
        if _role(args) is not None:
            drain_on_sigterm(partial(drain_engine_core, _settings(args).drain_timeout_s))

    async def _token_api(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        if body is None:
            return  # The client has disconnected.
        if (reason := _without_transfer(body)) is not None:
            await _refuse(scope, send, MISDIRECTED, reason)
            return
        await self._app(scope, _receive_again(body, receive), send)

    async def _names_weights(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward a call that names weights, unless its name may be that of other weights."""
        body = await _body(receive)
        if body is None:
            return  # The client has disconnected.
        if (reason := _bad_version(body)) is not None:
            await _refuse(scope, send, BAD_REQUEST, reason)
            return
        await self._app(scope, _receive_again(body, receive), send)


def _receive_again(body: bytes, receive: Receive) -> Receive:
    """Return a function that returns a body that was read, then what arrives after it."""
    arrived = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return arrived.pop() if arrived else await receive()

    return receive_again


def _bad_version(body: bytes) -> str | None:
    """Return what is wrong with the version that a call gives weights, None if nothing is.

    Bodies of another form are left for vLLM to refuse.
    """
    try:
        given = msgspec.json.decode(body, type=_NamedWeights)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    version = given.new_version if given.weight_version is None else given.weight_version
    if version is None:
        return None
    try:
        checked_version(version)
    except BadRequestError as error:
        return str(error)
    return None


def _bound_connections(state: Any) -> None:  # noqa: ANN401 - Starlette's
    """Bound connections and heads of vLLM's server, which has no bounds of its own.

    uvicorn calls the lifespan before it listens, and reads the protocol at each connection.  Web
    sockets, which the router does not use, would leave these bounds: there are none.
    """
    server = getattr(state, "server", None)
    if server is None or _role(state.args) is None:
        return
    make = server.config.http_protocol_class
    server.config.http_protocol_class = uvicorn_protocol(Connections(server_limits()), make)
    server.config.ws_protocol_class = None


def _no_key(path: str) -> tuple[int, str]:
    return UNAUTHORIZED, f"{path} requires the engines' API key; send Authorization: Bearer KEY"


def _refused_path(
    role: Role | None, path: str, *, takes_legs: bool, trains: bool
) -> tuple[int, str] | None:
    if trains:
        return None
    if role is not None and path in _TRAINS:
        return FORBIDDEN, (
            f"{path} changes weights or memory of an engine that stores and shares its KV; start "
            "the engine with rollouts in kv_connector_extra_config, or restart it instead"
        )
    if role is not None and path in _CHANGES_ENGINE:
        return FORBIDDEN, (
            f"{path} changes weights or memory of an engine that stores and shares its KV; "
            "restart the engine instead"
        )
    if takes_legs and path in LEG_PATHS:
        return None
    if role is Role.PREFILL and path != GENERATE_PATH and path not in _WITHOUT_KV:
        return MISDIRECTED, f"{path} at a prefill engine of a DualPath cluster; {_ASK_ROUTER}"
    return None


def _without_transfer(body: bytes) -> str | None:
    """Return why a prefill engine cannot compute this request, None if it can.

    Bodies that are not JSON objects are left for vLLM to refuse.
    """
    try:
        field = msgspec.json.decode(body, type=_TransferField)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    try:
        if isinstance(from_transfer_params(field.kv_transfer_params), PrefillTransfer):
            return None
    except IncompatibleError as error:
        return str(error)
    return f"the request has no prefill transfer for this prefill engine; {_ASK_ROUTER}"


def _settings(args: Any) -> EngineSettings:  # noqa: ANN401 - vLLM's parsed command line
    return engine_settings(args.kv_transfer_config.kv_connector_extra_config, os.environ)


def _role(args: Any) -> Role | None:  # noqa: ANN401 - vLLM's parsed command line
    transfer = getattr(args, "kv_transfer_config", None)
    if getattr(transfer, "kv_connector", None) != CONNECTOR:
        return None
    extra = transfer.kv_connector_extra_config  # type: ignore[union-attr]
    return Role(engine_values(extra, os.environ)["role"])


def _trains(args: Any) -> bool:  # noqa: ANN401 - vLLM's parsed command line
    extra = args.kv_transfer_config.kv_connector_extra_config
    return bool(engine_values(extra, os.environ).get("rollouts", False))


def _hosts(args: Any) -> AllowedHosts:  # noqa: ANN401 - vLLM's parsed command line
    """Return the hosts by which an engine may be called."""
    if _role(args) is None:
        return AllowedHosts()
    values = engine_values(args.kv_transfer_config.kv_connector_extra_config, os.environ)
    own = getattr(args, "host", None), urlsplit(str(values.get("api_url", ""))).hostname
    return server_hosts(values.get("allowed_hosts", ()), *filter(None, own))


async def _body(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
    return None


async def _refuse(scope: Message, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason[:120]})
        return
    await send_all(send, refusal(status, reason))
