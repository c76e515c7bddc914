"""Data-parallel groups: which ranks belong together, and for whom a group waits.

The ranks of one *start* of a group name the same group and epoch.  Which start is the newest need
not be known: a group is complete when ranks of one start have greeted, all of them, and a rank that
is left over from a former start waits in vain until the next process takes its ``engine_id``.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dualpath.core.cluster import GroupRank
from dualpath.core.control import Register
from dualpath.core.errors import EngineRefusedError
from dualpath.core.sessions import RouterSideState
from dualpath.router.refusals import ControlRefusal

if TYPE_CHECKING:
    from dualpath.router.control.engine_state import EngineState

_MOST_NAMED = 16
#: Who greets is looked for rank by rank: a stranger's number must not take the router's time.
MAX_RANKS = 4096


def started_with(dp: GroupRank, engines: "Iterable[EngineState]") -> "list[EngineState]":
    """Return the engines of one start of a group, by rank."""
    found = [(e.info.dp.rank, e) for e in engines if e.info.dp and e.info.dp.start == dp.start]
    return [engine for _, engine in sorted(found, key=lambda each: each[0])]


def waits_for(dp: GroupRank, engines: "Iterable[EngineState]") -> str | None:
    """Return which ranks of a start of a group have yet to greet, None if all have."""
    greeted = {
        e.info.dp.rank
        for e in started_with(dp, engines)
        if e.info.dp and e.machine.state is RouterSideState.REGISTERING
    }
    missing = [str(rank) for rank in range(dp.size) if rank not in greeted]
    if not missing:
        return None
    return (
        f"the data-parallel group {dp.group!r} waits for {len(missing)} of its {dp.size} ranks: "
        f"{', '.join(missing[:_MOST_NAMED])}; start them, and if one has ended all of them anew, "
        "since ranks start together"
    )


def check_rank(name: str, hello: Register, engines: "Iterable[EngineState]") -> None:
    """Raise ``EngineRefusedError`` if no group can have this rank."""
    if (dp := hello.dp) is None:
        return
    if not 0 <= dp.rank < dp.size <= MAX_RANKS or (dp.at_server or 0) < 0:
        raise EngineRefusedError(
            ControlRefusal.SETTINGS,
            f"{name} is rank {dp.rank} of {dp.size} of the data-parallel group {dp.group!r}, "
            f"number {dp.at_server} of its server; ranks count from 0 on, at most {MAX_RANKS}; "
            "correct its settings",
        )
    role = hello.address.role
    for engine in started_with(dp, engines):
        other, info = engine.info.dp, engine.info
        if info.engine_id == hello.address.engine_id or not engine.here:
            continue
        if other and (other.rank == dp.rank or (other.size, info.role) != (dp.size, role)):
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} is rank {dp.rank} of {dp.size}, {role.value}, of the data-parallel group "
                f"{dp.group!r}, where {info.engine_id!r} is rank {other.rank} of {other.size}, "
                f"{info.role.value}; give each rank a number of its own, and all one size and role",
            )
