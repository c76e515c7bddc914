"""The processes of the isolation experiment on the nodes of a lab, started, told and ended."""

import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import msgspec

from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.laboratory.experiments.isolation_settings import (
    EXCHANGE_PORT,
    Case,
    IsolationSettings,
    Leg,
    bulk_ports,
    flows,
)
from dualpath.laboratory.experiments.isolation_wire import (
    BulkArguments,
    BulkChecked,
    BulkCount,
    BulkTargets,
    ExchangeArguments,
    ExchangeOrder,
    ExchangeResult,
)
from dualpath.laboratory.lab.cluster import LabState, enter_node, lab_nodes
from dualpath.laboratory.lab.machine import Node
from dualpath.transport.contract import AgentInfo

_ANSWER_DEADLINE_S = 60.0
_END_DEADLINE_S = 10.0
#: Rounds begin this long after their order is given, so that all nodes begin together.
_NOTICE_S = 0.05
_WARM_UP_ROUNDS = 3
_Answer = TypeVar("_Answer")


class DialogueProcess:
    """A module of this package that runs on a node, told and telling line by line."""

    def __init__(self, state: LabState, node: Node, module: str, arguments: object) -> None:
        self.node = node
        self._name = f"{module} on {node.name}"
        argv = (
            *(sys.executable, "-m", f"dualpath.laboratory.experiments.{module}"),
            msgspec.json.encode(arguments).decode(),
        )
        # A session of its own: Ctrl-C reaches the experiment alone, which then ends the others.
        self._process = subprocess.Popen(
            enter_node(state, node, argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, line: object) -> None:
        """Send a word, or a document.

        Raises ``EngineLostError`` if the process has ended.
        """
        assert self._process.stdin is not None
        text = line.encode() if isinstance(line, str) else msgspec.json.encode(line)
        try:
            self._process.stdin.write(text + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._lost() from error

    def hear(self, kind: type[_Answer], within_s: float = _ANSWER_DEADLINE_S) -> _Answer:
        """Return the next answer.

        Raises ``EngineLostError`` if the process has ended, ``DeadlineError`` after ``within_s``.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], within_s)
        if not ready:
            raise DeadlineError(
                f"{self._name} has not answered within {within_s:g} s; see whether the machine is "
                "overloaded and repeat"
            )
        line = self._process.stdout.readline()
        if not line:
            raise self._lost()
        return msgspec.json.decode(line, type=kind)

    def end(self) -> None:
        """End the process, at the latest by force."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_DEADLINE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _lost(self) -> EngineLostError:
        code = self._process.wait()
        return EngineLostError(f"{self._name} has ended with {code}; its own message is above")


class Exchanges:
    """The exchange processes of all nodes."""

    def __init__(self, processes: Sequence[DialogueProcess]) -> None:
        self._processes = processes

    def measure(self, message_bytes: int, period_s: float, rounds: int) -> list[ExchangeResult]:
        """Do ``rounds`` on every node and return what each has measured."""
        start_s = time.monotonic() + _NOTICE_S
        order = ExchangeOrder(message_bytes, period_s, rounds, _WARM_UP_ROUNDS, start_s)
        for process in self._processes:
            process.tell(order)
        # A link without QoS may make every round late.
        within_s = _ANSWER_DEADLINE_S + 4 * rounds * period_s
        return [process.hear(ExchangeResult, within_s) for process in self._processes]


@contextmanager
def exchanges(settings: IsolationSettings, state: LabState, leg: Leg) -> Iterator[Exchanges]:
    """Start the exchange on every node, connected; end it afterwards."""
    with ExitStack() as stack:
        nodes = lab_nodes(state)
        processes = []
        for node in nodes:
            others = [peer.address for peer in nodes if peer is not node]
            arguments = ExchangeArguments(
                address=node.address,
                port=EXCHANGE_PORT,
                peers=tuple(others if leg is Leg.CNIC else [node.address]),
                most_bytes=max(settings.message_bytes),
                congestion_control=settings.congestion_control,
            )
            processes.append(DialogueProcess(state, node, "isolation_exchange", arguments))
            stack.callback(processes[-1].end)
        for word, answer in (("", "listening"), ("connect", "connected")):
            for process in processes:
                if word:
                    process.tell(word)
            for process in processes:
                assert process.hear(str) == answer
        yield Exchanges(processes)


class Bulks:
    """The bulk processes of all nodes, writing."""

    def __init__(
        self, sources: Sequence[DialogueProcess], everyone: Sequence[DialogueProcess]
    ) -> None:
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
    def _ask(
        processes: Sequence[DialogueProcess], word: str, answer: type[_Answer]
    ) -> list[_Answer]:
        for process in processes:
            process.tell(word)
        return [process.hear(answer) for process in processes]


@contextmanager
def bulks(settings: IsolationSettings, state: LabState, leg: Leg, case: Case) -> Iterator[Bulks]:
    """Start the bulk on every node and let it write; end it afterwards."""
    with ExitStack() as stack:
        nodes = lab_nodes(state)
        wanted = flows(leg, nodes)
        processes: dict[str, DialogueProcess] = {}
        for node in nodes:
            arguments = BulkArguments(
                agent=node.name,
                ports=bulk_ports(case).text,
                block_bytes=settings.block_bytes,
                blocks=settings.blocks,
                in_flight=settings.in_flight,
                sources=tuple(flow.source for flow in wanted if flow.target == node.name),
            )
            processes[node.name] = DialogueProcess(state, node, "isolation_bulk", arguments)
            stack.callback(processes[node.name].end)
        infos = {name: process.hear(AgentInfo) for name, process in processes.items()}
        sources = [processes[name] for name in dict.fromkeys(flow.source for flow in wanted)]
        for source in sources:
            targets = [flow.target for flow in wanted if flow.source == source.node.name]
            source.tell(BulkTargets(tuple(infos[target] for target in targets)))
        for source in sources:
            assert source.hear(str) == "writing"
        time.sleep(settings.settle_s)
        yield Bulks(sources, list(processes.values()))
