"""The plan has the steps of Fig. 4."""

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.movements import Place, Unit
from dualpath.plan.steps import (
    PromptLayout,
    decode_steps,
    load_steps,
    persist_steps,
    read_steps,
    send_steps,
    whole_plan,
)

GEOMETRY = BlockGeometry.uniform(layers=3, block_tokens=64, layer_block_bytes=1000)


def layout(*hits: HitRun, prompt_tokens: int = 64 * 10 + 5) -> PromptLayout:
    return PromptLayout(geometry=GEOMETRY, prompt_tokens=prompt_tokens, hits=hits)


def test_pe_path_reads_loads_and_sends_hits_and_misses() -> None:
    prompt = layout(HitRun(Role.PREFILL, BlockRun(0, 8)))
    chunk = BlockRun(8, 3)
    (read,) = read_steps(prompt)
    assert (read.label, read.source, read.destination) == (
        "4a.1-2",
        Place.STORAGE,
        Place.PE_BUFFER,
    )
    assert read.unit is Unit.FULL_BLOCK
    assert read.bytes == 8 * 3000
    (load,) = load_steps(prompt, 1, chunk)
    assert (load.label, load.blocks, load.bytes) == ("4a.3-4", BlockRun(0, 8), 8000)
    assert [s.label for s in send_steps(prompt, 1, chunk)] == ["4a.5-7", "miss"]
    assert sum(s.bytes for s in send_steps(prompt, 1, chunk)) == 11 * 1000


def test_a_step_of_a_layer_has_the_bytes_of_all_its_parts() -> None:
    unequal = BlockGeometry(64, ((700, 50), (100,), (30, 20, 10)))
    prompt = PromptLayout(unequal, 64 * 10 + 5, (HitRun(Role.DECODE, BlockRun(0, 8)),))
    (read,) = read_steps(prompt)
    assert read.bytes == 8 * 910
    loads = [load_steps(prompt, layer, BlockRun(8, 3)) for layer in range(unequal.layers)]
    assert [[step.bytes for step in steps] for steps in loads] == [[6000], [800], [480]]
    assert [step.bytes for step in decode_steps(prompt)] == [11 * 750, 11 * 100, 11 * 60]


def test_de_path_returns_only_miss_blocks() -> None:
    prompt = layout(HitRun(Role.DECODE, BlockRun(0, 8)))
    chunk = BlockRun(8, 3)
    assert [s.label for s in load_steps(prompt, 0, chunk)] == ["4b.3-5"]
    (send,) = send_steps(prompt, 0, chunk)
    assert (send.label, send.blocks) == ("miss", chunk)


def test_a_split_gives_each_run_the_path_of_its_side() -> None:
    prompt = layout(HitRun(Role.PREFILL, BlockRun(0, 5)), HitRun(Role.DECODE, BlockRun(5, 3)))
    chunk = BlockRun(8, 3)
    assert [(s.label, s.blocks) for s in load_steps(prompt, 0, chunk)] == [
        ("4a.3-4", BlockRun(0, 5)),
        ("4b.3-5", BlockRun(5, 3)),
    ]
    assert [(s.label, s.blocks) for s in send_steps(prompt, 0, chunk)] == [
        ("4a.5-7", BlockRun(0, 5)),
        ("miss", chunk),
    ]


def test_cached_blocks_are_not_read_but_take_the_path_of_their_side() -> None:
    read = layout(HitRun(Role.DECODE, BlockRun(0, 5)), HitRun(Role.PREFILL, BlockRun(5, 3)))
    cached = layout(
        HitRun(Role.DECODE, BlockRun(0, 5), cached=True), HitRun(Role.PREFILL, BlockRun(5, 3))
    )
    (step,) = read_steps(cached)
    assert (step.label, step.blocks) == ("4a.1-2", BlockRun(5, 3))
    of_storage = set(read_steps(read))
    assert list(whole_plan(cached)) == [
        each for each in whole_plan(read) if each not in of_storage or each == step
    ]


def test_a_later_chunk_reloads_what_earlier_chunks_computed_and_sends_hits_once() -> None:
    prompt = layout(HitRun(Role.PREFILL, BlockRun(0, 5)))
    second = BlockRun(8, 3)
    assert [(s.label, s.blocks) for s in load_steps(prompt, 0, second)] == [
        ("4a.3-4", BlockRun(0, 5)),
        ("chunk.reload", BlockRun(5, 3)),
    ]
    assert [s.label for s in send_steps(prompt, 0, second)] == ["miss"]


