"""Results of seeds and of fuzzing are added to the data of the page Hardening."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOTALS = {"faults": 3, "requests": 20, "answered": 19, "virtual_s": 3600.0, "events": 100}


class Pages:
    """``docs/draw_lab.py`` with its data in another folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._script = runpy.run_path(str(ROOT / "docs" / "draw_lab.py"))
        self._script["merge"].__globals__["HARDENING"] = folder

    def merge(self, file: str, /, **result: Any) -> None:
        path = self.folder / file
        path.write_text(json.dumps(result))
        self._script["merge"]([str(path)])

    def rows(self, kind: str) -> list[tuple[str, ...]]:
        return [*self._script["DRAWN"][kind]().rows]


def test_ranges_of_seeds_that_follow_each_other_are_summed(tmp_path: Path) -> None:
    pages = Pages(tmp_path)
    pages.merge("b.json", first=2000, seeds=1000, failing=[2500], **TOTALS)
    pages.merge("a.json", first=0, seeds=2000, failing=[], **TOTALS)
    pages.merge("c.json", first=9000, seeds=10, failing=[], **TOTALS)
    assert pages.rows("seeds") == [
        ("0 to 2,999", "3,000", "6", "40", "38", "200", "2.0", "2500"),
        ("9,000 to 9,009", "10", "3", "20", "19", "100", "1.0", "none"),
    ]


def test_a_range_that_is_run_again_replaces_the_stored_one(tmp_path: Path) -> None:
    pages = Pages(tmp_path)
    pages.merge("one.json", first=0, seeds=2000, failing=[7], **TOTALS)
    pages.merge("two.json", first=0, seeds=1000, failing=[], **TOTALS)
    assert [(row[1], row[-1]) for row in pages.rows("seeds")] == [("1,000", "none")]


def test_ranges_that_overlap_are_refused_and_change_nothing(tmp_path: Path) -> None:
    pages = Pages(tmp_path)
    pages.merge("one.json", first=0, seeds=2000, failing=[], **TOTALS)
    with pytest.raises(SystemExit, match="seeds from 0 and from 1500 overlap"):
        pages.merge("two.json", first=1500, seeds=100, failing=[], **TOTALS)
    assert [row[0] for row in pages.rows("seeds")] == ["0 to 1,999"]


def test_a_result_of_another_command_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    pages = Pages(tmp_path)
    with pytest.raises(SystemExit, match=r"memory\.json has neither `first` nor `subject`"):
        pages.merge("memory.json", requests=9)
    assert not (tmp_path / "seeds.json").exists()


def campaign(engines: str, part: str, made: int) -> dict[str, Any]:
    """The data of a page of ``dualpath chaos run``."""
    cell = {"component": "PE", "step": "reading", "fault": "hanging thread", "made": made}
    result = {
        "matrix": [cell | {"parts": {part: made}}],
        "outcomes": {"well": 40, "clear error": 1, "late": 0},
        **{"faults": made, "lost_to_single_fault": [], "leaks": ["a slot"], "problems": {"x": 2}},
        **{"wrong_kv": 0, "stale_kv": 1, "loaded_blocks": 5000},
    }
    settings = {"campaign": {"engines": engines}}
    runs = [{"cell": "campaign", "round": 0, "result": result}]
    return {"experiment": "chaos-run", "settings": settings, "runs": runs, "date": "2026-11-27"}


def test_campaigns_of_faults_of_parts_are_summed_by_part_and_listed(tmp_path: Path) -> None:
    pages = Pages(tmp_path)
    for name, engines, made in (("a", "emulated", 3), ("b", "vllm", 2), ("b", "vllm", 4)):
        data = campaign(engines, "thread MainThread", made)
        pages.merge(f"{name}.json", name=name, command=f"run {name}", data=data)
    assert pages.rows("parts-of-engines") == [
        ("thread of the HTTP server", "hangs", "PE", "3", "0"),
        ("thread of the engine core", "hangs", "PE", "0", "4"),
    ]
    ended = ("40", "1", "0", "0", "0 / 0 / 0", "0", "3", "0", "1", "5,000")
    assert pages.rows("part-campaigns") == [
        ("a", "emulated", "3", *ended),
        ("b", "vLLM", "4", *ended),
        ("all", "", "7", "80", "2", "0", "0", "0 / 0 / 0", "0", "6", "0", "2", "10,000"),
    ]
    assert pages.rows("part-commands") == [("a", "`run a`"), ("b", "`run b`")]


def test_results_of_fuzzing_have_their_own_table(tmp_path: Path) -> None:
    pages = Pages(tmp_path)
    sizes = {"warm_bytes": 0, "end_bytes": 1 << 20}
    counts = {"seed": 5, "count": 4000, "outcomes": {"refused": 3999, "taken": 1}}
    pages.merge("f.json", subject="traces", findings=[], findings_total=0, **counts, **sizes)
    assert pages.rows("fuzz") == [
        ("traces", "5", "4,000", "3,999 refused, 1 taken", "0", "+1.0"),
    ]
    assert not (tmp_path / "seeds.json").exists()
