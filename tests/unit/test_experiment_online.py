"""The online experiment: latencies at a rate, the search of rates, the report."""

import asyncio
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from tests.unit.test_experiments import LAB, measured, turn

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report.model import Table
from dualpath.workload.replay.client import ReplayOptions
from dualpath_lab.experiments import client
from dualpath_lab.experiments.client import ClientTask, StageSample, WatchedReplay, stage_sample
from dualpath_lab.experiments.online import (
    ONLINE,
    PARTS,
    Point,
    Rate,
    draw,
    end_rule,
    next_rate,
    point,
    ttft_parts,
)
from dualpath_lab.experiments.settings import Ends, JctSettings, OnlineSettings
from dualpath_sim.evaluation.runs import Ending, EndRule
from dualpath_sim.harness.experiment import Experiment, Page, RawData, Run, Stage, one_stage
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
                return point(made, rate.agents_per_s, SETTINGS, LAB)

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
    found = point(measured(Mode.DUALPATH, 12.0, {"pe0": 1.0}, turns), 0.5, SETTINGS, LAB)
    assert found.turns == 2
    assert found.ttft_s is not None
    assert found.ttft_s.mean == pytest.approx(1.5)
    assert found.meets(SETTINGS)
    slow = point(measured(Mode.DUALPATH, 12.0, {"pe0": 1.0}, (turn(5.0, 3.0),)), 0.6, SETTINGS, LAB)
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
        ({"ends": Ends.STEADY, "longest_s": 299.0}, "longest_s is 299, but a run can be steady"),
    ],
)
def test_inconsistent_rates_and_several_clusters_are_refused(
    change: dict[str, object], errors: str
) -> None:
    with pytest.raises(ConfigError, match=errors):
        msgspec.structs.replace(SETTINGS, **change).check()


# ------------------------------------------------------------------ runs that the rule of §7.4 ends

STEADY = OnlineSettings(ends=Ends.STEADY, window_s=20.0, lookback_s=40.0, ttft_slo_s=4.0)


class Router:
    """A router of which the requests spent 3 s each in the stages; it has answered ``requests``."""

    def __init__(self) -> None:
        self.requests = 0

    def get(self, url: str) -> "Router":
        assert url == "http://router/metrics"
        return self

    async def __aenter__(self) -> "Router":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def text(self) -> str:
        spent = {"lookup": 0.25, "queue": 0.25, "buffer_wait": 0.5, "read": 1.5, "prefill": 0.5}
        lines = [
            line
            for stage, each_s in spent.items()
            for line in (
                f'dualpath:stage_seconds_sum{{stage="{stage}"}} {each_s * self.requests}',
                f'dualpath:stage_seconds_count{{stage="{stage}"}} {float(self.requests)}',
                f'dualpath:stage_seconds_bucket{{stage="{stage}",le="1.0"}} 0.0',
            )
        ]
        return "\n".join([*lines, f"dualpath:time_to_first_token_seconds_count {self.requests}.0"])


async def watched(
    monkeypatch: pytest.MonkeyPatch,
    ttft_s: float,
    growth: float,
    longest_s: float = 900.0,
    until_s: float = 1200.0,
) -> tuple[WatchedReplay, bool]:
    """Replay turns that follow each other; the TTFT of turn n is ``growth``^n times the first's.

    Return the replay and whether it was ended before its last turn.
    """
    router = Router()
    cut = False

    async def replay(*_: object, partial: bool, each_turn: Any) -> str:
        nonlocal cut
        now_s, wait_s = 0.0, ttft_s
        try:
            while now_s < until_s:
                await asyncio.sleep(wait_s)
                router.requests += 1
                each_turn(turn(now_s, wait_s))
                now_s += wait_s
                wait_s *= growth
        except asyncio.CancelledError:
            assert partial
            cut = True
        return "result"

    monkeypatch.setattr(client, "replay", replay)
    task = ClientTask(
        endpoint="http://router",
        engines=2,
        trace="",
        options=ReplayOptions(),
        end_rule=end_rule(STEADY),
        longest_s=longest_s,
    )
    watch = WatchedReplay(cast(aiohttp.ClientSession, router), task)
    assert cast(str, await watch.run([])) == "result"
    return watch, cut