def test_with_all_layers_in_hbm_only_the_first_chunk_loads() -> None:
    prompt = layout(HitRun(Role.PREFILL, BlockRun(0, 5)))
    first = load_steps(prompt, 0, BlockRun(5, 3), resident=True)
    assert [s.label for s in first] == ["4a.3-4"]
    assert load_steps(prompt, 0, BlockRun(8, 3), resident=True) == ()


def test_decode_copies_every_block_and_persists_only_new_full_ones() -> None:
    prompt = layout(HitRun(Role.DECODE, BlockRun(0, 8)))
    assert [s.blocks for s in decode_steps(prompt)] == [BlockRun(0, 11)] * 3
    (persist,) = persist_steps(prompt)
    assert persist.blocks == BlockRun(8, 2)
    assert persist_steps(layout(HitRun(Role.DECODE, BlockRun(0, 10)))) == ()


#: Layers of 700, 100 and 60 bytes; the last two see 100 and 200 tokens: two and four blocks.
WINDOWED = BlockGeometry(64, ((700,), (100,), (60,)), (0, 100, 200))


def windowed(*hits: HitRun, prompt_tokens: int = 64 * 10 + 5) -> PromptLayout:
    whole_from = WINDOWED.whole_from(hits[-1].blocks.end)
    return PromptLayout(
        WINDOWED, prompt_tokens, tuple(run.whole_behind(whole_from) for run in hits)
    )


def test_window_layers_are_read_of_the_last_blocks_of_a_hit_only() -> None:
    prompt = windowed(HitRun(Role.PREFILL, BlockRun(0, 8)))
    reads = [(s.blocks, s.whole, s.bytes) for s in read_steps(prompt)]
    # Token 512 is computed next and sees tokens 313 to 512 at most: from block 4 on.
    assert reads == [(BlockRun(0, 4), False, 4 * 700), (BlockRun(4, 4), True, 4 * 860)]
    short = windowed(HitRun(Role.PREFILL, BlockRun(0, 2)))
    assert [(s.blocks, s.whole) for s in read_steps(short)] == [(BlockRun(0, 2), True)]


def test_of_a_window_layer_only_blocks_in_the_window_are_loaded_sent_and_copied() -> None:
    prompt, chunk = windowed(HitRun(Role.PREFILL, BlockRun(0, 8))), BlockRun(8, 3)
    loads = [load_steps(prompt, layer, chunk)[0] for layer in range(3)]
    assert [load.blocks for load in loads] == [BlockRun(0, 8), BlockRun(6, 2), BlockRun(4, 4)]
    # The DE computes token 644 at the earliest, which sees tokens from 545 and 445 on.
    sends = [send_steps(prompt, layer, chunk) for layer in range(3)]
    assert [[step.blocks for step in steps] for steps in sends] == [
        [BlockRun(0, 8), chunk],
        [chunk],
        [BlockRun(6, 2), chunk],
    ]
    assert [step.blocks for step in decode_steps(prompt)] == [
        BlockRun(0, 11),
        BlockRun(8, 3),
        BlockRun(6, 5),
    ]
    (persist,) = persist_steps(prompt)
    assert (persist.blocks, persist.whole, persist.bytes) == (BlockRun(8, 2), True, 2 * 860)


def test_a_later_chunk_loads_the_blocks_in_its_own_window() -> None:
    prompt = windowed(HitRun(Role.DECODE, BlockRun(0, 4)))
    loads = [load_steps(prompt, layer, BlockRun(6, 5)) for layer in range(3)]
    assert [[(s.label, s.blocks) for s in steps] for steps in loads] == [
        [("4b.3-5", BlockRun(0, 4)), ("chunk.reload", BlockRun(4, 2))],
        [("chunk.reload", BlockRun(4, 2))],
        [("4b.3-5", BlockRun(2, 2)), ("chunk.reload", BlockRun(4, 2))],
    ]


def test_without_hits_nothing_is_read_or_loaded() -> None:
    labels = {step.label for step in whole_plan(layout())}
    assert labels == {"miss", "8-9", "persist"}
