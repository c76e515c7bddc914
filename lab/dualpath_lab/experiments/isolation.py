"""Isolation of the inference lane (§5.1, A.1): an all-to-all with KV bulk, without and with QoS.

On hardware the virtual lanes of the compute NIC separate KV from collectives; in the lab the two
HTB classes of every CNIC and loopback device do.  The bulk is real:  Layer Blocks that
`NixlTransport` writes from DEs to PEs; it saturates its links.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.report.model import NOTHING, Panel, Series, Table, cell
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
from dualpath_lab.experiments.machine_load import BusyMeter
from dualpath_lab.experiments.node_channel import ANSWER_DEADLINE_S, NodeChannel
from dualpath_lab.nodes.cluster import LabState, LinkReport, lab_nodes, link_reports
from dualpath_lab.nodes.janitor import temporary_lab
from dualpath_lab.nodes.machine import Node, find_machine
from dualpath_lab.nodes.node_processes import NodeProcesses
from dualpath_lab.nodes.settings import Shaping
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    Page,
    Progress,
    RawData,
    Run,
    Stage,
)

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


# ------------------------------------------------------------------------------------------- runs
# One size in one case on one leg.


class Cell(NamedTuple):
    """A leg, the traffic in addition to the exchange, and the size of a message."""

    leg: Leg
    case: Case
    message_bytes: int

    @property
    def name(self) -> str:
        """Name of its runs."""
        return f"{self.leg.value}, {self.case.value}, {size_name(self.message_bytes)}"


class IsolationResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run: percentiles of its ``rounds`` of all nodes in s, rate of the bulk, load.

    ``late`` rounds ended after the next was due.  ``busy`` is the busy share of the machine, 0 to
    1.  ``first``: the exchange had real-time priority.  After the bulk ``checked_blocks`` in HBM
    were compared with their sources.
    """

    leg: Leg
    case: Case
    message_bytes: int
    rounds: int
    p50_s: float
    p90_s: float
    p99_s: float
    late: int
    wrong_messages: int
    bulk_bytes_per_s: float
    busy: float
    first: bool = False
    checked_blocks: int = 0
    wrong_blocks: int = 0
    links: tuple[LinkReport, ...] = ()

    @property
    def text(self) -> str:
        """The run for a progress message."""
        return (
            f"p50 {self.p50_s * 1e3:.2f} ms, p99 {self.p99_s * 1e3:.2f} ms, "
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


def _stages(
    settings: IsolationSettings, progress: Progress
) -> Iterator[Stage[Cell, IsolationResult]]:
    for leg in settings.legs:
        cells = (Cell(leg, case, size) for size in settings.message_bytes for case in Case)
        yield Stage({one.name: one for one in cells}, lambda leg=leg: _lab(settings, leg))  # type: ignore[misc]


@contextmanager
def _lab(settings: IsolationSettings, leg: Leg) -> Iterator[Measure[Cell, IsolationResult]]:
    """Make a lab with the exchange on every node; it is removed in any case.

    Raises ``ConfigError`` if a lab of that name exists or the machine cannot shape links.
    """
    wanted = settings.lab_settings
    if find_machine(wanted).shaping is Shaping.TOKEN_BUCKETS:
        raise ConfigError(
            "isolation needs links shaped by the kernel, which this user may not make; run as root "
            "or allow user namespaces (docs/how-to/lab.md)"
        )
    with temporary_lab(wanted) as state, exchange_processes(settings, state, leg) as exchange:
        yield lambda one, number: _run(settings, state, exchange, one)


def _run(
    settings: IsolationSettings, state: LabState, exchange: ExchangeProcesses, one: Cell
) -> IsolationResult:
    """Run one size in one case.

    Raises ``EngineLostError``, ``DeadlineError`` or ``TransportError`` if a process fails.
    """
    period_s = settings.period_s(one.leg, one.message_bytes)
    rounds = settings.rounds_of_run(one.leg, one.message_bytes)
    alone = one.case is Case.ALONE
    with nullcontext() if alone else bulk_processes(settings, state, one.leg, one.case) as bulk:
        meter = BusyMeter()
        before = [] if bulk is None else bulk.count()
        found = exchange.measure(one.message_bytes, period_s, rounds)
        after = [] if bulk is None else bulk.count()
        busy = meter.busy()
        checked = BulkChecked(0, 0) if bulk is None else bulk.stop()
    round_s = [seconds for node in found for seconds in node.round_s]
    return IsolationResult(
        leg=one.leg,
        case=one.case,
        message_bytes=one.message_bytes,
        rounds=len(round_s),
        p50_s=percentile(round_s, 50),
        p90_s=percentile(round_s, 90),
        p99_s=percentile(round_s, 99),
        late=sum(node.late for node in found),
        wrong_messages=sum(node.wrong for node in found),
        bulk_bytes_per_s=_bytes_per_s(before, after),
        busy=busy,
        first=exchange.first,
        checked_blocks=checked.blocks,
        wrong_blocks=checked.wrong,
        links=link_reports(state),
    )


def _bytes_per_s(before: list[BulkCount], after: list[BulkCount]) -> float:
    """Return the total rate of all sources."""
    pairs = zip(before, after, strict=True)
    return sum((end.bytes - begin.bytes) / (end.at_s - begin.at_s) for begin, end in pairs)


# ------------------------------------------------------------------------------------------- page
# The page of the isolation experiment: tables, plots, targets.

#: Limit of p99 with bulk and QoS over p99 alone, for the largest messages, and the tolerance of
#: slowdowns.
P99_TARGET, SLOWDOWN_TOLERANCE = 1.05, 0.15

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


Raw = RawData[IsolationSettings, IsolationResult]


def valid(raw: Raw) -> Raw:
    """Return the runs on a machine that was not too busy."""
    runs = [run for run in raw.runs if run.result.busy <= raw.settings.most_busy]
    return msgspec.structs.replace(raw, runs=runs)


def slowdown(counted: Raw, one: Cell, percent: int) -> float | None:
    """Return the median ratio to "alone" of the same repetition, None without any."""
    alone = one._replace(case=Case.ALONE)
    return counted.ratio(one.name, alone.name, lambda run: _percentile(run, percent))


def _percentile(run: IsolationResult, percent: int) -> float:
    return {50: run.p50_s, 90: run.p90_s, 99: run.p99_s}[percent]


def draw(raw: Raw) -> Page:
    """Draw every case beside "alone"."""
    settings, counted = raw.settings, valid(raw)
    return Page(
        settings=_setting_lines(raw, counted),
        tables=tuple(_table(counted, leg) for leg in settings.legs),
        panels=tuple(
            _panel(counted, leg, size) for leg in settings.legs for size in settings.message_bytes
        ),
        results=tuple(_results(raw, counted)),
        discussion=_DISCUSSION,
    )


def _setting_lines(raw: Raw, counted: Raw) -> tuple[str, ...]:
    settings, runs = raw.settings, raw.results
    busy = [run.busy for run in runs]
    links = next((run.links for run in runs if run.links), ())
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
        f"Machine {min(busy):.0%} to {max(busy):.0%} busy; {raw.rejected} runs were repeated and "
        f"{len(raw.runs) - len(counted.runs)} left out because it was above "
        f"{settings.most_busy:.0%}.",
        f"{sum(run.rounds for run in runs)} rounds; {sum(run.checked_blocks for run in runs)} "
        "blocks in HBM were compared with their sources after the bulk.",
    )


