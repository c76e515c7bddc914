"""Beyond the paper: what each addition gains over DualPath, on its settings and on real traces.

An addition is one entry of ``VARIANTS``: a mode and changed fields of ``ClusterSettings``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import DualPathError
from dualpath.core.modes import Mode
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.report.model import Panel, Series, Table, cell
from dualpath_sim.catalog.costs import DEFAULT_GPU
from dualpath_sim.catalog.load import load_gpu, load_model
from dualpath_sim.evaluation.planner import reshaped
from dualpath_sim.evaluation.report import FigureReport, exact, quantity
from dualpath_sim.evaluation.runs import Runs
from dualpath_sim.evaluation.serving import METHOD, online_spec
from dualpath_sim.evaluation.settings import DS_27B, DS_660B, QWEN_32B, EvaluationSettings, RunSpec
from dualpath_sim.evaluation.speedups import mean
from dualpath_sim.simulator.result import RoleMove

#: Agents ask again only when they were answered, so that a backlog never exceeds one round per
#: agent: it has to weigh within a minute to weigh at all.
REBALANCING = RebalanceSettings(horizon_s=60.0)

Case = tuple[str, RunSpec]
Shape = tuple[int, int]
_SECONDS = "{:,.0f} s"


class ShapeGain(msgspec.Struct, frozen=True):
    """JCT in seconds by (P, D), None where the shape cannot hold the model or a round."""

    case: str
    own: Shape
    jct_s: tuple[tuple[Shape, float | None], ...]

    @property
    def best(self) -> Shape:
        """The shape of the shortest JCT, the paper's own of equals."""
        known = {shape: seconds for shape, seconds in self.jct_s if seconds is not None}
        return min(known, key=lambda shape: (known[shape], shape != self.own))

    def seconds(self, shape: Shape) -> float | None:
        """Return the JCT of a shape."""
        return dict(self.jct_s)[shape]

    @property
    def gain(self) -> float | None:
        """The share of the own shape's JCT that the best one saves."""
        own_s, best_s = self.seconds(self.own), self.seconds(self.best)
        return None if not own_s or best_s is None else 1 - best_s / own_s


class MoveGain(msgspec.Struct, frozen=True):
    """JCT in seconds with fixed roles and with moving ones, None where the start cannot be."""

    case: str
    start: Shape
    fixed_s: float | None = None
    moving_s: float | None = None
    moves: tuple[RoleMove, ...] = ()

    @property
    def gain(self) -> float | None:
        """The share of the JCT that moving saves."""
        if not self.fixed_s or self.moving_s is None:
            return None
        return 1 - self.moving_s / self.fixed_s


def rebalanced_agents(settings: EvaluationSettings) -> int:
    """Agents of the moving runs, which only the reference core plays."""
    return 32 if settings.quick else 512


def shape_gains(runs: Runs, cases: Sequence[Case]) -> list[ShapeGain]:
    """Run every shape of every case that has more than one."""
    gains = []
    for case, spec in cases:
        own = _own_shape(runs, spec)
        nodes = sum(own)
        if nodes == 2:
            continue
        shapes = [(prefill, nodes - prefill) for prefill in range(1, nodes)]
        jct_s = tuple((shape, _jct_s(runs, spec, shape)) for shape in shapes)
        gains.append(ShapeGain(case, own, jct_s))
    return gains


def move_gains(runs: Runs, cases: Sequence[Case]) -> list[MoveGain]:
    """Run every case with fixed and with moving roles, from both starts."""
    gains = []
    for _, many in cases:
        own = _own_shape(runs, many)
        if sum(own) == 2:
            continue
        spec = msgspec.structs.replace(many, agents=rebalanced_agents(runs.settings))
        case = f"{spec.system.title}, {spec.workload}"
        for start in dict.fromkeys((own, own[::-1])):
            gains.append(_move_gain(runs, case, spec, start))
    return gains


