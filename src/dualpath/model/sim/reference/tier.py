"""A DRAM tier between storage and buffers: whole sessions, the least recently used leave."""

from collections import OrderedDict


class DramTier:
    """Which agents' KV is in the cluster-wide tier of ``capacity_tokens``."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._used_tokens = 0
        self._tokens: OrderedDict[int, int] = OrderedDict()

    def hit(self, agent: int, hit_tokens: int) -> int:
        """Return how many of the hit tokens are in the tier, and count the use."""
        held = self._tokens.get(agent, 0)
        if held:
            self._tokens.move_to_end(agent)
        return min(held, hit_tokens)

    def put(self, agent: int, tokens: int) -> None:
        """Hold an agent's KV of so many tokens; what exceeds the whole tier is not held."""
        self._used_tokens -= self._tokens.pop(agent, 0)
        if tokens > self._capacity_tokens:
            return
        self._tokens[agent] = tokens
        self._used_tokens += tokens
        while self._used_tokens > self._capacity_tokens:
            _, freed = self._tokens.popitem(last=False)
            self._used_tokens -= freed
