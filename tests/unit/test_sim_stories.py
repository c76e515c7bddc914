"""What happens to a round on a simulated cluster, in numbers that can be checked by hand."""

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.simulated import agents_of, decisions_of, growing_agent, small_model, small_setup

from dualpath.core.errors import ConfigError, TraceError
from dualpath.core.modes import Mode
from dualpath.policy.events import DE_REASONS, PE_REASONS
from dualpath.policy.read_side import READ_REASONS
from dualpath_sim.simulator.result import SimulationResult
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup, WindowLayers

MS = 1_000_000


@pytest.fixture(params=["reference", "compiled"])
def core(request):
    if request.param == "compiled":
        pytest.importorskip("numba")
    return request.param


def test_a_round_without_hits_is_computed_then_decoded(core):
    result = simulate(small_setup(), agents_of([(64, 0, 3)]), core=core)
    turns = result.turns
    assert turns.assigned_ns[0] == turns.granted_ns[0] == turns.loaded_ns[0] == 0
    # 64 tokens at 1 ms, then a tenth of the transfer of 64,000 bytes at 1 GB/s is exposed.
    assert turns.first_token_ns[0] == 64 * MS + 6_400
    # H2D of the same bytes, then two steps of 10 ms.
    assert turns.decoding_ns[0] == turns.first_token_ns[0] + 64_000
    assert turns.second_token_ns[0] == turns.decoding_ns[0] + 10 * MS
    assert turns.finished_ns[0] == turns.decoding_ns[0] + 20 * MS


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pass_that_begins_in_the_one_before_hides_its_first_loads_and_the_others_last_sends(
    core, overlap
):
    setup = small_setup(Mode.LAYERWISE, batch_cap_tokens=64, overlap_passes=overlap)
    turns = simulate(setup, agents_of([(64, 0, 1)], [(64, 0, 1)]), core=core).turns
    # A pass each, of 64 tokens at 1 ms; the first one follows none.
    first_ns, second_ns = sorted(turns.first_token_ns)
    assert first_ns == 64 * MS + 6_400
    assert second_ns == first_ns + 64 * MS + (0 if overlap else 6_400)


def test_passes_with_a_pause_between_them_overlap_nothing(core):
    setup = small_setup(Mode.LAYERWISE, batch_cap_tokens=64, overlap_passes=True)
    turns = simulate(setup, agents_of([(64, 0, 1), (64, 0, 1)]), core=core).turns
    first_ns, second_ns = sorted(turns.first_token_ns)
    assert first_ns == 64 * MS + 6_400
    assert second_ns == turns.granted_ns.max() + 64 * MS + 6_400


def test_hits_are_read_first_and_only_the_miss_is_computed(core):
    result = simulate(small_setup(Mode.BASIC), agents_of([(1000, 640, 2)]), core=core)
    turns = result.turns
    assert turns.loaded_ns[0] == 640 * MS
    load_ns, send_ns = 640_000, 1_024_000
    assert turns.first_token_ns[0] == 640 * MS + load_ns + 360 * MS
    # Basic sends all KV, rounded up to 16 blocks, after the computation.
    assert turns.decoding_ns[0] == turns.first_token_ns[0] + send_ns + send_ns


def test_dual_path_reads_on_both_storage_nics_what_basic_queues_on_one(core):
    agents = agents_of([(1000, 640, 1)], [(1000, 640, 1)])
    basic = simulate(small_setup(Mode.BASIC), agents, core=core)
    dual = simulate(small_setup(Mode.DUALPATH), agents, core=core)
    assert sorted(basic.turns.loaded_ns) == [640 * MS, 1280 * MS]
    assert sorted(dual.turns.loaded_ns) == [640 * MS, 640 * MS]
    assert basic.links.snic_read_bytes.sum(axis=0).tolist() == [1_280_000.0, 0.0]
    assert dual.links.snic_read_bytes.sum(axis=0).tolist() == [640_000.0, 640_000.0]


def test_split_reads_one_round_on_both_sides_at_once(core):
    agents = agents_of([(1000, 640, 1)])
    result = simulate(small_setup(Mode.SPLIT), agents, core=core, record_decisions=True)
    assert result.turns.loaded_ns[0] == 320 * MS
    decisions = decisions_of(result)
    assert decisions.prefill_read_tokens[0] == decisions.decode_read_tokens[0] == 320
    assert READ_REASONS[decisions.read_reason[0]] == "split"


