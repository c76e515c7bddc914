"""Retention and prefetching: in any order of messages only retained blocks are fetched."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.engine_harness import GEOMETRY, prompt_keys

from dualpath.core.blocks import BlockKey
from dualpath.core.control import Retain
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.buffer.dram_tier import Retention

S = 1_000_000_000
SLOTS = 4
#: Two chains with a common prefix.
SHARED = prompt_keys(2 * GEOMETRY.block_tokens)
CHAINS = [
    (*SHARED, *prompt_keys(4 * GEOMETRY.block_tokens, salt)[2:]) for salt in ("one", "another")
]

RETAINS = st.tuples(
    st.sampled_from(CHAINS), st.integers(1, 4), st.sampled_from([0.0, 5.0, 20.0]), st.booleans()
)
STEPS = st.lists(st.one_of(RETAINS, st.sampled_from(["wait", "read", "session"])), max_size=30)


class FetchQueue:
    """Queued fetches in order, in place of ``engine.read_queue``."""

    def __init__(self) -> None:
        self.keys: dict[BlockKey, None] = {}

    def fetch(self, keys: Sequence[BlockKey]) -> None:
        self.keys |= dict.fromkeys(keys)

    def cancel_fetch(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.keys.pop(key, None)


@given(STEPS)
def test_only_retained_blocks_are_fetched(steps) -> None:
    queue, now_s = FetchQueue(), 0
    buffer = BlockBuffer(GEOMETRY, SLOTS, lambda grant: None)
    retention = Retention(buffer, queue.fetch, queue.cancel_fetch)
    until_s: dict[BlockKey, float] = {}
    for step in steps:
        match step:
            case "wait":
                now_s += 4
                retention.expire(now_s * S)
                until_s = {key: end_s for key, end_s in until_s.items() if end_s > now_s}
            case "read":
                queue.cancel_fetch([*queue.keys][:1])
            case "session":
                retention.end_session()
                until_s.clear()
                assert not queue.keys
            case chain, blocks, retain_s, fetch:
                keys = chain[:blocks]
                retention.apply(Retain(b"", keys, retain_s, fetch=fetch), now_s * S)
                ends_s = {key: now_s + retain_s for key in keys}
                if retain_s:
                    until_s |= {k: max(end_s, until_s.get(k, 0)) for k, end_s in ends_s.items()}
                else:
                    until_s = {k: end_s for k, end_s in until_s.items() if k not in ends_s}
        assert queue.keys.keys() <= until_s.keys()
        assert len(queue.keys) <= SLOTS
