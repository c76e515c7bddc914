"""Isolation of the inference lane (§5.1, A.1): an all-to-all with KV bulk, without and with QoS.

On hardware the virtual lanes of the compute NIC separate KV from collectives; in the lab the two
HTB classes of every CNIC and loopback device do.  The bulk is real:  Layer Blocks that
`NixlTransport` writes from DEs to PEs; it saturates its links.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.report.model import NOTHING, Panel, Series, Table
from dualpath.transport.contract import AgentInfo
from dualpath_lab.experiments.isolation_bulk import (
    BulkArguments,
    BulkChecked,
    BulkCount,
    BulkTargets,
)
from dualpath_lab.experiments.isolation_exchange import (
    ExchangeArguments,
    ExchangeOrder,
    ExchangeResult,
)
from dualpath_lab.experiments.isolation_settings import (
    EXCHANGE_PORT,
    Case,
    IsolationSettings,
    Leg,
    bulk_ports,
    flows,
)
from dualpath_lab.experiments.machine_load import BusyMeter, repeat_while_busy
from dualpath_lab.experiments.node_channel import ANSWER_DEADLINE_S, NodeChannel
from dualpath_lab.experiments.report import ExperimentReport, Target
from dualpath_lab.nodes.cluster import LabState, LinkReport, lab_nodes, link_reports
from dualpath_lab.nodes.janitor import temporary_lab
from dualpath_lab.nodes.machine import Node, find_machine
from dualpath_lab.nodes.node_processes import NodeProcesses
from dualpath_lab.nodes.settings import Shaping

# --------------------------------------------------------------------------------- isolation nodes
# The processes of the isolation experiment on the nodes of a lab.

#: Rounds begin this long after the order, so that all nodes begin together.
_NOTICE_S = 0.05
_WARM_UP_ROUNDS = 3
_Answer = TypeVar("_Answer")


class ExchangeProcesses:
    """The exchange processes of all nodes; ``first``: they have real-time priority."""

    def __init__(self, processes: Sequence[NodeChannel], *, first: bool) -> None:
        self._processes = processes
        self.first = first

    def measure(self, message_bytes: int, period_s: float, rounds: int) -> list[ExchangeResult]:
        """Run ``rounds`` on every node and return the result of each node."""
        start_s = time.monotonic() + _NOTICE_S
        order = ExchangeOrder(message_bytes, period_s, rounds, _WARM_UP_ROUNDS, start_s)
        for process in self._processes:
            process.send(order)
        # A link without QoS may make every round late.
        within_s = ANSWER_DEADLINE_S + 4 * rounds * period_s
        return [process.receive(ExchangeResult, within_s) for process in self._processes]


@contextmanager
def _processes(state: LabState) -> Iterator[NodeProcesses]:
    with TemporaryDirectory() as logs, NodeProcesses(state, Path(logs)) as processes:
        yield processes


def _dialogue(processes: NodeProcesses, node: Node, module: str, arguments: object) -> NodeChannel:
    return NodeChannel(processes, f"{module}-{node.name}", node, module, arguments)


@contextmanager
def exchange_processes(
    settings: IsolationSettings, state: LabState, leg: Leg
) -> Iterator[ExchangeProcesses]:
    """Start and connect the exchange on every node; end it afterwards."""
    with _processes(state) as started:
        nodes = lab_nodes(state)
        processes = []
        for node in nodes:
            others = [peer.address for peer in nodes if peer is not node]
            arguments = ExchangeArguments(
                address=node.address,
                port=EXCHANGE_PORT,
                peers=tuple(others if leg is Leg.CNIC else [node.address]),
                max_bytes=max(settings.message_bytes),
                congestion_control=settings.congestion_control,
            )
            processes.append(_dialogue(started, node, "isolation_exchange", arguments))
        for process in processes:
            assert process.receive(str) == "listening"
        for process in processes:
            process.send("connect")
        first = [process.receive(bool) for process in processes]
        yield ExchangeProcesses(processes, first=all(first))


class BulkProcesses:
    """The running bulk processes of all nodes."""

    def __init__(self, sources: Sequence[NodeChannel], everyone: Sequence[NodeChannel]) -> None:
        self._sources = sources
        self._everyone = everyone

    def count(self) -> list[BulkCount]:
        """Return what every source has moved so far."""
        return self._ask(self._sources, "count", BulkCount)

    def stop(self) -> BulkChecked:
        """Let everything arrive, then look at every block."""
        self._ask(self._sources, "stop", BulkCount)
        checked = self._ask(self._everyone, "check", BulkChecked)
        return BulkChecked(sum(one.blocks for one in checked), sum(one.wrong for one in checked))

    @staticmethod
    def _ask(processes: Sequence[NodeChannel], word: str, answer: type[_Answer]) -> list[_Answer]:
        for process in processes:
            process.send(word)
        return [process.receive(answer) for process in processes]


@contextmanager
def bulk_processes(
    settings: IsolationSettings, state: LabState, leg: Leg, case: Case
) -> Iterator[BulkProcesses]:
    """Start the bulk on every node; end it afterwards."""
    with _processes(state) as started:
        nodes = lab_nodes(state)
        wanted = flows(leg, nodes)
        processes: dict[str, NodeChannel] = {}
        for node in nodes:
            arguments = BulkArguments(
                agent=node.name,
                ports=bulk_ports(case).text,
                block_bytes=settings.block_bytes,
                blocks=settings.blocks,
                in_flight=settings.in_flight,
                sources=tuple(flow.source for flow in wanted if flow.target == node.name),
            )
            processes[node.name] = _dialogue(started, node, "isolation_bulk", arguments)
        infos = {name: process.receive(AgentInfo) for name, process in processes.items()}
        sources = [processes[name] for name in dict.fromkeys(flow.source for flow in wanted)]
        for source in sources:
            targets = [flow.target for flow in wanted if flow.source == source.node.name]
            source.send(BulkTargets(tuple(infos[target] for target in targets)))
        for source in sources:
            assert source.receive(str) == "writing"
        time.sleep(settings.settle_s)
        yield BulkProcesses(sources, list(processes.values()))


# -------------------------------------------------------------------------------- isolation report
# The report of the isolation experiment: tables, plots, targets.

NAME = "isolation"
#: Limit of p99 with bulk and QoS over p99 alone, for the largest messages.
P99_TARGET = 1.05

_DISCUSSION = """\
A round ends when every peer has sent its message back; it begins at its scheduled time or at the
end of the previous one, whichever is later, so that durations without QoS are those of a
slowed-down model and not of a growing queue. Each number is the median over the repetitions of one
run's percentile over the rounds of all nodes; ratios are taken within a repetition.

