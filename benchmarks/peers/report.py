"""The report of runs of DualPath and other stacks: a page, a plot and the raw data."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

import msgspec
from benchmarks.peers.one_run import RunRecord
from benchmarks.peers.peer_stack import OWN_STACK

from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.laboratory.experiments.report import ExperimentReport, Target
from dualpath.laboratory.workload.replay.machine import ClientMachine
from dualpath.report.model import NOTHING, Panel, Series, Table

#: The stack that others are compared with: the default mode, or mode dualpath where that is
#: missing.
_OWN = tuple(f"{OWN_STACK}{mode.value}" for mode in (DEFAULT_MODE, Mode.DUALPATH))
DUALPATH = _OWN[0]
#: The project's targets for the best disaggregated peer's JCT over DualPath's: with storage as the
#: bottleneck; and where that peer's DRAM holds all KV, so that it reads nothing.
RATIO_TARGET, DRAM_RATIO_TARGET = 2.0, 1 / 0.95

_DISCUSSION = """\
`benchmarks/peers/README.md` describes the stacks, their common settings, and the fixes that peers
needed.

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
