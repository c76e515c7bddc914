"""The planner finds the best P:D by simulating, and the comparison says what binds."""

import numpy as np
import pytest

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report.model import Table
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.catalog.load import load_cluster, load_gpu, load_model
from dualpath_sim.evaluation.comparison import compare, prefill_units, summarise
from dualpath_sim.evaluation.planner import broken_slo, make_plan, reshaped
from dualpath_sim.evaluation.settings import PlanSettings
from dualpath_sim.simulator.result import NS_PER_S, Batches, LinkUse, SimulationResult, TurnTimes
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import (
    ClusterSettings,
    DecodeCosts,
    ModelCosts,
    PrefillCosts,
    Setup,
)

MODEL = ModelCosts(
    name="small",
    layers=4,
    kv_bytes_per_token=1000.0,
    prefill=PrefillCosts(batch_s=0.01, feed_forward_token_s=1e-3),
    decode=DecodeCosts(step_s=0.01, request_s=0.002),
    prefill_tokens_per_s=1000.0,
)


def setup_for(prefill_nodes: int, decode_nodes: int, mode: Mode = Mode.DUALPATH, **more) -> Setup:
    cluster = ClusterSettings(
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        gpus_per_node=1,
        prefill_nodes_per_group=1,
        decode_nodes_per_group=1,
        **more,
    )
    return Setup(cluster=cluster, model=MODEL, mode=mode)


def agent_table(agents: int, rounds: int, start_s: np.ndarray | None = None) -> AgentTable:
    """Agents of equal rounds: each appends 64 tokens behind what is stored."""
    prompts = np.tile(640 + 64 * np.arange(rounds), agents).astype(np.int32)
    hits = np.tile(np.where(np.arange(rounds) == 0, 0, 576 + 64 * np.arange(rounds)), agents)
    return AgentTable(
        first_round=np.arange(agents + 1, dtype=np.int64) * rounds,
        start_s=np.zeros(agents) if start_s is None else start_s,
        start_after_round=np.full(agents, -1, np.int64),
        prompt_tokens=prompts,
        hit_tokens=hits.astype(np.int32),
        generated_tokens=np.full(agents * rounds, 10, np.int32),
        delay_s=np.zeros(agents * rounds, np.float32),
    )


def reference(setup, agents, *, until_s=None):
    return simulate(setup, agents, core="reference", until_s=until_s)


class Cluster:
    """A stand-in for the simulator with known answers.

    A shape serves ``min(P · prefill, D · decode)`` agents per second; TTFT or TPOT leaves the SLO
    beyond.  All at once, the JCT is the agents over that rate.
    """

    def __init__(self, prefill: float, decode: float) -> None:
        self.rates = (prefill, decode)
        self.runs: list[tuple[int, float]] = []

    def __call__(self, setup, agents, *, until_s=None):
        prefill = setup.cluster.prefill_nodes * self.rates[0]
        decode = setup.cluster.decode_nodes * self.rates[1]
        offered = agents.agents / until_s if until_s else 0.0
        self.runs.append((setup.cluster.prefill_nodes, offered))
        ttft_s = 1.0 if offered <= prefill else 10.0
        tpot_s = 0.02 if offered <= decode else 0.2
        at_once = agents.agents / min(prefill, decode)
        submitted = agents.start_s if until_s else np.full(agents.agents, at_once)
        return self._result(setup, agents, submitted, ttft_s, tpot_s)

    @staticmethod
    def _result(setup, agents, submitted_s, ttft_s, tpot_s):
        submitted = (submitted_s * NS_PER_S).astype(np.int64)
        first = submitted + int(ttft_s * NS_PER_S)
        later = int(tpot_s * NS_PER_S)
        finished = first + later * (agents.generated_tokens.astype(np.int64) - 1)
        times = TurnTimes(
            submitted, submitted, submitted, submitted, submitted, first, first, first, finished
        )
        nothing = np.zeros(0, np.int64)
        none = np.zeros(0)
        batches = Batches(nothing, nothing, nothing, nothing, none, none)
        nodes = np.zeros((1, setup.cluster.nodes))
        links = LinkUse(NS_PER_S, nodes, nodes, nodes)
        end = int(finished.max())
        return SimulationResult(setup, agents, times, batches, links, None, end, False, 0)


def arriving(rate: float | None) -> AgentTable:
    if rate is None:
        return agent_table(100, 1)
    count = int(rate * 3600)
    return agent_table(count, 1, np.arange(count) / rate)


