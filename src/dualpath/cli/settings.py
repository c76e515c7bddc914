"""Settings of a command: its flags over the environment over ``--config FILE`` over defaults.

A command lists the ``Settings`` structs that it uses as ``Part``s; their flags, help and types come
from the declarations (``core.settings``).  A flag applies to every part that has the key.  Settings
of commands that serve (a cluster, its router and engines, a lab) can also be set in a section of a
file and as variables; commands that compute or measure have flags only.
"""

import argparse
import functools
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dualpath.cli.main import command_packages
from dualpath.core.settings import (
    OTHER_VARIABLES,
    Declared,
    Given,
    Layers,
    Origin,
    Schema,
    Settings,
    build,
    declared,
    from_environment,
    from_flag,
    from_tables,
    layered,
    option,
    with_flags,
)
from dualpath.node.home import given_with_homes
from dualpath.router.setting_owners import FRONT_ENDS_OWN, SCHEDULERS_OWN

T = TypeVar("T", bound=Settings)

CLUSTER = "cluster"
ROUTER = "router"
ENDPOINT = "endpoint"
FRONTEND = "frontend"
SCHEDULER = "scheduler"
ENGINE = "engine"

#: The struct of each section; imported when the section is used.
_OWN_SECTIONS = {
    CLUSTER: "dualpath.launch.settings:LocalClusterSettings",
    ROUTER: "dualpath.router.settings:RouterSettings",
    ENDPOINT: "dualpath.vllm.front_end_settings:FrontEndSettings",
    SCHEDULER: "dualpath.router.settings:SchedulerAddress",
    FRONTEND: "dualpath.router.settings:LinkSettings",
    ENGINE: "dualpath.engine.settings:EngineSettings",
}


@functools.cache
def _section_places() -> dict[str, str]:
    """Return where the struct of each section is, with those of installed command packages."""
    places = dict(_OWN_SECTIONS)
    for package in command_packages():
        places |= getattr(package, "SECTIONS", {})
    return places


class _Sections(Mapping[str, type[Settings]]):
    """The schema of a settings file, imported section by section."""

    def __getitem__(self, section: str) -> type[Settings]:
        module, _, name = (_OWN_SECTIONS.get(section) or _section_places()[section]).partition(":")
        kind: type[Settings] = getattr(importlib.import_module(module), name)
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(_section_places())

    def __len__(self) -> int:
        return len(_section_places())


SECTIONS: Schema = _Sections()


class Part(NamedTuple):
    """A section of settings that are flags of a command, under ``title`` in its help.

    ``positional`` keys are positional arguments, ``without`` keys have no flag.  ``defaults``
    override the declared ones.
    """

    section: str
    title: str = ""
    positional: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}


#: Settings of the router that apply to a front end; the others apply to its scheduler.
FRONT_END_OF_ROUTER = Part(ROUTER, "clients", without=SCHEDULERS_OWN)
LINK = Part(FRONTEND, "scheduler")
SCHEDULER_OF_ROUTER = Part(ROUTER, "engines and scheduling", without=FRONT_ENDS_OWN)


