"""Where this machine keeps what can be made again: models, digests of weights, costs of passes."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory, which need not exist.

    `$DUALPATH_CACHE`, else `$XDG_CACHE_HOME/dualpath`, else `~/.cache/dualpath`.
    """
    if environment.get("DUALPATH_CACHE"):
        return Path(environment["DUALPATH_CACHE"]).expanduser().absolute()
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"]).absolute() / "dualpath"
    return Path.home() / ".cache" / "dualpath"
