"""Compares DualPath with other stacks in all regimes; draws one page of them.

    dualpath lab bench peers-matrix --out FOLDER --resume --peer NAME=ENVIRONMENT … [--only REGIME]

Faster cores make every stack faster, so runs of several processors are not mixed: give each its
own ``--name``.  The page names the regimes without runs.  A regime is a comparison
(``comparison``) with the same requirements.
"""

import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dualpath.core.settings import Settings
from dualpath.report.model import NOTHING, Table
from dualpath_lab.benchmarks.peers.comparison import (
    MIB,
    MODES,
    PACKAGES,
    PEERS_EXPERIMENT,
    Environments,
    Logs,
    OwnModes,
    PeersSettings,
    Repeats,
    Stack,
    hit_share,
    of_stack,
    own_stack,
    peers_stage,
    published,
    repeatable,
    session,
    stacks,
    summary_line,
)
from dualpath_lab.benchmarks.peers.one_run import RunRecord
from dualpath_lab.models.random_models import KV_BYTES
from dualpath_sim.harness.experiment import Experiment, Page, RawData

# ----------------------------------------------------------------------------------------- regimes
# The settings in which stacks are compared.


class MatrixSettings(Settings, frozen=True, kw_only=True):
    """The stacks that are compared in every regime."""

    peer: Environments = msgspec.field(default_factory=dict)
    modes: OwnModes = MODES
    repeats: Repeats = 1
    logs: Logs = ""


class Agents(enum.StrEnum):
    """Length of the agents' sessions, small enough for two cores."""

    SHORT = "short"
    LONG = "long"

    @property
    def settings(self) -> dict[str, int]:
        """Settings of the agents; the model's longest context is that of the longest agent."""
        return {
            Agents.SHORT: {
                "agents": 12, "turns": 8, "history": 512, "append": 48, "generate": 8,
                "max_model_len": 1152,
            },
            Agents.LONG: {
                "agents": 6, "turns": 60, "history": 192, "append": 6, "generate": 2,
                "max_model_len": 896,
            },
        }[self]  # fmt: skip


class Bound(enum.StrEnum):
    """The bottleneck of a cluster that reads all KV through its PE."""

    STORAGE = "storage"
    BALANCED = "balanced"
    COMPUTE = "compute"

    @property
    def snic_mb_per_s(self) -> float:
        """Bandwidth of a node's storage NIC; the rest of a turn takes 0.5 s on two cores."""
        return {Bound.STORAGE: 20.0, Bound.BALANCED: 48.0, Bound.COMPUTE: 400.0}[self]


class Fits(enum.StrEnum):
    """Share of the agents' final KV that fits a node's DRAM."""

    ALL = "all"
    QUARTER = "quarter"
    NOTHING = "nothing"

    def dram_bytes(self, working_set_bytes: int, context_bytes: int) -> float:
        """Return DRAM per node, at least the longest context, which passes through it."""
        share = {Fits.ALL: 1.25, Fits.QUARTER: 0.25, Fits.NOTHING: 0.0}[self]
        return max(share * working_set_bytes, context_bytes)


class Regime(msgspec.Struct, frozen=True):
    """One combination of settings; ``pauses``: a 1 s tool call before every turn but the first."""

    agents: Agents
    bound: Bound
    fits: Fits
    pauses: bool

    @property
    def name(self) -> str:
        """Name of the regime."""
        pauses = "pauses" if self.pauses else "no-pauses"
        return f"{self.agents}-{self.bound}-{self.fits}-{pauses}"

    def settings(self, chosen: MatrixSettings) -> PeersSettings:
        """Return the settings of the comparison."""
        made = PeersSettings(
            peer=chosen.peer,
            modes=chosen.modes,
            repeats=chosen.repeats,
            logs=chosen.logs,
            nodes="1P2D",
            hbm_mib=64,
            snic_mb_per_s=self.bound.snic_mb_per_s,
            pause_s=1.0 if self.pauses else 0.0,
            **self.agents.settings,
        )
        tokens = sum(session(made, n).trajectory.total_tokens for n in range(made.agents))
        longest_bytes = made.max_model_len * KV_BYTES
        dram_bytes = self.fits.dram_bytes(tokens * KV_BYTES, longest_bytes)
        return msgspec.structs.replace(made, dram_mib=math.ceil(dram_bytes / MIB))


def regimes() -> Iterator[Regime]:
    """Yield all regimes, the shortest ones first."""
    for agents, pauses in itertools.product(Agents, (False, True)):
        for bound, fits in itertools.product(Bound, Fits):
            yield Regime(agents, bound, fits, pauses)


# ------------------------------------------------------------------------------------------- page
# The page of all regimes: the fastest stack, the ratios, and each stack's bottleneck.

