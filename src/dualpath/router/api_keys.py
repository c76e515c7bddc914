"""API keys: one rule for the servers of routers and engines, ours and vLLM's.

Where a server has keys, **every path asks for one** unless it is on a short list of exact names.
So a path that a new version of vLLM adds is closed until somebody opens it.  vLLM's own
``AuthenticationMiddleware`` knows prefixes only and leaves ``/invocations``, ``/tokenize`` and
others open; it stays behind ours.

A server without keys refuses what a web page of another site may have sent
(``router.foreign_pages``).  A key that is given but empty is an error: it would open the server.

Open are the probes of load balancers, and the page of the dashboard, which is the same for every
router and fetches its data with the key.  A router's ``/metrics`` is open by choice
(``--open-metrics``).  An engine's always is: a client with the engines' key could forge transfers,
and a scraper shall not hold it.
"""

import hmac
import logging
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.node.cluster_secret import is_loopback
from dualpath.node.secret_file import secret_variable
from dualpath.router.asgi import App, Message, Receive, Send, json_answer, own_path, send_all
from dualpath.router.foreign_pages import AllowedHosts, Header, PageRefused

logger = logging.getLogger(__name__)

#: vLLM's variable: the key of a server that is given none on its command line.
API_KEY_VARIABLE = "VLLM_API_KEY"
#: The router's variable: the key it shows to engines.
ENGINE_KEY_VARIABLE = "DUALPATH_ENGINE_API_KEY"
#: What every server answers without a key.
OPEN_PATHS = frozenset({"/health", "/ping", "/dashboard"})
METRICS_PATH = "/metrics"
#: What a router answers by whatever name it is called, as vLLM does: clients and Prometheus use
#: names of all kinds.  A page that resolves its name to the router can only have tokens generated.
ROUTER_BY_ANY_NAME = frozenset(
    {
        METRICS_PATH,
        *("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses"),
        *("/v1/messages", "/tokenize", "/detokenize", "/version"),
    }
)
#: What an engine's server answers beyond it.
ENGINE_OPEN_PATHS = frozenset({METRICS_PATH})

_OWN_HOSTS = AllowedHosts()
#: In vLLM's words.
UNAUTHORIZED = b'{"error":"Unauthorized"}'


class ApiKeys:
    """The keys a server accepts; without any it is open to everybody but pages of other sites.

    ``also_open`` are paths beyond ``OPEN_PATHS`` that need no key.  ``hosts`` are those by which
    the server may be called without a key, except for paths in ``by_any_name``.  Raises
    ``ConfigError`` for an empty key.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        also_open: Collection[str] = (),
        hosts: AllowedHosts = _OWN_HOSTS,
        by_any_name: Collection[str] = (),
    ) -> None:
        """Take the command line's keys, or else the environment's one."""
        if any(not key.strip() for key in keys):
            raise ConfigError("{api_keys} has an empty key; give every key a value or leave it out")
        chosen = [*keys] or [secret_variable(API_KEY_VARIABLE, environment) or ""]
        self._keys = [key.encode() for key in chosen if key]
        self._open = OPEN_PATHS.union(also_open)
        self._hosts = hosts
        self._by_any_name = frozenset(by_any_name)

    @property
    def asked_for(self) -> bool:
        """Whether clients have to show one."""
        return bool(self._keys)

    def admit(self, method: str, path: str, authorization: str | None) -> bool:
        """Whether a request with this ``Authorization`` header may be served.

        ``path`` is decoded and relative to the application, as its routes see it.
        """
        # A browser asks with OPTIONS, and without any key, whether it may send one.
        if not self._keys or method == "OPTIONS" or path in self._open:
            return True
        scheme, _, shown = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # All are compared, so that the time taken gives nothing away.
        fits = [hmac.compare_digest(_bytes(shown), key) for key in self._keys]
        return any(fits)

    def foreign(self, method: str, path: str, header: Header) -> PageRefused | None:
        """Return why a request may be one that a page of another site sent, None if it is not."""
        if self._keys or path in self._open:
            return None
        return self._hosts.refusal(method, header, any_host=path in self._by_any_name)

    def admit_call(self, scope: Message) -> bool:
        """Whether an ASGI call, of HTTP or a web socket, may be served."""
        authorization = next(iter(call_header(scope)("authorization")), None)
        return self.admit(scope.get("method", "GET"), own_path(scope), authorization)

    def foreign_call(self, scope: Message) -> PageRefused | None:
        """As ``foreign`` for an ASGI call."""
        return self.foreign(scope.get("method", "GET"), own_path(scope), call_header(scope))


def call_header(scope: Message) -> Header:
    """Return the headers of an ASGI call."""

    def header(name: str) -> list[str]:
        # Header bytes that are no UTF-8 become lone surrogates, as aiohttp has them.
        return [
            value.decode("utf-8", "surrogateescape")
            for key, value in scope["headers"]
            if key.lower() == name.encode()
        ]

    return header


def server_hosts(allowed: Collection[str], *own: str) -> AllowedHosts:
    """Return the hosts of a server: this machine's name, its ``own`` ones and allowed ones."""
    return AllowedHosts(allowed, own=(socket.gethostname(), *own))