def _table(counted: Raw, leg: Leg) -> Table:
    columns = (
        *("case and message", "rounds", "p50, ms", "p99, ms", "p50 / alone", "p99 / alone"),
        *("bulk, MB/s", "of its links", "rounds late", "machine busy"),
    )
    cells = (Cell(leg, case, size) for size in counted.settings.message_bytes for case in Case)
    rows = tuple(_row(counted, one) for one in cells)
    return Table(f"{leg.value}: round trip of the inference class", columns, rows)


def _row(counted: Raw, one: Cell) -> tuple[str, ...]:
    name = f"{one.case.value}, {size_name(one.message_bytes)}"
    found, alone = counted.of(one.name), one.case is Case.ALONE
    if not found:
        return (name, *([NOTHING] * 9))
    rounds = sum(run.rounds for run in found)
    bulk = median(run.bulk_bytes_per_s for run in found)
    limit = counted.settings.bulk_limit_bytes_per_s(one.leg)
    return (
        name,
        str(rounds),
        *(f"{median(_percentile(run, p) for run in found) * 1e3:.2f}" for p in (50, 99)),
        *(cell(slowdown(counted, one, percent), "{:.3f}") for percent in (50, 99)),
        NOTHING if alone else f"{bulk / 1e6:.0f}",
        NOTHING if alone else f"{bulk / limit:.0%}",
        f"{sum(run.late for run in found) / rounds:.0%}",
        f"{median(run.busy for run in found):.0%}",
    )