def shape_table(gains: Sequence[ShapeGain]) -> Table:
    """Return one row per case."""
    rows = tuple(
        (
            one.case,
            _name(one.own),
            _name(one.best),
            cell(one.gain, "{:+.1%}"),
            ", ".join(
                f"{_name(shape)} {cell(seconds, '{:,.0f} s')}" for shape, seconds in one.jct_s
            ),
        )
        for one in gains
    )
    columns = ("setting", "paper's P:D", "best P:D", "JCT saved", "JCT of every division")
    return Table("Best division into prefill and decode nodes", columns, rows)


def move_table(gains: Sequence[MoveGain], settings: EvaluationSettings) -> Table:
    """Return one row per case and start."""
    rows = tuple(
        (
            one.case,
            _name(one.start),
            cell(one.fixed_s, _SECONDS),
            cell(one.moving_s, _SECONDS),
            cell(one.gain, "{:+.1%}"),
            "; ".join(_moved(move) for move in one.moves) or "none",
        )
        for one in gains
    )
    columns = ("setting", "start", "fixed roles", "moving roles", "JCT saved", "moves")
    title = f"Online re-balancing, {rebalanced_agents(settings)} agents"
    return Table(title, columns, rows)


def _move_gain(runs: Runs, case: str, spec: RunSpec, start: Shape) -> MoveGain:
    try:
        started = _reshaped(runs, spec, start)
        fixed_s = runs.offline(started).jct_s
    except DualPathError:
        return MoveGain(case, start)
    overrides = (*started.overrides, ("rebalancing", REBALANCING))
    moving = msgspec.structs.replace(started, overrides=overrides)
    result = runs.offline(moving)
    return MoveGain(case, start, fixed_s, result.jct_s, result.moves)


def _jct_s(runs: Runs, spec: RunSpec, shape: Shape) -> float | None:
    try:
        return runs.offline(_reshaped(runs, spec, shape)).jct_s
    except DualPathError:
        return None


def _own_shape(runs: Runs, spec: RunSpec) -> Shape:
    cluster = runs.setup(spec).cluster
    return cluster.prefill_nodes, cluster.decode_nodes


def _reshaped(runs: Runs, spec: RunSpec, shape: Shape) -> RunSpec:
    """Return a run on another shape, with the HBM that the weights leave there."""
    cluster = runs.setup(spec).cluster
    if shape == (cluster.prefill_nodes, cluster.decode_nodes):
        return spec
    weights = (load_model(spec.system.model), load_gpu(DEFAULT_GPU))
    changed = reshaped(cluster, *shape, weights)
    hbm = tuple((f"{role}_hbm_bytes", getattr(changed, f"{role}_hbm_bytes")) for role in Role)
    return msgspec.structs.replace(spec, nodes=shape, overrides=(*spec.overrides, *hbm))


def _moved(move: RoleMove) -> str:
    joined = "" if move.joined_ns < 0 else f", serves at {move.joined_ns / 1e9:,.0f} s"
    return f"{move.reason} at {move.decided_ns / 1e9:,.0f} s{joined}"


def _name(shape: Shape) -> str:
    return f"{shape[0]}P{shape[1]}D"