"No QoS" is the same bulk on TCP ports of the inference lane, in the same lab. HTB has strict
priorities: KV gets the bandwidth that the inference lane does not use, and at least 1 %. InfiniBand
would share by weights, packet by packet, in hardware; that is not measured here. The rest of the
p99 of short messages is caused by the CPUs, which copy the bulk: segments of KV of 16 KiB instead
of 64 did not reduce it. Therefore the exchange has real-time priority if allowed, as a collective
on hardware needs no CPU.

On the loopback leg, which stands for CNIC-assisted H2D copies, a node exchanges with itself."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One size in one case: durations of the rounds of all nodes in s, rate of the bulk, load.

    ``late`` rounds ended after the next was due.  ``busy`` is the busy share of the machine, 0 to
    1; ``rejected`` earlier attempts were too busy.  ``first``: the exchange had real-time priority.
    """

    leg: Leg
    case: Case
    repetition: int
    message_bytes: int
    round_s: tuple[float, ...]
    late: int
    wrong_messages: int
    bulk_bytes_per_s: float
    busy: float
    rejected: int
    first: bool = False

    @property
    def text(self) -> str:
        """The run as one line of text."""
        return (
            f"{self.leg.value}, {size_name(self.message_bytes)}, {self.case.value}: "
            f"p50 {percentile(self.round_s, 50) * 1e3:.2f} ms, "
            f"p99 {percentile(self.round_s, 99) * 1e3:.2f} ms, "
            f"bulk {self.bulk_bytes_per_s / 1e6:.0f} MB/s, machine {self.busy:.0%} busy"
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def size_name(size_bytes: int) -> str:
    """Return a size with its unit."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


