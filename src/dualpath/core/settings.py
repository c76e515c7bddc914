"""Declarations of settings: fields of a ``Settings`` struct, each annotated with a ``Setting``.

    class EngineSettings(Settings, frozen=True):
        buffer_bytes: Annotated[int, Setting("PE or DE buffer", ge=1)] = 1 << 30

Everything else is derived from the declaration: the flag ``--buffer-bytes`` with its help, the key
of a file, the variable ``DUALPATH_ENGINE_BUFFER_BYTES``, the row of the reference page, the
argument in the command line that one process builds for another, and the check of the value.

A name ends with its unit.  Amounts of bytes and rates in bytes/s may be written with a unit, such
as ``512MiB``, ``25MB`` or ``1Gbit``, and so may times: ``90s``, ``15m``, ``12h`` or ``7d``.  Lists
are written with commas, tables as KEY=VALUE with commas; as JSON if an item contains a comma.
"""

import difflib
import enum
import functools
import math
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from dualpath.core.addresses import plain_host
from dualpath.core.errors import ConfigError

#: A setting with one of these words in its name is never printed.
SECRET_WORDS = frozenset({"secret", "key", "keys", "password"})

_UNITS = {"": 1.0, "bit": 1 / 8, "b": 1.0}
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40
}  # fmt: skip
_AMOUNT = re.compile(r"([+-]?[0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([kmgt]i?)?(b|bit)?", re.I)
_PATHS = re.compile(r"\b(PATH|FILE|DIR|FOLDER|MODEL)\b|\.(toml|jsonl?|html)\b")
_TIME = re.compile(r"([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*(ms|s|m|h|d)", re.I)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SHOWN_UNITS = (
    ("TB", 10**12),
    ("GiB", 1 << 30),
    ("GB", 10**9),
    ("MiB", 1 << 20),
    ("MB", 10**6),
    ("KiB", 1 << 10),
)
#: Suffixes of names and their units, longer suffixes first.
_SUFFIXES = (
    ("_bytes_per_s", "bytes/s"), ("_flops_per_s", "FLOP/s"), ("_tokens_per_s", "tokens/s"),
    ("_per_s", "per s"), ("_bytes", "bytes"), ("_tokens", "tokens"), ("_blocks", "Full Blocks"),
    ("_us", "µs"), ("_s", "s"), ("_quota", "bytes"), ("_ttl", "s"),
)  # fmt: skip


