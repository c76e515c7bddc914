"""Online serving on shaped links (§7.4): the highest arrival rate within an SLO, and latencies.

A run ends when the agents that arrive in a fixed time are done, or by the paper's rule: when the
mean TTFT is steady or above its limit.

Each mode's capacity is found by bisection. All runs have the same agents and the same pattern of
arrivals, stretched to the rate, so that two runs differ only in the rate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Panel, Series, Table, cell
from dualpath.router.stages import Stage as RequestStage
from dualpath.workload.replay.client import ReplayOptions
from dualpath.workload.replay.result import Distribution, TurnRecord, distribution
from dualpath_lab.experiments.client import StageSample
from dualpath_lab.experiments.jct import agents_of, lab_run_of, setting_lines, spoilt
from dualpath_lab.experiments.runs import (
    LabResult,
    Measured,
    lab_result,
    link_lines,
    load_lines,
    too_busy,
)
from dualpath_lab.experiments.settings import Ends, OnlineSettings
from dualpath_lab.experiments.workload import windows
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.evaluation.runs import Ending, EndRule
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
#: The parts of TTFT in Fig. 12, and the router's stages of which each is the sum.
PARTS = {
    "scheduling": (RequestStage.ADMISSION, RequestStage.LOOKUP, RequestStage.QUEUE),
    "allocating": (RequestStage.BUFFER_WAIT,),
    "reading": (RequestStage.READ,),
    "prefill": (RequestStage.PREFILL,),
}


class Rate(NamedTuple):
    """A mode at an arrival rate."""

    mode: Mode
    agents_per_s: float


class Point(LabResult, frozen=True, kw_only=True, omit_defaults=True):
    """One rate in one mode: latencies in seconds of the turns in the measured time.

    ``parts`` are the mean seconds of the parts of TTFT, in the order of ``PARTS``; empty if they
    were not sampled.  ``ending`` is None if the run ended when all agents were done.
    """

    agents_per_s: float
    turns: int
    ttft_s: Distribution | None
    ttst_s: Distribution | None
    tpot_s: Distribution | None
    parts: tuple[float, ...] = ()
    ending: Ending | None = None

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
                measured = lab_run.run(
                    rate.mode, options, end_rule=end_rule(settings), longest_s=settings.longest_s
                )
                return point(measured, rate.agents_per_s, settings, lab, lab_run.links)

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
    return max(round(rate * settings.agents_arrive_s), 1)


def end_rule(settings: OnlineSettings) -> EndRule | None:
    """Return the rule that ends runs, None if they end when all agents are done."""
    if settings.ends is Ends.DONE:
        return None
    return EndRule(
        ttft_limit_s=settings.ttft_slo_s,
        window_s=settings.window_s,
        lookback_s=settings.lookback_s,
    )


def point(
    run: Measured,
    agents_per_s: float,
    settings: OnlineSettings,
    lab: LabSettings,
    links: tuple[LinkReport, ...] = (),
) -> Point:
    """Return the latencies in the measured time.

    They are those of turns that began in the measured part of the arrival time, or, if a rule
    ended the run, of turns whose first token came in the last window.
    """
    end, all_turns = run.client.ending, run.client.replay.turns
    if end is None:
        begin_s, end_s = _FILLING * settings.arrive_s, settings.arrive_s
        turns = [turn for turn in all_turns if begin_s <= turn.start_s <= end_s]
    else:
        begin_s, end_s = end.at_s - settings.window_s, end.at_s
        turns = [t for t in all_turns if begin_s < t.start_s + (t.ttft_s or 0.0) <= end_s]

    def over(of: Callable[[TurnRecord], float | None]) -> Distribution | None:
        return distribution(of(turn) for turn in turns)

    return Point(
        agents_per_s=agents_per_s,
        turns=len(turns),
        ttft_s=over(lambda turn: turn.ttft_s),
        ttst_s=over(lambda turn: turn.ttst_s),
        tpot_s=over(lambda turn: turn.tpot_s),
        parts=ttft_parts(run.client.stages, begin_s, end_s),
        ending=end,
        **msgspec.structs.asdict(lab_result(run, lab, links)),
    )


def ttft_parts(samples: Sequence[StageSample], begin_s: float, end_s: float) -> tuple[float, ...]:
    """Return the mean seconds of each part of TTFT between two times, in the order of ``PARTS``.

    They are per request that got its first token in that time.  A split read is two reads at the
    same time: if there were more reads than requests, the part is the mean of a read.  Empty if
    there are too few samples, or no request got its first token.
    """
    inside = [sample for sample in samples if begin_s <= sample.time_s <= end_s]
    if len(inside) < 2 or not (requests := inside[-1].first_tokens - inside[0].first_tokens):
        return ()
    first, last = inside[0], inside[-1]
    reads = last.counts.get(RequestStage.READ, 0.0) - first.counts.get(RequestStage.READ, 0.0)

    def mean_s(stages: Sequence[RequestStage]) -> float:
        spent_s = sum(last.seconds.get(s, 0.0) - first.seconds.get(s, 0.0) for s in stages)
        return spent_s / (max(requests, reads) if RequestStage.READ in stages else requests)

    return tuple(mean_s(stages) for stages in PARTS.values())


def draw(raw: RawData[OnlineSettings, Point]) -> Page:
    """Draw every mode's capacity, and the latencies at every tried rate."""
    settings = raw.settings
    by_mode = {
        mode: [point for point in raw.results if point.mode is mode] for mode in settings.jct.mode
    }
    found = {mode: searched(settings, points) for mode, points in by_mode.items() if points}
    return Page(
        settings=(
            *setting_lines(settings.jct, arriving=True)[:-1],
            _method(settings),
            f"SLO: mean TTFT at most {settings.ttft_slo_s:g} s, mean TPOT at most "
            f"{settings.tpot_slo_s * 1e3:g} ms.",
            f"Rates by bisection from {settings.first_agents_per_s:g} agents/s, between "
            f"{settings.least_agents_per_s:g} and {settings.most_agents_per_s:g}, to "
            f"{settings.precision:.0%}; {settings.agreeing_runs} runs must agree on each end of "
            f"the bracket; at most {settings.most_runs} runs of a mode.",
            *link_lines(raw.results),
            *load_lines(raw, raw.results),
        ),
        tables=(
            _capacities(found),
            _latencies(settings, raw.results),
            *([_parts_table(raw.results)] if any(p.parts for p in raw.results) else []),
        ),
        panels=(
            *(_panel(raw.results, settings.jct.mode, n) for n in ("ttft_s", "ttst_s", "tpot_s")),
            *_parts_panels(raw.results, settings.jct.mode),
        ),
        results=tuple(_key_results(found, settings.precision)),
        too_busy=too_busy(raw.results),
    )


