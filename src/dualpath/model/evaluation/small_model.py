"""DS 27B with slower prefill: how fast its GPUs may be for the paper's speed-ups (§7.3)."""

import msgspec

from dualpath.core.modes import Mode
from dualpath.model.evaluation.report import quantity
from dualpath.model.evaluation.runs import Runs
from dualpath.model.evaluation.settings import DS_27B, MAIN_MODES, RunSpec
from dualpath.model.evaluation.speedups import mean
from dualpath.report.model import Table

WORKLOAD = "64K"
SHAPES = ((1, 1), (2, 1), (1, 2))
FACTORS = (1.0, 2.0)


class SmallModel(msgspec.Struct, frozen=True, kw_only=True):
    """Fig. 7's and Fig. 8's numbers of DS 27B at one factor on its prefill times.

    ``speedups`` are those of ``SHAPES`` at each batch size.
    """

    factor: float
    speedups: tuple[float, ...]
    pairs: tuple[float, float, float]
    fig7_speedup: float
    to_oracle: float


def slower(runs: Runs) -> list[SmallModel]:
    """Return the numbers at every factor."""
    factors = FACTORS[:1] if runs.settings.quick else FACTORS
    return [_at(runs, factor) for factor in factors]


def _at(runs: Runs, factor: float) -> SmallModel:
    settings = runs.settings
    batches = settings.ablation_agents

    def jct_s(mode: Mode, agents: int, nodes: tuple[int, int], workload: str = WORKLOAD) -> float:
        spec = RunSpec(
            system=DS_27B,
            mode=mode,
            workload=workload,
            agents=agents,
            nodes=nodes,
            prefill_slowdown=factor,
        )
        return runs.offline(spec).jct_s

    def pair(one: tuple[Mode, tuple[int, int]], other: tuple[Mode, tuple[int, int]]) -> float:
        return mean(jct_s(one[0], n, one[1]) / jct_s(other[0], n, other[1]) for n in batches)

    largest = [
        [jct_s(mode, settings.offline_agents[-1], (1, 1), length) for mode in MAIN_MODES]
        for length in settings.lengths
    ]
    return SmallModel(
        factor=factor,
        speedups=tuple(
            jct_s(Mode.BASIC, agents, shape) / jct_s(Mode.DUALPATH, agents, shape)
            for agents in batches
            for shape in SHAPES
        ),
        pairs=(
            pair((Mode.BASIC, (1, 1)), (Mode.BASIC, (1, 2))),
            pair((Mode.DUALPATH, (1, 1)), (Mode.BASIC, (2, 1))),
            pair((Mode.DUALPATH, (2, 1)), (Mode.DUALPATH, (1, 2))),
        ),
        fig7_speedup=max(basic_s / ours_s for basic_s, ours_s, _ in largest),
        to_oracle=max(ours_s / oracle_s for _, ours_s, oracle_s in largest),
    )


def table(found: list[SmallModel]) -> Table:
    """Return one row per factor below the paper's."""
    columns = (
        "prefill times",
        "Fig. 8 mean",
        "Fig. 8 max",
        "Basic 1P1D / 1P2D",
        "DualPath 1P1D / Basic 2P1D",
        "DualPath 2P1D / 1P2D",
        "Fig. 7 max",
        "DualPath / Oracle max",
    )
    paper = ("paper", "1.64x", "2.46x", "≈ 1.00x", "≈ 1.00x", "≈ 1.00x", "1.78x", "1.85x")
    rows = tuple(
        (
            f"x{one.factor:g}",
            *(
                quantity(value, "x")
                for value in (
                    mean(one.speedups),
                    max(one.speedups),
                    *one.pairs,
                    one.fig7_speedup,
                    one.to_oracle,
                )
            ),
        )
        for one in found
    )
    return Table("DS 27B with slower prefill (Fig. 7: largest batch only)", columns, (paper, *rows))