def test_every_shape_is_tried_and_the_shortest_jct_wins():
    cluster = Cluster(prefill=1.0, decode=0.5)
    plan = make_plan(PlanSettings(total_nodes=6), setup_for, arriving, cluster)
    assert [shape.prefill_nodes for shape in plan.shapes] == [1, 2, 3, 4, 5]
    assert (plan.best.prefill_nodes, plan.best.decode_nodes) == (2, 4)
    assert plan.best.jct_s == pytest.approx(100 / 2, rel=0.1)
    assert len(cluster.runs) == 5


def test_the_capacity_is_bisected_and_names_what_breaks_beyond_it():
    cluster = Cluster(prefill=1.0, decode=0.5)
    settings = PlanSettings(total_nodes=6, objective="capacity", precision=0.02)
    plan = make_plan(settings, setup_for, arriving, cluster)
    assert plan.best.prefill_nodes == 2
    for shape in plan.shapes:
        limit = min(shape.prefill_nodes * 1.0, shape.decode_nodes * 0.5)
        assert shape.agents_per_s is not None
        assert limit / 1.03 <= shape.agents_per_s <= limit * 1.001
    assert plan.shapes[0].slo == "TTFT"
    assert plan.shapes[-1].slo == "TPOT"


def test_many_nodes_are_searched_in_few_shapes_and_the_peak_is_found():
    cluster = Cluster(prefill=1.0, decode=0.25)
    settings = PlanSettings(total_nodes=144, most_shapes=15)
    plan = make_plan(settings, setup_for, arriving, cluster)
    assert len(plan.shapes) <= 25
    # 29P115D serves min(29, 28.75); neighbours serve less.
    assert plan.best.prefill_nodes == 29


def test_equal_inputs_give_equal_plans():
    settings = PlanSettings(total_nodes=4)
    agents = agent_table(12, 3)
    first = make_plan(settings, setup_for, lambda rate: agents, reference)
    second = make_plan(settings, setup_for, lambda rate: agents, reference)
    assert first == second
    assert first.best.score == max(shape.score for shape in first.shapes)


def test_a_plan_on_the_simulator_itself_gives_prefill_work_prefill_nodes():
    agents = agent_table(24, 1)
    plan = make_plan(PlanSettings(total_nodes=4), setup_for, lambda rate: agents, reference)
    assert plan.best.prefill_nodes == 3
    assert plan.shapes[0].binds == "PEs"


def test_equation_9_marks_the_shapes_without_a_bottleneck():
    def wide(prefill_nodes, decode_nodes):
        return setup_for(prefill_nodes, decode_nodes)

    plan = make_plan(PlanSettings(total_nodes=3), wide, arriving, Cluster(1.0, 1.0))
    # One GPU per node with a storage NIC as fast as its compute NIC: every ratio has one.
    assert plan.ratio_range == (float("inf"), 0.0)
    assert not any(shape.bottleneck_free for shape in plan.shapes)


def test_a_shape_that_cannot_be_is_shown_with_its_reason_and_the_rest_goes_on():
    def picky(prefill_nodes, decode_nodes):
        room = 40e9 if decode_nodes > 1 else 1e3
        return setup_for(prefill_nodes, decode_nodes, decode_hbm_bytes=room)

    agents = agent_table(4, 2)
    plan = make_plan(PlanSettings(total_nodes=3), picky, lambda rate: agents, reference)
    assert plan.best.prefill_nodes == 1
    assert "raise decode_hbm_bytes" in plan.shapes[1].refusal


def test_weights_over_fewer_gpus_leave_less_room_for_kv_and_in_the_end_none():
    cluster = load_cluster("paper-660b")
    weights = (load_model("ds-v3.2"), load_gpu("hopper"))
    assert reshaped(cluster, 2, 4, weights) == cluster
    fewer = reshaped(cluster, 4, 2, weights)
    assert fewer.prefill_hbm_bytes == cluster.prefill_hbm_bytes
    assert fewer.decode_hbm_bytes < cluster.decode_hbm_bytes
    assert reshaped(cluster, 4, 2, None).decode_hbm_bytes == cluster.decode_hbm_bytes
    with pytest.raises(ConfigError, match="weights over 8 GPUs leave no HBM for KV at the prefill"):
        reshaped(cluster, 1, 5, weights)


