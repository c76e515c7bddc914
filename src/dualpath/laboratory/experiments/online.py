"""Online serving on shaped links (§7.4): latencies against the arrival rate of agents, capacity."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.jct import agents_of, lab_run_of, setting_lines
from dualpath.laboratory.experiments.report import ExperimentReport
from dualpath.laboratory.experiments.run_lines import link_line, machine_lines, too_busy
from dualpath.laboratory.experiments.runs import Measured
from dualpath.laboratory.experiments.settings import OnlineSettings
from dualpath.laboratory.experiments.workload import windows
from dualpath.laboratory.workload.replay.metrics import distribution
from dualpath.laboratory.workload.replay.options import ReplayOptions
from dualpath.laboratory.workload.replay.result import Distribution, TurnRecord
from dualpath.report.model import NOTHING, Panel, Series, Table

#: Of the time in which agents arrive: what is before is the filling of an empty system.
_FILLING = 0.3


class Point(msgspec.Struct, frozen=True):
    """One rate in one mode: latencies of the turns that began in the measured time, in seconds."""

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


def measure_online(
    settings: OnlineSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Run every rate in every mode; raises as ``measure_jct``."""
    lab = msgspec.structs.replace(settings.jct.lab, nodes=settings.jct.nodes[0])
    most = max(round(max(settings.agents_per_s) * settings.arrive_s), 1)
    chosen = msgspec.structs.replace(agents_of(settings.jct, lab), agents=most)
    points: list[Point] = []
    runs: list[Measured] = []
    with lab_run_of(settings.jct, lab, windows(chosen), progress) as lab_run:
        for mode in settings.jct.mode:
            for rate in settings.agents_per_s:
                run = lab_run.run(mode, _options(settings, rate))
                runs.append(run)
                points.append(point(run, rate, settings.arrive_s))
                ttft_s = points[-1].ttft_s
                progress(
                    f"{mode.value} at {rate:g} agents/s: TTFT {ttft_s.mean if ttft_s else 0:.2f} s"
                )
                if not points[-1].meets(settings):
                    break
        lines = (link_line(lab_run.links), *machine_lines(runs))
    return _report(settings, command, lines, points)


def point(run: Measured, agents_per_s: float, arrive_s: float) -> Point:
    """Return the latencies of turns that began while agents arrived and the system was filled."""
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


def capacity(points: Sequence[Point], mode: Mode, settings: OnlineSettings) -> float:
    """Return the highest rate tried that met the SLO, 0 if none did."""
    met = [p.agents_per_s for p in points if p.mode is mode and p.meets(settings)]
    return max(met, default=0.0)


def _options(settings: OnlineSettings, rate: float) -> ReplayOptions:
    agents = max(round(rate * settings.arrive_s), 1)
    return ReplayOptions(agents=agents, agents_per_s=rate, seed=settings.jct.seed)


def _report(
    settings: OnlineSettings, command: str, lines: Sequence[str], points: Sequence[Point]
) -> ExperimentReport:
    return ExperimentReport(
        name=settings.jct.name,
        title="Online serving on shaped links",
        command=command,
        settings=(
            *setting_lines(settings.jct)[:-1],
            f"Poisson arrivals for {settings.arrive_s:g} s on {settings.jct.nodes[0]}, from an "
            f"empty system; latencies of turns that began after {_FILLING:.0%} of that time.",
            f"SLO: mean TTFT at most {settings.ttft_slo_s:g} s, mean TPOT at most "
            f"{settings.tpot_slo_s * 1e3:g} ms; rates above the first miss are not tried.",
            *lines,
        ),
        tables=(_latencies(settings, points), _capacities(settings, points)),
        panels=tuple(
            _panel(points, settings.jct.mode, name) for name in ("ttft_s", "ttst_s", "tpot_s")
        ),
        data={"points": points},
        too_busy=too_busy(points),
    )


def _latencies(settings: OnlineSettings, points: Sequence[Point]) -> Table:
    rows = tuple(
        (
            p.mode.value,
            f"{p.agents_per_s:g}",
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
        *("mode", "agents/s", "turns", "TTFT mean s", "p99 s", "TTST mean ms", "p99 ms"),
        *("TPOT mean ms", "p99 ms", "SLO met", "machine busy"),
    )
    return Table("Latencies", columns, rows)


def _times(found: Distribution | None, factor: float, form: str) -> tuple[str, str]:
    if found is None:
        return NOTHING, NOTHING
    return form.format(found.mean * factor), form.format(found.p99 * factor)


def _capacities(settings: OnlineSettings, points: Sequence[Point]) -> Table:
    found: Mapping[Mode, float] = {
        mode: capacity(points, mode, settings) for mode in settings.jct.mode
    }
    least = min((value for value in found.values() if value), default=0.0)
    rows = tuple(
        (mode.value, f"{value:g}", f"{value / least:.2f}" if least else NOTHING)
        for mode, value in found.items()
    )
    return Table("Capacity", ("mode", "agents/s within the SLO", "ratio"), rows)


def _panel(points: Sequence[Point], modes: Sequence[Mode], name: str) -> Panel:
    series = []
    for mode in modes:
        own = [p for p in points if p.mode is mode]
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