def windowed(setup: Setup) -> Setup:
    """Let 800 of the 1,000 bytes of a token lie in layers that see its last 128 tokens only."""
    windows = (WindowLayers(window_tokens=128, kv_bytes_per_token=800.0),)
    return msgspec.structs.replace(setup, model=small_model(window_layers=windows))


def test_of_layers_with_a_window_only_what_is_seen_is_read_and_moved(core):
    agents = agents_of([(1000, 640, 2)])
    turns = simulate(windowed(small_setup(Mode.BASIC)), agents, core=core).turns
    # 200 bytes of each of 640 tokens, and 800 of those in the last two blocks.
    read_ns = (128_000 + 102_400) * 1_000
    assert turns.loaded_ns[0] == read_ns
    load_ns = 128_000 + 102_400
    assert turns.first_token_ns[0] == read_ns + load_ns + 360 * MS
    # All of the computed blocks goes to the DE, hits without windows: the last token sees none.
    send_ns = 6 * 64_000 + 10 * 12_800
    # Into its HBM what the last token sees: blocks 13 to 15, that of token 872 up to the last.
    fill_ns = 16 * 12_800 + 3 * 51_200
    assert turns.decoding_ns[0] == turns.first_token_ns[0] + send_ns + fill_ns


def test_a_split_read_has_the_window_at_the_side_of_the_tail(core):
    setup, agents = windowed(small_setup(Mode.SPLIT)), agents_of([(1000, 640, 1)])
    result = simulate(setup, agents, core=core)
    assert result.links.snic_read_bytes.sum(axis=0).tolist() == [64_000.0, 64_000.0 + 102_400.0]


def test_a_dram_tier_caches_no_block_that_was_read_without_its_windows():
    """An agent hits what it has never computed: only what it computes is whole behind a gap."""
    rounds = [(1000, 640, 2), (1100, 960, 2)]
    for setup, found in ((small_setup(), 960), (windowed(small_setup()), 0)):
        cluster = msgspec.structs.replace(setup.cluster, dram_tier_bytes=0.0)
        setup = msgspec.structs.replace(setup, cluster=cluster)
        result = simulate(setup, agents_of(rounds))
        assert result.dram_tier_hit_tokens == found


def test_oracle_neither_reads_nor_transfers(core):
    result = simulate(small_setup(Mode.ORACLE), agents_of([(1000, 640, 2)]), core=core)
    assert result.turns.first_token_ns[0] == 360 * MS
    assert result.turns.finished_ns[0] == 370 * MS
    assert result.links.snic_read_bytes.sum() == result.links.cnic_bytes.sum() == 0


def test_equal_sharing_lets_concurrent_reads_end_together():
    agents = agents_of([(1000, 640, 1)], [(1000, 640, 1)])
    result = simulate(small_setup(Mode.BASIC, snic_sharing="equal"), agents)
    assert result.turns.loaded_ns.tolist() == [1280 * MS, 1280 * MS]
    assert result.links.snic_read_bytes[:, 0].sum() == pytest.approx(1_280_000)


def test_a_full_decode_buffer_makes_the_next_round_wait_for_space(core):
    setup = small_setup(decode_buffer_bytes=1_024_000.0, prefill_buffer_bytes=1_024_000.0)
    result = simulate(setup, agents_of([(1000, 640, 2)], [(1000, 640, 2)]), core=core)
    first, second = np.argsort(result.turns.granted_ns)
    assert result.turns.granted_ns[first] == 0
    assert result.turns.granted_ns[second] == result.turns.decoding_ns[first]


def test_the_next_round_reads_only_what_has_been_stored(core):
    agents = agents_of(growing_agent(turns=2, first=640, append=64, generated=2))
    slow = small_setup(snic_write_bytes_per_s=1e5)
    result = simulate(slow, agents, core=core)
    # The first round's 10 blocks take 6.4 s to be written, starting at its first token.
    stored_ns = result.turns.first_token_ns[0] + 6_400 * MS
    assert result.turns.granted_ns[1] < stored_ns
    assert result.turns.loaded_ns[1] == stored_ns + 640 * MS


def test_a_compute_quota_cuts_a_long_prompt_into_chunks(core):
    setup = small_setup(compute_quota_s=0.128)
    result = simulate(setup, agents_of([(320, 0, 1)]), core=core)
    assert result.batches.tokens.tolist() == [128, 128, 64]