@pytest.mark.virtual_time
async def test_a_replay_ends_when_its_mean_ttft_is_steady(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, cut = await watched(monkeypatch, ttft_s=0.5, growth=1.0)
    assert cut
    assert watch.ending == Ending(60.0, "steady")
    parts = ttft_parts(watch.stages, 40.0, 60.0)
    assert dict(zip(PARTS, parts, strict=True)) == pytest.approx(
        {"scheduling": 0.5, "allocating": 0.5, "reading": 1.5, "prefill": 0.5}
    )


@pytest.mark.virtual_time
async def test_a_replay_ends_when_its_mean_ttft_is_above_the_limit_or_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, cut = await watched(monkeypatch, ttft_s=0.5, growth=1.1)
    assert cut
    assert watch.ending is not None
    assert watch.ending.rule == "TTFT above limit"
    watch, cut = await watched(monkeypatch, ttft_s=0.01, growth=1.001, longest_s=50.0)
    assert cut
    assert watch.ending == Ending(50.0, "horizon")


@pytest.mark.virtual_time
async def test_a_replay_that_is_done_before_the_rule_applies_returns_all_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, cut = await watched(monkeypatch, ttft_s=0.5, growth=1.0, until_s=15.0)
    assert not cut
    assert watch.ending is not None
    assert watch.ending.rule == "horizon"


def test_a_split_read_counts_once_in_the_parts_of_ttft() -> None:
    def at(time_s: float, requests: float) -> StageSample:
        spent = {"queue": 1.0 * requests, "read": 4.0 * requests}
        return StageSample(time_s, spent, {"read": 2 * requests}, requests)

    parts = ttft_parts([at(0.0, 0.0), at(10.0, 5.0), at(20.0, 25.0)], 10.0, 20.0)
    assert dict(zip(PARTS, parts, strict=True)) == {
        "scheduling": 1.0, "allocating": 0.0, "reading": 2.0, "prefill": 0.0,
    }  # fmt: skip
    assert ttft_parts([at(0.0, 0.0), at(10.0, 5.0)], 5.0, 20.0) == ()


def test_latencies_of_a_run_that_the_rule_ended_are_those_of_the_last_window() -> None:
    turns = (turn(10.0, 1.0), turn(41.0, 3.0), turn(55.0, 5.0), turn(58.0, 99.0))
    made = measured(Mode.BASIC, 70.0, {"pe0": 1.0}, turns)
    made = msgspec.structs.replace(
        made,
        client=msgspec.structs.replace(
            made.client,
            ending=Ending(60.0, "TTFT above limit"),
            stages=[
                StageSample(40.0, {}, {}, 0.0),
                StageSample(60.0, {"queue": 6.0, "read": 2.0}, {"read": 2.0}, 2.0),
            ],
        ),
    )
    found = point(made, 0.5, STEADY, LAB)
    assert found.turns == 2
    assert found.ttft_s is not None
    assert found.ttft_s.mean == pytest.approx(4.0)
    raw = RawData(
        experiment="online", settings=STEADY, runs=[Run(cell="basic", round=0, result=found)]
    )
    page = draw(raw)
    (parts,) = (table for table in page.tables if table.title.startswith("Parts of TTFT"))
    assert parts.rows == (
        ("basic", "0.5", "3.000", "0.000", "1.000", "0.000", "4.000", "TTFT above limit, 60 s"),
    )
    assert [panel.title for panel in page.panels][-1] == "Parts of TTFT, basic"
    assert any("within 5% of what it was 40 s before" in line for line in page.settings)


def test_totals_of_stages_are_read_from_the_routers_metrics() -> None:
    text = (
        "# TYPE dualpath:stage_seconds histogram\n"
        'dualpath:stage_seconds_bucket{stage="read",le="0.1"} 1.0\n'
        'dualpath:stage_seconds_sum{stage="read"} 2.5\n'
        'dualpath:stage_seconds_count{stage="read"} 4.0\n'
        "dualpath:time_to_first_token_seconds_count 3.0\n"
    )
    assert stage_sample(7.0, text) == StageSample(7.0, {"read": 2.5}, {"read": 4.0}, 3.0)


def test_only_a_steady_end_has_a_rule_and_its_limit_is_the_slo() -> None:
    assert end_rule(SETTINGS) is None
    assert end_rule(STEADY) == EndRule(ttft_limit_s=4.0, window_s=20.0, lookback_s=40.0)


def _rates(table: Table, mode: str) -> list[str]:
    return [row[1] for row in table.rows if row[0] == mode]
