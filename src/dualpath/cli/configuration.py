"""Settings of a command: its flags over the environment over ``--config FILE`` over defaults."""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from dualpath.core.configuration import (
    OTHER_VARIABLES,
    Given,
    Layers,
    Origin,
    Schema,
    build,
    checked_flag,
    from_environment,
    from_tables,
    layered,
)

T = TypeVar("T", bound=msgspec.Struct)

CLUSTER = "cluster"
ROUTER = "router"
ENDPOINT = "endpoint"
ENGINE = "engine"
EMULATED = "emulated"


class Flag(NamedTuple):
    """The key that a command's argument sets; ``convert`` turns its value into the key's unit."""

    argument: str
    section: str
    key: str
    convert: Callable[[Any], Any] = lambda value: value
    positional: bool = False

    @property
    def place(self) -> str:
        """The argument as a user types it."""
        return self.argument.upper() if self.positional else option(self.argument)


def scaled(unit: float) -> Callable[[Any], Any]:
    """Return a conversion from a flag's unit, such as MiB, to bytes."""
    return lambda value: value * unit


MIB = 1 << 20

#: What every router has a flag for, `dualpath router` and `dualpath emulate router` alike.
ROUTER_FLAGS = (
    Flag("mode", ROUTER, "mode"),
    Flag("api_key", ROUTER, "api_keys"),
    Flag("cluster_secret_file", ROUTER, "cluster_secret_file"),
    Flag("max_body_mib", ROUTER, "max_body_bytes", scaled(MIB)),
    Flag("max_prompt_tokens", ROUTER, "max_prompt_tokens"),
    Flag("max_concurrent_requests", ROUTER, "max_concurrent_requests"),
    Flag("max_waiting_requests", ROUTER, "max_waiting_requests"),
    Flag("alpha_tokens", ROUTER, "alpha_tokens"),
    Flag("beta_tokens", ROUTER, "beta_tokens"),
    Flag("event_log", ROUTER, "event_log"),
    Flag("otlp_traces_endpoint", ROUTER, "otlp_traces_endpoint"),
)


def schema() -> Schema:
    """Return the sections of a settings file and what each may hold."""
    from dualpath.engine.settings import EngineSettings
    from dualpath.laboratory.emulated.settings import EmulatedOptions
    from dualpath.ops.launch.settings import LocalClusterSettings
    from dualpath.router.settings import RouterSettings
    from dualpath.vllm.front_end_settings import FrontEndSettings

    return {
        CLUSTER: LocalClusterSettings,
        ROUTER: RouterSettings,
        ENDPOINT: FrontEndSettings,
        ENGINE: EngineSettings,
        EMULATED: EmulatedOptions,
    }


class _RememberGiven(argparse.Action):
    """Stores a value and notes in ``given`` that it was typed and is no default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = {*getattr(namespace, "given", ()), self.dest}


def make_configurable(parser: argparse.ArgumentParser) -> None:
    """Let a parser tell typed values from defaults, and add ``--config``; call this first."""
    for name in (None, "store"):
        parser.register("action", name, _RememberGiven)
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        help="settings of all parts, one section each; flags and DUALPATH_... variables win",
    )


class Configuration:
    """The layers of one command."""

    def __init__(self, layers: Layers, flags: Mapping[tuple[str, str], str]) -> None:
        self.layers = layers
        self._flags = flags

    def settings(self, section: str, kind: type[T]) -> T:
        """Return a section's settings; raises ``ConfigError`` that names where a value is from."""
        flags = {key: flag for (owner, key), flag in self._flags.items() if owner == section}
        return build(kind, section, self.layers, flags)

    def elsewhere(self, section: str) -> list[Given]:
        """Return what file and environment say of a section."""
        origins = (Origin.FILE, Origin.ENVIRONMENT)
        return [g for g in self.layers.values() if g.section == section and g.origin in origins]


def configuration(
    args: argparse.Namespace, flags: Sequence[Flag], derived: Iterable[Given] = ()
) -> Configuration:
    """Return the layers of a command; raises ``ConfigError`` for an unknown key or wrong value.

    ``derived`` is what the command works out of several arguments, each with its origin.
    """
    known = schema()
    given = getattr(args, "given", ())
    defaults, typed = [], []
    for flag in flags:
        value = getattr(args, flag.argument)
        if value is None:
            continue
        found = checked_flag(known, flag.section, flag.key, flag.convert(value), flag.place)
        if flag.argument in given:
            typed.append(found)
        else:
            defaults.append(msgspec.structs.replace(found, origin=Origin.DEFAULT, place=""))
    derived = list(derived)
    defaults += [g for g in derived if g.origin is Origin.DEFAULT]
    typed += [g for g in derived if g.origin is Origin.FLAG]
    layers = layered(defaults, *outer_layers(getattr(args, "config", None), known), typed)
    return Configuration(layers, {(flag.section, flag.key): flag.place for flag in flags})


def outer_layers(file: str | None, known: Schema) -> tuple[list[Given], list[Given]]:
    """Return what the file and what the environment say; raises ``ConfigError``."""
    from dualpath.engine.settings_file import read_settings_file

    tables = from_tables(known, read_settings_file(file), file) if file else []
    return tables, from_environment(known, os.environ, OTHER_VARIABLES)


def from_arguments(
    args: argparse.Namespace, arguments: Sequence[str], section: str, key: str, value: object
) -> Given:
    """Return what several arguments say of one key: a flag if one of them was typed."""
    typed = [name for name in arguments if name in getattr(args, "given", ())]
    origin = Origin.FLAG if typed else Origin.DEFAULT
    return Given(section, key, value, origin, ", ".join(map(option, typed)))


def option(argument: str) -> str:
    """Return the option behind an argument's name."""
    return f"--{argument.replace('_', '-')}"
