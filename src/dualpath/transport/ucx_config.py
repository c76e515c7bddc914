"""UCX settings of one NIXL agent: defaults, checks, and who wins over them.

They reach UCX as one string ``KEY=VALUE,KEY=VALUE`` in NIXL's backend parameter ``engine_config``,
keys without the ``UCX_`` prefix.  A ``UCX_KEY`` variable in the environment of the process wins
over it silently, so that is logged.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping

from dualpath.core.errors import ConfigError

log = logging.getLogger(__name__)

#: UCX settings of every agent.
#:
#: * Larger TCP segments cut emulated READs from 1.5 to 0.5 CPU s/GB.
#: * Without the user timeout a silently lost link is never noticed.
#: * The thread that posts and the progress thread share one UCX worker.  With UCX's default, a
#:   spin lock, each burns a core while the other moves bytes over TCP; with a mutex it sleeps.
#: * One engine has one CNIC (§2.3).  With UCX's default of two rails, each Layer Block is cut in
#:   two where a second interface is up, the loopback included.
DEFAULT_ENGINE_CONFIG: Mapping[str, str] = {
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "1M",
    "TCP_USER_TIMEOUT": "2s",
    "USE_MT_MUTEX": "y",
    "MAX_RMA_RAILS": "1",
}


def check_engine_config(config: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for a key or value that NIXL's ``KEY=VALUE,…`` cannot carry.

    Whether UCX knows the key is found out when the agent is opened.
    """
    for key, value in config.items():
        if key.startswith("UCX_"):
            raise ConfigError(
                f"nixl_engine_config has the key {key!r}; leave UCX_ away: {key[4:]!r}"
            )
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
            raise ConfigError(
                f"nixl_engine_config has the key {key!r}; UCX's have capital letters, digits and "
                "_ only, such as IB_SL, IB_TRAFFIC_CLASS or TCP_PORT_RANGE"
            )
        if not re.fullmatch(r"[^\s,=]+", value):
            raise ConfigError(
                f"nixl_engine_config sets {key} to {value!r}; NIXL splits at commas and equal "
                f"signs, so a value has none, nor blanks; set UCX_{key} in the environment instead"
            )


def parse_engine_config(pairs: Iterable[str]) -> dict[str, str]:
    """Return the settings of ``KEY=VALUE`` texts; raises ``ConfigError`` for anything else."""
    config = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"NIXL engine setting {pair!r} has no =; use the form KEY=VALUE")
        config[key] = value
    check_engine_config(config)
    return config


def engine_config_text(config: Mapping[str, str]) -> str:
    """Return defaults and ``config``, which wins, as NIXL takes them.

    Raises ``ConfigError`` as ``check_engine_config``; logs what the environment overrides.
    """
    check_engine_config(config)
    for key, value in config.items():
        found = os.environ.get(f"UCX_{key}")
        if found is not None and found != value:
            log.warning(
                "UCX_%s=%s of the environment wins over %s=%s of nixl_engine_config",
                *(key, found, key, value),
            )
    return ",".join(f"{k}={v}" for k, v in {**DEFAULT_ENGINE_CONFIG, **config}.items())
