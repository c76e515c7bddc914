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


def read_secret(
    file: str,
    *,
    setting: str,
    variable: str,
    remedy: str,
    environment: Mapping[str, str] = os.environ,
) -> SecretText | None:
    """Return the secret in ``file`` (the value of ``setting``), else in a variable, else None.

    Raises ``ConfigError`` with the ``remedy`` for a file that cannot be read; logs a warning for a
    file that every user of the machine can read.
    """
    if not file:
        text = environment.get(variable, "").strip()
        return SecretText(text, variable) if text else None
    path = Path(file)
    try:
        text = path.read_text("utf-8").strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{{{setting}}} {file!r} cannot be read ({why}); {remedy}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        log.warning(
            "%s %r is open to every user of this machine (mode %o); chmod 600",
            *(setting, file, stat.S_IMODE(mode)),
        )
    return SecretText(text, f"{{{setting}}} {file!r}")
