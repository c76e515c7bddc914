"""Switches: engines that change their role, and groups that change their size.

A role decides an engine's worker, scheduler and KV layout, the size of a data-parallel group where
its experts are; so a switch means new processes: all of the *unit* drain, end, and are started
again under their old name, from which the ranks' names are made.  vLLM changes neither in a running
process.  The router starts no processes.  It stores the *request*; the supervisor of the engine
reads it and from then on owns the switch: a router that restarts loses the request, not the switch.
A request that no supervisor takes up, or that can no longer be carried out, ends by itself.  Stored
KV is not affected.

One switch at a time; the ranks of a group switch together, and are back when all of one start are.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from dualpath.core.cluster import Role, UnitShape
from dualpath.core.errors import BadRequestError
from dualpath.policy.rebalance import (
    Move,
    RebalanceSettings,
    RoleNodes,
    RolePolicy,
    RoleQueue,
    soonest_empty,
    switch_cost_s,
)
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.registry import EngineState, Pause, Registry

#: Supervisors poll every second; a request that old has no supervisor.
TAKE_UP_S = 30.0
_REMEMBERED = 16

logger = logging.getLogger(__name__)


class SwitchState(StrEnum):
    """Progress of a switch."""

    ASKED = "asked"
    DRAINING = "draining"
    STARTING = "starting"
    JOINED = "joined"
    CANCELLED = "cancelled"
    LOST = "lost"


#: A switch in one of these states has ended.
SWITCH_ENDS = (SwitchState.JOINED, SwitchState.CANCELLED, SwitchState.LOST)
#: Reason of a switch that an operator requested.
ASKED = "asked"


class Switch(msgspec.Struct):
    """One switch; ``reason`` is ``ASKED`` or that of ``policy.rebalance.Move``.

    ``engines`` are those that leave; ``to_ranks`` come back, None if the supervisor chooses.
    Seconds count from the request: until the last old process had ended, and until the end.
    ``note`` of a failed switch is the reason and the remedy.
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
    """The switches of a cluster; ``poll`` whenever something may have changed.

    ``ended`` is called with every switch that has ended.  A switch that takes longer than
    ``timeout_s`` has lost its engine.
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
        self.current: Switch | None = None
        #: The reason of the policy's last decision; None without a policy.
        self.policy_reason: str | None = None
        self.past: deque[Switch] = deque(maxlen=_REMEMBERED)

    @property
    def cost_s(self) -> float | None:
        """Duration of a switch from its request on: median of the last ones, None before any."""
        return switch_cost_s(self.took_s)

    @property
    def took_s(self) -> list[float]:
        """Durations of the last switches that succeeded."""
        return [s.took_s for s in self.past if s.state is SwitchState.JOINED and s.took_s]

    def nodes(self, role: Role) -> list[tuple[EngineState, ...]]:
        """Return the units that can switch: live engines that stay, ranks of groups together."""
        found: dict[str, tuple[EngineState, ...]] = {}
        for state in self._registry.all():
            if state.alive and state.info.role is role and Pause.DRAINING not in state.pauses:
                ranks = tuple(r for r in self._registry.group(state.info) if r.alive)
                found.setdefault(ranks[0].info.engine_id, ranks)
        return list(found.values())

    def request(
        self,
        role: Role | None,
        engine_id: str | None,
        reason: str = ASKED,
        ranks: int | None = None,
    ) -> Switch:
        """Request an engine or group in another role (None: its own), with so many ranks.

        Without ``ranks`` the supervisor chooses.  ``engine_id`` names an engine, a rank or a group;
        without it, the one that is empty soonest is chosen.  Raises ``BadRequestError`` if the
        switch is impossible.
        """
        self.poll()
        if self.current is not None:
            raise BadRequestError(
                f"{', '.join(self.current.engines)} changes to "
                f"{self.current.to_role.value} at present, one engine or group at a time does; "
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
        self.current = Switch(tuple(self._epochs), first.role, to_role, reason, ranks)
        logger.warning("%s shall become %s: %s", ", ".join(self._epochs), to_role.value, reason)
        return self.current

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

    def poll(self) -> None:
        """Update the state of the switch."""
        if (switch := self.current) is None:
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
        """Whether an engine belongs to the unit that switches, before or after."""
        return info.unit == self._unit or info.engine_id in self._epochs

    def _all_back(self, new: Sequence[EngineInfo]) -> bool:
        """Whether these are all ranks of their start, which may be more or fewer than before."""
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
                f"no supervisor took it up within {TAKE_UP_S:g} s; `dualpath serve` does for its "
                "engines"
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
        self.current = None
        self.past.append(switch)
        logger.warning(
            "%s to %s: %s after %.1f s %s",
            *(", ".join(switch.engines), switch.to_role.value, state.value, after_s, note),
        )
        self._ended(switch)

    def report(self) -> dict[str, Any]:
        """Return the answer of ``GET /dualpath/v1/roles``, JSON-safe."""
        self.poll()
        return {
            "prefill": len(self.nodes(Role.PREFILL)),
            "decode": len(self.nodes(Role.DECODE)),
            "switch": msgspec.to_builtins(self.current),
            "cost_s": self.cost_s,
            "policy": self.policy_reason,
            "past": [msgspec.to_builtins(switch) for switch in self.past],
        }


def _named(
    nodes: Sequence[tuple[EngineState, ...]], name: str, what: str
) -> tuple[EngineState, ...]:
    """Return the node with this name, or with a rank of this name."""
    for node in nodes:
        if any(name in (rank.info.engine_id, rank.info.unit) for rank in node):
            return node
    raise BadRequestError(
        f"no {what} {name[:80]!r} serves here; GET /dualpath/v1/status names those that do"
    )


def _unfinished(node: Sequence[EngineState]) -> int:
    return sum(state.report.load.unfinished_tokens for state in node if state.report is not None)


class LiveRolePolicy:
    """Live re-balancing: the simulator's policy (``policy.rebalance``) for this router's engines.

    ``Dispatch`` notifies it of requests; ``tick`` evaluates the policy every ``interval_s``.  The
    speed of a prefill node is what its slowest engine has reported, as for β; the simulator takes
    it from its model.
    """

    def __init__(
        self, settings: RebalanceSettings, roles: Roles, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._roles = roles
        self._clock = clock
        self._policy = RolePolicy(settings)
        self._due_s = clock() + settings.interval_s

    def loaded(self, request_id: str, prefill_tokens: int) -> None:
        """As ``RoleWatch.loaded``."""
        self._policy.loaded(request_id, prefill_tokens)

    def prefilled(self, request_id: str, decode_tokens: int) -> None:
        """As ``RoleWatch.prefilled``."""
        self._policy.prefilled(request_id, decode_tokens, self._clock())

    def over(self, request_id: str) -> None:
        """As ``RoleWatch.over``."""
        self._policy.over(request_id, self._clock())

    def tick(self, queues: Callable[[Role], RoleQueue]) -> None:
        """Evaluate the policy if it is due, and request a switch if one pays."""
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self._settings.interval_s
        prefill, decode = (self._roles.nodes(role) for role in Role)
        decision = self._policy.evaluate(
            RoleNodes(len(prefill), len(decode), sum(r.info.hbm_tokens for n in decode for r in n)),
            {role: queues(role) for role in Role},
            _tokens_per_s(prefill),
            self._roles.took_s,
            switching=self._roles.current is not None,
        )
        self._roles.policy_reason = decision.reason
        if isinstance(decision, Move):
            self._ask(decision)

    def _ask(self, move: Move) -> None:
        try:
            self._roles.request(move.to_role, None, move.reason)
        except BadRequestError as error:
            logger.warning("no switch of roles: %s", error)


def rebalance_settings(options: Mapping[str, Any]) -> RebalanceSettings:
    """Return settings of the policy from options of these names; raises as ``msgspec.convert``."""
    return msgspec.convert(dict(options), RebalanceSettings, strict=False)


def _tokens_per_s(nodes: list[tuple[EngineState, ...]]) -> float:
    """Return the speed of a prefill node, by its slowest engine; 0 if no engine knows it."""
    rates = [rank.info.rates.prefill_tokens for node in nodes for rank in node]
    known = [rate.per_s for rate in rates if rate is not None]
    return min(known, default=0.0) * max(map(len, nodes), default=0)
