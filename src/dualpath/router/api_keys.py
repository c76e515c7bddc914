"""API keys: one rule for the servers of routers and engines, ours and vLLM's.

Where a server has keys, **every path asks for one** unless it is on a short list of exact names.
So a path that a new version of vLLM adds is closed until somebody opens it.  vLLM's own
``AuthenticationMiddleware`` knows prefixes only and leaves ``/invocations``, ``/tokenize`` and
others open; it stays behind ours.

Open are the probes of load balancers, and the page of the dashboard, which is the same for every
router and fetches its data with the key.  A router's ``/metrics`` is open by choice
(``--open-metrics``).  An engine's always is: a client with the engines' key could forge transfers,
and a scraper shall not hold it.
"""

import hmac
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus

from dualpath.node.cluster_secret import is_loopback
from dualpath.router.asgi import App, Message, Receive, Send, own_path

logger = logging.getLogger(__name__)

#: vLLM's variable: the key of a server that is given none on its command line.
API_KEY_VARIABLE = "VLLM_API_KEY"
#: The router's variable: the key it shows to engines.
ENGINE_KEY_VARIABLE = "DUALPATH_ENGINE_API_KEY"
#: What every server answers without a key.
OPEN_PATHS = frozenset({"/health", "/ping", "/dashboard"})
METRICS_PATH = "/metrics"
#: What an engine's server answers beyond it.
ENGINE_OPEN_PATHS = frozenset({METRICS_PATH})

#: In vLLM's words.
UNAUTHORIZED = b'{"error":"Unauthorized"}'


class ApiKeys:
    """The keys a server accepts; without any it is open to everybody.

    ``also_open`` are paths beyond ``OPEN_PATHS`` that need no key.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        also_open: Collection[str] = (),
    ) -> None:
        """Take the command line's keys, or else the environment's one."""
        chosen = [*keys] or [environment.get(API_KEY_VARIABLE, "")]
        self._keys = [key.encode() for key in chosen if key]
        self._open = OPEN_PATHS.union(also_open)

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

    def admit_call(self, scope: Message) -> bool:
        """Whether an ASGI call, of HTTP or a web socket, may be served."""
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        # Header bytes that are no UTF-8 become lone surrogates, as aiohttp has them.
        authorization = shown[0].decode("utf-8", "surrogateescape") if shown else None
        return self.admit(scope.get("method", "GET"), own_path(scope), authorization)


def router_keys(keys: Sequence[str], *, open_metrics: bool) -> ApiKeys:
    """Return the keys of a router's server, and what it answers without one."""
    return ApiKeys(keys, also_open={METRICS_PATH} if open_metrics else ())


def engine_keys(keys: Sequence[str] = ()) -> ApiKeys:
    """Return the keys of an engine's server, and what it answers without one."""
    return ApiKeys(keys, also_open=ENGINE_OPEN_PATHS)


class ApiKeyGuard:
    """ASGI middleware: 401 for a request without a key, before its body is read.

    Without ``keys`` they are ``scope["app"].state.dualpath_api_keys``: vLLM makes middleware of an
    application and nothing else.
    """

    def __init__(self, app: App, keys: ApiKeys | None = None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send(
                {
                    "type": "http.response.start",
                    "status": HTTPStatus.UNAUTHORIZED,
                    "headers": [*headers, (b"content-length", b"%d" % len(UNAUTHORIZED))],
                }
            )
            await send({"type": "http.response.body", "body": UNAUTHORIZED})

    def _admits(self, scope: Message) -> bool:
        keys: ApiKeys = self._keys or scope["app"].state.dualpath_api_keys
        return keys.admit_call(scope)


def warn_if_open(host: str, keys: ApiKeys) -> None:
    """Log a warning if everybody who reaches ``host`` may use the models."""
    if not (keys.asked_for or is_loopback(host)):
        logger.warning(
            "the endpoint at %s serves everybody who reaches it; --api-keys or %s asks for a key",
            *(host, API_KEY_VARIABLE),
        )


def engine_headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the headers of the router's calls to engines that require a key."""
    return bearer(environment.get(ENGINE_KEY_VARIABLE))


def client_headers(
    keys: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return what a client of ours shows to a router: the first key, or the environment's."""
    return bearer(keys[0] if keys else environment.get(API_KEY_VARIABLE))


def bearer(key: str | None) -> dict[str, str]:
    """Return the headers that show ``key``, none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _bytes(shown: str) -> bytes:
    return shown.encode("utf-8", "surrogateescape")
