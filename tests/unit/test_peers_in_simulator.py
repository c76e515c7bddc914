"""Recorded comparisons with DualPath simulated: what a change of settings would change."""

import re
import shutil
from pathlib import Path

import pytest

from dualpath_lab.benchmarks.peers.in_simulator import main

PUBLISHED = Path(__file__).parents[2] / "docs" / "evaluation" / "peers" / "cells"
REGIME = "long-storage-nothing-no-pauses"


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    """One recorded regime, with DRAM for one context per node."""
    (recorded,) = PUBLISHED.glob(f"{REGIME}.*.json")
    shutil.copy(recorded, tmp_path)
    return tmp_path


def row_of(text: str) -> list[float]:
    """Return a row's numbers.

    The best other stack's JCT, DualPath's measured and simulated ones, the two ratios; TTFT and MB
    read.
    """
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {REGIME}"))
    return [float(number) for number in row.strip("| ").split(" | ")[1:]]


def test_without_flags_the_estimate_is_what_was_measured(
    cells: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(cells)]) == 0
    text = capsys.readouterr().out
    other_s, measured_s, simulated_s, with_flags_s, ratio, estimate, *_ = row_of(text)
    assert simulated_s == with_flags_s
    assert ratio == estimate == round(measured_s / other_s, 2)
    assert 0.7 < simulated_s / measured_s < 1.4
    assert re.search(rf"with flags: 0 of 1 won, worst {estimate}, geometric mean {estimate}", text)


def test_a_flag_of_the_cluster_changes_what_is_simulated(
    cells: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(cells), "--handover", "hbm"]) == 0
    _, _, simulated_s, with_flags_s, ratio, estimate, *_ = row_of(capsys.readouterr().out)
    assert with_flags_s < simulated_s
    assert estimate < ratio


def test_agents_whose_kv_is_in_dram_read_little_behind_their_first_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """8 agents, three of which fit the HBM of a DE: turns wait for the DE that caches their KV."""
    recorded = PUBLISHED.parents[1] / "lab" / "dram-peers.json"
    assert main([str(recorded)]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "dram-peers" in line)
    read_mb = float(row.strip("| ").split(" | ")[-1])
    assert read_mb < 200, "of 2,600 MB of hits; 317 MB without waiting"