def _panel(counted: Raw, leg: Leg, size: int) -> Panel:
    def milliseconds(case: Case, percent: int) -> float | None:
        name = Cell(leg, case, size).name
        return counted.median(name, lambda run: _percentile(run, percent) * 1e3)

    series = tuple(
        Series(
            f"p{percent}",
            tuple(case.value for case in Case),
            tuple(milliseconds(case, percent) for case in Case),
        )
        for percent in (50, 99)
    )
    return Panel(f"{leg.value}, {size_name(size)}", "grouped", "", "round, ms", series)


def _results(raw: Raw, counted: Raw) -> Iterator[KeyResult]:
    size = max(raw.settings.message_bytes)
    for leg in raw.settings.legs:
        found = slowdown(counted, Cell(leg, Case.QOS, size), 99)
        yield KeyResult(
            f"{leg.value}: p99 with bulk and QoS / alone, {size_name(size)}",
            found,
            P99_TARGET,
            at_least=False,
            note="no valid run: the machine was too busy" if found is None else "",
            tolerance=SLOWDOWN_TOLERANCE,
            any_machine=True,
        )
    wrong = sum(run.wrong_messages + run.wrong_blocks for run in raw.results)
    yield KeyResult("wrong messages and KV blocks", wrong, 0, at_least=False)


def _published(page: Page, settings: IsolationSettings) -> Raw:
    """Convert ``{"settings": …, "runs": [run, …], "bulk_checks": [check, …]}``."""
    known: Mapping[str, Any] = {
        name: value
        for name, value in page.data["settings"].items()
        if name in IsolationSettings.__struct_fields__
    }
    checks = iter(page.data["bulk_checks"])
    runs = []
    for one in page.data["runs"]:
        checked = None if one["case"] == Case.ALONE else next(checks, None)
        extra = (
            {"checked_blocks": checked["blocks"], "wrong_blocks": checked["wrong"]}
            if checked is not None
            else {}
        )
        result = msgspec.convert({**one, **extra}, IsolationResult)
        name = Cell(result.leg, result.case, result.message_bytes).name
        runs.append(
            Run(cell=name, round=one["repetition"], result=result, rejected=one["rejected"])
        )
    converted = msgspec.convert(known, IsolationSettings)
    return RawData(experiment=ISOLATION.name, settings=converted, runs=runs)


ISOLATION = Experiment(
    name="isolation",
    title="Isolation: an all-to-all with KV bulk",
    settings=IsolationSettings(),
    result=IsolationResult,
    stages=_stages,
    draw=draw,
    summary=lambda result: result.text,
    too_busy=lambda settings, result: result.busy > settings.most_busy,
    published=_published,
)