def router_keys(
    keys: Sequence[str], *, open_metrics: bool, hosts: AllowedHosts = _OWN_HOSTS
) -> ApiKeys:
    """Return the keys of a router's server, and what it answers without one."""
    also_open = {METRICS_PATH} if open_metrics else ()
    return ApiKeys(keys, also_open=also_open, hosts=hosts, by_any_name=ROUTER_BY_ANY_NAME)


def engine_keys(keys: Sequence[str] = (), hosts: AllowedHosts = _OWN_HOSTS) -> ApiKeys:
    """Return the keys of an engine's server, and what it answers without one."""
    return ApiKeys(keys, also_open=ENGINE_OPEN_PATHS, hosts=hosts)


class ApiKeyGuard:
    """ASGI middleware: refuses requests without a key, or of foreign pages, before their body.

    Without ``keys`` they are ``scope["app"].state.dualpath_api_keys``: vLLM makes middleware of an
    application and nothing else.
    """

    def __init__(self, app: App, keys: ApiKeys | None = None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        keys: ApiKeys = self._keys or scope["app"].state.dualpath_api_keys
        if not keys.admit_call(scope):
            await _refuse(scope, send, HTTPStatus.UNAUTHORIZED, UNAUTHORIZED)
        elif (foreign := keys.foreign_call(scope)) is not None:
            await _refuse(scope, send, foreign.status, foreign_body(foreign))
        else:
            await self._app(scope, receive, send)


def foreign_body(foreign: PageRefused) -> bytes:
    """Return the body of the answer to a request of a foreign page, in OpenAI's form."""
    error = {"message": foreign.reason, "type": "invalid_request_error", "code": foreign.status}
    return msgspec.json.encode({"error": error})


async def _refuse(scope: Message, send: Send, status: int, body: bytes) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
        return
    await send_all(send, json_answer(status, body, (b"connection", b"close")))


def warn_if_open(host: str, keys: ApiKeys) -> None:
    """Log a warning if everybody who reaches ``host`` may use the models."""
    if not (keys.asked_for or is_loopback(host)):
        logger.warning(
            "the endpoint at %s serves everybody who reaches it; --api-keys or %s asks for a key",
            *(host, API_KEY_VARIABLE),
        )


def engine_headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the headers of the router's calls to engines that require a key.

    Raises ``ConfigError`` if the variable is set and empty.
    """
    return bearer(secret_variable(ENGINE_KEY_VARIABLE, environment))


def client_headers(
    keys: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return what a client of ours shows to a router: the first key, or the environment's."""
    return bearer(keys[0] if keys else secret_variable(API_KEY_VARIABLE, environment))


def bearer(key: str | None) -> dict[str, str]:
    """Return the headers that show ``key``, none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _bytes(shown: str) -> bytes:
    return shown.encode("utf-8", "surrogateescape")
