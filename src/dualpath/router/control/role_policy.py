"""Live re-balancing: the simulator's policy (``policy.rebalance``) over this router's engines.

What it observes is observed by the simulator's rule as well (``policy.role_loads``).  Constants
that the simulator takes from its model are measured here:

- what a prefill node gets done is what its slowest engine says of itself, as for β;
- what passes through a full decode node is its HBM in tokens over the mean time that the last
  requests stayed, from their prefill to their end;
- a switch takes what the last ones took (``Roles.cost_s``), ``switch_s`` before any.

Until these are known nothing is decided.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.policy.rebalance import Move, Rebalancer, RebalanceSettings
from dualpath.policy.role_loads import RoleNodes, RoleQueue, RoleWatch
from dualpath.router.control.engine_state import EngineState
from dualpath.router.control.roles import Roles

logger = logging.getLogger(__name__)

_STAYS_KEPT = 256


class RolePolicy:
    """Watches requests as ``Dispatch.watch``; ``turn`` it often, it looks every ``interval_s``."""

    def __init__(
        self, settings: RebalanceSettings, roles: Roles, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._roles = roles
        self._clock = clock
        self._watch = RoleWatch()
        self._since_s: dict[str, float] = {}
        self._stays_s: deque[float] = deque(maxlen=_STAYS_KEPT)
        self._rebalancer: Rebalancer | None = None
        self._due_s = clock() + settings.interval_s

    def loaded(self, request_id: str, prefill_tokens: int) -> None:
        """As ``RoleWatch.loaded``."""
        self._watch.loaded(request_id, prefill_tokens)

    def prefilled(self, request_id: str, decode_tokens: int) -> None:
        """As ``RoleWatch.prefilled``."""
        self._since_s[request_id] = self._clock()
        self._watch.prefilled(request_id, decode_tokens)

    def over(self, request_id: str) -> None:
        """As ``RoleWatch.over``."""
        if (since_s := self._since_s.pop(request_id, None)) is not None:
            self._stays_s.append(self._clock() - since_s)
        self._watch.over(request_id)

    def turn(self, queues: Callable[[Role], RoleQueue]) -> None:
        """Look if it is time, and ask for a switch if one pays."""
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self._settings.interval_s
        nodes = {role: self._roles.nodes(role) for role in Role}
        if not all(nodes.values()) or (settings := self._tuned(nodes)) is None:
            self._roles.policy_says = "a rate is not known yet, or a role has no engine"
            return
        if self._rebalancer is None:
            self._rebalancer = Rebalancer(settings)
        self._rebalancer.retune(settings)
        observation = self._watch.look(
            settings,
            RoleNodes(len(nodes[Role.PREFILL]), len(nodes[Role.DECODE]), _hbm_tokens(nodes)),
            {role: queues(role) for role in Role},
            (),
            (),
        )
        if self._roles.under_way is not None:
            return
        decision = self._rebalancer.observe(observation)
        self._roles.policy_says = decision.reason
        if isinstance(decision, Move):
            self._ask(decision)

    def _ask(self, move: Move) -> None:
        try:
            self._roles.ask(move.to_role, None, move.reason)
        except BadRequestError as error:
            logger.warning("no switch of roles: %s", error)

    def _tuned(
        self, nodes: Mapping[Role, list[tuple[EngineState, ...]]]
    ) -> RebalanceSettings | None:
        """Return the settings with what is measured by now, None while a rate is not known."""
        engines = [rank.info.rates.prefill_tokens for node in nodes[Role.PREFILL] for rank in node]
        known = [rate.per_s for rate in engines if rate is not None]
        prefill = min(known, default=0.0) * max(map(len, nodes[Role.PREFILL]))
        stay_s = sum(self._stays_s) / len(self._stays_s) if self._stays_s else 0.0
        decode = _hbm_tokens(nodes) / len(nodes[Role.DECODE]) / stay_s if stay_s else 0.0
        given = self._settings
        prefill = given.prefill_node_tokens_per_s or prefill
        decode = given.decode_node_tokens_per_s or decode
        if not (prefill and decode):
            return None
        cost_s = self._roles.cost_s
        switch_s = given.switch_s if cost_s is None else cost_s
        return msgspec.structs.replace(given.with_rates(prefill, decode), switch_s=switch_s)


def rebalance_settings(options: Mapping[str, Any]) -> RebalanceSettings:
    """Return settings of the policy from options of these names; raises as ``msgspec.convert``."""
    return msgspec.convert(dict(options), RebalanceSettings, strict=False)


def _hbm_tokens(nodes: Mapping[Role, list[tuple[EngineState, ...]]]) -> int:
    return sum(rank.info.hbm_tokens for node in nodes[Role.DECODE] for rank in node)
