"""Planted bugs: each disables one mechanism that keeps KV right or the cluster alive."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec


class PlantedBug(msgspec.Struct, frozen=True):
    """``what`` describes the bug; the context of ``patch`` plants it."""

    what: str
    patch: Callable[[], AbstractContextManager[object]]


def replaced(owner: object, name: str, other: object) -> Callable[[], Any]:
    """Return a factory of contexts that replace an attribute."""
    return lambda: mock.patch.object(owner, name, other)
