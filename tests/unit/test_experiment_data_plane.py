"""The data-plane experiment: refused settings, the report, and one run with tiny sizes."""

from pathlib import Path

import pytest

from dualpath.core.errors import ConfigError
from dualpath.report import markdown
from dualpath_lab.experiments.data_plane import data_plane_report, measure_data_plane
from dualpath_lab.experiments.report import as_report, write_experiment
from dualpath_lab.experiments.settings import DataPlaneSettings, Leg, Mover, PostCost, Rate, Reader


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


def rates(*mb_per_s: float, cpu_s_per_gb: float = 0.5) -> list[Rate]:
    return [Rate(speed * 1e6, cpu_s_per_gb) for speed in mb_per_s]


def test_the_target_is_the_median_ratio_to_a_baseline_of_the_same_round() -> None:
    # The medians alone would be 97 to 100.
    reads = {Reader.NIXL: rates(50, 100, 300), Reader.READ_QUEUE: rates(48, 97, 288)}
    moves = {(leg, mover): rates(200) for leg in Leg for mover in Mover}
    moves[Leg.DE_TO_PE, Mover.TRAFFIC_MANAGER] = rates(170, cpu_s_per_gb=0.8)
    posts = [PostCost(1, 9e-6, 9e-6, 9e-6), PostCost(100, 30e-6, 20e-6, 1.0)]
    settings = DataPlaneSettings(storage="kv")
    report = data_plane_report(settings, "command", reads, moves, posts, 0.5)

    found = {target.what: (target.measured, target.met) for target in report.targets}
    assert found == {
        f"storage reads, relative to {Reader.NIXL}": (pytest.approx(0.96), True),
        f"{Leg.DE_TO_PE}, relative to raw NIXL": (pytest.approx(0.85), False),
        f"{Leg.DE_TO_PE}, CPU s/GB of both ends": (0.8, False),
        f"{Leg.PE_TO_DE}, relative to raw NIXL": (1.0, True),
        f"{Leg.PE_TO_DE}, CPU s/GB of both ends": (0.5, True),
        "checks and handle of one of 100 descriptors, µs": (pytest.approx(0.5), True),
    }
    assert "fio, which is not installed" in markdown.page(as_report(report))


@pytest.mark.nixl
@pytest.mark.long
def test_every_reader_and_mover_transfers_real_bytes(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
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
    report = measure_data_plane(settings)
    assert set(report.data["reads"]) >= {Reader.NIXL, Reader.READ_QUEUE}
    for found in (*report.data["reads"].values(), *report.data["moves"].values()):
        for one in found if isinstance(found, list) else [r for v in found.values() for r in v]:
            assert one["bytes_per_s"] > 0
    assert [cost["pieces"] for cost in report.data["posts"]] == [1, 3]
    assert list(tmp_path.iterdir()) == []
    written = write_experiment(report, tmp_path)
    assert {path.suffix for path in written} == {".json", ".md", ".png"}