TITLE = "What additions gain over DualPath"
DISCUSSION = """\
A gain is how much lower JCT (offline) or mean TTFT (online) is than DualPath's as the paper
describes it, same agents, same seed. Gains below about one percent in either direction are noise:
another decision early in a run shifts all later ones. The Oracle column is all that faster reading
could bring.

**Split read** shortens one read by using two storage NICs for it. Online that is its share of
TTFT, 1 to 2 %. Offline with DS 660B the PEs are the bottleneck and reads are hidden behind their
queue. DS 27B is bound by storage NICs, but both sides are busy already, and dividing a read adds
no bandwidth. Qwen 32B gains most: a DE has HBM for one or two requests, which hold it while they
are read.

**Best division.** The paper's own is the best one everywhere except for 0.4 % on one trace, within
noise. More prefill nodes make the PEs faster but leave fewer engines to decode on, with more of
the weights on each and so less HBM for KV. 1P5D and 5P1D of DS 660B are impossible: its experts do
not fit one node.

**Re-balancing** moves nothing where the division is right already. It repairs a wrong start where
the decode nodes lack HBM: half of the JCT of Qwen 32B, 10 to 17 % of DS 660B. Beside the right
start it loses time because it waits until contexts have filled the HBM, and at first until a
request is over. It observes requests that wait, not steps that are slow, so that a wrong start
which merely decodes slowly (DS 27B, the shorter traces) is left alone unless a TPOT objective is
set. On claude-code it moves one node where two were right: with its drain that move took 106 s,
which then counts as the cost of a switch. The model does not charge for spreading the experts of
DS 660B again, so its rows are upper bounds.

**Hand-over in HBM** ([how it works](architecture.md#hand-over-in-hbm)) lets
requests bypass the DE's DRAM. It gains most where that holds few contexts. The first table has the
rounds of real Claude Code sessions that Qwen3-Coder-480B finishes in an hour with 80 GB of DRAM per
node, and the mean TTFT. With `buffer` the buffers of the DEs bind, so that DualPath is slower than
Layerwise, whose PEs bind:

| rounds in an hour | `buffer` | `hbm` |
|---|---:|---:|
| Layerwise | 5,035 (78 s) | |
| DualPath | 3,921 (119 s) | 6,158 (53 s) |
| split read | 4,126 (110 s) | 6,449 (47 s) |
| Oracle | 6,939 (39 s) | |

`dualpath simulate --cluster paper-660b --model qwen3-coder-480b --kv-cache-dtype fp8 --nodes 2P2D
--prefill-dp 16 --decode-dp 16 --prefill-hbm-bytes 40e9 --decode-hbm-bytes 45e9 --trace
kv_cache_tester/rounds_dev.jsonl.xz --max-context-tokens 142000 --agents 500 --agents-per-s 0.1
--until-s 3600 --mode dualpath --handover hbm` (seed 0).

In the paper's settings it gains less. JCT by `dualpath simulate --trace 64k` (seed 0) with the
flags of the first column, offline:

| `--cluster` … | `buffer` | `hbm` |
|---|---:|---:|
| `paper-660b --model ds-v3.2 --nodes 2P4D --agents 256 --mode dualpath` | 918 s | 894 s |
| the same with `--agents 1024` | 1,754 s | 1,677 s |
| `paper-27b --model ds-27b --nodes 1P1D --agents 512 --mode dualpath` | 777 s | 713 s |
| the same with `--mode split` | 769 s | 709 s |
| `paper-qwen --model qwen2.5-32b --agents 48 --mode dualpath` | 1,698 s | 1,642 s |
| the same with `--mode split` | 1,610 s | 1,518 s |

Mean TTFT rises by 0.1 s at most (Qwen 32B) and falls by up to 0.2 s (DS 27B), TPOT falls by 5 to
17 %. The last table is about the [comparisons with other
stacks](evaluation/peers.md#every-regime) on real engines, with DualPath simulated: the measured JCT
times the simulated change, over the fastest other stack. `python -m
dualpath_lab.benchmarks.peers.in_simulator docs/evaluation/peers/cells --handover hbm` (no seed):

| flags | fastest in | worst | geometric mean |
|---|---:|---:|---:|
| none: as measured | 27 of 38 | 1.77 | 0.88 |
| `--handover hbm` | 31 of 38 | 1.39 | 0.78 |
| `--recompute-limit-s 10` | 28 of 38 | 1.30 | 0.84 |
| both | 31 of 38 | 1.04 | 0.74 |
| `--recompute-limit-s 10 --append-at-decode-tokens 512` | 32 of 38 | 1.14 | 0.71 |
| all three | 38 of 38 | 0.99 | 0.60 |

*Rejected*: choosing the side on which the request would be prefilled earlier, the PE's own queue
and CNIC counted. It saved 0.1 % on average offline (-0.2 to +0.8 %), cost 0.8 % online, and in a
split read changed nothing: the side with the shorter reading queue mostly is the side with the
earlier finish.
"""
ONLINE_APS = (0.2, 0.4)
#: The nodes of most settings, left out of their names below bars.
_MOSTLY = "2P4D"
_NAMED_BY = f"model ({_MOSTLY} by default), context or trace, agents"
#: How a gain is written.
_SAVED = "{:+.1%}"

