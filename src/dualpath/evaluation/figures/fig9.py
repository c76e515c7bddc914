"""Fig. 9: JCT against append length and generation length, DS 660B."""

from typing import Literal

from dualpath.core.modes import Mode
from dualpath.evaluation.report import Compared, FigureReport, Panel, Series, Statement
from dualpath.evaluation.runs import Runs
from dualpath.evaluation.settings import DS_660B, MODE_TITLES, RunSpec
from dualpath.evaluation.speedups import JctTriple, jct_table, triple

TITLE = "Offline inference: append and generation length (DS 660B)"
WORKLOAD = "64K"
Kind = Literal["append", "generation"]
DISCUSSION = """\
The factors of Fig. 9 are not in the text; 1 to 4 are taken. Scaled trajectories are cut at the
maximum length, so larger factors mean fewer turns. The text says two things that pull apart: that
Basic approaches DualPath as appends grow, and that the speed-up stays within 1.82 to 1.99; and
1.99 exceeds the 1.87 that §7.3 gives as the largest speed-up on DS 660B with unscaled appends.
"""


def build(runs: Runs) -> FigureReport:
    """Run each factor of append and of generation in three modes."""
    settings = runs.settings
    agents = settings.ablation_agents[0]
    append = [_triple(runs, agents, "append", factor) for factor in settings.scales]
    generation = [_triple(runs, agents, "generation", factor) for factor in settings.scales]
    speedups = [one.speedup for one in append]
    return FigureReport(
        name="fig9",
        title=TITLE,
        evaluation=settings,
        settings=(
            f"DS 660B on 2P4D, {WORKLOAD}, {agents:,} agents at once; lengths of every round "
            f"times {', '.join(f'{factor:g}' for factor in settings.scales)}, then cut at MAL.",
        ),
        tables=(
            jct_table("Append length", ("factor",), append),
            jct_table("Generation length", ("factor",), generation),
        ),
        panels=(
            _panel("Append length", append, settings.scales),
            _panel("Generation length", generation, settings.scales),
        ),
        compared=(
            Compared("fig9.append_speedup_low", min(speedups)),
            Compared("fig9.append_speedup_high", max(speedups)),
        ),
        statements=(_approaches("append", append), _approaches("generation", generation)),
        discussion=DISCUSSION,
        data={"append": append, "generation": generation},
    )


def _triple(runs: Runs, agents: int, kind: Kind, factor: float) -> JctTriple:
    spec = RunSpec(
        system=DS_660B,
        mode=Mode.BASIC,
        workload=WORKLOAD,
        agents=agents,
        append_scale=factor if kind == "append" else 1.0,
        generation_scale=factor if kind == "generation" else 1.0,
    )
    return triple(runs, spec, (f"x{factor:g}",))


def _approaches(kind: Kind, triples: list[JctTriple]) -> Statement:
    first, last = triples[0], triples[-1]
    return Statement(
        "§7.3",
        f"with {kind} length, Basic gradually approaches DualPath and Oracle",
        last.speedup < first.speedup,
        f"speed-up {first.speedup:.2f}x at {first.label[0]}, {last.speedup:.2f}x at "
        f"{last.label[0]}",
    )


def _panel(title: str, triples: list[JctTriple], scales: tuple[float, ...]) -> Panel:
    series = (
        Series(MODE_TITLES[Mode.BASIC], scales, tuple(one.basic_s for one in triples)),
        Series(MODE_TITLES[Mode.DUALPATH], scales, tuple(one.dualpath_s for one in triples)),
        Series(MODE_TITLES[Mode.ORACLE], scales, tuple(one.oracle_s for one in triples)),
    )
    return Panel(title, "lines", "factor", "JCT, s", series)
