"""What the model may lack: candidates for the online residuals, slower prefill for DS 27B."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import Table, cell
from dualpath_sim.evaluation.report import FigureReport, exact, quantity
from dualpath_sim.evaluation.runs import Runs
from dualpath_sim.evaluation.serving import WORKLOAD, bisected, meets_slo, online_spec, ratio
from dualpath_sim.evaluation.settings import (
    DS_27B,
    DS_660B,
    MAIN_MODES,
    EvaluationSettings,
    RunSpec,
)
from dualpath_sim.evaluation.speedups import mean

TTFT_APS, LOW_APS, HIGH_APS = 0.4, 0.1, 0.45
#: Lowest rate looked at; a system that misses the SLO there has no capacity worth the name.
LEAST_APS = 0.05
#: Long enough for the rule of §7.4 and for agents to end after it; shorter than the figures'.
HORIZON_S = 4000.0
OTHER_LENGTH = "48K"
#: Bytes/s of a storage NIC at which slower prefill leaves the largest speed-up where it is.
SLOW_STORAGE = 28e9
#: Steps of proportion that find a factor to within a percent.
_STEPS = 4
_LARGEST_FACTOR = 4.0


class Candidate(NamedTuple):
    """One change, or several together."""

    title: str
    generator: tuple[tuple[str, Any], ...] = ()
    overrides: tuple[tuple[str, Any], ...] = ()
    prefill_slowdown: float = 1.0
    interleaved: bool | None = None
    unseen_generation: float = 1.0

    def of(self, spec: RunSpec) -> RunSpec:
        """Return ``spec`` with the change."""
        return msgspec.structs.replace(
            spec,
            generator=self.generator,
            overrides=self.overrides,
            prefill_slowdown=self.prefill_slowdown,
            interleaved=self.interleaved,
            unseen_generation=self.unseen_generation,
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate gives; rates per second, times in seconds, all of DualPath but Basic's."""

    title: str
    basic_aps: float
    dualpath_aps: float
    ttft_s: float | None
    low_jct_s: float | None
    high_jct_s: float | None
    offline_s: float
    offline_other_s: float
    speedup: float

    @property
    def ratio(self) -> float | None:
        """Capacity of DualPath over Basic's; None without any."""
        return ratio([self.basic_aps, self.dualpath_aps])


MODEL = Candidate("the model")
WORKLOADS = (
    Candidate("appends vary less (sigma 0.5 for 1.4)", generator=(("append_sigma", 0.5),)),
    Candidate("first prompts 30 % of the total", generator=(("first_prompt_share", 0.3),)),
    Candidate("turns uniform", generator=(("tail", "uniform"),)),
    Candidate("turns lognormal", generator=(("tail", "lognormal"),)),
    Candidate("1.7x generation, not kept in context", unseen_generation=1.7),
)
PATHS = (
    Candidate("groups fetch every 0.5 s", overrides=(("fetch_interval_s", 0.5),)),
    Candidate("0.7 s between client and scheduler", overrides=(("request_overhead_s", 0.7),)),
    Candidate("exchange not hidden (one micro-batch)", interleaved=False),
    Candidate("compute quota 1 s for 0.3 s", overrides=(("compute_quota_s", 1.0),)),
)


def outcomes(runs: Runs) -> list[Outcome]:
    """Return the model's numbers and every candidate's; with ``quick`` settings of a few."""
    if runs.settings.quick:
        return [outcome(runs, candidate) for candidate in (MODEL, PATHS[1])]
    return [outcome(runs, one) for one in (MODEL, *WORKLOADS, *PATHS, *_slower(runs))]


def outcome(runs: Runs, candidate: Candidate) -> Outcome:
    """Run one candidate online and offline."""
    ttft, low, high = (
        runs.online(candidate.of(_online(runs.settings, Mode.DUALPATH, rate)))
        for rate in (TTFT_APS, LOW_APS, HIGH_APS)
    )
    offline_s = offline_jct_s(runs, candidate, Mode.DUALPATH)
    return Outcome(
        title=candidate.title,
        basic_aps=capacity(runs, candidate, Mode.BASIC),
        dualpath_aps=capacity(runs, candidate, Mode.DUALPATH),
        ttft_s=ttft.ttft.mean,
        low_jct_s=low.agent_jct,
        high_jct_s=high.agent_jct,
        offline_s=offline_s,
        offline_other_s=offline_jct_s(runs, candidate, Mode.DUALPATH, OTHER_LENGTH),
        speedup=offline_jct_s(runs, candidate, Mode.BASIC) / offline_s,
    )


