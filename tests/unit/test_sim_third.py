"""Simulated third DEs: what they read and cache for requests of others, and when they refuse.

A block of 64 tokens has 64 KB; a storage NIC reads 1 MB/s, the compute NICs are far faster.
"""

from typing import Any

import numpy as np
import pytest
from tests.simulated import agents_of, growing_agent, small_model, small_setup

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.policy.rebalance import RebalanceSettings
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup, WindowLayers

#: One round with a hit of 40 blocks.
LONE = agents_of([(40 * 64 + 10, 40 * 64, 2)])
BLOCK_S = 0.064


def setup_with(mode: Mode = Mode.SPLIT, thirds: int = 3, **changes: object) -> Setup:
    return small_setup(
        mode,
        **{"decode_nodes": 4, "decode_nodes_per_group": 4, "third_engine_reads": thirds, **changes},
    )


def read_s(setup: Setup) -> float:
    turns = simulate(setup, LONE).turns
    return float(turns.loaded_ns[0] - turns.granted_ns[0]) / 1e9


def test_five_storage_nics_read_a_hit_in_two_fifths_of_the_time_of_two() -> None:
    assert read_s(setup_with(thirds=0)) == pytest.approx(20 * BLOCK_S)
    assert read_s(setup_with()) == pytest.approx(8 * BLOCK_S)
    # One third DE: 14 + 13 + 13 blocks.
    assert read_s(setup_with(thirds=1)) == pytest.approx(14 * BLOCK_S)


def test_every_storage_nic_carries_its_part_once() -> None:
    links = simulate(setup_with(), LONE).links
    np.testing.assert_allclose(links.snic_read_bytes.sum(axis=0), [8 * 64e3] * 5)


def test_a_third_engine_without_room_for_a_prompt_of_its_own_reads_nothing() -> None:
    """41 blocks fit a decode node's buffer; a third DE would have slots for 33 left."""
    small = setup_with(decode_buffer_bytes=41 * 64e3)
    assert read_s(small) == pytest.approx(20 * BLOCK_S)
    assert read_s(setup_with(decode_buffer_bytes=60 * 64e3)) == pytest.approx(8 * BLOCK_S)


def test_what_another_decode_engine_caches_is_not_read_again() -> None:
    """Each DE has HBM for one agent of three, and all KV fits DRAM.

    Storage is so fast that no turn waits for the DE that caches its KV.
    """
    agents = agents_of(*[growing_agent(6, 300, 70, 20) for _ in range(3)])
    changes: dict[str, Any] = {
        "decode_nodes": 2,
        "decode_hbm_bytes": 900e3,
        "dram_tier_bytes": 1e9,
        "snic_bytes_per_s": 1e9,
    }
    without = simulate(setup_with(thirds=0, **changes), agents)
    with_thirds = simulate(setup_with(thirds=1, **changes), agents)
    assert without.links.snic_read_bytes.sum() > 0
    assert with_thirds.links.snic_read_bytes.sum() == 0
    assert with_thirds.dram_tier_hit_tokens == agents.hit_tokens.sum()


def test_models_with_window_layers_have_no_third_engines() -> None:
    windows = (WindowLayers(window_tokens=64, kv_bytes_per_token=300.0),)
    setups = [setup_with(thirds=thirds) for thirds in (0, 3)]
    without, with_thirds = (
        simulate(
            Setup(cluster=one.cluster, model=small_model(window_layers=windows), mode=one.mode),
            LONE,
        )
        for one in setups
    )
    np.testing.assert_array_equal(without.links.snic_read_bytes, with_thirds.links.snic_read_bytes)


def test_nodes_that_change_their_role_are_no_third_engines() -> None:
    with pytest.raises(ConfigError, match=r"third_engine_reads.* is 3, .*rebalancing"):
        simulate(setup_with(rebalancing=RebalanceSettings()), LONE)
