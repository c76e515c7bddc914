"""Memories of nodes: buffers granted first come, first served (§4.1), and the DRAM tier."""

from collections import OrderedDict, deque
from collections.abc import Callable

from dualpath.model.sim.rules import tier_hit_tokens

Granted = Callable[[], None]


class NodeBuffer:
    """Buffer space of one node in one role."""

    def __init__(self, capacity_bytes: float) -> None:
        self._free_bytes = capacity_bytes
        self._waiting: deque[tuple[float, Granted]] = deque()

    def reserve(self, need_bytes: float, granted: Granted) -> None:
        """Run ``granted`` when the bytes are reserved: at once if nobody waits and they fit."""
        self._waiting.append((need_bytes, granted))
        self._grant()

    def release(self, held_bytes: float) -> None:
        """Give bytes back, which may let others in."""
        self._free_bytes += held_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free_bytes:
            need_bytes, granted = self._waiting.popleft()
            self._free_bytes -= need_bytes
            granted()


class DramTier:
    """Which agents' KV is in the cluster-wide tier of ``capacity_tokens`` (0: there is none).

    It lies between storage and buffers and holds whole sessions; the least recently used leave.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._block_tokens = block_tokens
        self._used_tokens = 0
        self._tokens: OrderedDict[int, int] = OrderedDict()

    def hit(self, agent: int, hit_tokens: int) -> int:
        """Return how many of the hit tokens the tier has in whole blocks, and count the use."""
        held = self._tokens.get(agent, 0)
        if held:
            self._tokens.move_to_end(agent)
        return tier_hit_tokens(held, hit_tokens, self._block_tokens)

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
