"""Engines that change their role and groups that change their size: what became of the wish.

A role decides an engine's worker, scheduler and KV layout, the size of a data-parallel group where
its experts lie, so that a switch is new processes: all of the *unit* drain, end, and are started
again under their old name, of which a rank's is made.  vLLM changes neither in a running process.
The router starts no processes.  It keeps the *wish*; who supervises the engine reads it, and from
then on owns the switch: a router that is lost meanwhile forgets the wish, not the switch.  A wish
that nobody takes up, or that can no longer be carried out, ends by itself.  Stored KV does not
notice.

One switch at a time; the ranks of a group switch together, and are back when all of one start are.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from dualpath.core.cluster import Role, UnitShape
from dualpath.core.errors import BadRequestError
from dualpath.policy.role_loads import soonest_empty
from dualpath.policy.role_policy import switch_cost_s
from dualpath.router.control.engine_state import EngineState, Pause
from dualpath.router.control.registry import Registry
from dualpath.router.engines import EngineInfo

#: Who supervises engines asks every second; a wish that old is nobody's.
TAKE_UP_S = 30.0
_REMEMBERED = 16

logger = logging.getLogger(__name__)


class SwitchState(StrEnum):
    """How far a switch is."""

    ASKED = "asked"
    DRAINING = "draining"
    STARTING = "starting"
    JOINED = "joined"
    CANCELLED = "cancelled"
    LOST = "lost"


#: A switch that has come to one of these is over.
SWITCH_ENDS = (SwitchState.JOINED, SwitchState.CANCELLED, SwitchState.LOST)
#: The reason of a switch that somebody asked for.
ASKED = "asked"


class Switch(msgspec.Struct):
    """One switch; ``reason`` is ``ASKED`` or that of ``policy.rebalance.Move``.

    ``engines`` are those that leave; ``to_ranks`` come back, None if who starts them chooses.
    Seconds count from the asking: until the last old process was gone, and until the end.
    ``note`` says of a switch that failed why, and what to do.
    """

    engines: tuple[str, ...]
    from_role: Role
    to_role: Role
    reason: str
    to_ranks: int | None = None
    state: SwitchState = SwitchState.ASKED
    drained_after_s: float | None = None
    took_s: float | None = None
    note: str = ""


class Roles:
    """The switches of a cluster; ``look`` whenever something may have changed.

    ``ended`` is told of every switch that is over.  A switch that takes longer than ``timeout_s``
    has lost its engine.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], float],
        timeout_s: float,
        ended: Callable[[Switch], None] = lambda switch: None,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._timeout_s = timeout_s
        self._ended = ended
        self._asked_s = 0.0
        self._unit = ""
        self._epochs: dict[str, str] = {}
        self.under_way: Switch | None = None
        #: The reason of the policy's last decision; None without a policy.
        self.policy_says: str | None = None
        self.past: deque[Switch] = deque(maxlen=_REMEMBERED)

    @property
    def cost_s(self) -> float | None:
        """What a switch takes from the asking on: the median of the last ones, None before any."""
        return switch_cost_s(self.took_s)

    @property
    def took_s(self) -> list[float]:
        """What the last switches that came to their end took."""
        return [s.took_s for s in self.past if s.state is SwitchState.JOINED and s.took_s]

    def nodes(self, role: Role) -> list[tuple[EngineState, ...]]:
        """Return what switches as one: live engines that do not leave, ranks of groups together."""
        found: dict[str, tuple[EngineState, ...]] = {}
        for state in self._registry.all():
            if state.alive and state.info.role is role and Pause.DRAINING not in state.pauses:
                ranks = tuple(r for r in self._registry.group(state.info) if r.alive)
                found.setdefault(ranks[0].info.engine_id, ranks)
        return list(found.values())

    def ask(
        self,
        role: Role | None,
        engine_id: str | None,
        reason: str = ASKED,
        ranks: int | None = None,
    ) -> Switch:
        """Ask for an engine or group in another role (None: its own), with so many ranks.

        Without ``ranks`` who starts it chooses.  ``engine_id`` names an engine, a rank or a group;
        without, it is the one that is empty soonest.  Raises ``BadRequestError`` if that cannot be.
        """
        self.look()
        if self.under_way is not None:
            raise BadRequestError(
                f"{', '.join(self.under_way.engines)} changes to "
                f"{self.under_way.to_role.value} at present, one engine or group at a time does; "
                "ask again when GET /dualpath/v1/roles shows no switch"
            )
        chosen = self._chosen(role, engine_id, ranks)
        first = chosen[0].info
        if len(self.nodes(first.role)) < 2:
            raise BadRequestError(
                f"there is one {first.role.value} engine or group, at least 1 has to stay; start "
                "another before this one changes"
            )
        self._asked_s, self._unit = self._clock(), first.unit
        self._epochs = {rank.info.engine_id: rank.info.epoch for rank in chosen}
        to_role = role or first.role
        self.under_way = Switch(tuple(self._epochs), first.role, to_role, reason, ranks)
        logger.warning("%s shall become %s: %s", ", ".join(self._epochs), to_role.value, reason)
        return self.under_way

    def _chosen(
        self, role: Role | None, engine_id: str | None, ranks: int | None
    ) -> tuple[EngineState, ...]:
        if role is None:
            return self._resized(engine_id or "", ranks)
        giver = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        nodes = self.nodes(giver)
        if engine_id is None and nodes:
            return nodes[soonest_empty({i: _unfinished(n) for i, n in enumerate(nodes)})]
        return _named(nodes, engine_id or "", f"{giver.value} engine")

    def _resized(self, name: str, ranks: int | None) -> tuple[EngineState, ...]:
        if ranks is None:
            raise BadRequestError(
                'neither a role nor a number of ranks is asked for; give "role", "ranks" or both'
            )
        nodes = [node for role in Role for node in self.nodes(role)]
        chosen = _named(nodes, name, "engine or group")
        if len(chosen) == ranks:
            raise BadRequestError(f"{name} has {ranks} ranks already; ask for another number")
        return chosen

    def look(self) -> None:
        """See how far the switch is."""
        if (switch := self.under_way) is None:
            return
        alive = [s for s in self._registry.all() if s.alive and self._is_of_it(s.info)]
        old = [s for s in alive if self._epochs.get(s.info.engine_id) == s.info.epoch]
        new = [s.info for s in alive if s not in old]
        after_s = self._clock() - self._asked_s
        if not old and switch.drained_after_s is None:
            switch.state, switch.drained_after_s = SwitchState.STARTING, after_s
        if new and self._all_back(new):
            self._back(switch, new, after_s)
        elif switch.state is SwitchState.ASKED:
            self._not_begun(switch, old, after_s)
        elif after_s > self._timeout_s:
            note = f"it is not back after {after_s:.0f} s, role_switch_timeout_s is "
            note += f"{self._timeout_s:g}; see its log, or allow more with --role-switch-timeout-s"
            self._end(switch, SwitchState.LOST, after_s, note)

    def _is_of_it(self, info: EngineInfo) -> bool:
        """Whether an engine is of the unit that switches, of those that leave or of the next."""
        return info.unit == self._unit or info.engine_id in self._epochs

    def _all_back(self, new: Sequence[EngineInfo]) -> bool:
        """Whether these are all ranks of their start, which may be more or fewer than have left."""
        dp = new[0].dp
        return len(new) == (dp.size if dp is not None else 1)

    def _not_begun(self, switch: Switch, old: Sequence[EngineState], after_s: float) -> None:
        if any(Pause.DRAINING in state.pauses for state in old):
            switch.state = SwitchState.DRAINING
        elif len(self.nodes(switch.from_role)) < 2:
            note = f"it is the last {switch.from_role.value} engine by now; start another first"
            self._end(switch, SwitchState.CANCELLED, after_s, note)
        elif after_s > TAKE_UP_S:
            note = (
                f"nobody took it up within {TAKE_UP_S:g} s; `dualpath serve` does for its engines"
            )
            self._end(switch, SwitchState.CANCELLED, after_s, note)

    def _back(self, switch: Switch, new: Sequence[EngineInfo], after_s: float) -> None:
        shape = UnitShape(new[0].role, len(new))
        if shape == UnitShape(switch.to_role, switch.to_ranks or len(new)):
            self._end(switch, SwitchState.JOINED, after_s, "")
        else:
            note = f"it was started as {shape} again; ask once more"
            self._end(switch, SwitchState.CANCELLED, after_s, note)

    def _end(self, switch: Switch, state: SwitchState, after_s: float, note: str) -> None:
        switch.state, switch.took_s, switch.note = state, after_s, note
        self.under_way = None
        self.past.append(switch)
        logger.warning(
            "%s to %s: %s after %.1f s %s",
            *(", ".join(switch.engines), switch.to_role.value, state.value, after_s, note),
        )
        self._ended(switch)

    def report(self) -> dict[str, Any]:
        """Return the answer of ``GET /dualpath/v1/roles``, JSON-safe."""
        self.look()
        return {
            "prefill": len(self.nodes(Role.PREFILL)),
            "decode": len(self.nodes(Role.DECODE)),
            "switch": msgspec.to_builtins(self.under_way),
            "cost_s": self.cost_s,
            "policy": self.policy_says,
            "past": [msgspec.to_builtins(switch) for switch in self.past],
        }


def _named(
    nodes: Sequence[tuple[EngineState, ...]], name: str, what: str
) -> tuple[EngineState, ...]:
    """Return the node that is called so, or one of whose ranks is."""
    for node in nodes:
        if any(name in (rank.info.engine_id, rank.info.unit) for rank in node):
            return node
    raise BadRequestError(
        f"no {what} {name[:80]!r} serves here; GET /dualpath/v1/status names those that do"
    )


def _unfinished(node: Sequence[EngineState]) -> int:
    return sum(state.report.unfinished_tokens for state in node if state.report is not None)
