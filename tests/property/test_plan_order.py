"""Engines execute the whole plan: no step begins before its KV is at its source."""

import json
import tempfile
from collections import Counter as Tally
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from tests.engine_harness import GEOMETRY, ToyCluster, full_block, kv_bytes, prompt_keys
from tests.guard import GUARD_S
from tests.property.test_engine_paths import prompts
from tests.stored_runs import read_run

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.control import (
    Assign,
    Persist,
    Read,
    ReadDone,
    Release,
    Released,
    Reserved,
)
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.counters import BYTES_OF
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.plan import movements, steps
from dualpath.plan.movements import Place
from dualpath.plan.order import Executed, Present, begun_too_early, waits_for
from dualpath.plan.steps import (
    PromptLayout,
    Step,
    append_plan,
    generated_steps,
    step_of,
    whole_plan,
)

MOVEMENTS = {movement.label: movement for movement in movements.MOVEMENTS}

Prompt = tuple[int, int, int, tuple[int, ...]]
WINDOWED = msgspec.structs.replace(GEOMETRY, layer_windows=(0, 9, 0, 9, 4))


def layout_of(prompt: Prompt, geometry: BlockGeometry) -> PromptLayout:
    tokens, pe_hits, de_hits, _ = prompt
    runs = (
        HitRun(Role.PREFILL, BlockRun(0, pe_hits)),
        HitRun(Role.DECODE, BlockRun(pe_hits, de_hits)),
    )
    whole_from = geometry.whole_from(pe_hits + de_hits)
    hits = tuple(run.whole_behind(whole_from) for run in runs if run.blocks)
    return PromptLayout(geometry, tokens, hits)


def chunks_of(prompt: Prompt) -> list[BlockRun]:
    _, pe_hits, de_hits, ends = prompt
    firsts = (pe_hits + de_hits, *ends)
    return [BlockRun(first, end - first) for first, end in zip(firsts, ends, strict=False)]


def traced(path: Path, geometry: BlockGeometry = GEOMETRY) -> list[Executed]:
    """The steps in a trace, as they were executed."""
    found = []
    for event in json.loads(path.read_text())["traceEvents"]:
        for done in event["args"].get("steps", ()):
            blocks = BlockRun(done["first_block"], done["blocks"])
            step = step_of(
                MOVEMENTS[done["label"]], geometry, blocks, done["layer"], whole=done["whole"]
            )
            assert step.bytes == done["bytes"]
            start_ns = round(done["ts"] * 1000)
            found.append(Executed(step, start_ns, start_ns + round(done["dur"] * 1000)))
    return found


def run_traced(
    prompt: Prompt, folder: Path, mode: Mode, layer_buffers: int, geometry: BlockGeometry
) -> tuple[list[Executed], list[Present], Tally[str]]:
    """Run a prompt; return the executed steps, other KV, and the counters of both engines.

    One generated block follows; its steps call it block 0, so they come last and alone.
    """
    tokens, pe_hits, de_hits, _ = prompt
    cluster = ToyCluster(
        mode=mode, layer_buffers=layer_buffers, trace_out=str(folder / "trace"), geometry=geometry
    )
    now_ns = cluster.pe.manager.trace.now_ns
    keys, hbm = prompt_keys(tokens), list(range(40, 40 + GEOMETRY.blocks_for(tokens)))
    cluster.store(keys[: pe_hits + de_hits])
    present = [Present(Place.STORAGE, BlockRun(0, pe_hits + de_hits), None, now_ns())]
    try:
        transfer = cluster.load("r", keys, tokens, pe_hits, de_hits)
        for chunk in chunks_of(prompt):

            def computed(layer: int, stream: LayerStream, chunk: BlockRun = chunk) -> None:
                present.append(Present(Place.PE_HBM, chunk, layer, now_ns()))

            assert cluster.forward([(transfer, keys, chunk, hbm)], computed) == {}
        assert cluster.hand_to_decode(transfer, keys, hbm) is None
        cluster.release("r")
        assert cluster.de.manager.persister.drain(GUARD_S)
        counters = Tally(cluster.pe.report().counters) + Tally(cluster.de.report().counters)
    finally:
        cluster.close()
    executed = [done for name in ("trace", "trace.de") for done in traced(folder / name, geometry)]
    return executed, present, counters


def layer_blocks(plan: list[Step]) -> Tally[tuple[str, int, int | None, bool]]:
    return Tally(
        (step.label, block, step.layer, step.whole)
        for step in plan
        for block in range(step.blocks.first, step.blocks.end)
    )


