"""Engines of several GPUs in the simulator: their NICs, their HBM, their groups."""

import msgspec
import pytest
from tests.simulated import agents_of, small_setup

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.bounds import link_bytes
from dualpath.plan.movements import Link, Replicas
from dualpath.plan.steps import PromptLayout, whole_plan
from dualpath.policy.rebalance import RebalanceSettings
from dualpath_sim.simulator.derived import cluster_layout, limits, node_of
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup

#: One round with hits and misses, of which nothing else is waiting.
AGENT = agents_of([(1024, 960, 2)])


def parallel(prefill: int = 1, decode: int = 1, replicas: float = 1.0, **changes: object) -> Setup:
    """Return a node of 4 GPUs per role with engines of so many of them, and slow NICs."""
    setup = small_setup(
        changes.pop("mode", Mode.BASIC),  # type: ignore[arg-type]  # a mode, if given
        gpus_per_node=4,
        prefill_tp=prefill,
        decode_tp=decode,
        cnic_bytes_per_s=1e6,
        **changes,
    )
    model = msgspec.structs.replace(setup.model, prefill_replicas=replicas)
    return msgspec.structs.replace(setup, model=model)


def stages_s(setup: Setup) -> tuple[float, float]:
    """Return how long the pass takes that loads 960 tokens, and how long the DE's fill does.

    Basic loads before it computes 64 tokens in 64 ms, and sends afterwards.
    """
    turns = simulate(setup, AGENT, core="reference").turns
    loaded = (turns.first_token_ns[0] - turns.prefill_ns[0]) / 1e9 - 0.064
    return loaded, (turns.decoding_ns[0] - turns.first_token_ns[0]) / 1e9


def test_an_engine_of_four_gpus_loads_over_four_nics():
    one, four = stages_s(parallel()), stages_s(parallel(prefill=4, decode=4))
    assert one[0] == pytest.approx(0.96)
    assert four[0] == pytest.approx(0.96 / 4)
    # 1,024 tokens are sent, then loaded into the DE's HBM.
    assert one[1] == pytest.approx(2 * 1.024)
    assert four[1] == pytest.approx(2 * 1.024 / 4)


def test_kv_that_every_gpu_needs_is_loaded_by_each_and_sent_in_turn():
    """Latent attention: four NICs, four times the bytes; sends as with heads of its own."""
    loaded_s, sent_and_filled_s = stages_s(parallel(prefill=4, decode=4, replicas=4.0))
    assert loaded_s == pytest.approx(0.96)
    assert sent_and_filled_s == pytest.approx(2 * 1.024 / 4)


def test_kv_that_gpus_give_each_other_is_loaded_once():
    setup = parallel(prefill=4, decode=4, replicas=4.0, share_loads=True)
    loaded_s, sent_and_filled_s = stages_s(setup)
    assert loaded_s == pytest.approx(0.96 / 4)
    assert sent_and_filled_s == pytest.approx(2 * 1.024 / 4)
    # Each holds all of it all the same.
    assert limits(setup) == limits(parallel(prefill=4, decode=4, replicas=4.0))


def test_compute_nics_carry_what_the_plan_sums_up():
    """Basic reads 960 tokens at the PE: r loads from DRAM, sends of 1,024, a fill of 1,024."""
    for replicas, share_loads in ((1.0, False), (4.0, False), (4.0, True)):
        setup = parallel(prefill=4, decode=4, replicas=replicas, share_loads=share_loads)
        carried = simulate(setup, AGENT, core="reference").links.cnic_bytes.sum(axis=0)
        geometry = BlockGeometry.uniform(10, 64, 6400)
        hits = (HitRun(Role.PREFILL, BlockRun(0, 15)),)
        plan = whole_plan(PromptLayout(geometry=geometry, prompt_tokens=1024, hits=hits))
        loads = link_bytes(plan, Replicas(prefill=replicas, shares_loads=share_loads))
        assert carried[0] == pytest.approx(loads[Link.PE_CNIC_READ] + loads[Link.PE_CNIC_WRITE])
        assert carried[1] == pytest.approx(loads[Link.DE_CNIC_READ] + loads[Link.DE_CNIC_WRITE])


def test_the_slower_end_of_a_transfer_counts():
    loaded_s, sent_and_filled_s = stages_s(parallel(prefill=4))
    assert loaded_s == pytest.approx(0.96 / 4)
    assert sent_and_filled_s == pytest.approx(1.024 + 1.024)


def test_an_engines_hbm_is_that_of_its_gpus_less_what_they_hold_twice():
    one, four = parallel(), parallel(prefill=4, decode=4)
    assert limits(four).prefill_hbm_tokens == 4 * limits(one).prefill_hbm_tokens
    assert limits(four).decode_hbm_tokens == 4 * limits(one).decode_hbm_tokens
    twice = limits(parallel(prefill=4, replicas=2.0))
    assert twice.prefill_hbm_tokens == 2 * limits(one).prefill_hbm_tokens


def test_engines_are_numbered_node_by_node_whatever_their_gpus():
    cluster = parallel(prefill=4, decode=2, prefill_nodes=2, decode_nodes=2).cluster
    assert (cluster.prefill_engines, cluster.decode_engines) == (2, 4)
    assert [node_of(cluster, engine) for engine in range(6)] == [0, 1, 2, 2, 3, 3]


def test_a_group_of_data_parallel_engines_is_a_part_of_a_node_or_whole_nodes():
    part = parallel(prefill=2, prefill_dp=1, decode_nodes=2).cluster
    assert part.group_engines(Role.PREFILL) == 1
    layout = cluster_layout(part)
    assert layout.prefill_units == (range(1), range(1, 2))
    whole = parallel(decode=2, decode_nodes=3, decode_dp=4).cluster
    assert cluster_layout(whole).decode_units == (range(4, 8), range(8, 10))


def test_engines_and_groups_that_no_node_has_are_refused():
    refused = [
        ({"prefill": 3}, "prefill_tp is 3; it must divide"),
        ({"decode": 8}, "decode_tp is 8"),
        ({"prefill_dp": 3}, "3 engines of 1 GPUs"),
        ({"decode": 2, "rebalancing": RebalanceSettings()}, "both roles must have the same"),
    ]
    for changes, expected in refused:
        with pytest.raises(ConfigError, match=expected):
            parallel(**changes).cluster.check()  # type: ignore[arg-type]  # checked above
    parallel(prefill=2, decode=2, rebalancing=RebalanceSettings()).cluster.check()
