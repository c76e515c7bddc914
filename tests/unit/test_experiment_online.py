"""The online experiment: latencies at a rate, the search of rates, the report."""

import msgspec
import pytest
from tests.unit.test_experiments import LAB, measured, turn

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report.model import Table
from dualpath_lab.experiments.online import ONLINE, Point, Rate, draw, next_rate, point
from dualpath_lab.experiments.settings import JctSettings, OnlineSettings
from dualpath_sim.harness.experiment import Experiment, Page, Stage, one_stage
from dualpath_sim.harness.run import measure

SETTINGS = OnlineSettings(arrive_s=10.0)


class Serving:
    """Systems whose TTFT is 1 s up to their capacities in agents per second, and 3 s beyond.

    The runs in ``wrong``, by mode, give the other answer.
    """

    def __init__(self, capacities: dict[Mode, float], wrong: dict[Mode, int] | None = None) -> None:
        self.capacities = capacities
        self.wrong = wrong or {}

    def experiment(self) -> Experiment[OnlineSettings, Point]:
        def stages(settings: OnlineSettings, _: object) -> list[Stage[Rate, Point]]:
            runs: list[Rate] = []

            def run(rate: Rate, number: int) -> Point:
                runs.append(rate)
                index = sum(one.mode is rate.mode for one in runs) - 1
                meets = rate.agents_per_s <= self.capacities[rate.mode]
                ttft_s = 1.0 if meets is not (index == self.wrong.get(rate.mode)) else 3.0
                turns = (turn(4.0, ttft_s), turn(5.0, ttft_s))
                made = measured(rate.mode, 12.0, {"pe0": 1.0}, turns)
                return point(made, rate.agents_per_s, SETTINGS.arrive_s, LAB)

            made: list[Stage[Rate, Point]] = one_stage({}, run)
            (stage,) = made
            search = lambda runs: next_rate(settings, runs)  # noqa: E731
            return [msgspec.structs.replace(stage, next_cell=search)]

        return msgspec.structs.replace(ONLINE, stages=stages)


def search(serving: Serving, settings: OnlineSettings = SETTINGS) -> tuple[Page, list[str]]:
    jct = msgspec.structs.replace(settings.jct, mode=tuple(serving.capacities))
    said: list[str] = []
    own = msgspec.structs.replace(settings, jct=jct)
    return draw(measure(serving.experiment(), own, said.append)), said


def test_latencies_are_measured_after_the_system_has_filled_up() -> None:
    turns = (turn(0.0, 99.0), turn(3.0, 1.0), turn(9.0, 2.0), turn(10.5, 99.0))
    found = point(measured(Mode.DUALPATH, 12.0, {"pe0": 1.0}, turns), 0.5, 10.0, LAB)
    assert found.turns == 2
    assert found.ttft_s is not None
    assert found.ttft_s.mean == pytest.approx(1.5)
    assert found.meets(SETTINGS)
    slow = point(measured(Mode.DUALPATH, 12.0, {"pe0": 1.0}, (turn(5.0, 3.0),)), 0.6, 10.0, LAB)
    assert not slow.meets(SETTINGS)


def test_every_mode_is_searched_and_its_bracket_rates_and_ratio_are_drawn() -> None:
    page, said = search(Serving({Mode.BASIC: 0.35, Mode.DUALPATH: 1.25}))
    capacities, latencies = page.tables
    assert capacities.rows == (
        ("basic", "0.336", "0.367", "7", "1.00", ""),
        ("dualpath", "1.23", "1.35", "8", "3.67", ""),
    )
    assert _rates(latencies, "basic") == ["0.4", "0.2", "0.283", "0.336", "0.367", "0.336", "0.367"]
    assert said[0] == "basic at 0.4 agents/s: mean TTFT 3.00 s, machine 50% busy"
    assert len(said) == len(latencies.rows)
    ttft = page.panels[0].series[1]
    assert list(ttft.x) == sorted(ttft.x)
    assert [result.tolerance for result in page.results] == [0.1, 0.1, 0.2]


def test_a_bracket_that_does_not_hold_and_an_open_one_have_a_remark() -> None:
    page, _ = search(
        Serving({Mode.BASIC: 0.01, Mode.DUALPATH: 0.9, Mode.ORACLE: 99.0}, wrong={Mode.DUALPATH: 1})
    )
    rows = {row[0]: row for row in page.tables[0].rows}
    assert rows["basic"][1:3] == ("-", "0.05")
    assert rows["basic"][-1] == "no tried rate is within the SLO"
    assert rows["dualpath"][-1] == "the first run at 0.8 was overturned"
    assert rows["oracle"][1:3] == ("1.6", "-")
    assert rows["oracle"][-1] == "the highest allowed rate is within the SLO"
    few = msgspec.structs.replace(SETTINGS, most_runs=3)
    page, _ = search(Serving({Mode.SPLIT: 1.0}), few)
    assert page.tables[0].rows[0][-1] == "not narrowed to the end: the limit of runs was reached"


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
