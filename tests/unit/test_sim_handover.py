"""DEs that receive prompts in HBM, on simulated clusters, in numbers checked by hand."""

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.simulated import agents_of, growing_agent, small_model, small_setup

from dualpath.core.modes import Handover, Mode
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.evaluation.comparison import summarise
from dualpath_sim.simulator.result import SimulationResult
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import WindowLayers

MS = 1_000_000
#: The DRAM of a node that has room for one prompt of 704 tokens.
ONE_CONTEXT_BYTES = 704_000.0


def both(
    agents: AgentTable, mode: Mode = Mode.DUALPATH, **cluster: Any
) -> tuple[SimulationResult, SimulationResult]:
    """Run agents with prompts received in buffers, and in HBM."""
    by_buffer, by_hbm = (
        simulate(small_setup(mode, handover=handover, **cluster), agents)
        for handover in (Handover.BUFFER, Handover.HBM)
    )
    return by_buffer, by_hbm


def test_requests_do_not_wait_for_dram_that_they_only_pass_through() -> None:
    """Of two prompts with 640 hits each the PE's node reads one and the DE's node the other."""
    agents = agents_of([(704, 640, 20)], [(704, 640, 20)])
    by_buffer, by_hbm = both(agents, decode_buffer_bytes=ONE_CONTEXT_BYTES)
    assert (by_hbm.turns.granted_ns == 0).all()
    np.testing.assert_array_equal(by_hbm.turns.loaded_ns, [640 * MS, 640 * MS])
    first, second = by_buffer.turns.granted_ns
    assert first == 0
    assert second == by_buffer.turns.decoding_ns[0], "once the first prompt is in HBM"
    assert by_hbm.jct_s < by_buffer.jct_s / 1.5
    for read in (by_buffer, by_hbm):
        np.testing.assert_array_equal(read.links.snic_read_bytes.sum(axis=0), [640e3, 640e3])


def test_kv_goes_into_hbm_without_a_stop_in_dram() -> None:
    """A prompt of 704 tokens of which 640 are hits, read at the PE; CNICs carry 10 MB/s."""
    agents = agents_of([(704, 640, 2)])
    by_buffer, by_hbm = both(agents, cnic_bytes_per_s=1e7)
    # Loads of 64 ms are longer than the computation; a tenth of the last sends is exposed.
    assert by_hbm.turns.first_token_ns[0] == by_buffer.turns.first_token_ns[0]
    # Then the copy of 704 tokens into HBM takes 70.4 ms, or has no place.
    sent_ns = by_hbm.turns.decoding_ns[0]
    assert by_buffer.turns.decoding_ns[0] - sent_ns == int(70.4 * MS)
    # In a buffer the PE loads and sends, the DE copies; in HBM the DE stages its new block.
    assert by_buffer.links.cnic_bytes.sum() == 2 * 640e3 + 2 * 704e3 + 2 * 704e3
    assert by_hbm.links.cnic_bytes.sum() == 2 * 640e3 + 2 * 704e3 + 2 * 64e3


def test_what_the_decode_engine_has_read_is_copied_while_the_pe_computes() -> None:
    """The DE's node reads the second prompt; to copy its 640 hits into HBM takes 64 ms."""
    agents = agents_of([(704, 640, 2)], [(704, 640, 2)])
    by_buffer, by_hbm = both(agents, cnic_bytes_per_s=1e7)
    assert by_hbm.links.snic_read_bytes.sum(axis=0)[1] == 640e3
    waits_ns = by_hbm.turns.decoding_ns - by_hbm.turns.first_token_ns
    assert (waits_ns == 0).all()
    assert (by_buffer.turns.decoding_ns - by_buffer.turns.first_token_ns >= int(70.4 * MS)).all()


@pytest.mark.parametrize("tier_bytes", [None, 0.0])
def test_the_same_blocks_are_stored_and_found_again(tier_bytes: float | None) -> None:
    """Hits that the PE has sent are cached at the DE from copies: the next turn reads nothing."""
    agents = agents_of([(704, 640, 2), (832, 704, 65)])
    by_buffer, by_hbm = both(agents, dram_tier_bytes=tier_bytes)
    for direction in ("snic_write_bytes", "snic_read_bytes"):
        in_buffer, in_hbm = (getattr(run.links, direction).sum() for run in (by_buffer, by_hbm))
        assert in_buffer == in_hbm
    assert by_hbm.links.snic_write_bytes.sum() == (1 + 2 + 1) * 64e3
    assert by_hbm.dram_tier_hit_tokens == (0 if tier_bytes is None else 704)
    assert by_hbm.dram_tier_hit_tokens == by_buffer.dram_tier_hit_tokens


def test_a_pass_loads_for_a_tenth_of_a_second_or_as_long_as_it_computes() -> None:
    """Two prompts load 64 ms each and compute for 1 ms."""
    agents = agents_of([(641, 640, 1)], [(641, 640, 1)])
    changes: dict[str, Any] = {"cnic_bytes_per_s": 1e7, "snic_bytes_per_s": 1e9}
    by_buffer, by_hbm = both(agents, **changes)
    assert by_buffer.batches.tokens.tolist() == [2]
    assert by_hbm.batches.tokens.tolist() == [1, 1]


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.LAYERWISE, Mode.ROUND_ROBIN, Mode.ORACLE])
def test_baselines_receive_in_buffers_whatever_the_setting(mode: Mode) -> None:
    agents = agents_of(*[growing_agent(4, 640, 64, 5)] * 3)
    by_buffer, by_hbm = both(agents, mode, dram_tier_bytes=0.0)
    for one, other in zip(by_buffer.turns, by_hbm.turns, strict=True):
        np.testing.assert_array_equal(one, other)


def test_models_with_window_layers_receive_in_buffers() -> None:
    """Blocks that have left a window in HBM could not be stored whole."""
    agents = agents_of(*[growing_agent(4, 640, 64, 5)] * 3)
    layers = (WindowLayers(window_tokens=64, kv_bytes_per_token=300.0),)
    by_buffer, by_hbm = (
        simulate(
            msgspec.structs.replace(
                small_setup(handover=handover), model=small_model(window_layers=layers)
            ),
            agents,
        )
        for handover in (Handover.BUFFER, Handover.HBM)
    )
    for one, other in zip(by_buffer.turns, by_hbm.turns, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_use_of_memories_is_that_of_what_they_hold() -> None:
    """Slots are for hits that the DE reads, here none; HBM is held from the assignment on."""
    agents = agents_of([(704, 640, 2)])
    by_buffer, by_hbm = (
        summarise(run).use
        for run in both(agents, decode_buffer_bytes=ONE_CONTEXT_BYTES, decode_hbm_bytes=1e6)
    )
    assert by_buffer.decode_buffers is not None
    assert by_buffer.decode_buffers > 0.9
    assert by_hbm.decode_buffers == 0
    assert by_buffer.decode_hbm < 0.05
    assert by_hbm.decode_hbm > 0.6