@settings(max_examples=50, deadline=None)
@given(
    prompts(),
    st.integers(1, GEOMETRY.layers),
    st.sampled_from([Mode.DUALPATH, Mode.BASIC]),
    st.sampled_from([GEOMETRY, WINDOWED]),
)
def test_the_whole_plan_is_executed_in_a_valid_order(
    prompt: Prompt, layer_buffers: int, mode: Mode, geometry: BlockGeometry
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        executed, present, counters = run_traced(
            prompt, Path(folder), mode, layer_buffers, geometry
        )
    resident = mode is Mode.BASIC or layer_buffers == GEOMETRY.layers
    sizes = [chunk.count for chunk in chunks_of(prompt)]
    plan = list(whole_plan(layout_of(prompt, geometry), sizes, resident=resident))
    assert layer_blocks([done.step for done in executed]) == layer_blocks(plan)
    assert begun_too_early(executed, present, geometry) == []
    counted: Tally[str] = Tally()
    for step in plan:
        for counter in BYTES_OF[step.label]:
            counted[counter.value] += step.bytes
    of_bytes = {counter.value for counters in BYTES_OF.values() for counter in counters}
    assert {name: counters[name] for name in of_bytes} == {n: counted[n] for n in of_bytes}


@st.composite
def appends(draw: st.DrawFn) -> tuple[int, int]:
    """Hit blocks, and tokens that the DE computes behind them."""
    return draw(st.integers(1, 12)), draw(st.integers(1, 4 * GEOMETRY.block_tokens))


@settings(max_examples=40, deadline=None)
@given(appends(), st.booleans())
def test_a_decode_engine_that_appends_executes_the_plan_of_the_hit(
    append: tuple[int, int], cached: bool
) -> None:
    """The DE reads the hit, or has it cached; no PE has a part in it; all blocks are stored."""
    hit_blocks, new_tokens = append
    hit_tokens = hit_blocks * GEOMETRY.block_tokens
    tokens = hit_tokens + new_tokens
    keys, hbm = prompt_keys(tokens), list(range(40, 40 + GEOMETRY.blocks_for(tokens)))
    full = tokens // GEOMETRY.block_tokens
    with tempfile.TemporaryDirectory() as folder:
        cluster = ToyCluster(trace_out=f"{folder}/trace")
        try:
            de = cluster.de
            cluster.store(keys[:hit_blocks])
            if cached:
                append_hit(cluster, "before", keys[:hit_blocks])
                de.command(Release("before", "test"))
                de.answer(Released, "before")
            before = Tally(de.report().counters)
            since_ns = de.manager.trace.now_ns()
            found, slots = append_hit(cluster, "r", keys[:hit_blocks])
            assert found == (hit_blocks if cached else 0)
            transfer = DecodeTransfer("r", hit_tokens, slots, hit_key_tail=keys[hit_blocks - 1])
            assert cluster.fill(transfer, hbm[:hit_blocks]) is None
            assert de.manager.buffer.slots_of("r") == (), "slots are free once they are in HBM"
            for layer in range(GEOMETRY.layers):
                for block, key in enumerate(keys):
                    if block >= hit_blocks:  # computed by the DE
                        new = np.frombuffer(kv_bytes(key, layer), np.uint8)
                        de.hbm[layer][hbm[block]] = new
                    assert de.hbm[layer][hbm[block]].tobytes() == kv_bytes(key, layer)
            for block in range(hit_blocks, full):
                de.manager.persist_generated(
                    [GeneratedBlock(hbm[block], keys[block], keys[block - 1])]
                )
            assert de.manager.persister.drain(GUARD_S)
            stored = [bytearray(GEOMETRY.full_block_bytes) for _ in range(full)]
            outcome = read_run(cluster.storage, keys[:full], [memoryview(one) for one in stored])
            counted = Tally(de.report().counters)
            counted.subtract(before)
            at_pe = Tally(cluster.pe.report().counters)
        finally:
            cluster.close()
        executed = traced(Path(f"{folder}/trace.de"))
        assert traced(Path(f"{folder}/trace")) == [], "the PE has done nothing"
    assert outcome.good_blocks == full
    assert [bytes(one) for one in stored] == [full_block(key) for key in keys[:full]]
    runs = HitRun(Role.DECODE, BlockRun(0, hit_blocks), cached=cached)
    layout = PromptLayout(GEOMETRY, hit_tokens, (runs,))
    plan = list(append_plan(layout))
    blocks = [step for _ in range(hit_blocks, full) for step in generated_steps(GEOMETRY, slot=0)]
    mine = [done for done in executed if done.start_ns >= since_ns]
    assert layer_blocks([done.step for done in mine]) == layer_blocks([*plan, *blocks])
    place = Place.DE_BUFFER if cached else Place.STORAGE
    present = [Present(place, BlockRun(0, hit_blocks), None, since_ns)]
    of_hit = [done for done in mine if done.step.label in {step.label for step in plan}]
    assert begun_too_early(of_hit, present, GEOMETRY) == []
    of_bytes: Tally[str] = Tally()
    for step in (*plan, *blocks):
        for counter in BYTES_OF[step.label]:
            of_bytes[counter.value] += step.bytes
    names = {counter.value for counters in BYTES_OF.values() for counter in counters}
    assert {name: counted[name] for name in names} == {name: of_bytes[name] for name in names}
    assert not any(at_pe[name] for name in names)


def append_hit(
    cluster: ToyCluster, request_id: str, keys: Sequence[bytes]
) -> tuple[int, tuple[int, ...]]:
    """Let a DE reserve slots for a hit, read what it does not cache, and know it is complete."""
    de, count = cluster.de, len(keys)
    de.command(Assign(request_id, 100, count, tuple(keys), count))
    granted = de.answer(Reserved, request_id)
    slots = granted.slots
    if granted.cached_blocks < count:
        run = HitRun(Role.DECODE, BlockRun(0, count), slots)
        de.command(Read(request_id, run, 0, GUARD_S))
        done = de.answer(ReadDone, request_id)
        assert done.good_blocks == count
        slots = done.slots
    de.command(Persist(request_id, count, count))
    return granted.cached_blocks, slots


def test_a_generated_block_leaves_hbm_before_it_is_written(tmp_path: Path) -> None:
    cluster = ToyCluster(trace_out=str(tmp_path / "trace"))
    since_ns = cluster.de.manager.trace.now_ns()
    cluster.de.manager.persist_generated([GeneratedBlock(9, prompt_keys(GEOMETRY.block_tokens)[0])])
    assert cluster.de.manager.persister.drain(GUARD_S)
    cluster.close()
    executed = traced(tmp_path / "trace.de")
    plan = list(steps.generated_steps(GEOMETRY, slot=0))
    assert layer_blocks([done.step for done in executed]) == layer_blocks(plan)
    present = [Present(Place.DE_HBM, BlockRun(0, 1), None, since_ns)]
    assert begun_too_early(executed, present, GEOMETRY) == []


# ---------------------------------------------------------------- the rule itself

SMALL = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=10)