def capacity(runs: Runs, candidate: Candidate, mode: Mode) -> float:
    """Return the highest rate that meets the SLO, by bisection alone; 0 below ``LEAST_APS``."""

    def meets(rate: float) -> bool:
        return meets_slo(runs, candidate.of(_online(runs.settings, mode, rate)))

    limit = runs.settings.aps_limit(DS_660B)
    if not meets(LEAST_APS):
        return 0.0
    return limit if meets(limit) else bisected(meets, LEAST_APS, limit)


def offline_jct_s(runs: Runs, candidate: Candidate, mode: Mode, workload: str = WORKLOAD) -> float:
    """Return the JCT of the largest batch on 2P4D."""
    agents = runs.settings.offline_agents[-1]
    spec = RunSpec(system=DS_660B, mode=mode, workload=workload, agents=agents)
    return runs.offline(candidate.of(spec)).jct_s


def _online(settings: EvaluationSettings, mode: Mode, rate: float) -> RunSpec:
    return online_spec(settings, DS_660B, mode, rate, horizon_s=min(HORIZON_S, settings.horizon_s))


def _slower(runs: Runs) -> list[Candidate]:
    """Return machines slowed down until they meet a number of the paper elsewhere."""

    def jct_factor(factor: float) -> float:
        slowed = Candidate("", prefill_slowdown=factor)
        return 3167.0 / offline_jct_s(runs, slowed, Mode.DUALPATH, OTHER_LENGTH)

    def capacity_factor(factor: float) -> float:
        slowed = Candidate("", prefill_slowdown=factor)
        # Near its limit a capacity falls faster than in proportion.
        found: float = (capacity(runs, slowed, Mode.DUALPATH) / HIGH_APS) ** 0.5
        return found

    jct = _found(jct_factor, 1.0)
    online = _found(capacity_factor, jct)
    whole = f"prefill {jct:.2f}x slower, storage NICs 28 GB/s"
    storage = (("snic_bytes_per_s", SLOW_STORAGE), ("snic_write_bytes_per_s", SLOW_STORAGE))
    return [
        Candidate("storage NICs 28 GB/s", overrides=storage),
        Candidate(f"prefill {jct:.2f}x slower (3,167 s is 48K)", prefill_slowdown=jct),
        Candidate(f"prefill {online:.2f}x slower (0.45 APS)", prefill_slowdown=online),
        Candidate(whole, overrides=storage, prefill_slowdown=jct),
        Candidate(
            f"{whole}, 1.7x generation",
            overrides=storage,
            prefill_slowdown=jct,
            unseen_generation=1.7,
        ),
    ]


def _found(change: Callable[[float], float], factor: float) -> float:
    """Return the factor that needs least change, of a few reached in proportion."""
    tried: dict[float, float] = {}
    for _ in range(_STEPS):
        factor = round(min(max(factor, 1.0), _LARGEST_FACTOR), 2)
        tried[factor] = change(factor)
        factor *= tried[factor]
    return min(tried, key=lambda one: abs(tried[one] - 1))


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


def _small_table(found: list[SmallModel]) -> Table:
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


