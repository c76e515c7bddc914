"""Settings from flags, environment and file, and the origin of each value.

A schema maps sections to ``Settings`` structs (``core.settings``).  A key has the same name
everywhere: ``mode`` of section ``router`` is ``--mode``, ``mode`` under ``[router]`` in a file and
``DUALPATH_ROUTER_MODE`` in the environment.  Later layers override earlier ones: default, file,
environment, flag.
"""

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Declared, Settings, declared, is_secret, nearest

T = TypeVar("T", bound=Settings)

Schema = Mapping[str, type[Settings]]

PREFIX = "DUALPATH_"

#: Variables with our prefix that are not settings of a section.
OTHER_VARIABLES = frozenset(
    {
        "DUALPATH_CACHE",
        "DUALPATH_CLUSTER_SECRET",
        "DUALPATH_DATA",
        "DUALPATH_ENGINE_API_KEY",
        "DUALPATH_STORAGE_KEY",
    }
)

HIDDEN = "(hidden)"


class Origin(enum.StrEnum):
    """The layer of a value; a later member overrides an earlier one."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


class Given(msgspec.Struct, frozen=True):
    """A value for one key of one section; ``place`` is the flag, variable or key the user wrote."""

    section: str
    key: str
    value: Any
    origin: Origin
    place: str

    @property
    def shown(self) -> str:
        """The value for display; secrets are hidden."""
        if is_secret(self.key) and self.value not in (None, "", ()):
            return HIDDEN
        if isinstance(self.value, str):
            return self.value
        return "" if self.value is None else msgspec.json.encode(self.value).decode()


Layers = Mapping[tuple[str, str], Given]


def variable(section: str, key: str) -> str:
    """Return the environment variable that sets a key."""
    return f"{PREFIX}{section}_{key}".upper()


def from_tables(schema: Schema, tables: Mapping[str, Any], file: str) -> list[Given]:
    """Return the values of a parsed file; raises ``ConfigError`` for what the schema lacks.

    ``tables`` are its sections, ``file`` is its name for messages.
    """
    found = []
    for section, table in tables.items():
        if section not in schema:
            raise ConfigError(f"{file}: unknown section [{section}]; {nearest(section, schema)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{file}: {section} must be a section; write [{section}] above it")
        keys = _by_name(schema[section])
        for key, value in table.items():
            place = f"{file} [{section}] {key}"
            if key not in keys:
                raise ConfigError(f"{place}: unknown key; {nearest(key, keys)}")
            found.append(_given(section, keys[key], value, Origin.FILE, place))
    return found


def from_environment(
    schema: Schema, environment: Mapping[str, str], others: Collection[str] = ()
) -> list[Given]:
    """Return the values of variables; raises ``ConfigError`` for unknown variables and bad values.

    ``others`` are variables with our prefix that are not settings.
    """
    found = []
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in others:
            continue
        # Only sections that the variable may belong to are loaded, as each costs an import.
        sections = [section for section in schema if name.startswith(variable(section, ""))]
        keys = {variable(s, f.name): (s, f) for s in sections for f in declared(schema[s])}
        if name not in keys:
            known = keys or {variable(s, f.name) for s in schema for f in declared(schema[s])}
            raise ConfigError(
                f"{name} in the environment is unknown; {nearest(name, (*known, *others))}; "
                "unset or correct it"
            )
        section, field = keys[name]
        found.append(_given(section, field, environment[name], Origin.ENVIRONMENT, name))
    return found


def from_flag(section: str, field: Declared, text: object, place: str) -> Given:
    """Return the value of a flag: a text or, for a setting with ``rest``, a list of texts.

    Raises ``ConfigError``.
    """
    return _given(section, field, text, Origin.FLAG, place)


def layered(*layers: Iterable[Given]) -> dict[tuple[str, str], Given]:
    """Return the effective value of every key; later layers override earlier ones."""
    return {(given.section, given.key): given for layer in layers for given in layer}


def build(kind: type[T], section: str, layers: Layers, flags: Mapping[str, str]) -> T:
    """Return a section's settings; those with an empty section name come from flags only.

    ``flags`` maps keys to the flags of this command.  Raises ``ConfigError`` that names a missing
    key or an invalid value, in the spelling that the user wrote or can write.
    """
    given = {key: value for (owner, key), value in layers.items() if owner == section}
    for field in declared(kind):
        if field.required and field.name not in given:
            named = flags.get(field.name) or f"{field.name} of [{section}]"
            if not section:
                raise ConfigError(f"{named} is missing; give it: {field.setting.help}")
            raise ConfigError(
                f"{named} is missing; give it, or set {variable(section, field.name)} or "
                f"{field.name} in [{section}] of a --config file"
            )
    places = {key: value.place for key, value in given.items() if value.place}
    try:
        return kind(**{key: value.value for key, value in given.items()})
    except ConfigError as error:
        raise ConfigError(error.spelled({**flags, **places})) from error


def effective(kind: type[Settings], section: str, layers: Layers) -> list[Given]:
    """Return every key of a section with its value and origin; a missing value is None."""
    rows = []
    for field in declared(kind):
        known = layers.get((section, field.name))
        if known is None:
            value = None if field.required else field.default
            place = "required, not set" if field.required else ""
            known = Given(section, field.name, value, Origin.DEFAULT, place)
        rows.append(known)
    return rows


def _by_name(kind: type[Settings]) -> dict[str, Declared]:
    return {field.name: field for field in declared(kind)}


def _given(section: str, field: Declared, value: object, origin: Origin, place: str) -> Given:
    """Return a value converted to the field's type; raises ``ConfigError`` with the place."""
    written = origin is not Origin.FILE and isinstance(value, str)
    try:
        found = field.parse(str(value)) if written else field.convert(value)
    except ConfigError as error:
        raise ConfigError(error.spelled({field.name: place})) from error
    return Given(section, field.name, found, origin, place)
