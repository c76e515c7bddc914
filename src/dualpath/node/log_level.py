"""The level of log lines, the same in all processes of a cluster: they inherit the environment."""

import logging
import os
from collections.abc import Mapping

from dualpath.core.errors import ConfigError
from dualpath.core.settings import nearest

#: Set by ``--log-level`` of every subcommand, or by the user.
LOG_LEVEL_VARIABLE = "DUALPATH_LOG_LEVEL"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def log_level(default: int = logging.INFO, environment: Mapping[str, str] = os.environ) -> int:
    """Return the level of the environment as a number of ``logging``, else ``default``.

    Raises ``ConfigError`` for an unknown level.
    """
    name = environment.get(LOG_LEVEL_VARIABLE, "").lower()
    if not name:
        return default
    if name not in LEVELS:
        raise ConfigError(
            f"{LOG_LEVEL_VARIABLE} is {name!r} in the environment; {nearest(name, LEVELS)}"
        )
    return LEVELS[name]