#: The path of each trace in the folder of real workloads.
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


VARIANTS = (Variant("split read", Mode.SPLIT),)
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
    cases = _cases(runs, list(traces))
    offline = [_offline_gains(runs, case, spec) for case, spec in cases]
    serving = [_online_gains(runs, rate) for rate in ONLINE_APS]
    distinct = _one_per_system_and_trace(cases)
    shapes = shape_gains(runs, distinct)
    moving = move_gains(runs, distinct)
    absent = [name for name in TRACE_FILES if name not in traces]
    return FigureReport(
        name="beyond",
        title=TITLE,
        evaluation=settings,
        settings=(
            "Offline: all agents at once, no tool delays; additional agents of a trace are drawn "
            "as in §A.3, and sessions are cut at the model's context limit.",
            f"Online: DS 660B on 2P4D, 64K. {METHOD}",
            "Division: all nodes of a setting, shared out in every way; HBM for KV is what the "
            "weights leave at the width over which experts are then spread.",
            f"Re-balancing: the reference core with {rebalanced_agents(settings)} agents, a switch "
            f"takes {REBALANCING.switch_s:g} s after the node's last request, horizon "
            f"{REBALANCING.horizon_s:g} s, polled every {REBALANCING.interval_s:g} s.",
            *((f"Not found and left out: {', '.join(absent)}.",) if absent else ()),
        ),
        tables=(
            _table("Offline: JCT", offline),
            _table("Online: mean TTFT", serving),
            shape_table(shapes),
            move_table(moving, settings),
        ),
        panels=(_panel("Offline: JCT saved", offline),),
        results=exact(
            {
                f"{one.case}: {variant.title}, s": seconds
                for one in (*offline, *serving)
                for variant, seconds in zip(VARIANTS, one.variants_s, strict=True)
            }
            | {f"{one.case}: best P:D, s": one.seconds(one.best) for one in shapes}
            | {
                f"{one.case} from {_name(one.start)}: moving roles, s": one.moving_s
                for one in moving
            }
        ),
        discussion=DISCUSSION,
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


def _one_per_system_and_trace(cases: Sequence[tuple[str, RunSpec]]) -> list[tuple[str, RunSpec]]:
    """Return the last and largest case of every system, number of nodes and source of agents."""
    chosen: dict[tuple[object, ...], tuple[str, RunSpec]] = {}
    for case, spec in cases:
        trace = spec.workload if spec.workload in TRACE_FILES else ""
        chosen[spec.system, spec.nodes, trace] = (case, spec)
    return list(chosen.values())


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
            quantity(one.base_s, "s"),
            *(cell(one.gain(seconds), _SAVED) for seconds in one.variants_s),
            cell(one.gain(one.bound_s), _SAVED),
        )
        for one in gains
    ]
    rows.append(("mean", "", *_means(gains)))
    return Table(f"{title}, and how much of it each addition saves", columns, tuple(rows))


def _means(gains: Sequence[Gains]) -> list[str]:
    columns = [[one.gain(one.variants_s[i]) for one in gains] for i in range(len(VARIANTS))]
    columns.append([one.gain(one.bound_s) for one in gains])
    known = [[value for value in column if value is not None] for column in columns]
    return [cell(mean(values) if values else None, _SAVED) for values in known]


def _panel(title: str, gains: Sequence[Gains]) -> Panel:
    names = tuple(short_name(one.case) for one in gains)
    series = tuple(
        Series(variant.title, names, tuple(_scaled(one.gain(one.variants_s[i])) for one in gains))
        for i, variant in enumerate(VARIANTS)
    )
    return Panel(title, "grouped", _NAMED_BY, "saved, %", series, from_zero=False)


def short_name(case: str) -> str:
    """Return a setting as it fits below a bar."""
    return case.removeprefix("DS ").replace(f" {_MOSTLY}", "")


def _scaled(gain: float | None) -> float | None:
    return None if gain is None else 100 * gain