class Runs:
    """Runs on a machine that was not too busy, by leg, size and case."""

    def __init__(self, runs: Sequence[Run], most_busy: float) -> None:
        self.valid = [run for run in runs if run.busy <= most_busy]
        self.dropped = len(runs) - len(self.valid)

    def of(self, leg: Leg, message_bytes: int, case: Case) -> list[Run]:
        """Return the repetitions."""
        wanted = (leg, message_bytes, case)
        return [run for run in self.valid if (run.leg, run.message_bytes, run.case) == wanted]

    def round_s(self, leg: Leg, message_bytes: int, case: Case, percent: float) -> float | None:
        """Return the median of a percentile, None without runs."""
        found = [percentile(run.round_s, percent) for run in self.of(leg, message_bytes, case)]
        return median(found) if found else None

    def slowdown(self, leg: Leg, message_bytes: int, case: Case, percent: float) -> float | None:
        """Return the median ratio to "alone" of the same repetition, None without any."""
        alone = {run.repetition: run for run in self.of(leg, message_bytes, Case.ALONE)}
        found = [
            percentile(run.round_s, percent) / percentile(alone[run.repetition].round_s, percent)
            for run in self.of(leg, message_bytes, case)
            if run.repetition in alone
        ]
        return median(found) if found else None


def isolation_report(
    settings: IsolationSettings,
    runs: Sequence[Run],
    checks: Sequence[BulkChecked],
    links: Sequence[LinkReport],
) -> ExperimentReport:
    """Return the report of all runs; ``checks`` are of the bulk, ``links`` of the lab."""
    counted = Runs(runs, settings.most_busy)
    return ExperimentReport(
        name=NAME,
        title="Isolation: an all-to-all with KV bulk",
        command=f"dualpath lab bench {NAME}",
        settings=_setting_lines(settings, runs, counted, checks, links),
        tables=tuple(_table(settings, counted, leg) for leg in settings.legs),
        panels=tuple(
            _panel(counted, leg, size) for leg in settings.legs for size in settings.message_bytes
        ),
        targets=_targets(settings, counted, runs, checks),
        discussion=_DISCUSSION,
        data={
            "settings": msgspec.to_builtins(settings),
            "runs": [_run_data(run) for run in runs],
            "bulk_checks": msgspec.to_builtins(list(checks)),
        },
    )


def _setting_lines(
    settings: IsolationSettings,
    runs: Sequence[Run],
    counted: Runs,
    checks: Sequence[BulkChecked],
    links: Sequence[LinkReport],
) -> tuple[str, ...]:
    busy = [run.busy for run in runs]
    return (
        f"Lab of {settings.nodes}, "
        + "; ".join(
            f"{link.link} {link.bytes_per_s * 8 / 1e9:g} Gbit/s ({link.how})"
            for link in links
            if link.link != "SNIC"
        )
        + ". A lab: network namespaces on one machine, not a fabric.",
        f"Exchange: one message to each peer and back, TCP {settings.congestion_control}; messages "
        f"use {settings.load:.0%} of a link's rate in each direction. {settings.repeat} "
        f"repetitions of at least {settings.rounds} rounds of each of {settings.count} nodes, "
        "cases interleaved. Its processes have "
        + ("real-time" if all(run.first for run in runs) else "normal")
        + " priority.",
        f"Bulk: NIXL WRITE over UCX tcp, {settings.blocks} Layer Blocks of "
        f"{settings.block_bytes} bytes per transfer, {settings.in_flight} transfers in flight "
        "between two agents; CNIC: from every DE to every PE; loopback: every node to itself.",
        f"Machine: {os.cpu_count()} cores, Linux {platform.release()}, "
        f"{min(busy):.0%} to {max(busy):.0%} busy; {sum(run.rejected for run in runs)} runs were "
        f"repeated and {counted.dropped} left out because it was above "
        f"{settings.most_busy:.0%}.",
        f"{sum(len(run.round_s) for run in runs)} rounds; {sum(c.blocks for c in checks)} blocks "
        "in HBM were compared with their sources after the bulk.",
    )