class Setting(msgspec.Struct, frozen=True):
    """The declaration of one setting: its help in one clause, and the limits of its value.

    For a list, limits and ``choices`` apply to its items.  ``metavar`` stands for the value in a
    help text.  A setting with ``flag`` False is set in a file or a variable only; one with ``rest``
    takes all arguments that follow its flag.  One with ``host`` is a host: IPv6 may be typed with
    brackets, and is stored without.
    """

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str = ""
    flag: bool = True
    rest: bool = False
    host: bool = False

    def allows(self, value: float) -> bool:
        """Whether a number is finite and inside the limits."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


class Declared(msgspec.Struct, frozen=True):
    """One field of a ``Settings`` struct with its declaration; ``kind`` is its type."""

    name: str
    kind: Any
    setting: Setting
    default: Any

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is msgspec.NODEFAULT

    @property
    def flag(self) -> str:
        """The option that sets it."""
        return option(self.name)

    @property
    def unit(self) -> str:
        """The unit of a plain number; empty without one."""
        known = (unit for suffix, unit in _SUFFIXES if self.name.endswith(suffix))
        return next(known, "") if self.is_number else ""

    @property
    def limits(self) -> str:
        """The limits in words, such as ``at least 1``; empty without limits."""
        own = self.setting
        named = {"at least": own.ge, "above": own.gt, "at most": own.le, "below": own.lt}
        given = {word: self._limit(limit) for word, limit in named.items() if limit is not None}
        if list(given) == ["at least", "at most"]:
            return f"between {given['at least']} and {given['at most']}"
        return " and ".join(f"{word} {limit}" for word, limit in given.items())

    @property
    def is_bool(self) -> bool:
        """Whether it is a switch; one that may be None has a default that depends on others."""
        return self.kind in (bool, bool | None)

    @property
    def is_list(self) -> bool:
        """Whether it is a list."""
        return any(typing.get_origin(part) is tuple for part in _parts(self.kind))

    @property
    def is_table(self) -> bool:
        """Whether it is a table of values by name."""
        return any(typing.get_origin(part) is dict for part in _parts(self.kind))

    @property
    def is_number(self) -> bool:
        """Whether it, or each of its items, is a number."""
        return any(part in (int, float) for part in _item_parts(self.kind))

    @property
    def is_path(self) -> bool:
        """Whether it is the path of a file or folder, or may be one."""
        return self.kind is str and _PATHS.search(self.setting.metavar) is not None

    @property
    def is_amount(self) -> bool:
        """Whether it is in bytes or bytes/s and may be written with a unit."""
        return self.is_number and self.unit in ("bytes", "bytes/s")

    @property
    def is_time(self) -> bool:
        """Whether it is in seconds and may be written with a unit."""
        return self.is_number and self.unit == "s"

    @property
    def form(self) -> str:
        """How a value is written, for the message about one that is not; empty for plain text."""
        if self.is_table:
            values = next(typing.get_args(p)[1] for p in _parts(self.kind) if typing.get_args(p))
            known: list[str] = []
            if isinstance(values, type) and issubclass(values, enum.Enum):
                known = [str(member.value) for member in values]
            value = "N" if values is int else "|".join(known) or "VALUE"
            return f"KEY={value}, with commas between several"
        if self.is_bool:
            return "true or false"
        if self.is_amount:
            rate = self.unit == "bytes/s"
            one = "a rate such as 25GB or 100Gbit" if rate else "an amount such as 512MiB or 2GB"
        elif self.is_time:
            one = "a time such as 90s, 15m, 12h or 7d"
        elif self.is_number:
            one = "a number" if float in _item_parts(self.kind) else "a whole number"
        else:
            return ""
        return f"{one}, with commas between several" if self.is_list else one

    @property
    def choices(self) -> tuple[str, ...]:
        """All valid values if they can be listed, else empty."""
        if self.setting.choices:
            return self.setting.choices
        for part in _item_parts(self.kind):
            if isinstance(part, type) and issubclass(part, enum.Enum):
                return tuple(str(member.value) for member in part)
            if typing.get_origin(part) is Literal:
                return tuple(map(str, typing.get_args(part)))
        return ()

    def parse(self, text: str) -> Any:  # noqa: ANN401 - of any type
        """Parse the text of a flag or variable; raises ``ConfigError``."""
        try:
            return self.checked(msgspec.convert(self._plain(text), self.kind, strict=False))
        except (msgspec.MsgspecError, ValueError) as error:
            raise self._wrong(text, error) from error

    def convert(self, value: object) -> Any:  # noqa: ANN401 - of any type
        """Convert a file's value to the field's type; raises ``ConfigError``."""
        if isinstance(value, str) and (self.is_amount or self.is_time):
            return self.parse(value)
        try:
            return self.checked(msgspec.convert(value, self.kind))
        except msgspec.ValidationError as error:
            raise self._wrong(value, error, ", without quotes" * isinstance(value, str)) from error

    def checked(self, value: Any) -> Any:  # noqa: ANN401 - of any type
        """Return a value of the field's type; raises ``ConfigError`` if it is beyond the limits."""
        if self.setting.host:
            return self._host(value)
        several = isinstance(value, tuple)
        items = tuple(value.values()) if isinstance(value, dict) else value
        for item in items if isinstance(items, tuple) else (value,):
            number = isinstance(item, int | float) and not isinstance(item, bool)
            if number and not self.setting.allows(item):
                shown = _plain_text(value) if several else str(item)
                limits = (self.limits or "finite") + (" in each item" if several else "")
                raise ConfigError(f"{{{self.name}}} is {shown}; it must be {limits}; correct it")
            if isinstance(item, str) and "\0" in item:
                raise ConfigError(f"{{{self.name}}} has a NUL character; correct it")
            if isinstance(item, str) and self.choices and item not in self.choices:
                raise self._wrong(value)
        return value

    def text(self, value: object) -> str:
        """Return the text that ``parse`` converts to this value."""
        if isinstance(value, tuple | dict):
            items = value if isinstance(value, tuple) else (*value, *value.values())
            if any(set(str(i)) & set(",=") or str(i)[:1] in ("[", "{") for i in items):
                return msgspec.json.encode(value).decode()
        return _plain_text(value)

    def shown(self, value: object) -> str:
        """Return a value for display: bytes with a unit if that is exact."""
        if isinstance(value, int | float) and value and self.is_amount:
            for unit, size in _SHOWN_UNITS:
                if value % size == 0:
                    return f"{value / size:g}{unit}"
        return _plain_text(value)

    def _host(self, text: str) -> str:
        try:
            return plain_host(text)
        except ValueError as error:
            raise ConfigError(f"{{{self.name}}} is {text!r}, {error}") from error

    def _limit(self, limit: float) -> str:
        return f"2**{round(math.log2(limit))}" if limit > 2**53 else self.shown(limit)

    def _plain(self, text: str) -> Any:  # noqa: ANN401 - what msgspec converts
        """Return the text as input for msgspec: as a list or table if the field is one."""
        if text in ("none", "null") and type(None) in _parts(self.kind):
            return None
        if text[:1] in ("[", "{") and (self.is_list or self.is_table):
            return msgspec.json.decode(text)
        if self.is_table:
            pairs = [item.partition("=") for item in _split(text)]
            if any(not key or not equals for key, equals, _ in pairs):
                raise ValueError("write KEY=VALUE, with commas between several")
            return {key: value for key, _, value in pairs}
        if self.is_list:
            return [self._number(item) for item in _split(text)]
        return self._number(text)

    def _number(self, text: str) -> Any:  # noqa: ANN401 - a number if it is one
        if self.is_time and (match := _TIME.fullmatch(text.strip())):
            seconds = round(float(match[1]) * _SECONDS[match[2].lower()], 9)
            return int(seconds) if seconds.is_integer() else seconds
        match = _AMOUNT.fullmatch(text.strip()) if self.is_number else None
        if match is None or ((match[2] or match[3]) and not self.is_amount):
            return text
        value = float(match[1])
        value *= _FACTORS[(match[2] or "").lower()] * _UNITS[(match[3] or "").lower()]
        return int(value) if value.is_integer() and abs(value) < 2**53 else _exact(text, value)

    def _wrong(
        self, value: object, error: Exception | None = None, remark: str = ""
    ) -> ConfigError:
        if is_secret(self.name):
            return ConfigError(f"{{{self.name}}} has a wrong value; correct it")
        if self.choices:
            close = difflib.get_close_matches(str(value), self.choices, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}?" if close else "; correct it"
            several = "of" if self.is_list else "one of"
            return ConfigError(
                f"{{{self.name}}} is {value!r}; it must be {several} "
                f"{', '.join(self.choices)}{hint}"
            )
        if self.form and isinstance(error, msgspec.ValidationError):
            return ConfigError(f"{{{self.name}}} is {value!r}; give {self.form}{remark}")
        return ConfigError(f"{{{self.name}}} is {value!r}: {error}; correct it")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all structs of settings; an instance is always valid.

    ``check`` is called whenever an instance is created.  A subclass that compares several fields
    extends it.  In an error message ``{name}`` is a placeholder for a setting, which is replaced by
    the user's spelling.
    """

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for invalid settings."""
        self.check()

    def check(self) -> None:
        """Raise ``ConfigError`` for the first value that is beyond its limits."""
        for field in declared(type(self)):
            value = field.checked(getattr(self, field.name))
            if field.setting.host:
                msgspec.structs.force_setattr(self, field.name, value)  # Without brackets.


