"""Online serving on shaped links (§7.4): the highest arrival rate within an SLO, and latencies.

Each mode's capacity is found by bisection. All runs have the same agents and the same pattern of
arrivals, stretched to the rate, so that two runs differ only in the rate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Panel, Series, Table, cell
from dualpath.workload.replay.client import ReplayOptions
from dualpath.workload.replay.result import Distribution, TurnRecord, distribution
from dualpath_lab.experiments.jct import agents_of, lab_run_of, setting_lines, spoilt
from dualpath_lab.experiments.runs import (
    LabResult,
    Measured,
    lab_result,
    link_lines,
    load_lines,
    too_busy,
)
from dualpath_lab.experiments.settings import OnlineSettings
from dualpath_lab.experiments.workload import windows
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.evaluation.serving import RateSearch, within
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    Page,
    Progress,
    RawData,
    Run,
    Stage,
)

#: Share of the arrival time that is not measured, as the system fills up.
_FILLING = 0.3


class Rate(NamedTuple):
    """A mode at an arrival rate."""

    mode: Mode
    agents_per_s: float


class Point(LabResult, frozen=True, kw_only=True, omit_defaults=True):
    """One rate in one mode: latencies in seconds of the turns that began in the measured time."""

    agents_per_s: float
    turns: int
    ttft_s: Distribution | None
    ttst_s: Distribution | None
    tpot_s: Distribution | None

    def meets(self, settings: OnlineSettings) -> bool:
        """Whether the SLO is met."""
        ttft, tpot = self.ttft_s, self.tpot_s
        return (
            ttft is not None
            and ttft.mean <= settings.ttft_slo_s
            and (tpot is None or tpot.mean <= settings.tpot_slo_s)
        )


class Searched(NamedTuple):
    """One mode: the search, and its runs in their order."""

    search: RateSearch
    points: Sequence[Point]


def _stages(settings: OnlineSettings, progress: Progress) -> Iterator[Stage[Rate, Point]]:
    lab = msgspec.structs.replace(settings.jct.lab, nodes=settings.jct.nodes[0])

    @contextmanager
    def open_lab() -> Iterator[Measure[Rate, Point]]:
        most = _agents(settings, settings.most_agents_per_s)
        agents = windows(msgspec.structs.replace(agents_of(settings.jct, lab), agents=most))
        with lab_run_of(settings.jct, lab, agents, progress) as lab_run:

            def run(rate: Rate, number: int) -> Point:
                options = ReplayOptions(
                    agents=_agents(settings, rate.agents_per_s),
                    agents_per_s=rate.agents_per_s,
                    seed=settings.jct.seed,
                )
                measured = lab_run.run(rate.mode, options)
                return point(measured, rate.agents_per_s, settings.arrive_s, lab, lab_run.links)

            yield run

    yield Stage({}, open_lab, lambda runs: next_rate(settings, runs))


def next_rate(settings: OnlineSettings, runs: Sequence[Run[Point]]) -> tuple[str, Rate] | None:
    """Return the rate to try now: modes are searched one after the other."""
    for mode in settings.jct.mode:
        points = [run.result for run in runs if run.result.mode is mode]
        rate = searched(settings, points).search.next_rate()
        if rate is not None:
            return f"{mode.value} at {rate:.4g} agents/s", Rate(mode, rate)
    return None


def searched(settings: OnlineSettings, points: Sequence[Point]) -> Searched:
    """Return the search of one mode's capacity after the runs so far."""
    search = RateSearch(
        settings.first_agents_per_s,
        within(settings.precision),
        least_rate=settings.least_agents_per_s,
        most_rate=settings.most_agents_per_s,
        agreeing_runs=settings.agreeing_runs,
        most_runs=settings.most_runs,
    )
    for one in points:
        # The rate that the search asked for; the recorded one is rounded.
        rate = search.next_rate()
        if rate is not None:
            search.answer(rate, one.meets(settings))
    return Searched(search, points)


def _agents(settings: OnlineSettings, rate: float) -> int:
    return max(round(rate * settings.arrive_s), 1)


def point(
    run: Measured,
    agents_per_s: float,
    arrive_s: float,
    lab: LabSettings,
    links: tuple[LinkReport, ...] = (),
) -> Point:
    """Return the latencies of turns that began in the measured part of the arrival time."""
    turns = [t for t in run.client.replay.turns if _FILLING * arrive_s <= t.start_s <= arrive_s]

    def over(of: Callable[[TurnRecord], float | None]) -> Distribution | None:
        return distribution(of(turn) for turn in turns)

    return Point(
        agents_per_s=agents_per_s,
        turns=len(turns),
        ttft_s=over(lambda turn: turn.ttft_s),
        ttst_s=over(lambda turn: turn.ttst_s),
        tpot_s=over(lambda turn: turn.tpot_s),
        **msgspec.structs.asdict(lab_result(run, lab, links)),
    )


