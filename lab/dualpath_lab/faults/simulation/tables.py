"""The tables of a process: their sizes, and which still name a request after all have ended.

Every table that grows with traffic has a bound.  A table with an entry for each request that is not
removed when the request ends has none, so that after a run no table may name a request, except
histories of a fixed length.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Set
from enum import Enum, auto
from typing import NamedTuple, cast

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
    leaves = _LEAVES
    pending: list[tuple[str, object]] = [("", root)]
    while pending:
        name, value = pending.pop()
        kind = type(value)
        if (shape := _SHAPES.get(kind)) is None:
            shape = _SHAPES[kind] = _shape_of(kind)
            if shape is _LEAF:
                leaves.add(kind)
        if shape is _LEAF or id(value) in seen:
            continue
        seen.add(id(value))
        if type(shape) is _Fields:
            for field, path in shape.names:
                if type(one := getattr(value, field, None)) not in leaves:
                    pending.append((path, one))
            if shape.has_dict:
                for field, one in vars(value).items():
                    if type(one) not in leaves:
                        pending.append((f"{shape.kind}.{field}", one))
            continue
        # Its shape is that of a collection, as ``_shape_of`` has looked up.
        entries = cast(Collection[object], value)
        if shape is not _Shape.TUPLE:
            yield name, entries
        pending += [(name, one) for one in entries if type(one) not in leaves]
        if shape is _Shape.MAPPING:
            values = cast(Mapping[object, object], value).values()
            pending += [(name, one) for one in values if type(one) not in leaves]


class _Shape(Enum):
    LEAF = auto()
    MAPPING = auto()
    TABLE = auto()
    TUPLE = auto()


class _Fields(NamedTuple):
    """An object of the system: ``names`` are its slots or fields with the names of their tables."""

    kind: str
    names: tuple[tuple[str, str], ...]
    has_dict: bool


_LEAF = _Shape.LEAF
#: The shapes of all types met so far, and those types that are leaves.
_SHAPES: dict[type, _Shape | _Fields] = {}
_LEAVES: set[type] = {str, bytes, int, float, bool, type(None)}


def _shape_of(kind: type) -> _Shape | _Fields:
    """Return what objects of a type consist of."""
    if issubclass(kind, str | bytes | int | float | None):
        return _LEAF
    if issubclass(kind, tuple):
        return _Shape.TUPLE
    if issubclass(kind, Mapping):
        return _Shape.MAPPING
    if issubclass(kind, list | deque | Set):
        return _Shape.TABLE
    own = next((k.__name__ for k in kind.__mro__ if k.__module__.startswith(_SYSTEM)), None)
    if own is None:
        return _LEAF
    if issubclass(kind, msgspec.Struct):
        return _Fields(own, tuple((n, f"{own}.{n}") for n in kind.__struct_fields__), False)
    slots = (name for each in kind.__mro__ for name in _slots(each))
    return _Fields(own, tuple((n, f"{own}.{n}") for n in slots), kind.__dictoffset__ != 0)


#: The most frequent entries that name no request.
_UNNAMED = frozenset({bytes, int, float, bool, tuple, type(None)})


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
            kind = type(entry)
            if kind in _UNNAMED:
                continue
            one = entry if kind is str else getattr(entry, "request_id", None)
            if isinstance(one, str) and (one in requests or one.rpartition(".")[0] in requests):
                found[name] = one
                break
    return [f"{name} names {one}" for name, one in found.items()]
