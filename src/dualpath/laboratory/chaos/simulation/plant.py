"""One bug that can be planted: what takes back something that keeps KV right or a cluster alive."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec


class Plant(msgspec.Struct, frozen=True):
    """``what`` is taken back, in words; ``patch`` takes it back as long as it is entered."""

    what: str
    patch: Callable[[], AbstractContextManager[object]]


def instead(owner: object, name: str, other: object) -> Callable[[], Any]:
    """Return what replaces an attribute for a while."""
    return lambda: mock.patch.object(owner, name, other)
