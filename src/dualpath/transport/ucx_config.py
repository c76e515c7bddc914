"""UCX settings of one NIXL agent: defaults, checks, and precedence.

They are passed to UCX as one string ``KEY=VALUE,KEY=VALUE`` in NIXL's backend parameter
``engine_config``, keys without the ``UCX_`` prefix.  A ``UCX_KEY`` variable in the environment of
the process overrides a setting silently, so a warning is logged.
"""

import logging
import os
import re
from collections.abc import Mapping

from dualpath.core.errors import ConfigError

log = logging.getLogger(__name__)

#: UCX settings of every agent.
#:
#: * Larger TCP segments reduce emulated READs from 1.5 to 0.5 CPU s/GB.
#: * Without the user timeout a silently lost link is never detected.
#: * The thread that posts and the progress thread share one UCX worker.  With UCX's default, a
#:   spin lock, each uses a full core while the other copies over TCP; with a mutex it sleeps.
#: * One engine has one CNIC (§2.3).  With UCX's default of two rails, each Layer Block is split in
#:   two if a second interface is up, including the loopback.
DEFAULT_ENGINE_CONFIG: Mapping[str, str] = {
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "1M",
    "TCP_USER_TIMEOUT": "2s",
    "USE_MT_MUTEX": "y",
    "MAX_RMA_RAILS": "1",
}


def check_engine_config(config: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for a key or value that NIXL's ``KEY=VALUE,…`` cannot carry.

    UCX itself rejects unknown keys when the agent is opened.
    """
    for key, value in config.items():
        if key.startswith("UCX_"):
            raise ConfigError(f"nixl_engine_config has the key {key!r}; omit UCX_: {key[4:]!r}")
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
            raise ConfigError(
                f"nixl_engine_config has the key {key!r}; keys of UCX have only capital letters, "
                "digits and _, such as IB_SL, IB_TRAFFIC_CLASS or TCP_PORT_RANGE"
            )
        if not re.fullmatch(r"[^\s,=]+", value):
            raise ConfigError(
                f"nixl_engine_config sets {key} to {value!r}; a value must not contain commas, "
                f"equal signs or blanks, as NIXL splits there; set UCX_{key} in the environment "
                "instead"
            )


def engine_config_text(config: Mapping[str, str]) -> str:
    """Return the defaults, overridden by ``config``, in NIXL's format.

    Raises ``ConfigError`` as ``check_engine_config``; logs settings that the environment overrides.
    """
    check_engine_config(config)
    for key, value in config.items():
        found = os.environ.get(f"UCX_{key}")
        if found is not None and found != value:
            log.warning(
                "UCX_%s=%s of the environment overrides %s=%s of nixl_engine_config",
                *(key, found, key, value),
            )
    return ",".join(f"{k}={v}" for k, v in {**DEFAULT_ENGINE_CONFIG, **config}.items())
