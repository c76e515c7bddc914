"""A replay by a client process on the lab's head node, with all links metered."""

import statistics

import msgspec

from dualpath.laboratory.experiments.client import DONE, READY, ClientResult, ClientTask
from dualpath.laboratory.experiments.dialogue import ANSWER_DEADLINE_S, NodeChannel
from dualpath.laboratory.experiments.machine_load import BusyMeter, process_cpu_s
from dualpath.laboratory.experiments.meters import LinkMeter, Sample
from dualpath.laboratory.lab.cluster import LabState, lab_head, lab_nodes
from dualpath.laboratory.lab.node_processes import NodeProcesses
from dualpath.ops.launch.process import local


class Metered(msgspec.Struct, frozen=True, kw_only=True):
    """One replay.  ``busy`` is the busy share of the machine during the replay.

    ``cpu_s`` has the CPU seconds of each process during the replay.  ``samples`` begin and end with
    the replay; their times are seconds since its beginning.
    """

    client: ClientResult
    busy: float
    cpu_s: dict[str, float]
    samples: list[Sample]

    @property
    def jct_s(self) -> float:
        """Job completion time of all agents (§7.2)."""
        return self.client.replay.summary.jct_s

    @property
    def storage_bytes(self) -> int:
        """Bytes that all nodes read from storage."""
        return sum(self.node_bytes("snic").values())

    def node_bytes(self, link: str) -> dict[str, int]:
        """Return the bytes over a link of every node, by the link's name in ``NodeBytes``."""
        first, last = self.samples[0].nodes, self.samples[-1].nodes
        return {name: getattr(last[name], link) - getattr(first[name], link) for name in first}

    def snic_use(self, bytes_per_s: float, begin: float = 0.25, end: float = 0.75) -> list[float]:
        """Return each node's storage rate relative to its link, from ``begin`` to ``end``.

        These are shares of the run.
        """
        low, high = self._at(begin * self.jct_s), self._at(end * self.jct_s)
        passed_s = high.time_s - low.time_s
        return [moved / passed_s / bytes_per_s for moved in _snic_bytes(low, high)]

    def snic_balance(self, window_s: float) -> float:
        """Return mean max/avg of the nodes' storage reads over windows (Fig. 13)."""
        ratios = []
        for index in range(int(self.jct_s / window_s)):
            low, high = self._at(index * window_s), self._at((index + 1) * window_s)
            moved = _snic_bytes(low, high)
            if sum(moved) > 0:
                ratios.append(max(moved) / statistics.fmean(moved))
        return statistics.fmean(ratios) if ratios else 1.0

    def _at(self, time_s: float) -> Sample:
        return min(self.samples, key=lambda sample: abs(sample.time_s - time_s))


def _snic_bytes(low: Sample, high: Sample) -> list[int]:
    return [high.nodes[name].snic - low.nodes[name].snic for name in low.nodes]


def replay_metered(
    processes: NodeProcesses, state: LabState, name: str, task: ClientTask, deadline_s: float
) -> Metered:
    """Run a client ``name`` with a task on the head node, and meter all nodes.

    Each node has at least one of ``processes``.  Raises ``EngineLostError`` if any of them ends or
    the client fails, ``DeadlineError`` if the replay takes longer than ``deadline_s``.
    """
    nodes, servers = lab_nodes(state), [local(p) for p in processes.processes]
    client = NodeChannel(processes, name, lab_head(state), "client", task)
    # The client's own time-out is shorter, and its error names what it has waited for.
    assert client.receive(str, task.ready_within_s + ANSWER_DEADLINE_S) == READY
    metered = (*servers, client.process)
    cpu_before = {p.name: process_cpu_s(p.pid) for p in metered}
    pids = {node.name: processes.first_on(node).pid for node in nodes}
    meter = LinkMeter(state, pids, nodes)
    busy = BusyMeter()
    meter.start()
    try:
        client.send("begin")
        assert client.receive(str, deadline_s) == DONE
        share = busy.busy()
        cpu_s = {p.name: process_cpu_s(p.pid) - cpu_before[p.name] for p in metered}
    finally:
        samples = meter.stop()
    result = client.receive(ClientResult)
    client.close()
    return Metered(client=result, busy=share, cpu_s=cpu_s, samples=_since_begin(samples))


def _since_begin(samples: list[Sample]) -> list[Sample]:
    begin_s = samples[0].time_s
    return [msgspec.structs.replace(s, time_s=s.time_s - begin_s) for s in samples]
