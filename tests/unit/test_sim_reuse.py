"""What the rule of which chain gives way (``policy.reuse``) is worth over whole simulated runs."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.simulated import agents_of, growing_agent, small_setup

from dualpath.policy.reuse import ReuseForecast
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.formats import read_trace
from dualpath_sim.simulator.result import SimulationResult
from dualpath_sim.simulator.run import simulate

DATA = Path(os.environ.get("DUALPATH_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
TRACE = DATA / "mini_swe_gemini3" / "rounds_dev_dsv3tok.jsonl.xz"
BLOCK_BYTES = 64_000.0
#: Blocks that what runs needs at a time.
RUNNING_BLOCKS = 16


def run(agents: AgentTable, buffer_blocks: int) -> SimulationResult:
    """Run agents on a DE with a buffer of so many blocks; its PE's has none to spare."""
    setup = small_setup(
        prefill_buffer_bytes=_largest_blocks(agents) * BLOCK_BYTES,
        decode_buffer_bytes=buffer_blocks * BLOCK_BYTES,
        dram_tier_bytes=0.0,
        prefill_hbm_bytes=1e12,
        decode_hbm_bytes=1e12,
    )
    return simulate(setup, agents, core="reference")


def dram_share(agents: AgentTable, buffer_blocks: int) -> float:
    """Return the part of the hit tokens that came from DRAM."""
    return run(agents, buffer_blocks).dram_tier_hit_tokens / int(agents.hit_tokens.sum())


def least_recently_used(agents: AgentTable, buffer_blocks: int, patch: pytest.MonkeyPatch) -> float:
    """Return the same where forecasts are never believed."""
    with patch.context() as patched:
        patched.setattr(ReuseForecast, "believed", False)
        return dram_share(agents, buffer_blocks)


def _largest_blocks(agents: AgentTable) -> int:
    return int((agents.prompt_tokens + agents.generated_tokens).max()) // 64 + 2


def in_turn(agents: int, turns: int) -> AgentTable:
    """Return agents that ask one after the other, round and round."""
    rounds = growing_agent(turns, 640, 16, 2)
    starts = [2.0 * agent for agent in range(agents)]
    return agents_of(*[rounds] * agents, start_s=starts, delay_s=2.0 * agents)


def test_of_agents_that_come_in_turn_as_many_are_found_as_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve contexts of up to 14 blocks, room for a quarter: an LRU finds none."""
    agents = in_turn(12, 8)
    quarter = RUNNING_BLOCKS + 12 * 14 // 4
    assert least_recently_used(agents, quarter, monkeypatch) == 0.0
    assert dram_share(agents, quarter) > 0.3


def test_an_agent_that_stays_away_makes_room() -> None:
    """Half of the agents end after four turns: what they left is given up, not waited for."""
    short, long = growing_agent(4, 640, 16, 2), growing_agent(16, 640, 16, 2)
    starts = [2.0 * agent for agent in range(8)]
    agents = agents_of(*[short, long] * 4, start_s=starts, delay_s=16.0)
    # Room for what runs and the four that stay.
    assert dram_share(agents, RUNNING_BLOCKS + 4 * 15) > 0.6


def test_where_pauses_do_not_repeat_it_is_the_least_recently_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pauses of exponential length: no forecast is any good, and none does harm."""
    rng = np.random.default_rng(0)
    agents = in_turn(12, 12)
    pauses = rng.exponential(16.0, agents.rounds).astype(np.float32)
    agents = agents._replace(delay_s=pauses)
    for share in (0.25, 0.5, 0.75):
        blocks = RUNNING_BLOCKS + int(share * 12 * 13)
        usual = least_recently_used(agents, blocks, monkeypatch)
        assert dram_share(agents, blocks) > usual - 0.05


@pytest.mark.skipif(not TRACE.exists(), reason=f"no {TRACE}")
def test_on_recorded_sessions_that_wait_for_storage_it_finds_twice_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve sessions of coding agents without pauses; a tenth of their contexts fits."""
    sessions = [s for s in read_trace(TRACE) if 12 <= s.turns <= 20][:12]
    agents = agents_from_sessions(sessions, WorkloadSettings(block_tokens=64))
    last = agents.first_round[1:] - 1
    contexts = int((agents.prompt_tokens[last] + agents.generated_tokens[last]).sum())
    blocks = _largest_blocks(agents) + contexts // 64 // 10
    assert dram_share(agents, blocks) > 1.5 * least_recently_used(agents, blocks, monkeypatch)
