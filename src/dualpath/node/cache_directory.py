"""The cache directory of this machine: models, digests of weights, measured costs of passes."""

import os
from collections.abc import Mapping
from pathlib import Path

from dualpath.node.private_folder import private_folder


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory, which may not exist yet.

    `$DUALPATH_CACHE`, else `$XDG_CACHE_HOME/dualpath`, else `~/.cache/dualpath`.
    """
    if environment.get("DUALPATH_CACHE"):
        return Path(environment["DUALPATH_CACHE"]).expanduser().absolute()
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"]).absolute() / "dualpath"
    return Path.home() / ".cache" / "dualpath"


def private_cache_directory() -> Path:
    """Return the directory, created and readable by this user only.

    Raises ``ConfigError`` if others may change it: they would choose the digests of weights, from
    which the names of stored KV are derived, and the models that are loaded.
    """
    return Path(private_folder(cache_directory(), "the cache (DUALPATH_CACHE)"))