@functools.cache
def declared(kind: type[Settings]) -> tuple[Declared, ...]:
    """Return the declarations of all fields, in their order."""
    return tuple(_declarations(kind))


def arguments(settings: Settings, positional: Collection[str] = ()) -> list[str]:
    """Return the equivalent command line: positional settings, then those that are not defaults."""
    words = [_plain_text(getattr(settings, name)) for name in positional]
    rest: list[str] = []
    for field in declared(type(settings)):
        value = getattr(settings, field.name)
        if value == field.default or field.name in positional:
            continue
        if field.setting.rest:
            rest = [field.flag, *value]
        elif field.is_bool:
            words.append(field.flag if value else option(f"no_{field.name}"))
        else:
            text = field.text(value)
            words += [f"{field.flag}={text}"] if text[:1] == "-" else [field.flag, text]
    return words + rest


def is_secret(name: str) -> bool:
    """Whether the value of a setting or variable of this name must never be printed."""
    return not SECRET_WORDS.isdisjoint(name.lower().split("_"))


def refuse_empty_secret(name: str, value: object, place: str = "") -> None:
    """Raise ``ConfigError`` if a key or secret is given and empty, alone or in a list.

    It would mean "no key", and a server would be open where a variable was never filled.
    """
    if not is_secret(name):
        return
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return
    if not items or any(isinstance(item, str) and not item.strip() for item in items):
        raise ConfigError(f"{place or f'{{{name}}}'} is empty; give it a value or leave it out")


