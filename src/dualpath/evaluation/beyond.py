"""Beyond the paper: what each addition gains over DualPath, on its settings and on real traces.

An addition is one entry of ``VARIANTS``: a mode and changed fields of ``ClusterSettings``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath.evaluation.report import NOTHING, FigureReport, Panel, Series, Table
from dualpath.evaluation.runs import Runs
from dualpath.evaluation.serving import METHOD, online_spec
from dualpath.evaluation.settings import DS_27B, DS_660B, QWEN_32B, RunSpec
from dualpath.evaluation.speedups import mean

TITLE = "What additions gain over DualPath"
DISCUSSION = """\
A gain is how much lower JCT (offline) or mean TTFT (online) is than DualPath's as the paper
describes it, same agents, same seed. Where DualPath is already bound by computation, no way of
reading can gain anything offline; the Oracle column bounds what is left.
"""
GIGABYTE = 1e9
ONLINE_APS = (0.2, 0.4)

#: Where each trace lies in the folder of real workloads.
TRACE_FILES = {
    "mini-swe": "mini_swe_gemini3/rounds_dev_dsv3tok.jsonl.xz",
    "claude-code": "kv_cache_tester/dev.jsonl.xz",
    "agentperf": "agentperf_local/traces.tar.xz",
}


class Variant(NamedTuple):
    """One addition."""

    title: str
    mode: Mode
    overrides: tuple[tuple[str, Any], ...] = ()

    def of(self, spec: RunSpec) -> RunSpec:
        """Return ``spec`` with the addition."""
        return msgspec.structs.replace(
            spec, mode=self.mode, overrides=(*spec.overrides, *self.overrides)
        )


FINISH_TIME = ("read_choice", "finish-time")
VARIANTS = (
    Variant("split read", Mode.SPLIT),
    Variant("side by finish time", Mode.DUALPATH, (FINISH_TIME,)),
    Variant("split, finish time", Mode.SPLIT, (FINISH_TIME,)),
    *(
        Variant(f"DRAM {size} GB", Mode.DUALPATH, (("dram_tier_bytes", size * GIGABYTE),))
        for size in (50, 200, 800)
    ),
)
BASE = Variant("DualPath", Mode.DUALPATH)
BOUND = Variant("Oracle", Mode.ORACLE)


class Gains(msgspec.Struct, frozen=True):
    """Seconds of DualPath and Oracle, and each variant's, in the order of ``VARIANTS``."""

    case: str
    base_s: float | None
    bound_s: float | None
    variants_s: tuple[float | None, ...]

    def gain(self, variant_s: float | None) -> float | None:
        """Return the share of DualPath's time that a variant saves."""
        if self.base_s is None or variant_s is None or not self.base_s:
            return None
        return 1 - variant_s / self.base_s


def existing_traces(folder: Path) -> dict[str, Path]:
    """Return the real traces that are there."""
    return {name: folder / file for name, file in TRACE_FILES.items() if (folder / file).is_file()}


def build(runs: Runs, traces: Mapping[str, Path]) -> FigureReport:
    """Run every case with every addition."""
    settings = runs.settings
    offline = [_offline_gains(runs, case, spec) for case, spec in _cases(runs, list(traces))]
    serving = [_online_gains(runs, rate) for rate in ONLINE_APS]
    absent = [name for name in TRACE_FILES if name not in traces]
    return FigureReport(
        name="beyond",
        title=TITLE,
        evaluation=settings,
        settings=(
            "Offline: all agents at once, no tool delays; additional agents of a trace are drawn "
            "as in §A.3, and sessions are cut at the model's context limit.",
            f"Online: DS 660B on 2P4D, 64K. {METHOD}",
            "DRAM: size per node of a cluster-wide cache between storage and buffers.",
            *((f"Not found and left out: {', '.join(absent)}.",) if absent else ()),
        ),
        tables=(
            _table("Offline: JCT", offline),
            _table("Online: mean TTFT", serving),
        ),
        panels=(_panel("Offline: JCT saved", offline),),
        discussion=DISCUSSION,
        data={"variants": [v.title for v in VARIANTS], "offline": offline, "online": serving},
    )


def _cases(runs: Runs, traces: Sequence[str]) -> list[tuple[str, RunSpec]]:
    """Return the paper's settings, then the real traces on the 2P4D cluster."""
    settings = runs.settings
    few, many = settings.ablation_agents
    base = RunSpec(system=DS_660B, mode=Mode.DUALPATH, agents=few)
    replace = msgspec.structs.replace
    cases = [
        (f"DS 660B 2P4D, {length}, {agents:,}", replace(base, workload=length, agents=agents))
        for length in settings.lengths
        for agents in (few, many)
    ]
    for shape in ((1, 1), (1, 2)):
        name = f"DS 27B {shape[0]}P{shape[1]}D, 64K, {few:,}"
        cases.append((name, replace(base, system=DS_27B, nodes=shape)))
    cases.append((f"Qwen 32B 1P2D, 64K, {few:,}", replace(base, system=QWEN_32B)))
    cases += [
        (f"DS 660B 2P4D, {trace}, {few:,}", replace(base, workload=trace)) for trace in traces
    ]
    return cases


def _offline_gains(runs: Runs, case: str, spec: RunSpec) -> Gains:
    def jct_s(variant: Variant) -> float:
        return runs.offline(variant.of(spec)).jct_s

    return Gains(case, jct_s(BASE), jct_s(BOUND), tuple(jct_s(variant) for variant in VARIANTS))


def _online_gains(runs: Runs, rate: float) -> Gains:
    spec = online_spec(runs.settings, DS_660B, Mode.DUALPATH, rate)

    def ttft_s(variant: Variant) -> float | None:
        return runs.online(variant.of(spec)).ttft.mean

    return Gains(
        f"DS 660B 2P4D, 64K, {rate:g} APS",
        ttft_s(BASE),
        ttft_s(BOUND),
        tuple(ttft_s(variant) for variant in VARIANTS),
    )


def _table(title: str, gains: Sequence[Gains]) -> Table:
    columns = ("setting", "DualPath", *(v.title for v in VARIANTS), "Oracle")
    rows = [
        (
            one.case,
            _seconds(one.base_s),
            *(_percent(one.gain(seconds)) for seconds in one.variants_s),
            _percent(one.gain(one.bound_s)),
        )
        for one in gains
    ]
    rows.append(("mean", "", *_means(gains)))
    return Table(f"{title}, and how much of it each addition saves", columns, tuple(rows))


def _means(gains: Sequence[Gains]) -> list[str]:
    columns = [[one.gain(one.variants_s[i]) for one in gains] for i in range(len(VARIANTS))]
    columns.append([one.gain(one.bound_s) for one in gains])
    known = [[value for value in column if value is not None] for column in columns]
    return [_percent(mean(values) if values else None) for values in known]


def _panel(title: str, gains: Sequence[Gains]) -> Panel:
    names = tuple(str(index + 1) for index in range(len(gains)))
    series = tuple(
        Series(variant.title, names, tuple(_scaled(one.gain(one.variants_s[i])) for one in gains))
        for i, variant in enumerate(VARIANTS)
    )
    return Panel(title, "grouped", "row of the table", "saved, %", series, from_zero=False)


def _scaled(gain: float | None) -> float | None:
    return None if gain is None else 100 * gain


def _percent(gain: float | None) -> str:
    return NOTHING if gain is None else f"{gain:+.1%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3f} s"