def _table(settings: IsolationSettings, runs: Runs, leg: Leg) -> Table:
    columns = (
        *("case and message", "rounds", "p50, ms", "p99, ms", "p50 / alone", "p99 / alone"),
        *("bulk, MB/s", "of its links", "rounds late", "machine busy"),
    )
    return Table(
        f"{leg.value}: round trip of the inference class",
        columns,
        tuple(
            _row(settings, runs, leg, size, case)
            for size in settings.message_bytes
            for case in Case
        ),
    )


def _row(
    settings: IsolationSettings, runs: Runs, leg: Leg, size: int, case: Case
) -> tuple[str, ...]:
    name = f"{case.value}, {size_name(size)}"
    found = runs.of(leg, size, case)
    if not found:
        return (name, *([NOTHING] * 9))
    rounds = sum(len(run.round_s) for run in found)
    bulk = median(run.bulk_bytes_per_s for run in found)
    percentiles = [runs.round_s(leg, size, case, percent) for percent in (50, 99)]
    slowdowns = [runs.slowdown(leg, size, case, percent) for percent in (50, 99)]
    return (
        name,
        str(rounds),
        *(NOTHING if one is None else f"{one * 1e3:.2f}" for one in percentiles),
        *(NOTHING if one is None else f"{one:.3f}" for one in slowdowns),
        NOTHING if case is Case.ALONE else f"{bulk / 1e6:.0f}",
        NOTHING if case is Case.ALONE else f"{bulk / settings.bulk_limit_bytes_per_s(leg):.0%}",
        f"{sum(run.late for run in found) / rounds:.0%}",
        f"{median(run.busy for run in found):.0%}",
    )


def _panel(runs: Runs, leg: Leg, size: int) -> Panel:
    def milliseconds(case: Case, percent: float) -> float | None:
        found_s = runs.round_s(leg, size, case, percent)
        return None if found_s is None else found_s * 1e3

    return Panel(
        f"{leg.value}, {size_name(size)}",
        "grouped",
        "",
        "round, ms",
        tuple(
            Series(
                f"p{percent}",
                tuple(case.value for case in Case),
                tuple(milliseconds(case, percent) for case in Case),
            )
            for percent in (50, 99)
        ),
    )


def _targets(
    settings: IsolationSettings, counted: Runs, runs: Sequence[Run], checks: Sequence[BulkChecked]
) -> tuple[Target, ...]:
    size = max(settings.message_bytes)
    wrong = sum(run.wrong_messages for run in runs) + sum(check.wrong for check in checks)
    return (
        *(_p99_target(counted, leg, size) for leg in settings.legs),
        Target("wrong messages and KV blocks", wrong, 0, at_least=False),
    )


def _p99_target(counted: Runs, leg: Leg, size: int) -> Target:
    found = counted.slowdown(leg, size, Case.QOS, 99)
    return Target(
        f"{leg.value}: p99 with bulk and QoS / alone, {size_name(size)}",
        math.inf if found is None else found,
        P99_TARGET,
        at_least=False,
        note="no valid run: the machine was too busy" if found is None else "",
    )


