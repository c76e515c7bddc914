"""Expands ``~`` in paths that no shell has expanded: of files, variables and ``--flag=~/PATH``."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Given, Settings, declared


def with_home(path: str) -> str:
    """Return a path with ``~`` and ``~user`` expanded; raises ``ConfigError`` for unknown users."""
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigError(f"{path!r} names a user who has no home directory; give the whole path")
    return expanded


def with_homes(kind: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of settings with ``~`` expanded in those that are paths."""
    paths = {field.name for field in declared(kind) if field.is_path}
    return {
        key: with_home(value) if key in paths and isinstance(value, str) else value
        for key, value in values.items()
    }


def given_with_homes(kind: type[Settings], given: Iterable[Given]) -> Iterator[Given]:
    """Yield the given settings likewise; errors name the place of the value."""
    for one in given:
        try:
            value = with_homes(kind, {one.key: one.value})[one.key]
        except ConfigError as error:
            raise ConfigError(f"{one.place or one.key}: {error}") from error
        yield msgspec.structs.replace(one, value=value)
