"""Causes of an emulated GPU's idle time between two passes, from its trace."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dualpath_lab.benchmarks.overhead.between_passes import PARTS, idle_times, spans

#: Track, name, start, duration, arguments.
Event = tuple[str, str, float, float, dict[str, float]]

#: Times in ms.  Two layers, one buffer: a pass computes for 10 ms, begins at 0 and ends at 17.
FIRST: list[Event] = [
    ("engine", "compare", 0, 2, {}),
    ("engine", "pass", 2, 15, {"compute_s": 0.010}),
    ("pass", "begin", 2, 1, {}),
    ("wait", "load of layer 0", 3, 1, {}),
    ("compute", "compute L0", 3, 6, {}),
    ("compute", "compute L1", 10, 5, {}),
    ("wait", "send of layer 0", 9, 1, {}),
    ("wait", "send of layer 1", 15, 2, {}),
    ("engine", "settle", 17, 1, {}),
]


def write_events(path: Path, events: Sequence[Event]) -> Path:
    trace_events = [
        {"tid": track, "name": name, "ts": start * 1000, "dur": duration * 1000, "args": args}
        for track, name, start, duration, args in events
    ]
    path.write_text(json.dumps({"traceEvents": trace_events}))
    return path


def test_the_time_between_two_passes_is_attributed_to_its_causes(tmp_path: Path) -> None:
    follower = ("engine", "pass", 20, 15, {"compute_s": 0.010})
    (idle,) = idle_times(spans(write_events(tmp_path / "t", [*FIRST, follower])), buffers=1)
    assert idle.compute_s == 0.010
    assert idle.idle_s == pytest.approx(0.008)
    expected = dict(zip(PARTS, (1, 1, 2, 0, 1, 1), strict=True))
    found = {part: round(idle.parts.get(part, 0.0) * 1e3, 3) for part in PARTS}
    assert found == expected


def test_work_during_a_pass_is_not_counted(tmp_path: Path) -> None:
    beside: list[Event] = [("pass", "begin", 11, 2, {}), ("finish", "send of layer 1", 21, 3, {})]
    follower = ("engine", "pass", 17, 15, {"compute_s": 0.010})
    (idle,) = idle_times(
        spans(write_events(tmp_path / "t", [*FIRST, *beside, follower])), buffers=1
    )
    assert idle.parts[PARTS[4]] == pytest.approx(0.001)
    assert idle.parts[PARTS[2]] == pytest.approx(0.002)


def test_a_wait_for_requests_is_not_idle_time_between_passes(tmp_path: Path) -> None:
    follower = ("engine", "pass", 90, 15, {"compute_s": 0.010})
    assert idle_times(spans(write_events(tmp_path / "t", [*FIRST, follower])), buffers=1) == []


def test_mode_oracle_has_no_layerwise_transfers(tmp_path: Path) -> None:
    only = [event for event in FIRST if event[0] == "engine"]
    assert idle_times(spans(write_events(tmp_path / "t", only)), buffers=1) == []