def draw(raw: RawData[OnlineSettings, Point]) -> Page:
    """Draw every mode's capacity, and the latencies at every tried rate."""
    settings = raw.settings
    by_mode = {
        mode: [point for point in raw.results if point.mode is mode] for mode in settings.jct.mode
    }
    found = {mode: searched(settings, points) for mode, points in by_mode.items() if points}
    return Page(
        settings=(
            *setting_lines(settings.jct)[:-1],
            f"Poisson arrivals for {settings.arrive_s:g} s on {settings.jct.nodes[0]}, starting "
            f"with an empty system; latencies of turns that began after {_FILLING:.0%} of that "
            "time.",
            f"SLO: mean TTFT at most {settings.ttft_slo_s:g} s, mean TPOT at most "
            f"{settings.tpot_slo_s * 1e3:g} ms.",
            f"Rates by bisection from {settings.first_agents_per_s:g} agents/s, between "
            f"{settings.least_agents_per_s:g} and {settings.most_agents_per_s:g}, to "
            f"{settings.precision:.0%}; {settings.agreeing_runs} runs must agree on each end of "
            f"the bracket; at most {settings.most_runs} runs of a mode.",
            *link_lines(raw.results),
            *load_lines(raw, raw.results),
        ),
        tables=(_capacities(found), _latencies(settings, raw.results)),
        panels=tuple(
            _panel(raw.results, settings.jct.mode, name) for name in ("ttft_s", "ttst_s", "tpot_s")
        ),
        results=tuple(_key_results(found, settings.precision)),
        too_busy=too_busy(raw.results),
    )


def _key_results(found: Mapping[Mode, Searched], precision: float) -> Iterator[KeyResult]:
    """Yield each mode's capacity, within a step of its search, and its ratio to the first's."""
    first, *others = ((mode.value, one.search.bracket.met or None) for mode, one in found.items())
    yield KeyResult(f"{first[0]}: agents/s within the SLO", first[1], tolerance=precision)
    for mode, rate in others:
        yield KeyResult(f"{mode}: agents/s within the SLO", rate, tolerance=precision)
        yield KeyResult(
            f"{mode} relative to {first[0]}",
            rate / first[1] if rate and first[1] else None,
            tolerance=2 * precision,
            any_machine=True,
        )


def _capacities(found: Mapping[Mode, Searched]) -> Table:
    met = [search.bracket.met for search, _ in found.values() if search.bracket.met]
    rows = tuple(
        (
            mode.value,
            cell(search.bracket.met or None, "{:.3g}"),
            cell(search.bracket.missed, "{:.3g}"),
            str(len(points)),
            f"{search.bracket.met / min(met):.2f}" if met else NOTHING,
            remarks(search),
        )
        for mode, (search, points) in found.items()
    )
    columns = ("mode", "agents/s within the SLO", "missed it", "runs", "ratio", "remark")
    return Table("Capacity", columns, rows)


def remarks(search: RateSearch) -> str:
    """Describe why a bracket may not contain the capacity, and runs that were overturned."""
    bracket = search.bracket
    found = [f"the first run at {rate:.3g} was overturned" for rate in search.overturned]
    if search.cut_short:
        found.append("not narrowed to the end: the limit of runs was reached")
    if bracket.missed is None:
        found.append("the highest allowed rate is within the SLO")
    if not bracket.met:
        found.append("no tried rate is within the SLO")
    return "; ".join(found)


def _latencies(settings: OnlineSettings, points: Sequence[Point]) -> Table:
    rows = tuple(
        (
            p.mode.value,
            f"{p.agents_per_s:.3g}",
            str(p.turns),
            *_times(p.ttft_s, 1, "{:.2f}"),
            *_times(p.ttst_s, 1e3, "{:.0f}"),
            *_times(p.tpot_s, 1e3, "{:.1f}"),
            "yes" if p.meets(settings) else "no",
            f"{p.busy:.0%}",
        )
        for p in points
    )
    columns = (
        *("mode", "agents/s", "turns", "TTFT mean s", "p50 s", "p99 s"),
        *("TTST mean ms", "p50 ms", "p99 ms", "TPOT mean ms", "p50 ms", "p99 ms"),
        *("SLO met", "machine busy"),
    )
    return Table("Latencies, in the order of runs", columns, rows)


def _times(found: Distribution | None, factor: float, form: str) -> tuple[str, ...]:
    if found is None:
        return (NOTHING,) * 3
    return tuple(form.format(value * factor) for value in (found.mean, found.p50, found.p99))


def _panel(points: Sequence[Point], modes: Sequence[Mode], name: str) -> Panel:
    series = []
    for mode in modes:
        own = sorted((p for p in points if p.mode is mode), key=lambda p: p.agents_per_s)
        values = [getattr(p, name) for p in own]
        series.append(
            Series(
                mode.value,
                tuple(p.agents_per_s for p in own),
                tuple(None if value is None else value.mean for value in values),
            )
        )
    title = name.removesuffix("_s").upper()
    return Panel(f"Mean {title}", "lines", "agents/s", f"{title} (s)", tuple(series))


def _published(page: Page, settings: OnlineSettings) -> RawData[OnlineSettings, Point]:
    """Convert ``{"points": [point, …]}``."""
    runs: list[Run[Point]] = []
    for one in page.data["points"]:
        result = msgspec.convert({"jct_s": 0.0, **one}, Point)
        name = f"{result.mode.value} at {result.agents_per_s:.4g} agents/s"
        number = sum(run.cell == name for run in runs)
        runs.append(Run(cell=name, round=number, result=result))
    return RawData(experiment=ONLINE.name, settings=settings, runs=runs)


def _summary(one: Point) -> str:
    mean_s = one.ttft_s.mean if one.ttft_s else 0.0
    return f"mean TTFT {mean_s:.2f} s, machine {one.busy:.0%} busy"


ONLINE = Experiment(
    name="online",
    title="Online serving on shaped links",
    settings=OnlineSettings(),
    result=Point,
    stages=_stages,
    draw=draw,
    summary=_summary,
    too_busy=lambda settings, result: spoilt(settings.jct, result),
    fixed=("repeat", "vllm"),
    published=_published,
)
