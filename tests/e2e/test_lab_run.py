"""Agents on a lab: all blocks are right, bytes use their links, the lab is removed."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.e2e.test_lab_network import surroundings
from tests.guard import GUARD_S

from dualpath.core.cluster import nodes_text
from dualpath.core.errors import ConfigError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.launch.process import SpawnedProcess
from dualpath.transport.nixl import nixl_package
from dualpath.workload.replay.client import ReplayOptions
from dualpath_lab.emulated.settings import Verify
from dualpath_lab.experiments.dram_tier import dram_share
from dualpath_lab.experiments.engine_nodes import EmulatedEngines
from dualpath_lab.experiments.jct import JCT
from dualpath_lab.experiments.runs import LabRun
from dualpath_lab.experiments.settings import EmulatedNodes, JctSettings, WindowSettings
from dualpath_lab.experiments.workload import windows
from dualpath_lab.nodes.machine import find_machine, find_remains
from dualpath_lab.nodes.settings import LabSettings, Shaping
from dualpath_sim.harness.files import write
from dualpath_sim.harness.run import measure

NAME = f"run{os.getpid()}"
NODES = EmulatedNodes(
    layers=3,
    layer_block_bytes=8192,
    speedup=200.0,
    buffer_bytes=16 << 20,
    hbm_bytes=16 << 20,
    verify=Verify.FULL,
)
WINDOWS = WindowSettings(agents=4, turns=2, scale=0.03)
LAB = LabSettings(name=NAME, snic_bytes_per_s=20e6, cnic_bytes_per_s=100e6, image_bytes=64 << 20)


def why_not() -> str:
    """Return why this machine cannot have such a lab, empty if it can."""
    pytest.importorskip(nixl_package())
    try:
        shaping = find_machine(LAB).shaping
    except ConfigError as error:
        return str(error)
    return "" if shaping is Shaping.ROOT else f"only {shaping.value} is allowed here"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"lab: {why_not()}")


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = surroundings()
    yield
    assert find_remains(NAME).is_empty
    assert surroundings() == before


def lab_run(prefill: int, decode: int) -> LabRun:
    lab = msgspec.structs.replace(LAB, nodes=nodes_text(prefill, decode))
    return LabRun(lab, EmulatedEngines(NODES), windows(WINDOWS))


@pytest.mark.usefixtures("nothing_left")
def test_one_prefill_and_one_decode_node_read_over_both_paths() -> None:
    with lab_run(1, 1) as made:
        measured = made.run(Mode.DUALPATH, ReplayOptions())
        again = made.run(Mode.ROUND_ROBIN, ReplayOptions())
    result = measured.client
    assert result.replay.summary.turns == WINDOWS.agents * WINDOWS.turns
    assert not result.replay.failed
    # Every byte of the hits was read once, by whichever node, and compared at every place.
    block_bytes = NODES.layers * NODES.layer_block_bytes
    hits = result.replay.summary.hit_tokens
    assert hits
    assert measured.storage_bytes >= hits // NODES.block_tokens * block_bytes
    assert set(result.verified) == {"pe_buffer", "pe_hbm", "de_buffer", "de_hbm"}
    assert result.verified["de_hbm"] > 0
    assert not any(result.wrong.values())
    # Round robin reads on either side in turn.
    first, last = again.samples[0].nodes, again.samples[-1].nodes
    assert all(last[node].snic > first[node].snic for node in ("pe0", "de0"))
    assert all(last[node].cnic_out > first[node].cnic_out for node in ("pe0", "de0"))
    # Both runs began with the same storage: the same tokens were there.
    assert again.client.replay.summary.hit_tokens == hits


@pytest.mark.usefixtures("nothing_left")
def test_the_ranks_of_groups_send_the_planned_bytes_over_their_nodes_link() -> None:
    groups = EmulatedEngines(msgspec.structs.replace(NODES, dp=2))
    with LabRun(LAB, groups, windows(WINDOWS)) as made:
        measured = made.run(Mode.BASIC, ReplayOptions())
    assert not any(measured.client.wrong.values())
    # With Basic all KV of every prompt goes from the PEs to the DEs, once.
    turns = measured.client.replay.turns
    blocks = sum(-(-turn.prompt_tokens // NODES.block_tokens) for turn in turns)
    planned = blocks * NODES.layers * NODES.layer_block_bytes
    first, last = (sample.nodes["pe0"] for sample in (measured.samples[0], measured.samples[-1]))
    # Headers, control messages and tokens besides.
    assert planned < last.cnic_out - first.cnic_out < 1.15 * planned


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_engines_of_one_lab_cache_histories_or_seal_blocks() -> None:
    replace = msgspec.structs.replace
    nodes = replace(NODES, dram_tier=True, dram_bytes=48 << 20)
    without = EmulatedEngines(replace(nodes, dram_tier=False))
    sealed = EmulatedEngines(replace(nodes, dram_tier=False, storage_protection="encrypted"))
    lab = LabRun(LAB, EmulatedEngines(nodes), windows(WINDOWS), warm=True)
    with lab as made:
        cached = made.run(Mode.DUALPATH, ReplayOptions())
        others = [
            made.run(Mode.DUALPATH, ReplayOptions(), engines) for engines in (without, sealed)
        ]
    # The only DE has cached every context; nothing is read again.
    assert cached.storage_bytes == 0
    assert dram_share(cached) == 1.0
    hits = cached.client.replay.summary.hit_tokens
    assert hits
    for run in (cached, *others):
        assert run.client.replay.summary.hit_tokens == hits
        assert run.client.verified["de_hbm"] > 0
        assert not any(run.client.wrong.values())
    assert all(run.storage_bytes > 0 and dram_share(run) == 0.0 for run in others)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_the_page_has_every_mode_of_two_decode_nodes(tmp_path: Path) -> None:
    settings = JctSettings(
        nodes=("1P2D",),
        mode=(Mode.BASIC, Mode.DUALPATH),
        repeat=1,
        agents_per_node=2,
        windows=WINDOWS,
        lab=LAB,
        emulated=NODES,
        # A busy machine affects only times, which are not asserted here.
        busy_limit=1.0,
    )
    said: list[str] = []
    raw = measure(JCT, settings, said.append)
    page = JCT.page(raw, "small", "dualpath lab bench jct")
    assert [row[0] for row in page.tables[0].rows] == ["basic", "dualpath"]
    assert any("none wrong" in line for line in page.settings)
    basic, dualpath = raw.of("1P2D basic")[0], raw.of("1P2D dualpath")[0]
    assert basic.storage_bytes > 0
    assert basic.summary is not None
    assert dualpath.summary is not None
    assert basic.summary.hit_tokens == dualpath.summary.hit_tokens
    paths = write(page, tmp_path)
    assert [path.name for path in paths] == ["small.json", "small.md", "small.png"]
    assert any("lab of 1P2D is up" in line for line in said)


@pytest.mark.usefixtures("nothing_left")
def test_a_run_with_a_dead_engine_ends_with_its_log() -> None:
    broken = msgspec.structs.replace(NODES, batch_cap_tokens=1)
    with (
        LabRun(LAB, EmulatedEngines(broken), windows(WINDOWS)) as made,
        pytest.raises(EngineLostError, match="batch-cap-tokens is 1"),
    ):
        made.run(Mode.DUALPATH, ReplayOptions())


@pytest.mark.usefixtures("nothing_left")
def test_the_janitor_removes_the_lab_of_a_killed_process(tmp_path: Path) -> None:
    argv = (sys.executable, "-m", "dualpath.cli.main", "lab", "run", "--name", NAME)
    small = ("--agents-per-node", "2", "--turns", "2", "--scale", "0.03", "--image-bytes", "64MB")
    maker = SpawnedProcess(
        "maker",
        (*argv, *small, "--layers", "3", "--mode", "dualpath"),
        tmp_path / "maker.log",
        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        maker.wait_for_line("storing the agents' histories", GUARD_S)
        engines = _ends(find_remains(NAME).process_ids)
        janitor = _ends(_janitors())
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait(GUARD_S)
    _wait(engines)
    _wait(janitor)
    # The fixture now expects no lab, and `lab down` was not called.


def _janitors() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"dualpath_lab.nodes.janitor" in words and NAME.encode() in words:
                found.append(int(entry.name))
    assert len(found) == 1
    return found


def _ends(process_ids: "list[int] | tuple[int, ...]") -> list[int]:
    """Return descriptors that become readable when the processes end."""
    found = []
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.pidfd_open(process_id))
    return found


def _wait(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(GUARD_S * 1000), "it did not end"
        os.close(descriptor)
