"""Pins of blocks that must not be evicted: empty objects whose names are the pins.

``janitor/pins/namespace/<namespace>``, ``…/tenant/<tag>`` and ``…/chain/<namespace>/<key in hex>``.
"""

import re

from dualpath.core.errors import ConfigError
from dualpath.policy.eviction import Pins
from dualpath.storage.objects import ObjectTree

PINS = "janitor/pins/"
_KINDS = {
    "namespace": re.compile(r"namespace/([A-Za-z0-9._-]+)"),
    "tenant": re.compile(r"tenant/([0-9a-f]{16})"),
    "chain": re.compile(r"chain/([A-Za-z0-9._-]+)/([0-9a-f]{64})"),
}


def pin_name(kind: str, *parts: str) -> str:
    """Return the object name of a pin; raises ``ConfigError`` if it is malformed."""
    name = "/".join((kind, *parts))
    if kind not in _KINDS or not _KINDS[kind].fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be pinned; give a namespace's folder, a tenant's tag of 16 hex "
            "digits, or a folder and a key of 64 hex digits"
        )
    return PINS + name


def read_pins(tree: ObjectTree) -> Pins:
    """Return all pins; raises ``StorageError``."""
    found: dict[str, set[tuple[str, ...]]] = {kind: set() for kind in _KINDS}
    for info in tree.objects(PINS):
        for kind, pattern in _KINDS.items():
            if named := pattern.fullmatch(info.name.removeprefix(PINS)):
                found[kind].add(named.groups())
    return Pins(
        namespaces=frozenset(name for (name,) in found["namespace"]),
        tenants=frozenset(tag for (tag,) in found["tenant"]),
        chains=frozenset((name, bytes.fromhex(key)) for name, key in found["chain"]),
    )
