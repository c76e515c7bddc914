"""Secrets of one cluster: the cluster secret, and the engines' API key.

They are generated for every cluster (a cluster secret in the environment is used instead) and
passed to processes through the environment, never on a command line.  Engines listen on the
loopback address, which every user of the machine can reach; the key admits only the router, so that
users cannot bypass the router's limits and keys or forge transfers.  On several machines the
operator must set the secret.
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
        """Read or generate the keys; raises ``ConfigError`` for several machines without secret."""
        secret = environment.get(SECRET_VARIABLE)
        if not secret and not one_machine:
            raise ConfigError(
                f"{SECRET_VARIABLE} is not set, and engines on other nodes need a cluster secret; "
                f"set it: export {SECRET_VARIABLE}=$(openssl rand -hex 32)"
            )
        self._secret = {SECRET_VARIABLE: secret or new_secret()}
        self._engine_key = new_secret()
        self._api_keys = settings.api_keys
        chosen = "UCX_NET_DEVICES" in environment or "NET_DEVICES" in settings.nixl_engine_config
        self._devices = {} if chosen or not one_machine else LOOPBACK_DEVICES

    def router_environment(self) -> dict[str, str]:
        """Return the router's variables, with the clients' API keys if there are any."""
        keys = {variable("router", "api_keys"): json.dumps(self._api_keys)}
        return {
            **self._secret,
            ENGINE_KEY_VARIABLE: self._engine_key,
            **(keys if self._api_keys else {}),
        }

    def engine_environment(self) -> dict[str, str]:
        """Return an engine's variables; they replace a client's API key in the environment."""
        return {**self._secret, **self._devices, API_KEY_VARIABLE: self._engine_key}