def _method(settings: OnlineSettings) -> str:
    arrivals = f"Poisson arrivals on {settings.jct.nodes[0]}, starting with an empty system"
    if settings.ends is Ends.DONE:
        return (
            f"{arrivals}, for {settings.arrive_s:g} s; latencies of turns that began after "
            f"{_FILLING:.0%} of that time."
        )
    return (
        f"{arrivals}. A run ends when the mean TTFT over a sliding {settings.window_s:g} s exceeds "
        f"the limit, or is within {EndRule().variation:.0%} of what it was "
        f"{settings.lookback_s:g} s before, after {settings.longest_s:g} s at the latest; "
        "latencies are those of the last window."
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


def _parts_table(points: Sequence[Point]) -> Table:
    """Return the parts of TTFT (Fig. 12); the rest is HTTP, the messages to engines, retries."""
    rows = tuple(
        (
            p.mode.value,
            f"{p.agents_per_s:.3g}",
            *(f"{part:.3f}" for part in p.parts),
            f"{p.ttft_s.mean:.3f}",
            NOTHING if p.ending is None else f"{p.ending.rule}, {p.ending.at_s:.0f} s",
        )
        for p in points
        if p.parts and p.ttft_s is not None
    )
    columns = ("mode", "agents/s", *(f"{part} s" for part in PARTS), "TTFT mean s", "ended")
    return Table("Parts of TTFT, means in the order of runs", columns, rows)


def _parts_panels(points: Sequence[Point], modes: Sequence[Mode]) -> Iterator[Panel]:
    for mode in modes:
        # A rate that was run several times is drawn once, with its last run.
        own = {p.agents_per_s: p for p in points if p.mode is mode and p.parts}
        rates = sorted(own)
        names = tuple(f"{rate:.3g}" for rate in rates)
        series = tuple(
            Series(part, names, tuple(own[rate].parts[index] for rate in rates))
            for index, part in enumerate(PARTS)
        )
        if own:
            yield Panel(f"Parts of TTFT, {mode.value}", "stacked", "agents/s", "mean, s", series)


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
    fixed=("repeat",),
    published=_published,
)