def test_a_lock_step_unit_waits_for_its_slowest_engine(core):
    agents = agents_of([(640, 0, 1)], [(64, 0, 1)])
    together = simulate(small_setup(gpus_per_node=2), agents, core=core)
    alone = simulate(small_setup(gpus_per_node=2, lockstep=False), agents, core=core)
    assert together.turns.first_token_ns[0] == together.turns.first_token_ns[1]
    assert together.batches.attention_max_s[0] == pytest.approx(0.64)
    assert together.batches.attention_mean_s[0] == pytest.approx(0.352)
    assert alone.turns.first_token_ns[1] < 65 * MS


def test_decoding_slows_down_while_more_requests_share_the_steps(core):
    decode = msgspec.structs.replace(small_model().decode, step_s=0.0, request_s=0.01)
    setup = msgspec.structs.replace(small_setup(Mode.ORACLE), model=small_model(decode=decode))
    alone = simulate(setup, agents_of([(64, 0, 11)]), core=core)
    paired = simulate(setup, agents_of([(64, 0, 11)], [(64, 0, 11)]), core=core)
    assert alone.tpot_s()[0] == pytest.approx(0.01)
    assert paired.tpot_s() == pytest.approx([0.02, 0.02])


def test_a_sub_agent_starts_when_the_round_it_waits_for_is_over(core):
    agents = agents_of([(64, 0, 1)], [(64, 0, 1)], start_s=[0, 2.0], start_after_round=[-1, 0])
    result = simulate(small_setup(Mode.ORACLE), agents, core=core)
    assert result.turns.submitted_ns[1] == result.turns.finished_ns[0] + 2_000 * MS


def test_tool_delays_and_arrivals_are_respected(core):
    rounds = growing_agent(turns=2, first=64, append=64, generated=1)
    agents = agents_of(rounds, start_s=[5.0], delay_s=1.5)
    result = simulate(small_setup(Mode.ORACLE), agents, core=core)
    assert result.turns.submitted_ns[0] == 6_500 * MS
    assert result.turns.submitted_ns[1] == result.turns.finished_ns[0] + 1_500 * MS


def column(result: SimulationResult, name: str) -> dict[int, int]:
    """Return one column of the decisions by round."""
    decisions = decisions_of(result)
    return dict(zip(decisions.round.tolist(), getattr(decisions, name).tolist(), strict=True))


def test_a_dram_tier_spares_the_storage_nics():
    agents = agents_of(growing_agent(turns=4, first=640, append=64, generated=2))
    without = simulate(small_setup(), agents)
    with_tier = simulate(small_setup(dram_tier_bytes=0.0), agents, record_decisions=True)
    assert without.links.snic_read_bytes.sum() > 0
    assert with_tier.links.snic_read_bytes.sum() == 0
    assert with_tier.dram_tier_hit_tokens == agents.hit_tokens.sum()
    assert with_tier.jct_s < without.jct_s
    # Its DE has all of a context, and hands it to the PE layer by layer.
    decisions = decisions_of(with_tier)
    np.testing.assert_array_equal(decisions.decode_cached_tokens, agents.hit_tokens)
    assert {READ_REASONS[code] for code in decisions.read_reason[1:]} == {"kept"}


def test_a_round_is_placed_at_the_engines_that_cache_its_context():
    """Two agents on two PEs and two DEs, each of which would do: nothing is read ever again."""
    rounds = growing_agent(turns=4, first=640, append=64, generated=2)
    agents = agents_of(rounds, rounds, start_s=[0.0, 0.3])
    for groups in (1, 2):
        setup = small_setup(
            prefill_nodes=2, decode_nodes=2, decode_nodes_per_group=groups, dram_tier_bytes=0.0
        )
        result = simulate(setup, agents, record_decisions=True)
        engine = column(result, "decode_engine")
        assert len({engine[r] for r in range(4)}) == len({engine[r] for r in range(4, 8)}) == 1
        assert result.links.snic_read_bytes.sum() == 0


def test_a_small_buffer_caches_the_heads_of_contexts_used_last():
    """The buffer holds 15 blocks and a prompt takes 10 to 13: one context and a bit stay."""
    rounds = growing_agent(turns=3, first=640, append=64, generated=2)
    agents = agents_of(rounds, rounds, start_s=[0.0, 3.0], delay_s=6.0)
    setup = small_setup(decode_buffer_bytes=15 * 64e3, dram_tier_bytes=0.0)
    result = simulate(setup, agents, record_decisions=True)
    cached = column(result, "decode_cached_tokens")
    hits = agents.hit_tokens
    # The second agent's round came between: of the first's 10 blocks the tail had to go.
    assert 0 < cached[1] < hits[1]
    assert 0 < result.links.snic_read_bytes.sum() < hits.sum() * 1000.0


