"""Event logs without the names of the run they come from."""

from typing import Any

import msgspec

from dualpath.core.cluster import Role
from dualpath.policy.event_log import Entry, EventLog
from dualpath.policy.events import EngineJoined

#: Fields that hold names, and the kind of name.
FIELDS = {
    "request_id": "r",
    "lost_requests": "r",
    "engine_id": "engine-",
    "prefill_engine": "engine-",
    "decode_engine": "engine-",
    "node": "node-",
    "group": "group-",
}


def shortened(log: EventLog) -> EventLog:
    """Return a log in which requests, engines, nodes and groups are numbered as they appear."""
    names: dict[tuple[str, str], str] = {}
    return EventLog(
        begin=log.begin,
        entries=tuple(_renamed(_introduced(entry, names), names) for entry in log.entries),
    )


def _introduced(entry: Entry, names: dict[tuple[str, str], str]) -> Entry:
    """Give an engine and its group names that show the role."""
    if isinstance(event := entry.event, EngineJoined):
        short = "pe" if event.spec.role is Role.PREFILL else "de"
        for kind, name in (("engine-", event.spec.engine_id), ("group-", event.spec.group)):
            prefix = f"{short}-" if kind == "engine-" else f"{short}-group-"
            taken = sum(value.startswith(prefix) for (k, _), value in names.items() if k == kind)
            names.setdefault((kind, name), f"{prefix}{taken}")
    return entry


def _renamed(value: Any, names: dict[tuple[str, str], str], kind: str = "") -> Any:
    if isinstance(value, msgspec.Struct):
        changes = {
            field: _renamed(getattr(value, field), names, FIELDS.get(field, ""))
            for field in value.__struct_fields__
        }
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(_renamed(part, names, kind) for part in value)
    if kind and isinstance(value, str):
        taken = sum(k == kind for k, _ in names)
        return names.setdefault((kind, value), f"{kind}{taken}")
    return value
