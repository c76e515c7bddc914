"""The tables of a process: their sizes, and which still name a request after all have ended.

Every table that grows with traffic has a bound.  A table with an entry for each request that is not
removed when the request ends has none, so that after a run no table may name a request, except
histories of a fixed length.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Set

import msgspec

#: Tables of a fixed length, by class and attribute.
HISTORIES = frozenset(
    {"RouterService.records", "LinkedFrontEnd.records", "Dispatch.recent", "Dashboard._ended"}
)
#: Tables of slots with writers that are not proven dead, bounded by the buffer.
QUARANTINES = frozenset({"SlotPool._quarantine", "Releases._slots"})
_SYSTEM = ("dualpath.", "dualpath_lab.emulated")


def tables(root: object) -> Iterator[tuple[str, Collection[object]]]:
    """Yield all tables that can be reached from an object of the system, with their names.

    A table is a mapping, a set, a list or a deque; its name is the class and the attribute.
    """
    seen: set[int] = set()
    pending: list[tuple[str, object]] = [("", root)]
    while pending:
        name, value = pending.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | None):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            yield name, value
            pending += [(name, one) for one in (*value.keys(), *value.values())]
        elif isinstance(value, list | deque | Set | tuple):
            if not isinstance(value, tuple):
                yield name, value
            pending += [(name, one) for one in value]
        elif (kind := _system_class(value)) is not None:
            pending += [(f"{kind}.{field}", one) for field, one in _fields(value)]


def _system_class(value: object) -> str | None:
    """Return the name of an object's first class that belongs to the system, None without one."""
    classes = (kind for kind in type(value).__mro__ if kind.__module__.startswith(_SYSTEM))
    return next((kind.__name__ for kind in classes), None)


def sizes(root: object) -> Counter[str]:
    """Return the entries of all tables reached from ``root``, by class and attribute."""
    found: Counter[str] = Counter()
    for name, table in tables(root):
        found[name] += len(table)
    return found


def _fields(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, msgspec.Struct):
        names: Collection[str] = value.__struct_fields__
    else:
        slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
        names = {*getattr(value, "__dict__", {}), *(one for each in slots for one in each)}
    for name in names:
        if (one := getattr(value, name, None)) is not None:
            yield name, one


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
