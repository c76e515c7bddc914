"""DEs that receive KV in HBM: the same tokens, every byte compared, and nothing left behind.

The story: an agent of a few turns.  Its answers and hits are those that it gets from the same
cluster with the hand-over in the DE's buffer.
"""

import asyncio
import contextlib
from collections import deque
from typing import Any

import pytest
from tests.emulated_cluster import GEOMETRY, Cluster, cluster
from tests.guard import GUARD_S
from tests.unit.test_emulated_dram import total, updated

from dualpath.core.modes import Handover, Mode
from dualpath.engine.counters import Counter
from dualpath.engine.passes.pump import LoadTimes
from dualpath.router.settings import RouterSettings
from dualpath_lab.emulated.prefill import Batch, BatchFormer
from dualpath_lab.emulated.requests import PrefillRequest

PROMPT = list(range(1, 38))


def settings(handover: Handover, **more: Any) -> RouterSettings:
    return RouterSettings(handover=handover, **more)


def handovers(made: Cluster) -> set[str]:
    return {one["handover"] for one in made.service.status()["assignments"]}


async def left_hbm(made: Cluster) -> None:
    """Wait until the blocks of all prompts are copied out of HBM and stored."""

    def over() -> bool:
        managers = [engine.plane.manager for engine in made.engines.values()]
        return all(
            m.staging.free == m.staging.capacity and not m._generated._left for m in managers
        )

    await made.arrivals.until(over, GUARD_S)
    await made.stored()


async def turns(made: Cluster, count: int = 4) -> list[tuple[list[int], int]]:
    """Return the tokens and the hit tokens of each turn."""
    context, answers = list(PROMPT), []
    for turn in range(count):
        answers.append(await made.ask(context, 6))
        context += [*answers[-1][0], *range(100 + turn, 109 + turn)]
        await made.idle()
        await left_hbm(made)
        await updated(made)
    assert made.counts(0) > 0
    assert made.counts(1) == 0
    assert made.service.metrics.recomputed_tokens == 0
    return answers


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.SPLIT])
@pytest.mark.parametrize("dram_tier", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
async def test_prompts_received_in_hbm_have_the_answers_and_hits_of_the_buffer(
    mode: Mode, dram_tier: bool, parts: int
) -> None:
    name = f"{mode.value}-{dram_tier}-{parts}"
    more: dict[str, Any] = {}
    if parts == 2:
        from dualpath_lab.emulated.settings import part_geometry

        more["geometry"] = part_geometry("16+8*5", GEOMETRY.block_tokens)
    found = {}
    for handover in (Handover.BUFFER, Handover.HBM):
        router = settings(handover, dram_tier=dram_tier)
        storage = f"memory://handover-{handover.value}-{name}"
        async with cluster(storage, mode, router=router, **more) as made:
            answers = await turns(made)
            found[handover] = (
                answers,
                total(made, Counter.PERSISTED_BLOCKS),
                total(made, Counter.PE_TO_DE_BYTES) > 0,
                total(made, Counter.PERSIST_DROPPED_BLOCKS),
            )
            assert handovers(made) == {handover.value}
            assert made.engines["prefill-0"].plane.manager.load_token_s > 0
    assert found[Handover.HBM] == found[Handover.BUFFER]
    assert found[Handover.HBM][3] == 0


@pytest.mark.parametrize("handover", [Handover.HBM, Handover.AUTO])
async def test_prompts_that_wait_for_hbm_and_slots_of_two_engines_all_get_their_answers(
    handover: Handover,
) -> None:
    """HBM holds two prompts with their answers, the buffer the hits of one; six come at once."""
    prompts = [[1000 * number + index for index in range(60)] for number in range(6)]
    answers = {}
    for chosen in (Handover.BUFFER, handover):
        storage = f"memory://handover-crowd-{chosen.value}-for-{handover.value}"
        more: dict[str, Any] = {
            "hbm_bytes": 40 * GEOMETRY.full_block_bytes,
            "buffer_bytes": 20 * GEOMETRY.full_block_bytes,
        }
        async with cluster(storage, Mode.SPLIT, 1, 2, router=settings(chosen), **more) as made:
            first = await asyncio.gather(*(made.ask(prompt, 8) for prompt in prompts))
            await made.idle()
            await left_hbm(made)
            longer = [
                [*prompt, *tokens, 7] for prompt, (tokens, _) in zip(prompts, first, strict=True)
            ]
            again = await asyncio.gather(*(made.ask(prompt, 8) for prompt in longer))
            await made.idle()
            await left_hbm(made)
            assert made.counts(1) == 0
            answers[chosen] = [*first, *again]
    assert answers[handover] == answers[Handover.BUFFER]


@pytest.mark.parametrize(("handover", "passes"), [(Handover.HBM, [1] * 5), (Handover.BUFFER, [5])])
async def test_turns_that_wait_at_once_do_not_all_wait_for_the_loads_of_one_pass(
    handover: Handover, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of a token takes a millisecond, as observed; two contexts take longer than 0.1 s."""
    monkeypatch.setattr(LoadTimes, "seconds", lambda self, size_bytes: 1e-3)
    form, at_once, sizes = BatchFormer.form, 1, list[int]()

    def form_noted(
        self: BatchFormer, waiting: deque[PrefillRequest], load_token_s: float
    ) -> Batch | None:
        nonlocal at_once
        if len(waiting) < at_once or (batch := form(self, waiting, load_token_s)) is None:
            return None
        at_once = 1
        sizes.append(len(batch.chunks))
        return batch

    monkeypatch.setattr(BatchFormer, "form", form_noted)
    prompts = [[1000 * agent + index for index in range(60)] for agent in range(5)]
    storage = f"memory://handover-at-once-{handover.value}"
    async with cluster(storage, Mode.SPLIT, router=settings(handover), speedup=1.0) as made:
        first = await asyncio.gather(*(made.ask(prompt, 3) for prompt in prompts))
        await made.idle()
        await left_hbm(made)
        sizes.clear()
        at_once = 5
        turns = [[*prompt, *tokens, 7] for prompt, (tokens, _) in zip(prompts, first, strict=True)]
        second = await asyncio.gather(*(made.ask(turn, 1) for turn in turns))
        assert [hits for _, hits in second] == [60] * 5
        assert sizes == passes
        assert made.counts(1) == 0


@pytest.mark.parametrize("counter", [Counter.PE_TO_DE_BYTES, Counter.D2H_BYTES])
async def test_a_client_that_leaves_in_mid_transfer_or_later_leaves_nothing_in_hbm(
    counter: Counter,
) -> None:
    """It leaves when the first layer was sent, or when the first new block has left HBM."""
    router = settings(Handover.HBM)
    storage = f"memory://handover-leaves-{counter.value}"
    async with cluster(storage, Mode.SPLIT, router=router, speedup=0.2) as made:
        asking = asyncio.create_task(made.ask(PROMPT, 60))
        await made.arrivals.until(lambda: total(made, counter) > 0, GUARD_S)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await made.idle()
        await left_hbm(made)
        assert len((await made.ask(PROMPT, 6))[0]) == 6
        await made.idle()
        assert made.counts(1) == 0
