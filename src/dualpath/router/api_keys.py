"""API keys as vLLM's server has them, for servers that are not vLLM's; and the engines' own key.

The same paths ask for a key, in the same form and from the same settings, as in vLLM's
``AuthenticationMiddleware``, which guards the router that runs on vLLM's front end.
"""

import hmac
import logging
import os
from collections.abc import Mapping, Sequence

from dualpath.transport.cluster_secret import is_loopback

logger = logging.getLogger(__name__)

#: vLLM's variable: the key of a server that is given none on its command line.
API_KEY_VARIABLE = "VLLM_API_KEY"
#: The router's variable: the key it shows to engines.
ENGINE_KEY_VARIABLE = "DUALPATH_ENGINE_API_KEY"
#: Where a key is asked for; health, metrics and status are open, as in vLLM.
GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")
#: All that an engine with keys answers without one: what probes and Prometheus ask.
OPEN_PATHS = frozenset({"/health", "/metrics"})


class ApiKeys:
    """The keys a server accepts; without any it is open to everybody."""

    def __init__(
        self, keys: Sequence[str] = (), environment: Mapping[str, str] = os.environ
    ) -> None:
        """Take the command line's keys, or else the environment's one."""
        chosen = [*keys] or [environment.get(API_KEY_VARIABLE, "")]
        self._keys = [key.encode() for key in chosen if key]

    @property
    def asked_for(self) -> bool:
        """Whether clients have to show one."""
        return bool(self._keys)

    def admit(self, method: str, path: str, authorization: str | None) -> bool:
        """Whether a request with this ``Authorization`` header may be served."""
        if method == "OPTIONS" or not path.startswith(GUARDED_PREFIXES):
            return True
        return self.fit(authorization)

    def fit(self, authorization: str | None) -> bool:
        """Whether this ``Authorization`` header shows one of the keys; True if there are none."""
        if not self._keys:
            return True
        scheme, _, shown = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # All are compared, so that the time taken gives nothing away.
        fits = [hmac.compare_digest(_bytes(shown), key) for key in self._keys]
        return any(fits)


def warn_if_open(host: str, keys: ApiKeys) -> None:
    """Say that everybody who reaches ``host`` may use the models, if that is so."""
    if not (keys.asked_for or is_loopback(host)):
        logger.warning(
            "the endpoint at %s serves everybody who reaches it; --api-keys or %s asks for a key",
            *(host, API_KEY_VARIABLE),
        )


def engine_headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what the router's calls show to engines that ask for a key."""
    key = environment.get(ENGINE_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _bytes(shown: str) -> bytes:
    # Header bytes that are no UTF-8 arrive as lone surrogates.
    return shown.encode("utf-8", "surrogateescape")
