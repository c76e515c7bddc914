"""What only the processes of one cluster know: its secret, and the engines' API key.

Made anew for every cluster (a secret in the environment is kept) and handed on through the
environment, never on a command line.  Engines listen on the loopback address, where every user of
the machine reaches them; the key keeps all but the router away, so that nobody passes the router's
own limits and keys, or forges a transfer.  On several machines the secret is the operator's.
"""

import json
import os
from collections.abc import Mapping

from dualpath.core.configuration import variable
from dualpath.core.errors import ConfigError
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.router.api_keys import API_KEY_VARIABLE, ENGINE_KEY_VARIABLE
from dualpath.transport.cluster_secret import SECRET_VARIABLE, new_secret

#: UCX's TCP transport listens on every network device it may use; between processes of one
#: machine the loopback device is enough.
LOOPBACK_DEVICES = {"UCX_NET_DEVICES": "lo"}


class ClusterKeys:
    """Secret and keys of one local cluster, as environments of its processes."""

    def __init__(
        self,
        settings: LocalClusterSettings,
        environment: Mapping[str, str] = os.environ,
        *,
        one_machine: bool = True,
    ) -> None:
        """Take or make them; raises ``ConfigError`` for several machines without a secret."""
        secret = environment.get(SECRET_VARIABLE)
        if not secret and not one_machine:
            raise ConfigError(
                f"{SECRET_VARIABLE} is not set, and engines on other nodes are let in by a secret "
                f"alone; set it: export {SECRET_VARIABLE}=$(openssl rand -hex 32)"
            )
        self._secret = {SECRET_VARIABLE: secret or new_secret()}
        self._engine_key = new_secret()
        self._api_keys = settings.api_keys
        chosen = "UCX_NET_DEVICES" in environment or "NET_DEVICES" in settings.nixl_engine_config
        self._devices = {} if chosen or not one_machine else LOOPBACK_DEVICES

    def router_environment(self) -> dict[str, str]:
        """Return what the router needs; the clients' keys too, if there are any."""
        keys = {variable("router", "api_keys"): json.dumps(self._api_keys)}
        return {
            **self._secret,
            ENGINE_KEY_VARIABLE: self._engine_key,
            **(keys if self._api_keys else {}),
        }

    def engine_environment(self) -> dict[str, str]:
        """Return what an engine needs; the clients' key of the environment does not count there."""
        return {**self._secret, **self._devices, API_KEY_VARIABLE: self._engine_key}