def test_blocks_evicted_before_the_grant_are_read_after_all():
    """Eight agents' contexts are too many for 60 blocks: while one waits, others take its place."""
    agents = agents_of(*[growing_agent(3, 320 + 64 * agent, 64, 2) for agent in range(8)])
    setup = small_setup(decode_buffer_bytes=60 * 64e3, dram_tier_bytes=0.0)
    result = simulate(setup, agents, record_decisions=True)
    decisions = decisions_of(result)
    believed = decisions.decode_cached_tokens.sum() + decisions.prefill_cached_tokens.sum()
    assert 0 < result.dram_tier_hit_tokens < believed
    read = result.links.snic_read_bytes.sum() / 1000.0
    assert read == pytest.approx(agents.hit_tokens.sum() - result.dram_tier_hit_tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("buffer_blocks", [28, 36])
def test_buffers_with_room_for_little_more_than_what_runs_never_cost_a_read(seed, buffer_blocks):
    """Nine agents on 1P2D: all storage NICs read less than without a tier, the busiest no more.

    Blocks that the index has and the engine has evicted are read by the rule all the same.  Other
    decisions make the busiest read a twentieth more or less.
    """
    rng = np.random.default_rng(seed)
    agents = agents_of(
        *[
            growing_agent(6, int(rng.integers(320, 960)), int(rng.integers(32, 160)), 2)
            for _ in range(9)
        ]
    )
    buffers = {
        "prefill_buffer_bytes": buffer_blocks * 64e3,
        "decode_buffer_bytes": buffer_blocks * 64e3,
    }
    runs = [
        simulate(small_setup(decode_nodes=2, dram_tier_bytes=tier, **buffers), agents)
        for tier in (None, 0.0)
    ]
    without, with_tier = (run.links.snic_read_bytes.sum(axis=0) for run in runs)
    found = runs[1].dram_tier_hit_tokens
    assert 0 < found < agents.hit_tokens.sum() / 2
    assert with_tier.sum() == pytest.approx(without.sum() - found * 1000.0)
    assert with_tier.max() <= without.max() * 1.05


def test_hits_behind_a_long_reading_queue_are_computed_again():
    """Storage reads 10 tokens/s: the first round's hit takes a minute, computing it 0.6 s."""
    agents = agents_of(*[growing_agent(2, 640, 64, 2)] * 3)
    runs = {}
    for limit_s in (0.0, 1.0, 60.0):
        setup = small_setup(recompute_limit_s=limit_s, snic_bytes_per_s=1e4, beta_tokens=500_000)
        runs[limit_s] = simulate(setup, agents, record_decisions=True)
    never, briefly, often = runs.values()
    assert often.jct_s < 5 < never.jct_s
    assert often.links.snic_read_bytes.sum() == 0
    written = {limit_s: run.links.snic_write_bytes.sum() for limit_s, run in runs.items()}
    assert len(set(written.values())) == 1, "what is stored is not written again"
    assert "recompute" in {READ_REASONS[code] for code in decisions_of(often).read_reason}
    # 640 tokens would be 0.5 s of a PE at the mean turn's speed: within the limit of 1 s as well.
    assert briefly.jct_s == often.jct_s
    assert int(often.batches.tokens.sum()) == int(agents.prompt_tokens.sum())


def test_a_decode_engine_that_caches_a_context_computes_the_append_and_no_pe_loads_it():
    """One agent: from its second turn on its DE copies the hit into HBM and computes the rest."""
    agents = agents_of(growing_agent(turns=3, first=640, append=64, generated=2))
    runs = [
        simulate(
            small_setup(dram_tier_bytes=0.0, append_at_decode_tokens=tokens, cnic_bytes_per_s=1e7),
            agents,
            record_decisions=True,
        )
        for tokens in (0, 128)
    ]
    ordinary, append = runs
    reasons = [PE_REASONS[code] for code in decisions_of(append).pe_reason]
    assert reasons == ["short-queue", "append-at-decode", "append-at-decode"]
    assert list(decisions_of(append).prefill_engine) == [0, -1, -1]
    turns = append.turns
    # The prompt of 706 tokens has a hit of 640, which takes 64 ms at 10 MB/s; 66 ms are computed.
    assert turns.first_token_ns[1] - turns.loaded_ns[1] == (64 + 66) * MS
    assert turns.finished_ns[1] == turns.first_token_ns[1] + 10 * MS
    pe_bytes = [run.links.cnic_bytes[:, 0].sum() for run in runs]
    assert pe_bytes[1] < pe_bytes[0] / 2
    written = {run.links.snic_write_bytes.sum() for run in runs}
    assert len(written) == 1, "the same blocks are stored"
    assert append.jct_s < ordinary.jct_s


def test_requests_of_a_decode_engine_wait_while_it_computes_an_append():
    """The first agent decodes when the second one's append of 100 tokens is computed."""
    agents = agents_of([(64, 0, 200)], [(640, 0, 1), (740, 640, 1)])
    jct_s = []
    for tokens in (0, 128):
        setup = small_setup(dram_tier_bytes=0.0, append_at_decode_tokens=tokens)
        result = simulate(setup, agents)
        jct_s.append(result.agent_jct_s()[0])
    assert jct_s[1] - jct_s[0] == pytest.approx(0.1, abs=1e-6)


def test_engines_in_lock_step_compute_no_append():
    agents = agents_of(*[growing_agent(3, 640, 64, 2)] * 2)
    changes: dict[str, Any] = {"gpus_per_node": 2, "dram_tier_bytes": 0.0}
    without = simulate(small_setup(**changes), agents)
    limited = simulate(small_setup(append_at_decode_tokens=500, **changes), agents)
    assert limited.end_ns == without.end_ns
    free = simulate(small_setup(append_at_decode_tokens=500, lockstep=False, **changes), agents)
    assert free.end_ns < without.end_ns


def test_a_run_can_be_stopped_early(core):
    agents = agents_of(growing_agent(turns=10, first=640, append=64, generated=2))
    result = simulate(small_setup(), agents, core=core, until_s=2.0)
    assert result.stopped
    assert result.end_ns <= 2_000 * MS
    assert (result.turns.finished_ns == -1).any()
    assert np.isnan(result.agent_jct_s()[0])


def test_every_assignment_has_its_reasons(core):
    agents = agents_of(*[growing_agent(3, 640, 64, 2)] * 4)
    result = simulate(small_setup(), agents, core=core, record_decisions=True)
    decisions = decisions_of(result)
    assert len(decisions.round) == agents.rounds
    assert {PE_REASONS[code] for code in decisions.pe_reason} == {"short-queue"}
    assert {DE_REASONS[code] for code in decisions.de_reason} <= set(DE_REASONS)
    first_rounds = np.isin(decisions.round, agents.first_round[:-1])
    assert {READ_REASONS[c] for c in decisions.read_reason[first_rounds]} == {"no-hit"}


def test_progress_is_reported(core):
    seen = []
    agents = agents_of(*[growing_agent(50, 640, 64, 2)] * 200)
    simulate(
        small_setup(Mode.ORACLE),
        agents,
        core=core,
        progress=lambda done, rounds, now_s: seen.append((done, rounds, now_s)),
    )
    assert seen
    assert seen == sorted(seen)
    assert {rounds for _, rounds, _ in seen} == {agents.rounds}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_nodes": 0}, "prefill_nodes is 0; it must be between 1"),
        ({"decode_nodes": 0}, "decode_nodes is 0; it must be between 1"),
        ({"snic_bytes_per_s": -1.0}, "snic_bytes_per_s is -1.0"),
        ({"cnic_bytes_per_s": float("nan")}, "cnic_bytes_per_s is nan"),
        ({"decode_hbm_bytes": 64_000.0}, "decode_hbm_bytes holds 64"),
        ({"prefill_buffer_bytes": 64_000.0}, "prefill_buffer_bytes holds 64000"),
        ({"decode_buffer_bytes": 64_000.0}, "decode_buffer_bytes holds 64000"),
        ({"prefill_hbm_bytes": 10_000.0}, "prefill_hbm_bytes holds 50"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        simulate(small_setup(**changes), agents_of([(1000, 640, 2)]), core="reference")


def test_rounds_beyond_the_context_limit_are_refused():
    setup = msgspec.structs.replace(small_setup(), model=small_model(context_limit_tokens=1000))
    with pytest.raises(TraceError, match=r"longest round has 1002 tokens.*takes 1000; truncate"):
        simulate(setup, agents_of([(1000, 640, 2)]), core="reference")


@pytest.mark.parametrize("wrong", [(0, 0, 1), (64, 64, 1), (64, 0, 0), (64, -1, 1)])
def test_rounds_that_cannot_be_are_refused(wrong):
    with pytest.raises(TraceError, match="round 1 of agent 0 has"):
        simulate(small_setup(), agents_of([(64, 0, 1), wrong]), core="reference")