def option(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def with_flags(help_text: str) -> str:
    """Return a help with its placeholders, which stand for settings, as flags."""
    return re.sub(r"\{([a-z][a-z0-9_]*)\}", lambda found: option(found[1]), help_text)


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint with the most similar known name, or with all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"


def _declarations(kind: type[Settings]) -> Iterator[Declared]:
    for field in msgspec.structs.fields(kind):
        notes = getattr(field.type, "__metadata__", ())
        found = [note for note in notes if isinstance(note, Setting)]
        if not found:
            continue  # a nested struct of settings
        made = field.default_factory
        default = field.default if made is msgspec.NODEFAULT else made()
        yield Declared(field.name, typing.get_args(field.type)[0], found[0], default)


def _parts(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type
    """Return the members of a union, or the type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)


def _item_parts(kind: Any) -> Iterator[Any]:  # noqa: ANN401 - a type
    for part in _parts(kind):
        if typing.get_origin(part) is tuple:
            yield from _parts(typing.get_args(part)[0])
        else:
            yield part


_UNIONS = (typing.Union, type(int | None))


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _exact(text: str, value: float) -> Any:  # noqa: ANN401 - a number, or the text itself
    """Return a large whole number exactly, without the rounding of a float."""
    return int(text) if text.strip().isdigit() else value


def _plain_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, tuple):
        return ",".join(map(_plain_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, enum.Enum):
        return str(value.value)
    return "none" if value is None else str(value)


# ----------------------------------------------------------------------------------- configuration
# Settings from flags, environment and file, and the origin of each value.
#
# A schema maps sections to ``Settings`` structs (``core.settings``).  A key has the same name
# everywhere: ``mode`` of section ``router`` is ``--mode``, ``mode`` under ``[router]`` in a file
# and ``DUALPATH_ROUTER_MODE`` in the environment.  Later layers override earlier ones: default,
# file, environment, flag.

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
        "DUALPATH_LOG_LEVEL",
        "DUALPATH_LEASE_PASSWORD",
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
        refuse_empty_secret(field.name, value, place)
        refuse_empty_secret(field.name, found, place)
    except ConfigError as error:
        raise ConfigError(error.spelled({field.name: place})) from error
    return Given(section, field.name, found, origin, place)