class SettingAction(argparse.Action):
    """Stores the text given for a setting; settings that were not given are absent."""

    declared: Declared
    shown_default: str

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Store the text; a switch is ``true`` or ``false``; tables given again are joined."""
        if self.nargs == 0:
            values = str(not str(option_string).startswith("--no-")).lower()
        elif self.declared.is_table and self.dest in namespace:
            values = f"{getattr(namespace, self.dest)},{values}"
        setattr(namespace, self.dest, values)


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        help="settings file with a section per part; flags and DUALPATH_... variables override it",
    )


def add_parts(parser: argparse.ArgumentParser, parts: Iterable[Part]) -> None:
    """Add the flags of all parts and ``--config``."""
    add_config_argument(parser)
    for part in parts:
        add_settings(
            parser,
            SECTIONS[part.section],
            title=part.title,
            positional=part.positional,
            without=part.without,
            defaults=part.defaults,
        )


def add_settings(
    parser: argparse.ArgumentParser,
    kind: type[Settings],
    *,
    title: str = "",
    positional: Sequence[str] = (),
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    defaults: Mapping[str, Any] = {},
) -> None:
    """Add an argument for every setting that may be a flag: if in ``only``, not in ``without``.

    A flag that the parser already has applies to both.  ``defaults`` override the declared ones.
    """
    group = parser.add_argument_group(title) if title else parser
    for field in declared(kind):
        taken = field.flag in parser._option_string_actions
        wanted = field.name not in without and (not only or field.name in only)
        if taken or not wanted or not field.setting.flag:
            continue
        default = defaults.get(field.name, field.default)
        options: dict[str, Any] = {"metavar": _metavar(field)}
        if field.name in positional:
            names = [field.name]
            options = {"nargs": "?", "metavar": field.name.upper()}
        elif field.is_bool:
            names, options = [field.flag, option(f"no_{field.name}")], {"nargs": 0}
        else:
            names = [field.flag]
            if field.setting.rest:
                options["nargs"] = argparse.REMAINDER
        action = group.add_argument(
            *names, action=SettingAction, default=argparse.SUPPRESS, help=_help(field, default),
            **options,
        )  # fmt: skip
        assert isinstance(action, SettingAction)
        action.declared, action.shown_default = field, default_text(field, default)
        action.required = False  # the value may be in a file or a variable


def flag_settings(
    args: argparse.Namespace,
    kind: type[T],
    *,
    positional: Sequence[str] = (),
    defaults: Mapping[str, Any] = {},
    **computed: Any,  # noqa: ANN401 - values of any type
) -> T:
    """Return settings of flags over ``defaults``; ``computed`` values override both.

    Raises ``ConfigError`` that names the flag.
    """
    given = [Given("", key, value, Origin.DEFAULT, "") for key, value in defaults.items()]
    typed = given_with_homes(kind, _typed(args, "", kind, positional, tuple(computed)))
    overrides = [Given("", key, value, Origin.DEFAULT, "") for key, value in computed.items()]
    flags = {field.name: _place(field, positional) for field in declared(kind)}
    return build(kind, "", layered(given, typed, overrides), flags)


class Configuration:
    """The layers of one command."""

    def __init__(self, layers: Layers, flags: Mapping[str, str]) -> None:
        self.layers = layers
        self._flags = flags

    def settings(self, section: str, kind: type[T]) -> T:
        """Return a section's settings; raises ``ConfigError`` that names a value's origin."""
        return build(kind, section, self.layers, self._flags)

    def elsewhere(self, section: str) -> list[Given]:
        """Return the settings of a section from file and environment."""
        origins = (Origin.FILE, Origin.ENVIRONMENT)
        return [g for g in self.layers.values() if g.section == section and g.origin in origins]


def configuration(
    args: argparse.Namespace, parts: Iterable[Part], derived: Iterable[Given] = ()
) -> Configuration:
    """Return the layers of a command; raises ``ConfigError`` for an unknown key or invalid value.

    ``derived``: settings that the command derives from other arguments, each with its origin.
    """
    defaults: list[Given] = []
    typed: list[Given] = []
    flags: dict[str, str] = {}
    for part in parts:
        kind = SECTIONS[part.section]
        defaults += [
            Given(part.section, key, value, Origin.DEFAULT, "")
            for key, value in part.defaults.items()
        ]
        found = _typed(args, part.section, kind, part.positional, part.without)
        typed += given_with_homes(kind, found)
        flags |= {f.name: _place(f, part.positional) for f in declared(kind) if f.setting.flag}
    derived = list(derived)
    defaults += [g for g in derived if g.origin is Origin.DEFAULT]
    typed += [g for g in derived if g.origin is Origin.FLAG]
    outer = outer_layers(getattr(args, "config", None))
    return Configuration(layered(defaults, *outer, typed), flags)


def outer_layers(file: str | None) -> tuple[list[Given], list[Given]]:
    """Return the settings of file and environment; raises ``ConfigError``."""
    from dualpath.engine.settings import read_settings_file

    tables = from_tables(SECTIONS, read_settings_file(file), file) if file else []
    variables = from_environment(SECTIONS, os.environ, OTHER_VARIABLES)
    return _with_homes(tables), _with_homes(variables)


def _with_homes(given: Iterable[Given]) -> list[Given]:
    return [found for one in given for found in given_with_homes(SECTIONS[one.section], [one])]


def default_text(field: Declared, default: object) -> str:
    """Return a default as text; empty if there is none or the help describes it."""
    if field.required and default is field.default:
        return "required"
    return "" if default in (None, "", (), {}) else field.shown(default)


def _typed(
    args: argparse.Namespace,
    section: str,
    kind: type[Settings],
    positional: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Iterator[Given]:
    for field in declared(kind):
        if field.name in args and field.setting.flag and field.name not in without:
            yield from_flag(section, field, getattr(args, field.name), _place(field, positional))


def _place(field: Declared, positional: Sequence[str]) -> str:
    return field.name.upper() if field.name in positional else field.flag


def _metavar(field: Declared) -> str:
    if field.setting.metavar:
        return field.setting.metavar
    if field.choices:
        return "{" + ",".join(field.choices) + "}" + (",…" if field.is_list else "")
    unit = "" if field.unit == "per s" else field.unit.upper().replace("FULL ", "")
    one = unit or ("N" if field.is_number else "")
    name = one or field.name.rpartition("_")[2].upper()
    return f"{name},…" if field.is_list else name


def _help(field: Declared, default: object) -> str:
    notes = [field.limits] if field.limits else []
    shown = default_text(field, default)
    notes += [f"default: {shown}"] if shown not in ("", "required") else []
    text = with_flags(field.setting.help) + (f" ({'; '.join(notes)})" if notes else "")
    text = f"{text}; required" if shown == "required" else text
    return text.replace("%", "%%")
