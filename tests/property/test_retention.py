"""Orders to keep and to bring back: whatever comes in which order, nothing is read for nobody."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.engine_harness import GEOMETRY, prompt_keys

from dualpath.core.blocks import BlockKey
from dualpath.core.control import Retain
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.retention import Retention

S = 1_000_000_000
SLOTS = 4
#: Two conversations with a beginning in common.
SHARED = prompt_keys(2 * GEOMETRY.block_tokens)
CHAINS = [
    (*SHARED, *prompt_keys(4 * GEOMETRY.block_tokens, salt)[2:]) for salt in ("one", "another")
]

ORDERS = st.tuples(
    st.sampled_from(CHAINS), st.integers(1, 4), st.sampled_from([0.0, 5.0, 20.0]), st.booleans()
)
STEPS = st.lists(st.one_of(ORDERS, st.sampled_from(["wait", "read", "session"])), max_size=30)


class Wanted:
    """What waits to be read, in order; the queue's own rules are ``engine.read_queue``'s."""

    def __init__(self) -> None:
        self.keys: dict[BlockKey, None] = {}

    def fetch(self, keys: Sequence[BlockKey]) -> None:
        self.keys |= dict.fromkeys(keys)

    def leave(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.keys.pop(key, None)


@given(STEPS)
def test_only_what_an_order_keeps_is_brought_back(steps) -> None:
    wanted, now_s = Wanted(), 0
    buffer = BlockBuffer(GEOMETRY, SLOTS, lambda grant: None)
    retention = Retention(buffer, wanted.fetch, wanted.leave)
    until_s: dict[BlockKey, float] = {}
    for step in steps:
        match step:
            case "wait":
                now_s += 4
                retention.expire(now_s * S)
                until_s = {key: end_s for key, end_s in until_s.items() if end_s > now_s}
            case "read":
                wanted.leave([*wanted.keys][:1])
            case "session":
                retention.end_session()
                until_s.clear()
                assert not wanted.keys
            case chain, blocks, retain_s, fetch:
                keys = chain[:blocks]
                retention.order(Retain(keys, retain_s, fetch=fetch), now_s * S)
                ends_s = {key: now_s + retain_s for key in keys}
                if retain_s:
                    until_s |= {k: max(end_s, until_s.get(k, 0)) for k, end_s in ends_s.items()}
                else:
                    until_s = {k: end_s for k, end_s in until_s.items() if k not in ends_s}
        assert wanted.keys.keys() <= until_s.keys()
        assert len(wanted.keys) <= SLOTS
