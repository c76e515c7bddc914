"""Re-balancing over time, for simulator and router alike: what they tell it is measured here.

``policy.rebalance`` weighs a move, ``policy.role_loads`` says how both roles fare.  What these
take as constants of a cluster follows from what has happened:

- what passes through a full decode node is its HBM in tokens over the mean time that the last
  requests stayed, from their prefill to their end;
- a switch takes what the last ones took from the decision on, their drain included.

Until the first request is over nothing is decided.  Nor is while a switch is under way; the
interval is over all the same, and the rest begins when the node serves again.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dualpath.core.cluster import Role
from dualpath.policy.rebalance import Decision, Rebalancer, RebalanceSettings, Stay
from dualpath.policy.role_loads import RoleNodes, RoleQueue, RoleWatch

_STAYS_KEPT = 256
_SWITCHES_KEPT = 16


class RolePolicy:
    """Told how far requests are and what switches took; ``look`` every ``interval_s``.

    Times in seconds, of any clock.
    """

    def __init__(self, settings: RebalanceSettings) -> None:
        self._settings = settings
        self._watch = RoleWatch()
        self._since_s: dict[str, float] = {}
        self._stays_s: deque[float] = deque(maxlen=_STAYS_KEPT)
        self._rebalancer: Rebalancer | None = None

    def loaded(self, request_id: str, prefill_tokens: int) -> None:
        """As ``RoleWatch.loaded``."""
        self._watch.loaded(request_id, prefill_tokens)

    def prefilled(self, request_id: str, decode_tokens: int, now_s: float) -> None:
        """As ``RoleWatch.prefilled``."""
        self._since_s[request_id] = now_s
        self._watch.prefilled(request_id, decode_tokens)

    def over(self, request_id: str, now_s: float) -> None:
        """As ``RoleWatch.over``."""
        if (since_s := self._since_s.pop(request_id, None)) is not None:
            self._stays_s.append(now_s - since_s)
        self._watch.over(request_id)

    def look(
        self,
        nodes: RoleNodes,
        queues: Mapping[Role, RoleQueue],
        prefill_node_tokens_per_s: float,
        took_s: Sequence[float],
        *,
        switching: bool,
        ttft_s: Sequence[float] = (),
        tpot_s: Sequence[float] = (),
    ) -> Decision:
        """Return what to do after one more interval; the caller carries a ``Move`` out.

        ``prefill_node_tokens_per_s`` is what engines say of themselves, 0 if they do not know.
        ``took_s`` are the switches so far.  Besides the reasons of ``Stay``: "unmeasured" (a rate
        is not known yet, or a role has no engine) and "switching".
        """
        settings = self._tuned(nodes, prefill_node_tokens_per_s, took_s)
        if settings is None:
            self._watch.skip()
            return Stay("unmeasured")
        observation = self._watch.look(settings, nodes, queues, ttft_s, tpot_s)
        if self._rebalancer is None:
            self._rebalancer = Rebalancer(settings)
        self._rebalancer.retune(settings)
        return Stay("switching") if switching else self._rebalancer.observe(observation)

    def _tuned(
        self, nodes: RoleNodes, prefill_node_tokens_per_s: float, took_s: Sequence[float]
    ) -> RebalanceSettings | None:
        """Return the settings with what is measured by now, None while a rate is not known."""
        if not (nodes.prefill and nodes.decode):
            return None
        given = self._settings
        stay_s = sum(self._stays_s) / len(self._stays_s) if self._stays_s else 0.0
        decode = nodes.decode_hbm_tokens / nodes.decode / stay_s if stay_s else 0.0
        prefill = given.prefill_node_tokens_per_s or prefill_node_tokens_per_s
        decode = given.decode_node_tokens_per_s or decode
        if not (prefill and decode):
            return None
        cost_s = switch_cost_s(took_s)
        return msgspec.structs.replace(
            given.with_rates(prefill, decode),
            switch_s=given.switch_s if cost_s is None else cost_s,
        )


def switch_cost_s(took_s: Iterable[float]) -> float | None:
    """Return what a switch takes, drain included: the median of the last, None before any."""
    last = list(took_s)[-_SWITCHES_KEPT:]
    return statistics.median(last) if last else None
