"""The online experiment: latencies at a rate, the search of rates, the report."""

import msgspec
import pytest
from tests.unit.test_experiments import measured, turn

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report.model import Table
from dualpath_lab.experiments.online import Point, online_report, point, searched
from dualpath_lab.experiments.settings import JctSettings, OnlineSettings

SETTINGS = OnlineSettings(arrive_s=10.0)


class Serving:
    """A system with a TTFT of 1 s up to its capacity in agents per second, and 3 s beyond."""

    def __init__(self, mode: Mode, capacity: float, wrong: int | None = None) -> None:
        self.mode = mode
        self.capacity = capacity
        self.wrong = wrong
        self.runs = 0

    def at(self, rate: float) -> Point:
        meets = (rate <= self.capacity) is not (self.runs == self.wrong)
        self.runs += 1
        ttft_s = 1.0 if meets else 3.0
        run = measured(self.mode, 12.0, {"pe0": 1.0}, (turn(4.0, ttft_s), turn(5.0, ttft_s)))
        return point(run, rate, SETTINGS.arrive_s)


def test_latencies_are_measured_after_the_system_has_filled_up() -> None:
    turns = (turn(0.0, 99.0), turn(3.0, 1.0), turn(9.0, 2.0), turn(10.5, 99.0))
    found = point(measured(Mode.DUALPATH, 12.0, {"pe0": 1.0}, turns), 0.5, 10.0)
    assert found.turns == 2
    assert found.ttft_s is not None
    assert found.ttft_s.mean == pytest.approx(1.5)
    assert found.meets(SETTINGS)
    slow = point(measured(Mode.DUALPATH, 12.0, {"pe0": 1.0}, (turn(5.0, 3.0),)), 0.6, 10.0)
    assert not slow.meets(SETTINGS)


def test_every_mode_is_searched_and_its_bracket_rates_and_ratio_are_reported() -> None:
    errors: list[str] = []
    found = {
        mode: searched(SETTINGS, Serving(mode, capacity).at, errors.append)
        for mode, capacity in ((Mode.BASIC, 0.35), (Mode.DUALPATH, 1.25))
    }
    report = online_report(SETTINGS, "dualpath lab bench online", (), found)
    capacities, latencies = report.tables
    assert capacities.rows == (
        ("basic", "0.336", "0.367", "7", "1.00", ""),
        ("dualpath", "1.23", "1.35", "8", "3.67", ""),
    )
    assert _rates(latencies, "basic") == ["0.4", "0.2", "0.283", "0.336", "0.367", "0.336", "0.367"]
    assert errors[0] == "basic at 0.4 agents/s: TTFT 3.00 s, not within the SLO"
    assert len(errors) == len(latencies.rows)
    ttft = report.panels[0].series[1]
    assert list(ttft.x) == sorted(ttft.x)


def test_a_bracket_that_does_not_hold_and_an_open_one_have_a_remark() -> None:
    modes = (Mode.BASIC, Mode.DUALPATH, Mode.ORACLE, Mode.SPLIT)
    found = {
        Mode.BASIC: searched(SETTINGS, Serving(Mode.BASIC, 0.01).at),
        Mode.DUALPATH: searched(SETTINGS, Serving(Mode.DUALPATH, 0.9, wrong=1).at),
        Mode.ORACLE: searched(SETTINGS, Serving(Mode.ORACLE, 99.0).at),
        Mode.SPLIT: searched(
            msgspec.structs.replace(SETTINGS, most_runs=3), Serving(Mode.SPLIT, 1.0).at
        ),
    }
    settings = msgspec.structs.replace(
        SETTINGS, jct=JctSettings(nodes=("1P2D",), mode=modes, repeat=1)
    )
    rows = {row[0]: row for row in online_report(settings, "c", (), found).tables[0].rows}
    assert rows["basic"][1:3] == ("-", "0.05")
    assert rows["basic"][-1] == "no tried rate is within the SLO"
    assert rows["dualpath"][-1] == "the first run at 0.8 was overturned"
    assert rows["oracle"][1:3] == ("1.6", "-")
    assert rows["oracle"][-1] == "the highest allowed rate is within the SLO"
    assert rows["split"][-1] == "not narrowed to the end: the limit of runs was reached"


@pytest.mark.parametrize(
    ("change", "errors"),
    [
        ({"first_agents_per_s": 2.0}, "first_agents_per_s is 2, must be between"),
        ({"least_agents_per_s": 0.5}, r"least_agents_per_s \(0.5\)"),
        ({"jct": JctSettings(nodes=("1P1D", "1P2D"))}, "give one cluster for an online"),
    ],
)
def test_inconsistent_rates_and_several_clusters_are_refused(
    change: dict[str, object], errors: str
) -> None:
    with pytest.raises(ConfigError, match=errors):
        msgspec.structs.replace(SETTINGS, **change).check()


def _rates(table: Table, mode: str) -> list[str]:
    return [row[1] for row in table.rows if row[0] == mode]
