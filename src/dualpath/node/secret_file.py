"""Reads shared secrets from a file or from the environment."""

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dualpath.core.errors import ConfigError

log = logging.getLogger(__name__)


class SecretText(NamedTuple):
    """A secret and its origin (file or variable), which error messages name."""

    text: str
    origin: str


def secret_variable(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a key or secret in a variable, None if it is not set.

    Raises ``ConfigError`` if it is set and empty: the server would be open without a warning.
    """
    text = environment.get(name)
    if text is not None and not text.strip():
        raise ConfigError(f"{name} is set and empty; give it a value or unset it")
    return text


def read_secret(
    file: str,
    *,
    setting: str,
    variable: str,
    remedy: str,
    environment: Mapping[str, str] = os.environ,
) -> SecretText | None:
    """Return the secret in ``file`` (the value of ``setting``), else in a variable, else None.

    Raises ``ConfigError`` with the ``remedy`` for a file that cannot be read, and for an empty
    secret; logs a warning for a file that every user of the machine can read.
    """
    if not file:
        given = secret_variable(variable, environment)
        return None if given is None else SecretText(given.strip(), variable)
    path = Path(file)
    try:
        text = path.read_text("utf-8").strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{{{setting}}} {file!r} cannot be read ({why}); {remedy}") from error
    if not text:
        raise ConfigError(f"{{{setting}}} {file!r} is empty; {remedy}")
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        log.warning(
            "%s %r is open to every user of this machine (mode %o); chmod 600",
            *(setting, file, stat.S_IMODE(mode)),
        )
    return SecretText(text, f"{{{setting}}} {file!r}")
