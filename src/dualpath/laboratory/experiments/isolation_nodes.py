"""The processes of the isolation experiment on the nodes of a lab."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from dualpath.laboratory.experiments.dialogue import ANSWER_DEADLINE_S, NodeChannel
from dualpath.laboratory.experiments.isolation_bulk import (
    BulkArguments,
    BulkChecked,
    BulkCount,
    BulkTargets,
)
from dualpath.laboratory.experiments.isolation_exchange import (
    ExchangeArguments,
    ExchangeOrder,
    ExchangeResult,
)
from dualpath.laboratory.experiments.isolation_settings import (
    EXCHANGE_PORT,
    Case,
    IsolationSettings,
    Leg,
    bulk_ports,
    flows,
)
from dualpath.laboratory.lab.cluster import LabState, lab_nodes
from dualpath.laboratory.lab.machine import Node
from dualpath.laboratory.lab.node_processes import NodeProcesses
from dualpath.transport.contract import AgentInfo

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
