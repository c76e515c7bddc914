"""The tables of a process: their sizes, and which still name a request after all have ended.

Every table that grows with traffic has a bound.  A table with an entry for each request that is not
removed when the request ends has none, so that after a run no table may name a request, except
histories of a fixed length.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Set
from enum import Enum, auto
from typing import NamedTuple

import msgspec

#: Tables of a fixed length, by class and attribute.
HISTORIES = frozenset(
    {"RouterService.records", "LinkedFrontEnd.records", "Dispatch.recent", "Dashboard._ended"}
)
#: Tables of slots and of reserved HBM with writers that are not proven dead, bounded by both.
QUARANTINES = frozenset(
    {
        *("SlotPool._quarantine", "Releases._slots"),
        *("HbmReservations._reserved", "EmulatedHbm._reserved"),
    }
)
_SYSTEM = ("dualpath.", "dualpath_lab.emulated")


def tables(root: object) -> Iterator[tuple[str, Collection[object]]]:
    """Yield all tables that can be reached from an object of the system, with their names.

    A table is a mapping, a set, a list or a deque; its name is the class and the attribute.
    """
    # Every run ends with this walk over all its objects, so that it looks at each type only once.
    seen: set[int] = set()
    pending: list[tuple[str, object]] = [("", root)]
    while pending:
        name, value = pending.pop()
        kind = type(value)
        shape = _SHAPES.get(kind) or _SHAPES.setdefault(kind, _shape_of(kind))
        if shape is _LEAF or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(shape, _Fields):
            for field, path in shape.names:
                if (one := getattr(value, field, None)) is not None:
                    pending.append((path, one))
            if shape.has_dict:
                for field, one in vars(value).items():
                    pending.append((f"{shape.kind}.{field}", one))
            continue
        assert isinstance(value, Collection)
        if shape is not _Shape.TUPLE:
            yield name, value
        entries = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
        pending += [(name, one) for one in entries if type(one) not in _ATOMS]


class _Shape(Enum):
    LEAF = auto()
    TABLE = auto()
    TUPLE = auto()


class _Fields(NamedTuple):
    """An object of the system: ``names`` are its slots or fields with the names of their tables."""

    kind: str
    names: tuple[tuple[str, str], ...]
    has_dict: bool


_LEAF = _Shape.LEAF
#: The most frequent leaves.
_ATOMS = frozenset({str, bytes, int, float, bool, type(None)})


#: The shapes of all types met so far.
_SHAPES: dict[type, _Shape | _Fields] = {}


def _shape_of(kind: type) -> _Shape | _Fields:
    """Return what objects of a type consist of."""
    if issubclass(kind, str | bytes | int | float | None):
        return _LEAF
    if issubclass(kind, tuple):
        return _Shape.TUPLE
    if issubclass(kind, Mapping | list | deque | Set):
        return _Shape.TABLE
    own = next((k.__name__ for k in kind.__mro__ if k.__module__.startswith(_SYSTEM)), None)
    if own is None:
        return _LEAF
    if issubclass(kind, msgspec.Struct):
        return _Fields(own, tuple((n, f"{own}.{n}") for n in kind.__struct_fields__), False)
    slots = (name for each in kind.__mro__ for name in _slots(each))
    return _Fields(own, tuple((n, f"{own}.{n}") for n in slots), kind.__dictoffset__ != 0)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def sizes(root: object) -> Counter[str]:
    """Return the entries of all tables reached from ``root``, by class and attribute."""
    found: Counter[str] = Counter()
    for name, table in tables(root):
        found[name] += len(table)
    return found


def naming(root: object, requests: Collection[str], bounded: Collection[str]) -> list[str]:
    """Return the tables reached from ``root``, except ``bounded`` ones, that name a request."""
    found: dict[str, str] = {}
    for name, table in tables(root):
        if name in bounded or name in found:
            continue
        for entry in table:
            one = entry if isinstance(entry, str) else getattr(entry, "request_id", None)
            if isinstance(one, str) and (one in requests or one.rpartition(".")[0] in requests):
                found[name] = one
                break
    return [f"{name} names {one}" for name, one in found.items()]
