"""Third DEs serve a part of a hit: the same tokens, every byte compared, and nothing left behind.

The story: an agent of a few turns.  Its answers and hits are those that it gets from the same
cluster without third DEs.
"""

import asyncio
from collections import Counter as Tally
from typing import Any

import pytest
from tests.emulated_cluster import GEOMETRY, Cluster, cluster
from tests.ranked_harness import CountingTransport
from tests.unit.test_emulated_dram import updated
from tests.unit.test_emulated_rank_bytes import agents

from dualpath.core.cluster import Role
from dualpath.core.modes import Handover, Mode
from dualpath.engine.counters import BYTES_OF, Counter
from dualpath.plan.movements import Place
from dualpath.plan.steps import PromptLayout, whole_plan
from dualpath.router.settings import RouterSettings
from dualpath.transport.contract import Direction
from dualpath.transport.copy_transport import CopyTransfer
from dualpath_lab.emulated.settings import part_geometry

PROMPT = list(range(1, 78))
AT_PREFILL = {Place.PE_BUFFER, Place.PE_HBM}
#: Of generated tokens as well, which belong to no prompt.
OF_GENERATED = {Counter.STORAGE_WRITE_BYTES, Counter.D2H_BYTES}


def settings(thirds: int, **more: Any) -> RouterSettings:
    return RouterSettings(third_engine_reads=thirds, **more)


def served(made: Cluster) -> set[str]:
    """The third DEs of all requests so far."""
    return {
        run["third_engine"]
        for one in made.service.status()["assignments"]
        for run in one["reads"]
        if "third_engine" in run
    }


async def turns(made: Cluster, count: int = 3) -> list[tuple[list[int], int]]:
    """Return the tokens and the hit tokens of each turn."""
    context, answers = list(PROMPT), []
    for turn in range(count):
        answers.append(await made.ask(context, 6))
        context += [*answers[-1][0], *range(100 + turn, 109 + turn)]
        await made.stored()
        await made.idle()
        await updated(made)
    assert made.counts(0) > 0
    assert made.counts(1) == 0
    assert made.service.metrics.recomputed_tokens == 0
    return answers


@pytest.mark.parametrize("handover", [Handover.BUFFER, Handover.HBM])
async def test_what_third_engines_read_gives_the_same_answers_and_hits(handover: Handover) -> None:
    found = {}
    for most in (0, 2):
        router = settings(most, handover=handover, dram_tier=False)
        storage = f"memory://thirds-{handover.value}-{most}"
        async with cluster(storage, Mode.SPLIT, 1, 4, router=router) as made:
            answers = await turns(made)
            snapshots = [e.plane.manager.counters.snapshot() for e in made.engines.values()]
            read_bytes = sum(each[Counter.STORAGE_READ_BYTES] for each in snapshots)
            found[most] = answers, read_bytes
            assert len(served(made)) >= most
            assert most or not served(made)
    assert found[0] == found[2]


@pytest.mark.parametrize("parts", ["16*5", "16+8*5", "16*2,16@6,16,16"])
async def test_engines_move_the_steps_of_the_plan(parts: str) -> None:
    """Third engines read what the plan gives them, the PE loads it from there and sends it."""
    geometry = part_geometry(parts, GEOMETRY.block_tokens)
    router = settings(2, dram_tier=False)
    whole: dict[str, Any] = {"batch_cap_tokens": 512, "compute_quota_s": 0.0, "geometry": geometry}
    storage = f"memory://thirds-plan-{parts}"
    async with cluster(storage, Mode.SPLIT, 1, 4, router=router, **whole) as made:
        await turns(made)
        assert served(made)
        if geometry.layer_windows:
            return  # The bytes of windows depend on where a hit ends.
        planned: dict[str, Tally[Counter]] = {name: Tally() for name in made.engines}
        for placed in made.service.scheduler.dispatch.recent:
            assignment = placed.assignment
            assert assignment is not None
            layout = PromptLayout(geometry, placed.request.prompt_tokens, assignment.reads)
            for step in whole_plan(layout):
                at_prefill = {step.source, step.destination} & AT_PREFILL
                engine = assignment.at(Role.PREFILL if at_prefill else Role.DECODE).engine_id
                if step.destination is Place.THIRD_BUFFER:
                    engine = step.third
                planned[engine].update(dict.fromkeys(BYTES_OF[step.label], step.bytes))
        for name, running in made.engines.items():
            counted = running.plane.manager.counters.snapshot()
            for counter, step_bytes in planned[name].items():
                assert counter in OF_GENERATED or counted[counter] == step_bytes, (name, counter)


