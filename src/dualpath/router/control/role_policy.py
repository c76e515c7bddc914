"""Live re-balancing: the simulator's policy (``policy.role_policy``) over this router's engines.

What a prefill node gets done is what its slowest engine says of itself, as for β; the simulator
takes that from its model.  All else is observed, measured and decided by the same object.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.policy.rebalance import Move, RebalanceSettings
from dualpath.policy.role_loads import RoleNodes, RoleQueue
from dualpath.policy.role_policy import RolePolicy
from dualpath.router.control.engine_state import EngineState
from dualpath.router.control.roles import Roles

logger = logging.getLogger(__name__)


class LiveRolePolicy:
    """Watches requests as ``Dispatch.watch``; ``turn`` it often, it looks every ``interval_s``."""

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

    def turn(self, queues: Callable[[Role], RoleQueue]) -> None:
        """Look if it is time, and ask for a switch if one pays."""
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self._settings.interval_s
        prefill, decode = (self._roles.nodes(role) for role in Role)
        decision = self._policy.look(
            RoleNodes(len(prefill), len(decode), sum(r.info.hbm_tokens for n in decode for r in n)),
            {role: queues(role) for role in Role},
            _tokens_per_s(prefill),
            self._roles.took_s,
            switching=self._roles.under_way is not None,
        )
        self._roles.policy_says = decision.reason
        if isinstance(decision, Move):
            self._ask(decision)

    def _ask(self, move: Move) -> None:
        try:
            self._roles.ask(move.to_role, None, move.reason)
        except BadRequestError as error:
            logger.warning("no switch of roles: %s", error)


def rebalance_settings(options: Mapping[str, Any]) -> RebalanceSettings:
    """Return settings of the policy from options of these names; raises as ``msgspec.convert``."""
    return msgspec.convert(dict(options), RebalanceSettings, strict=False)


def _tokens_per_s(nodes: list[tuple[EngineState, ...]]) -> float:
    """Return what a prefill node gets done, by its slowest engine; 0 if no engine knows."""
    rates = [rank.info.rates.prefill_tokens for node in nodes for rank in node]
    known = [rate.per_s for rate in rates if rate is not None]
    return min(known, default=0.0) * max(map(len, nodes), default=0)