def test_when_no_shape_can_be_the_first_refusal_is_raised():
    def never(prefill_nodes, decode_nodes):
        return setup_for(prefill_nodes, decode_nodes, decode_hbm_bytes=1e3)

    agents = agent_table(4, 2)
    with pytest.raises(ConfigError, match="raise decode_hbm_bytes"):
        make_plan(PlanSettings(total_nodes=3), never, lambda rate: agents, reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_nodes": 1}, "total_nodes is 1; it must be between 2"),
        ({"total_nodes": 4, "ttft_slo_s": 0.0}, "ttft_slo_s is 0.0"),
        ({"total_nodes": 4, "precision": 0.0}, "precision is 0.0"),
        ({"total_nodes": 4, "most_shapes": 1}, "most_shapes is 1"),
    ],
)
def test_settings_out_of_range_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(PlanSettings(**change), setup_for, arriving, Cluster(1.0, 1.0))


def test_the_slo_is_the_callers():
    agents = arriving(0.1)
    slow = Cluster._result(setup_for(1, 1), agents, agents.start_s, 6.0, 0.02)
    assert broken_slo(slow, PlanSettings(total_nodes=2)) == "TTFT"
    assert broken_slo(slow, PlanSettings(total_nodes=2, ttft_slo_s=7.0)) == ""
    assert broken_slo(slow, PlanSettings(total_nodes=2, ttft_slo_s=7.0, tpot_slo_s=0.01)) == "TPOT"
    unanswered = slow._replace(
        turns=slow.turns._replace(first_token_ns=np.full_like(slow.turns.first_token_ns, -1))
    )
    assert broken_slo(unanswered, PlanSettings(total_nodes=2)) == "nothing answered"


def test_a_summary_counts_every_byte_read_and_finds_the_slow_storage_nic():
    agents = agent_table(8, 6)
    slow = setup_for(1, 1, Mode.BASIC, snic_bytes_per_s=5e4)
    summary = summarise(reference(slow, agents))
    assert summary.prefill_read_bytes == pytest.approx(summary.hit_tokens * 1000.0)
    assert summary.decode_read_bytes == 0
    assert summary.binds == "SNICs of the PEs"
    assert 0.8 <= summary.use.snic_prefill <= 1.01
    assert summary.unfinished_rounds == 0


def test_buffers_bind_where_decode_nodes_hold_one_prompt():
    agents, largest_prompt_bytes = agent_table(8, 6), 960 * 1000.0
    small = setup_for(2, 1, prefill_buffer_bytes=1e9, decode_buffer_bytes=largest_prompt_bytes)
    summary = summarise(reference(small, agents))
    assert summary.binds == "buffers of the DEs"
    assert 0.7 <= (summary.use.decode_buffers or 0) <= 1
    # With room for all prompts something else binds, and the same KV is a small part of it.
    ample = summarise(reference(setup_for(2, 1, decode_buffer_bytes=1e9), agents))
    assert ample.binds != summary.binds
    assert 0 < (ample.use.decode_buffers or 0) < 0.1
    assert ample.jct_s < summary.jct_s


def test_only_a_run_that_reads_at_prefill_nodes_uses_their_buffers():
    agents = agent_table(4, 4)
    basic = summarise(reference(setup_for(1, 1, Mode.BASIC), agents))
    oracle = summarise(reference(setup_for(1, 1, Mode.ORACLE), agents))
    assert basic.use.prefill_buffers
    assert oracle.use.prefill_buffers is oracle.use.decode_buffers is None


def test_a_single_agent_is_bound_by_latency_alone():
    summary = summarise(reference(setup_for(1, 1), agent_table(1, 4)))
    assert summary.binds.startswith("latency: ")
    assert sum(summary.stages_s.values()) > 0


def test_a_comparison_relates_to_basic_and_oracle_and_warns_of_cut_runs():
    agents = agent_table(6, 3)
    runs = [summarise(reference(setup_for(1, 1, mode), agents)) for mode in Mode]
    table = compare(runs).blocks[0]
    assert isinstance(table, Table)
    cells = {name: values for name, *values in table.rows}
    assert cells["speed-up over Basic"][0] == "1.00x"
    assert cells["JCT relative to Oracle"][-1] == "1.00x"
    cut = summarise(reference(setup_for(1, 1), agents, until_s=0.5))
    assert compare([cut]).warnings == (f"dualpath: {cut.unfinished_rounds} rounds unfinished",)
    with pytest.raises(ConfigError, match="no run to compare"):
        compare([])


def test_prefill_units_are_groups_with_lock_step_and_engines_without():
    cluster = ClusterSettings(prefill_nodes=5, decode_nodes=1, prefill_nodes_per_group=2)
    assert prefill_units(cluster) == 3
    alone = ClusterSettings(prefill_nodes=5, decode_nodes=1, lockstep=False)
    assert prefill_units(alone) == 40
