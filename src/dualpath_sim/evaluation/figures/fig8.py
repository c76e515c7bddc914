"""Fig. 8: JCT against the prefill-decode ratio, DS 27B."""

from dualpath.core.modes import Mode
from dualpath.report.model import Panel
from dualpath_sim.evaluation.report import Compared, FigureReport
from dualpath_sim.evaluation.runs import Runs
from dualpath_sim.evaluation.settings import DS_27B, RunSpec
from dualpath_sim.evaluation.speedups import JctTriple, jct_panel, jct_table, mean, triple

TITLE = "Offline inference: prefill-decode ratio (DS 27B)"
SHAPES = ((1, 1), (2, 1), (1, 2))
WORKLOAD = "64K"
DISCUSSION = """\
The order of the shapes, the largest speed-up and two pairs of equal storage agree with the paper.
The third pair differs because of the DE buffers: 80 GB per node (§A.4) hold about 110 prompts of
this model, and the single decode node of 2P1D can have no more requests in flight.

If the three pairs were exactly equal, the speed-up of 1P2D would be the product of the other two,
so that with 2.46x for 1P2D the mean of the three could not be below 1.87x. A mean of 1.64x needs
settings with a smaller gain, which the text does not name; here the mean is over 64K and the batch
sizes of §7.5.
"""


def build(runs: Runs) -> FigureReport:
    """Run three shapes at each batch size in three modes."""
    settings = runs.settings
    triples = {
        (shape, agents): triple(
            runs,
            RunSpec(system=DS_27B, mode=Mode.BASIC, workload=WORKLOAD, agents=agents, nodes=shape),
            (_name(shape), f"{agents:,}"),
        )
        for agents in settings.ablation_agents
        for shape in SHAPES
    }
    return FigureReport(
        name="fig8",
        title=TITLE,
        evaluation=settings,
        settings=(
            f"DS 27B, {WORKLOAD}, agents {', '.join(map(str, settings.ablation_agents))}, all at "
            "once; pairs are compared by the mean over the batch sizes.",
        ),
        tables=(jct_table("JCT", ("nodes", "agents"), triples.values()),),
        panels=tuple(_panel(triples, agents) for agents in settings.ablation_agents),
        compared=_compared(triples, settings.ablation_agents),
        discussion=DISCUSSION,
    )


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}P{shape[1]}D"


Triples = dict[tuple[tuple[int, int], int], JctTriple]


def _compared(triples: Triples, batches: tuple[int, ...]) -> tuple[Compared, ...]:
    speedups = [one.speedup for one in triples.values()]

    def basic_s(shape: tuple[int, int], agents: int) -> float:
        return triples[shape, agents].basic_s

    def dualpath_s(shape: tuple[int, int], agents: int) -> float:
        return triples[shape, agents].dualpath_s

    return (
        Compared("fig8.speedup_mean", mean(speedups)),
        Compared("fig8.speedup_max", max(speedups)),
        Compared(
            "fig8.basic_1p1d_1p2d", mean(basic_s((1, 1), n) / basic_s((1, 2), n) for n in batches)
        ),
        Compared(
            "fig8.dualpath_1p1d_basic_2p1d",
            mean(dualpath_s((1, 1), n) / basic_s((2, 1), n) for n in batches),
        ),
        Compared(
            "fig8.dualpath_2p1d_1p2d",
            mean(dualpath_s((2, 1), n) / dualpath_s((1, 2), n) for n in batches),
        ),
    )


def _panel(triples: Triples, agents: int) -> Panel:
    chosen = [triples[shape, agents] for shape in SHAPES]
    names = [one.label[0] for one in chosen]
    return jct_panel(f"{agents:,} agents", "grouped", "nodes", names, chosen)