#: From this utilization on, a link or the cores count as the bottleneck.
_FULL = 0.85
_COLUMNS = (
    *("stack", "runs", "JCT s", "to DualPath", "TTFT p50 s", "TTFT p99 s", "hit tokens"),
    *("SNICs, MB read", "CNICs, MB in", "machine busy", "CPU-s", "waits for"),
    *("same outputs as DualPath", "turns failed"),
)

_DISCUSSION = """\
Each regime is a comparison as by `dualpath lab bench peers`;
`lab/dualpath_lab/benchmarks/peers/README.md` describes the stacks, what they have in common and
where they differ. Bytes are those of the measured turns, a number per node: prefill nodes, then
decode nodes.

"Waits for" lists the bottlenecks of a stack's own run: every storage NIC and compute NIC, and the
cores, with a utilization of at least 85 %. During pauses of the agents' tools nothing has to be
busy. Where the cores are the bottleneck, a stack may be faster on more cores."""


Raw = RawData[PeersSettings, RunRecord]


def of_regime(raw: RawData[MatrixSettings, RunRecord], regime: Regime) -> Raw:
    """Return the runs of one regime as those of a comparison."""
    runs = [
        msgspec.structs.replace(run, cell=run.result.stack)
        for run in raw.runs
        if run.cell == f"{regime.name} {run.result.stack}"
    ]
    return RawData(
        experiment=PEERS_EXPERIMENT.name,
        settings=regime.settings(raw.settings),
        runs=runs,
        machine=raw.machine,
        versions=raw.versions,
        date=raw.date,
    )


def draw(raw: RawData[MatrixSettings, RunRecord]) -> Page:
    """Draw the page of all regimes, which also names those without runs."""
    return draw_regimes({regime: [of_regime(raw, regime)] for regime in regimes()})


def draw_regimes(measured: Mapping[Regime, Sequence[Raw]]) -> Page:
    """Draw the page of runs on one or more processors."""
    with_runs = [(regime, one) for regime, found in measured.items() for one in found if one.runs]
    return Page(
        settings=_setting_lines(len(dict(with_runs)), len(measured)),
        tables=(_winners(measured), *(_regime_table(regime, one) for regime, one in with_runs)),
        results=tuple(
            result
            for regime, one in with_runs
            for result in repeatable(stacks(one.results), f"{regime.name} ")
        ),
        discussion=_DISCUSSION,
    )


def _setting_lines(run: int, regimes: int) -> tuple[str, ...]:
    return (
        "Real vLLM engines on CPU at 1P2D, links shaped by the kernel, a model of random weights "
        "with 32,768 bytes of KV per token in float32. Short agents: 12 with 8 turns; long ones: 6 "
        "with 60. DRAM per node holds 1.25 of their KV, a quarter, or only the longest "
        "context; storage NICs have 20, 48 or 400 MB/s; a pause is a second before a turn.",
        f"{run} of {regimes} regimes have been run. Compare only within a row: other "
        "processors are faster or slower.",
    )


def jct_by_regime(measured: Mapping[Regime, Sequence[Raw]]) -> Table:
    """Return the job completion times of every stack, the best one of a regime bold."""
    stack_names = {
        "DualPath (`split`)": "dualpath-split",
        "… with recomputation": "dualpath-split-recompute",
        "LMCache": "vllm-nixl-lmcache",
        "vLLM's offloading": "vllm-nixl-offloading",
        "Mooncake Store": "vllm-nixl-mooncake",
    }
    nics = {bound: f"{bound.snic_mb_per_s:g} MB/s" for bound in Bound}
    fits = {Fits.ALL: "all", Fits.QUARTER: "a quarter", Fits.NOTHING: "one context"}
    rows = []
    for regime, found in measured.items():
        for raw in found:
            times = {one.name: f"{one.jct_s:.1f}" for one in stacks(raw.results)}
            shown = [_stack_time(times, name) for name in stack_names.values()]
            best = min(float(one) for one in shown if one)
            rows.append(
                (
                    str(regime.agents.settings["turns"]),
                    nics[regime.bound],
                    fits[regime.fits],
                    "1 s a turn" if regime.pauses else "none",
                    "EPYC" if raw.machine and "EPYC" in raw.machine.cpu_model else "Xeon",
                    *(f"**{t}**" if t and float(t) == best else t or NOTHING for t in shown),
                )
            )
    heads = ("turns", "storage NICs", "DRAM per node holds", "tools", "cores", *stack_names)
    return Table("", heads, tuple(rows), align="lllllrrrrr")


def _stack_time(times: Mapping[str, str], stack: str) -> str:
    """Return a stack's time, of a variant of it where it has one, '' where it was not run."""
    found = [one for name, one in times.items() if name == stack or name.startswith(f"{stack}-dr")]
    return found[0] if found else ""


