"""Online serving on shaped links (§7.4): the highest arrival rate within an SLO, and latencies.

Each mode's capacity is found by bisection. All runs have the same agents and the same pattern of
arrivals, stretched to the rate, so that two runs differ only in the rate.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Panel, Series, Table, cell
from dualpath.workload.replay.client import ReplayOptions
from dualpath.workload.replay.result import Distribution, TurnRecord, distribution
from dualpath_lab.experiments.jct import agents_of, lab_run_of, setting_lines
from dualpath_lab.experiments.report import ExperimentReport
from dualpath_lab.experiments.runs import Measured, link_line, machine_lines, too_busy
from dualpath_lab.experiments.settings import OnlineSettings
from dualpath_lab.experiments.workload import windows
from dualpath_sim.evaluation.serving import RateSearch, within

#: Share of the arrival time that is not measured, as the system fills up.
_FILLING = 0.3


class Point(msgspec.Struct, frozen=True):
    """One rate in one mode: latencies in seconds of the turns that began in the measured time."""

    mode: Mode
    agents_per_s: float
    turns: int
    ttft_s: Distribution | None
    ttst_s: Distribution | None
    tpot_s: Distribution | None
    busy: float

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


def measure_online(
    settings: OnlineSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Search the capacity of every mode; raises as ``measure_jct``."""
    lab = msgspec.structs.replace(settings.jct.lab, nodes=settings.jct.nodes[0])
    most = _agents(settings, settings.most_agents_per_s)
    chosen = msgspec.structs.replace(agents_of(settings.jct, lab), agents=most)
    runs: list[Measured] = []

    def at(mode: Mode, rate: float) -> Point:
        agents = _agents(settings, rate)
        options = ReplayOptions(agents=agents, agents_per_s=rate, seed=settings.jct.seed)
        runs.append(lab_run.run(mode, options))
        return point(runs[-1], rate, settings.arrive_s)

    with lab_run_of(settings.jct, lab, windows(chosen), progress) as lab_run:
        found = {
            mode: searched(settings, partial(at, mode), progress) for mode in settings.jct.mode
        }
        lines = (link_line(lab_run.links), *machine_lines(runs))
    return online_report(settings, command, lines, found)


def searched(
    settings: OnlineSettings,
    at: Callable[[float], Point],
    progress: Callable[[str], None] = lambda text: None,
) -> Searched:
    """Search one mode's capacity; ``at`` runs it at a rate."""
    search = RateSearch(
        settings.first_agents_per_s,
        within(settings.precision),
        least_rate=settings.least_agents_per_s,
        most_rate=settings.most_agents_per_s,
        agreeing_runs=settings.agreeing_runs,
        most_runs=settings.most_runs,
    )
    points: list[Point] = []
    while (rate := search.next_rate()) is not None:
        points.append(found := at(rate))
        met = found.meets(settings)
        search.answer(rate, met)
        mean_s = found.ttft_s.mean if found.ttft_s else 0.0
        progress(
            f"{found.mode.value} at {rate:.3g} agents/s: TTFT {mean_s:.2f} s, "
            f"{'' if met else 'not '}within the SLO"
        )
    return Searched(search, points)


def _agents(settings: OnlineSettings, rate: float) -> int:
    return max(round(rate * settings.arrive_s), 1)


def point(run: Measured, agents_per_s: float, arrive_s: float) -> Point:
    """Return the latencies of turns that began in the measured part of the arrival time."""
    turns = [t for t in run.client.replay.turns if _FILLING * arrive_s <= t.start_s <= arrive_s]

    def over(of: Callable[[TurnRecord], float | None]) -> Distribution | None:
        return distribution(of(turn) for turn in turns)

    return Point(
        mode=run.mode,
        agents_per_s=agents_per_s,
        turns=len(turns),
        ttft_s=over(lambda turn: turn.ttft_s),
        ttst_s=over(lambda turn: turn.ttst_s),
        tpot_s=over(lambda turn: turn.tpot_s),
        busy=run.busy,
    )


def online_report(
    settings: OnlineSettings,
    command: str,
    lines: Sequence[str],
    found: Mapping[Mode, Searched],
) -> ExperimentReport:
    """Return the report; ``lines`` describe links and machine."""
    points = [p for mode in found.values() for p in mode.points]
    return ExperimentReport(
        name=settings.jct.name,
        title="Online serving on shaped links",
        command=command,
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
            *lines,
        ),
        tables=(_capacities(found), _latencies(settings, points)),
        panels=tuple(
            _panel(points, settings.jct.mode, name) for name in ("ttft_s", "ttst_s", "tpot_s")
        ),
        data={
            "points": points,
            "capacities": {
                mode.value: {
                    "bracket": search.bracket,
                    "overturned": search.overturned,
                    "cut_short": search.cut_short,
                }
                for mode, (search, _) in found.items()
            },
        },
        too_busy=too_busy(points),
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