def one_by_one(plan: list[Step]) -> list[Executed]:
    return [Executed(step, 10 * at, 10 * at + 9) for at, step in enumerate(plan)]


def present_from_the_start(layout: PromptLayout) -> list[Present]:
    misses = BlockRun(layout.hit_blocks, layout.prompt_blocks - layout.hit_blocks)
    return [
        Present(Place.STORAGE, BlockRun(0, layout.hit_blocks), None, 0),
        Present(Place.PE_HBM, misses, None, 0),
    ]


SPLIT = PromptLayout(
    SMALL, 19, (HitRun(Role.PREFILL, BlockRun(0, 1)), HitRun(Role.DECODE, BlockRun(1, 2)))
)


@pytest.mark.parametrize("layout", [SPLIT, PromptLayout(SMALL, 9)])
@pytest.mark.parametrize("chunks", [(), (1, 1)])
def test_the_order_of_a_plan_is_valid(layout: PromptLayout, chunks: tuple[int, ...]) -> None:
    if not layout.hits:
        chunks = (*chunks, 1) if chunks else ()
    plan = list(whole_plan(layout, chunks))
    assert begun_too_early(one_by_one(plan), present_from_the_start(layout), SMALL) == []


def test_a_step_before_its_dependency_is_found() -> None:
    plan = list(whole_plan(SPLIT))
    present = present_from_the_start(SPLIT)
    for position, step in enumerate(plan):
        if not waits_for(step, plan):
            continue
        early = [step, *plan[:position], *plan[position + 1 :]]
        found = begun_too_early(one_by_one(early), present, SMALL)
        assert found, step
        assert found[0].startswith(f"{step.label} moved block")


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("4a.1-2", ()),
        ("4a.3-4", ("4a.1-2",)),
        ("4b.3-5", ("4b.1-2",)),
        ("4a.5-7", ("4a.3-4",)),
        ("miss", ()),
        ("chunk.reload", ("miss",)),
        ("8-9", ("4b.1-2", "4a.5-7", "miss")),
        ("persist", ("miss",)),
    ],
)
def test_the_dependencies_of_a_step_follow_from_its_source(
    label: str, expected: tuple[str, ...]
) -> None:
    plan = list(whole_plan(SPLIT, (1, 1)))
    step = next(step for step in plan if step.label == label)
    assert waits_for(step, plan) == expected