def _winners(measured: Mapping[Regime, Sequence[Raw]]) -> Table:
    columns = (
        *("agents", "bound by", "DRAM holds", "tools", "processor", "fastest", "JCT s"),
        *("DualPath's", "why"),
    )
    rows: list[tuple[str, ...]] = []
    for regime, found in measured.items():
        name = (regime.agents, regime.bound, regime.fits, "pauses" if regime.pauses else "none")
        run = [one for one in found if one.runs]
        rows += [(*name, _processor(one), *_fastest(one)) for one in run]
        if not run:
            rows.append((*name, NOTHING, "not run", *[NOTHING] * 3))
    return Table("Fastest stack", columns, tuple(rows), align="llllllrrl")


def _fastest(measured: Raw) -> tuple[str, str, str, str]:
    """Return the fastest stack, its JCT, DualPath's JCT, and the reason."""
    ranked = sorted(_without_failures(stacks(measured.results)), key=lambda stack: stack.jct_s)
    if not ranked:
        return "all had failed turns", NOTHING, NOTHING, NOTHING
    own, first = own_stack(ranked), ranked[0]
    own_jct = f"{own.jct_s:.1f}" if own else NOTHING
    return first.label, f"{first.jct_s:.1f}", own_jct, _why(ranked, own, measured)


def _without_failures(found: Sequence[Stack]) -> list[Stack]:
    """Return the stacks without failed turns, which would shorten their JCT."""
    return [stack for stack in found if not sum(run.turns_failed for run in stack.runs)]


def _why(ranked: Sequence[Stack], own: Stack | None, measured: Raw) -> str:
    """Return the bottlenecks of the fastest stack and of the one it is compared with."""
    first = ranked[0]
    other = ranked[1:2] if own in (None, first) else [own]
    return "; ".join(
        f"{stack.label} waits for {waits_for(stack, measured)}, "
        f"{sum(stack.typical.snic_bytes.values()) / 1e9:.2f} GB read, "
        f"{hit_share(stack.typical)} hits"
        for stack in (first, *(one for one in other if one is not None))
    )


def waits_for(stack: Stack, measured: Raw) -> str:
    """Return the bottlenecks of a stack's typical run."""
    run = stack.typical
    snic_bytes_per_s = measured.settings.snic_mb_per_s * 1e6
    cnic_bytes_per_s = measured.settings.cnic_gbit_per_s * 1e9 / 8
    uses = {f"storage at {n}": b / snic_bytes_per_s for n, b in run.snic_bytes.items()}
    uses |= {f"CNIC of {n}": b / cnic_bytes_per_s for n, b in run.cnic_in_bytes.items()}
    shares = {name: used_s / run.jct_s for name, used_s in uses.items()} | {"cores": run.busy}
    saturated = {name: share for name, share in shares.items() if share >= _FULL}
    if not saturated:
        return "nothing saturated"
    return ", ".join(f"{name} ({share:.0%})" for name, share in saturated.items())


def _regime_table(regime: Regime, measured: Raw) -> Table:
    found = stacks(measured.results)
    own = own_stack(found)
    rows = [of_stack(stack, own) | _waits(stack, measured) for stack in found]
    title = f"{regime.name}, {_processor(measured)}"
    return Table(title, _COLUMNS, tuple(tuple(row[name] for name in _COLUMNS) for row in rows))


def _waits(stack: Stack, measured: Raw) -> dict[str, str]:
    """Return a stack's bytes, CPU time and bottlenecks by column."""
    run = stack.typical
    return {
        "SNICs, MB read": _megabytes(run.snic_bytes),
        "CNICs, MB in": _megabytes(run.cnic_in_bytes),
        "CPU-s": f"{sum(run.cpu_s.values()):.0f}",
        "waits for": waits_for(stack, measured),
    }


def _megabytes(of_nodes: Mapping[str, int]) -> str:
    return " + ".join(f"{count / 1e6:.0f}" for count in of_nodes.values())


def _processor(measured: Raw) -> str:
    return measured.machine.cores if measured.machine is not None else NOTHING


def read_regimes(folder: Path) -> dict[Regime, list[Raw]]:
    """Return the published runs of every regime: a file per regime and processor model."""
    return {
        regime: [
            published(msgspec.json.decode(path.read_bytes()))
            for path in sorted(folder.glob(f"{regime.name}.*.json"))
        ]
        for regime in regimes()
    }


PEERS_MATRIX = Experiment(
    name="peers-matrix",
    title="DualPath and other stacks in every regime",
    settings=MatrixSettings(),
    result=RunRecord,
    stages=lambda settings, progress: [
        peers_stage(regime.settings(settings), f"{regime.name} ") for regime in regimes()
    ],
    draw=draw,
    repeat=lambda settings: settings.repeats,
    summary=summary_line,
    keep_going=True,
    packages=PACKAGES,
)