async def test_what_a_third_engine_has_in_dram_is_not_read() -> None:
    """decode-0 serves the first turn; the second needs more HBM than it has."""
    small = {"decode-0": {"hbm_bytes": 24 * GEOMETRY.full_block_bytes}}
    found = {}
    for most in (0, 1):
        storage = f"memory://thirds-dram-{most}"
        async with cluster(storage, Mode.SPLIT, 1, 2, router=settings(most), own=small) as made:
            first, _ = await made.ask(PROMPT, 6)
            await made.stored()
            await made.idle()
            await updated(made)
            second = await made.ask([*PROMPT, *first, *range(200, 230)], 6)
            await made.stored()
            await made.idle()
            assert made.counts(1) == 0
            counted = made.engines["decode-0"].plane.manager.counters.snapshot()
            totals = [e.plane.manager.counters.snapshot() for e in made.engines.values()]
            found[most] = second
            read_bytes = sum(each[Counter.STORAGE_READ_BYTES] for each in totals)
            in_dram = counted[Counter.DRAM_HIT_BYTES]
            hit_bytes = second[1] // GEOMETRY.block_tokens * GEOMETRY.full_block_bytes
            assert (read_bytes, in_dram) == ((0, hit_bytes) if most else (hit_bytes, 0))
            assert served(made) == ({"decode-0"} if most else set())
    assert found[0] == found[1]


async def test_many_requests_at_once_get_their_answers_while_slots_are_short() -> None:
    """Buffers hold two contexts; six agents come at once, twice."""
    prompts = [[1000 * number + index for index in range(60)] for number in range(6)]
    answers = {}
    for most in (0, 2):
        more: dict[str, Any] = {"buffer_bytes": 40 * GEOMETRY.full_block_bytes}
        storage = f"memory://thirds-crowd-{most}"
        async with cluster(storage, Mode.SPLIT, 1, 3, router=settings(most), **more) as made:
            first = await asyncio.gather(*(made.ask(prompt, 8) for prompt in prompts))
            await made.stored()
            longer = [
                [*prompt, *tokens, 7] for prompt, (tokens, _) in zip(prompts, first, strict=True)
            ]
            again = await asyncio.gather(*(made.ask(prompt, 8) for prompt in longer))
            await made.stored()
            await made.idle()
            assert made.counts(1) == 0
            answers[most] = [*first, *again]
    assert answers[0] == answers[2]


@pytest.mark.parametrize("prefill_tp", [1, 2])
@pytest.mark.parametrize("decode_tp", [1, 2])
async def test_engines_of_several_ranks_serve_and_are_served(
    prefill_tp: int, decode_tp: int
) -> None:
    storage = f"memory://thirds-ranks-{prefill_tp}-{decode_tp}"
    router = settings(2, dram_tier=False)
    ranks: dict[str, Any] = {"prefill_tp": prefill_tp, "decode_tp": decode_tp, "kv_heads": 2}
    async with cluster(storage, Mode.SPLIT, 1, 4, router=router, **ranks) as made:
        await turns(made)
        assert served(made)


def kill_when_read(made: Cluster, engine: str, patched: pytest.MonkeyPatch) -> list[str]:
    """Let an engine's memory be lost once a load from it is posted; return a list of its agents."""
    post, killed = CountingTransport.post, list[str]()
    (agent,) = agents(made, engine)

    def posted(self: CountingTransport, *where: Any, **how: Any) -> CopyTransfer:
        transfer = post(self, *where, **how)
        if where[0] is Direction.READ and where[3] == agent:
            killed.append(agent)
            made.fabric.kill(agent)
        return transfer

    patched.setattr(CountingTransport, "post", posted)
    return killed


@pytest.mark.parametrize("in_dram", [True, False])
async def test_a_third_engine_whose_memory_is_lost_in_mid_transfer_costs_no_answer(
    in_dram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves from DRAM, or what it has read.  The PE has posted a load from it by then."""
    small = {"decode-0": {"hbm_bytes": 24 * GEOMETRY.full_block_bytes}}
    found = {}
    for most in (0, 1):
        storage = f"memory://thirds-lost-{in_dram}-{most}"
        router = settings(most, dram_tier=in_dram)
        async with cluster(storage, Mode.SPLIT, 1, 2, router=router, own=small) as made:
            first, _ = await made.ask(PROMPT, 6)
            await made.stored()
            await made.idle()
            await updated(made)
            with monkeypatch.context() as patched:
                killed = kill_when_read(made, "decode-0", patched)
                found[most] = await made.ask([*PROMPT, *first, *range(200, 230)], 6)
            assert bool(killed) == bool(most)
            await made.idle()
            assert made.counts(1) == 0
            assert made.service.records[-1].attempts == 1 + most
            assert made.service.records[-1].failures == []
    assert found[0] == found[1]
