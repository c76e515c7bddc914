"""Reads the TOML file in which settings of all parts may stand."""

import tomllib
from pathlib import Path
from typing import Any

from dualpath.core.errors import ConfigError


def read_settings_file(path: str) -> dict[str, Any]:
    """Return the sections of a TOML file; raises ``ConfigError`` if it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"settings file {path!r} cannot be read: {error}; correct it") from error
