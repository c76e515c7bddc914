"""A prompt in a decode engine's buffer while other threads finish with it."""

from types import SimpleNamespace
from typing import cast

from tests.engine_harness import GEOMETRY

from dualpath.core.blocks import block_keys
from dualpath.core.control import Persist
from dualpath.engine.buffer.block_buffer import BlockBuffer
from dualpath.engine.buffer.hbm_reservations import HbmReservations
from dualpath.engine.control.assigned_requests import ActiveRequests, ServedPrompts
from dualpath.engine.io.persister import ChainWrites, Persister, WriteTask
from dualpath.engine.passes.pass_transfers import NoHolder
from dualpath.engine.ranks.rank import Rank
from dualpath.engine.threads import OS_THREADS, Health


class FilledMeanwhile(ActiveRequests):
    """The copy to HBM ends just when the prompt is marked as being persisted."""

    buffer: BlockBuffer

    def persist_seen(self, request_id: str) -> bool:
        seen = super().persist_seen(request_id)
        self.kv_in_hbm(request_id)
        if self.done_with_buffer(request_id):
            self.buffer.release(request_id)
        return seen


def test_a_prompt_is_stored_and_cached_though_its_slots_are_freed_at_that_moment() -> None:
    slots = 4
    buffer, active = BlockBuffer(GEOMETRY, slots, lambda grant: None), FilledMeanwhile()
    active.buffer = buffer
    writes: list[WriteTask] = []
    rank = SimpleNamespace(geometry=GEOMETRY, counters=None, trace=None, health=Health())
    prompts = ServedPrompts(
        *(cast(Rank, rank), active, buffer),
        cast(Persister, SimpleNamespace(add=writes.append)),
        lambda message: None,
        HbmReservations(None),
        lambda new, hits: None,
        NoHolder(),
        ChainWrites(lambda chain: None),
        moves_bytes=True,
    )
    keys = block_keys(tuple(range(3 * GEOMETRY.block_tokens)), GEOMETRY.block_tokens)
    active.add("r", 3 * GEOMETRY.block_tokens, OS_THREADS.now_ns(), keys)
    buffer.request("r", 3)
    prompts.persist(Persist(request_id="r", first_block=1, blocks=3))
    (write,) = writes
    assert list(write.keys) == list(keys[1:])
    assert buffer.free < slots, "what is being written stays pinned"
    write.then()
    assert buffer.free == slots
    assert buffer.missing(keys) == []