def _run_data(run: Run) -> dict[str, object]:
    """Return a run without the durations of its thousands of rounds."""
    data = {name: getattr(run, name) for name in run.__struct_fields__ if name != "round_s"}
    data["rounds"] = len(run.round_s)
    for percent in (50, 90, 99, 100):
        data[f"p{percent}_s"] = percentile(run.round_s, percent)
    return data


class RunContext(msgspec.Struct, frozen=True):
    """The context of runs: leg, case, repetition, and the processes of the bulk, if any."""

    leg: Leg
    case: Case
    repetition: int
    bulk: BulkProcesses | None = None

    def count(self) -> list[BulkCount]:
        """Return the bytes that every source of the bulk has transferred so far."""
        return [] if self.bulk is None else self.bulk.count()


def measure_isolation(
    settings: IsolationSettings, progress: Callable[[str], None] = lambda line: None
) -> ExperimentReport:
    """Make a lab, measure every case on it, remove it, and return the report.

    Raises ``ConfigError`` if a lab of that name exists or the machine cannot shape links,
    ``EngineLostError``, ``DeadlineError`` or ``TransportError`` if a process on a node fails.
    The lab is removed in any case, also after ``kill -9``.
    """
    wanted = settings.lab_settings
    if find_machine(wanted).shaping is Shaping.TOKEN_BUCKETS:
        raise ConfigError(
            "isolation needs links shaped by the kernel, which this user may not make; run as root "
            "or allow user namespaces (docs/how-to/lab.md)"
        )
    with temporary_lab(wanted) as state:
        runs: list[Run] = []
        checks: list[BulkChecked] = []
        for leg in settings.legs:
            with exchange_processes(settings, state, leg) as exchange:
                for repetition in range(settings.repeat):
                    for case in Case:
                        if case is Case.ALONE:
                            context = RunContext(leg, case, repetition)
                            runs += _measure_sizes(settings, exchange, context, progress)
                            continue
                        with bulk_processes(settings, state, leg, case) as bulk:
                            context = RunContext(leg, case, repetition, bulk)
                            runs += _measure_sizes(settings, exchange, context, progress)
                            checks.append(bulk.stop())
        return isolation_report(settings, runs, checks, link_reports(state))


def _measure_sizes(
    settings: IsolationSettings,
    exchange: ExchangeProcesses,
    context: RunContext,
    progress: Callable[[str], None],
) -> Iterator[Run]:
    """Yield one run per size, repeated while the machine is too busy; the last attempt counts."""
    for message_bytes in settings.message_bytes:

        def once(rejected: int, message_bytes: int = message_bytes) -> Run:
            run = _measure_run(settings, exchange, context, message_bytes, rejected)
            progress(run.text)
            return run

        yield repeat_while_busy(once, lambda run: run.busy > settings.most_busy, settings.attempts)


def _measure_run(
    settings: IsolationSettings,
    exchange: ExchangeProcesses,
    context: RunContext,
    message_bytes: int,
    rejected: int,
) -> Run:
    period_s = settings.period_s(context.leg, message_bytes)
    rounds = settings.rounds_of_run(context.leg, message_bytes)
    meter = BusyMeter()
    before = context.count()
    results = exchange.measure(message_bytes, period_s, rounds)
    after = context.count()
    return Run(
        leg=context.leg,
        case=context.case,
        repetition=context.repetition,
        message_bytes=message_bytes,
        round_s=tuple(one for result in results for one in result.round_s),
        late=sum(result.late for result in results),
        wrong_messages=sum(result.wrong for result in results),
        bulk_bytes_per_s=_bytes_per_s(before, after),
        busy=meter.busy(),
        rejected=rejected,
        first=exchange.first,
    )


def _bytes_per_s(before: list[BulkCount], after: list[BulkCount]) -> float:
    """Return the total rate of all sources."""
    pairs = zip(before, after, strict=True)
    return sum((end.bytes - begin.bytes) / (end.at_s - begin.at_s) for begin, end in pairs)
