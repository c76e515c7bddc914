"""The data-plane experiment: refused settings, the report, and one run with tiny sizes."""

from pathlib import Path

import pytest

from dualpath.core.errors import ConfigError
from dualpath.report import markdown
from dualpath.transport.nixl import nixl_package
from dualpath_lab.experiments.data_plane import (
    DATA_PLANE,
    POSTS,
    STORAGE,
    DataPlaneResult,
    draw,
)
from dualpath_lab.experiments.settings import DataPlaneSettings, Leg, Mover, PostCost, Rate, Reader
from dualpath_sim.harness.experiment import RawData, Run
from dualpath_sim.harness.files import write
from dualpath_sim.harness.run import measure


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": ""}, "storage is missing"),
        ({"blocks": 1}, "blocks is 1; it must be at least 2"),
        ({"move_s": 0.0}, "move_s is 0.0; it must be above 0"),
        ({"descriptor_counts": (0,)}, "descriptor_counts is 0; it must be at least 1 in each"),
    ],
)
def test_missing_sizes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataPlaneSettings(**{"storage": "kv", **changes})  # type: ignore[arg-type]


def result(mb_per_s: float, leg: str, cpu_s_per_gb: float = 0.5) -> DataPlaneResult:
    return DataPlaneResult(busy=0.5, rates={leg: Rate(mb_per_s * 1e6, cpu_s_per_gb)})


def test_the_target_is_the_median_ratio_to_a_baseline_of_the_same_round() -> None:
    # The medians alone would be 97 to 100.
    reads = {Reader.NIXL: (50, 100, 300), Reader.READ_QUEUE: (48, 97, 288)}
    runs = [
        Run(cell=reader.value, round=number, result=result(speed, STORAGE))
        for reader, speeds in reads.items()
        for number, speed in enumerate(speeds)
    ]
    for mover in Mover:
        slow = mover is Mover.TRAFFIC_MANAGER
        made = result(170 if slow else 200, Leg.DE_TO_PE.value, 0.8 if slow else 0.5)
        both = made.rates | {Leg.PE_TO_DE.value: Rate(200e6, 0.5)}
        moved = DataPlaneResult(busy=0.5, rates=both)
        runs.append(Run(cell=mover.value, round=0, result=moved))
    posts = (PostCost(1, 9e-6, 9e-6, 9e-6), PostCost(100, 30e-6, 20e-6, 1.0))
    runs.append(Run(cell=POSTS, round=0, result=DataPlaneResult(busy=0.5, posts=posts)))
    page = draw(RawData(experiment="data-plane", settings=DataPlaneSettings(), runs=runs))

    found = {target.what: (target.measured, target.met) for target in page.results}
    assert found == {
        f"storage reads, relative to {Reader.NIXL}": (pytest.approx(0.96), True),
        f"{Leg.DE_TO_PE}, relative to raw NIXL": (pytest.approx(0.85), False),
        f"{Leg.DE_TO_PE}, CPU s/GB of both ends": (0.8, False),
        f"{Leg.PE_TO_DE}, relative to raw NIXL": (1.0, True),
        f"{Leg.PE_TO_DE}, CPU s/GB of both ends": (0.5, True),
        "checks and handle of one of 100 descriptors, µs": (pytest.approx(0.5), True),
    }
    assert "fio, which is not installed" in markdown.page(page.report())


@pytest.mark.nixl
@pytest.mark.long
def test_every_reader_and_mover_transfers_real_bytes(tmp_path: Path) -> None:
    pytest.importorskip(nixl_package())
    settings = DataPlaneSettings(
        storage=str(tmp_path),
        layers=3,
        layer_block_bytes=4096,
        stored_blocks=5,
        read_batch_blocks=2,
        blocks=4,
        move_s=0.001,
        descriptor_counts=(1, 3),
        repeat=1,
    )
    raw = measure(DATA_PLANE, settings)
    assert set(raw.cells) >= {Reader.NIXL, Reader.READ_QUEUE, *Mover, POSTS}
    for run in raw.results:
        assert all(rate.bytes_per_s > 0 for rate in run.rates.values())
    assert [cost.pieces for cost in raw.of(POSTS)[0].posts] == [1, 3]
    assert list(tmp_path.iterdir()) == []
    written = write(DATA_PLANE.page(raw, "data-plane", "command"), tmp_path)
    assert {path.suffix for path in written} == {".json", ".md", ".png"}
