"""Settings of an engine, from ``kv_connector_extra_config``, the environment and a settings file.

The former override the latter.
"""

from collections.abc import Mapping
from typing import Any

from dualpath.core.configuration import (
    OTHER_VARIABLES,
    PREFIX,
    from_environment,
    from_tables,
    layered,
)
from dualpath.core.errors import ConfigError
from dualpath.engine.settings import EngineSettings, parse_settings, read_settings_file

SECTION = "engine"
#: Key of ``kv_connector_extra_config`` that names a settings file; only its ``[engine]`` is read.
FILE_KEY = "config"


def engine_settings(extra: Mapping[str, Any], environment: Mapping[str, str]) -> EngineSettings:
    """Return the settings of an engine; raises ``ConfigError`` for unknown or invalid ones."""
    return parse_settings(engine_values(extra, environment))


def engine_values(extra: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return all given settings, from whatever source; raises ``ConfigError``."""
    values = dict(extra)
    file = values.pop(FILE_KEY, "")
    if not isinstance(file, str):
        raise ConfigError(
            f"kv_connector_extra_config: {FILE_KEY} is {file!r}; give the path of a TOML file"
        )
    schema = {SECTION: EngineSettings}
    prefix = f"{PREFIX}{SECTION}_".upper()
    variables = {name: text for name, text in environment.items() if name.startswith(prefix)}
    table = read_settings_file(file).get(SECTION, {}) if file else {}
    outer = layered(
        from_tables(schema, {SECTION: table}, file),
        from_environment(schema, variables, OTHER_VARIABLES),
    )
    return {given.key: given.value for given in outer.values()} | values