TITLE = "What the model may lack"
DISCUSSION = """\
The columns show the online numbers that the model misses and the offline numbers that it was
fitted to. The paper's row has "3,167 ?" in both offline columns because Table 3 does not name the
length.

**Workload.** Table 2 does not give the spread of appends. Of all candidates that leave DualPath
unchanged, this spread moves Basic's capacity most. Larger first prompts have nearly the same
effect and meet Basic's 0.20; the distribution of turns has a small one. No candidate of the
workload lowers DualPath's capacity by more than 0.05.

**Generation.** If a part of the generated tokens does not stay in the context (157 turns of 176
tokens are 1.7 times what fits, see Fig. 11), completion times rise by 60 %. That explains most of
the completion time at 0.45 APS and is too much at 0.1 APS. Capacity hardly changes, since prefill
determines it.

**Delays.** A fetch interval or a request path of some tenths of a second is added to every TTFT
and changes nothing else. 0.7 s gives a TTFT of 1.6 s at 0.4 APS and does not lower capacity.

**Prefill.** Without a second micro-batch, the times of exchange and computation add up; this costs
a tenth of capacity. A quota of 1 s costs a quarter of capacity, at a TTFT of 2.0 s, because during
long passes every engine waits for the slowest. It nearly gives the paper's online numbers of
DualPath, and none of its offline ones.

**A slower machine.** Both of the paper's systems serve fewer agents than the model's. DualPath's
capacity is 0.45 if prefill is slowed by a factor just below 1.6; the offline JCT at 64K is 4,800 s
then. If 3,167 s is the JCT at 48K, a factor of 1.5 meets it, together with a capacity of 0.48 APS
and a TTFT near 1.7 s. This factor lowers the speed-up at 64K to 1.5x, and storage NICs at 28 GB/s
raise it to 1.87x again. So one machine, with prefill 1.5 times slower and storage at 28 of 50
GB/s, meets JCT, largest speed-up, DualPath's capacity and its TTFT at once; only Basic's capacity
is a tenth too low then. An argument against this machine: §7.2 says that 3FS saturates the NIC of
50 GB/s. Arguments for it: if 3,167 s is at 48K, Basic takes 1.87 times as long and its two nodes
read 37 GB/s, close to the 41 GB/s at which the paper's Basic fails online; at 64K they read 71
GB/s, and that failure is unexplained. And Fig. 15 counts prompt tokens per second in units of 1e7,
which suits 48K.

**DS 27B.** All prefill times are doubled in addition to the fitted factor (0.36 of the GPU's
rates). No factor meets all numbers: those of Fig. 8 cannot all hold in one setting.
"""
#: Capacities on the paper's grid; mean completion times follow from §8.2 (Fig. 11).
_PAPER = (
    *("paper", "0.20", "0.45", "2.25x"),
    *("1.74", "616", "1,352"),
    *("3,167 ?", "3,167 ?", "1.87x"),
)


def build(runs: Runs) -> FigureReport:
    """Run every candidate, and DS 27B at every factor."""
    found, small = outcomes(runs), slower(runs)
    return FigureReport(
        name="candidates",
        title=TITLE,
        evaluation=runs.settings,
        settings=(
            "None of this enters a figure. DS 660B on 2P4D, 64K, one change at a time; online as "
            f"in Fig. 10 with a horizon of {HORIZON_S:,.0f} s, offline with "
            f"{runs.settings.offline_agents[-1]:,} agents. DS 27B as in Fig. 7 and 8.",
        ),
        tables=(_table(found), _small_table(small)),
        results=exact(
            {
                f"{one.title}: {what}": number
                for one in found
                for what, number in (
                    ("APS, DualPath to Basic", one.ratio),
                    ("offline JCT, s", one.offline_s),
                    ("speed-up", one.speedup),
                )
            }
            | {
                f"DS 27B, prefill times x{one.factor:g}: speed-up": one.fig7_speedup
                for one in small
            }
        ),
        discussion=DISCUSSION,
    )


def _table(found: list[Outcome]) -> Table:
    columns = (
        "change",
        "Basic, APS",
        "DualPath, APS",
        "ratio",
        "TTFT at 0.4, s",
        "JCT at 0.1, s",
        "JCT at 0.45, s",
        "offline 64K, s",
        "offline 48K, s",
        "speed-up 64K",
    )
    rows = tuple(
        (
            one.title,
            f"{one.basic_aps:.2f}",
            f"{one.dualpath_aps:.2f}",
            quantity(one.ratio, "x"),
            cell(one.ttft_s, "{:.2f}"),
            cell(one.low_jct_s, "{:,.0f}"),
            cell(one.high_jct_s, "{:,.0f}"),
            cell(one.offline_s, "{:,.0f}"),
            cell(one.offline_other_s, "{:,.0f}"),
            quantity(one.speedup, "x"),
        )
        for one in found
    )
    return Table("Candidates for the online residuals", columns, (_PAPER, *rows))
