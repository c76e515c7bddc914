"""One schema for settings from flags, environment and file, and where each value came from.

A schema maps sections to ``msgspec.Struct``s.  A key has the same name everywhere: ``mode`` of
section ``router`` is ``mode`` under ``[router]`` in a file and ``DUALPATH_ROUTER_MODE`` in the
environment.  Later layers win: default, file, environment, flag.
"""

import difflib
import enum
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from dualpath.core.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

Schema = Mapping[str, type[msgspec.Struct]]

PREFIX = "DUALPATH_"

#: Variables with our prefix that are no setting of a section.
OTHER_VARIABLES = frozenset(
    {"DUALPATH_CACHE", "DUALPATH_CLUSTER_SECRET", "DUALPATH_DATA", "DUALPATH_ENGINE_API_KEY"}
)

#: A key with one of these words in its name is never printed.
SECRET_WORDS = frozenset({"secret", "key", "keys", "password"})
HIDDEN = "(hidden)"


class Origin(enum.StrEnum):
    """Who said so; a later member wins over an earlier one."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


class Given(msgspec.Struct, frozen=True):
    """A value for one key of one section; ``place`` is what a user typed to give it."""

    section: str
    key: str
    value: Any
    origin: Origin
    place: str

    @property
    def shown(self) -> str:
        """The value as people may see it."""
        if is_secret(self.key) and self.value not in (None, "", ()):
            return HIDDEN
        return self.value if isinstance(self.value, str) else _text(self.value)


Layers = Mapping[tuple[str, str], Given]


def is_secret(name: str) -> bool:
    """Whether a key or variable of this name is kept from all output."""
    return not SECRET_WORDS.isdisjoint(name.lower().split("_"))


def variable(section: str, key: str) -> str:
    """Return the environment variable that sets a key."""
    return f"{PREFIX}{section}_{key}".upper()


def from_tables(schema: Schema, tables: Mapping[str, Any], file: str) -> list[Given]:
    """Return what a file says; raises ``ConfigError`` for a section, key or value it may not have.

    ``tables`` is the parsed file, ``file`` its name for messages.
    """
    found = []
    for section, table in tables.items():
        if section not in schema:
            raise ConfigError(f"{file}: unknown section [{section}]; {_nearest(section, schema)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{file}: {section} must be a section; write [{section}] above it")
        types = _types(schema[section])
        for key, value in table.items():
            place = f"{file} [{section}] {key}"
            if key not in types:
                raise ConfigError(f"{place}: unknown key; {_nearest(key, types)}")
            converted = _convert(value, types[key], key, place)
            found.append(Given(section, key, converted, Origin.FILE, place))
    return found


def from_environment(
    schema: Schema, environment: Mapping[str, str], others: Collection[str] = ()
) -> list[Given]:
    """Return what variables say; raises ``ConfigError`` for unknown ones and wrong values.

    ``others`` are variables with our prefix that are no setting.  Lists and tables are JSON.
    """
    known = {variable(s, key): (s, key) for s, kind in schema.items() for key in _types(kind)}
    found = []
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in others:
            continue
        if name not in known:
            raise ConfigError(
                f"{name} in the environment is unknown; {_nearest(name, (*known, *others))}; "
                "unset or correct it"
            )
        section, key = known[name]
        value = _parse(environment[name], _types(schema[section])[key], key, name)
        found.append(Given(section, key, value, Origin.ENVIRONMENT, name))
    return found


def checked_flag(schema: Schema, section: str, key: str, value: object, place: str) -> Given:
    """Return a flag's value in the type of its key; raises ``ConfigError``."""
    kind = _types(schema[section])[key]
    return Given(section, key, _convert(value, kind, key, place), Origin.FLAG, place)


def layered(*layers: Iterable[Given]) -> dict[tuple[str, str], Given]:
    """Return the winner for every key; later layers win."""
    return {(given.section, given.key): given for layer in layers for given in layer}


def build(kind: type[T], section: str, layers: Layers, flags: Mapping[str, str]) -> T:
    """Return a section's settings, checked by their own class.

    ``flags`` names the flag of a key for messages.  Raises ``ConfigError`` that names the key that
    is missing, or where a wrong value came from.
    """
    given = {key: value for (owner, key), value in layers.items() if owner == section}
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in given:
            first = flags.get(field.name)
            raise ConfigError(
                f"{first or f'{field.name} of [{section}]'} is missing; give it, or set "
                f"{variable(section, field.name)} or {field.name} in [{section}] of a --config file"
            )
    try:
        settings = kind(**{key: value.value for key, value in given.items()})
        check = getattr(settings, "checked", None)
        return settings if check is None else check()
    except ConfigError as error:
        raise ConfigError(_with_place(str(error), given)) from error


def effective(kind: type[msgspec.Struct], section: str, layers: Layers) -> list[Given]:
    """Return every key of a section with its value and origin; a missing one has value None."""
    rows = []
    for field in msgspec.structs.fields(kind):
        known = layers.get((section, field.name))
        if known is None:
            value = None if field.required else _default(field)
            place = "required, not set" if field.required else ""
            known = Given(section, field.name, value, Origin.DEFAULT, place)
        rows.append(known)
    return rows


def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _default(field: msgspec.structs.FieldInfo) -> Any:  # noqa: ANN401 - of any type
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _convert(value: object, kind: Any, key: str, place: str) -> Any:  # noqa: ANN401 - any type
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wrong(value, key, place, error) from error


def _parse(text: str, kind: Any, key: str, place: str) -> Any:  # noqa: ANN401 - of any type
    """Return the value that a variable's text means: JSON where a list or table is wanted."""
    try:
        if kind is not str and text[:1] in ("[", "{"):
            return msgspec.json.decode(text, type=kind)
        return msgspec.convert(text, kind, strict=False)
    except msgspec.MsgspecError as error:
        raise _wrong(text, key, place, error) from error


def _wrong(value: object, key: str, place: str, error: Exception) -> ConfigError:
    if is_secret(key):
        return ConfigError(f"{place} has a wrong value; correct it")
    return ConfigError(f"{place} is {value!r}: {error}; correct it")


def _with_place(message: str, given: Mapping[str, Given]) -> str:
    """Add to a message that begins with a key, or ends with its path, where its value is from."""
    named = [value for key, value in given.items() if re.search(rf"^{key}\b|\$\.{key}\b", message)]
    places = [value.place for value in named if value.origin is not Origin.DEFAULT]
    return f"{message} ({', '.join(places)})" if places else message


def _nearest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"


def _text(value: object) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()
