"""How both roles fare, as ``policy.rebalance`` observes it: one rule for simulator and router.

What waits counts where it is held up:

- a loaded prompt at its PE waits for prefill; one whose read is under way waits for storage, which
  no move makes faster;
- requests without an engine of a role wait for what those before them wait for: they count in
  full if at least half of the tokens placed at the role are loaded (PE) or past their first token
  (DE), less as this share falls to none;
- a DE holds a request's HBM from its assignment on, also while it is read and prefilled, so that
  the HBM held is the DE's load by the same share.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from dualpath.core.cluster import Role
from dualpath.policy.rebalance import ClusterObservation, RebalanceSettings, RoleLoad

_Node = TypeVar("_Node")


class RoleQueue(NamedTuple):
    """What the engines of a role have and what waits for them, in the tokens tok_e counts.

    ``placed_tokens`` are of requests that have an engine of the role (HBM held, for DEs);
    ``waiting`` requests of ``waiting_tokens`` have none yet.
    """

    placed_tokens: int
    waiting: int
    waiting_tokens: int


class RoleNodes(NamedTuple):
    """The nodes of both roles, and how many tokens the HBM of all decode nodes holds."""

    prefill: int
    decode: int
    decode_hbm_tokens: int


class RoleWatch:
    """How far requests are, and what they got done since the last look.

    Told what the scheduler is told, right after it.  Requests that it does not know, or no longer,
    change nothing, so that an end may be told twice.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, int] = {}
        self._decoding: dict[str, int] = {}
        self._loaded_tokens = self._decoding_tokens = self._prompt_tokens = 0

    def loaded(self, request_id: str, prefill_tokens: int) -> None:
        """All hits of a request are in DRAM: its prompt waits for its PE."""
        self._loaded_tokens += prefill_tokens - self._loaded.pop(request_id, 0)
        self._loaded[request_id] = prefill_tokens

    def prefilled(self, request_id: str, decode_tokens: int) -> None:
        """Its PE is through with it; its DE has ``decode_tokens`` of HBM for it."""
        prompt_tokens = self._loaded.pop(request_id, 0)
        self._loaded_tokens -= prompt_tokens
        self._prompt_tokens += prompt_tokens
        self._decoding_tokens += decode_tokens - self._decoding.pop(request_id, 0)
        self._decoding[request_id] = decode_tokens

    def over(self, request_id: str) -> None:
        """It has ended, well or not."""
        self._loaded_tokens -= self._loaded.pop(request_id, 0)
        self._decoding_tokens -= self._decoding.pop(request_id, 0)

    def skip(self) -> None:
        """The last interval is not looked at; the next one begins."""
        self._prompt_tokens = 0

    def look(
        self,
        settings: RebalanceSettings,
        nodes: RoleNodes,
        queues: Mapping[Role, RoleQueue],
        ttft_s: Sequence[float],
        tpot_s: Sequence[float],
    ) -> ClusterObservation:
        """Return how the last interval was; the next one begins.

        ``ttft_s`` and ``tpot_s`` are those of the interval.  Raises ``ConfigError`` if the rate of
        prefill nodes is not given.
        """
        done, self._prompt_tokens = self._prompt_tokens, 0
        rate = settings.node_tokens_per_s(Role.PREFILL)
        before, behind = queues[Role.PREFILL], queues[Role.DECODE]
        at_pes = _share(2 * self._loaded_tokens, before.placed_tokens)
        at_des = _share(2 * self._decoding_tokens, behind.placed_tokens)
        prefill = RoleLoad(
            nodes=nodes.prefill,
            utilisation=_share(done, rate * nodes.prefill * settings.interval_s),
            waiting_requests=int(at_pes * before.waiting),
            waiting_tokens=self._loaded_tokens + int(at_pes * before.waiting_tokens),
            latency_s=_mean(ttft_s),
        )
        decode = RoleLoad(
            nodes=nodes.decode,
            utilisation=at_des * _share(behind.placed_tokens, nodes.decode_hbm_tokens),
            waiting_requests=int(at_des * behind.waiting),
            waiting_tokens=int(at_des * behind.waiting_tokens),
            latency_s=_mean(tpot_s),
        )
        return ClusterObservation(interval_s=settings.interval_s, prefill=prefill, decode=decode)


def soonest_empty(unfinished_tokens: Mapping[_Node, int]) -> _Node:
    """Return the node with the fewest unfinished tokens, of equals the last one."""
    return min(reversed(list(unfinished_tokens)), key=lambda node: unfinished_tokens[node])


def _share(part: float, whole: float) -> float:
    return min(part / whole, 1.0) if whole else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
