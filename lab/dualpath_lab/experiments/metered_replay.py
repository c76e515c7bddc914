"""A replay by a client process on the lab's head node, with all links metered."""

import statistics
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dualpath.launch.process import local
from dualpath_lab.experiments.client import DONE, READY, ClientResult, ClientTask
from dualpath_lab.experiments.machine_load import BusyMeter, process_cpu_s
from dualpath_lab.experiments.node_channel import ANSWER_DEADLINE_S, NodeChannel
from dualpath_lab.nodes.cluster import LabState, lab_head, lab_nodes
from dualpath_lab.nodes.machine import Node
from dualpath_lab.nodes.node_processes import NodeProcesses
from dualpath_lab.nodes.steps import SNIC, cgroup_folder, cnics

# ------------------------------------------------------------------------------------------ meters
# Bytes over the links of all nodes during a run, from the kernel's counters.

SAMPLE_S = 0.1


class NodeBytes(msgspec.Struct, frozen=True):
    """Bytes of a node so far: storage reads, its CNICs by direction, its loopback device.

    ``rails`` has (out, in) of each CNIC.  -1: this lab cannot count them.
    """

    snic: int
    cnic_out: int
    cnic_in: int
    loopback: int
    rails: tuple[tuple[int, int], ...] = ()


class Sample(msgspec.Struct, frozen=True):
    """Counters of all nodes at ``time_s`` of the monotonic clock."""

    time_s: float
    nodes: dict[str, NodeBytes]


class LinkMeter:
    """Samples the links of all nodes every ``SAMPLE_S`` until it is stopped.

    ``process_ids`` has one live process per node; the node's network is read through its /proc.
    """

    def __init__(
        self, state: LabState, process_ids: Mapping[str, int], nodes: tuple[Node, ...]
    ) -> None:
        self._state = state
        self._process_ids = dict(process_ids)
        self._nodes = nodes
        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link-meter", daemon=True)

    def start(self) -> None:
        """Take a first sample and start sampling."""
        self._samples.append(self._sample())
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Take a last sample and return all samples."""
        self._over.set()
        self._thread.join()
        self._samples.append(self._sample())
        return self._samples

    def _run(self) -> None:
        next_s = self._samples[0].time_s + SAMPLE_S
        while not self._over.wait(max(next_s - time.monotonic(), 0)):
            self._samples.append(self._sample())
            next_s += SAMPLE_S

    def _sample(self) -> Sample:
        return Sample(time.monotonic(), {node.name: self._node(node) for node in self._nodes})

    def _node(self, node: Node) -> NodeBytes:
        devices = self._devices(node)
        names, loopback = cnics(self._state.settings), devices.get("lo")
        rails = tuple((devices[c][1], devices[c][0]) for c in names if c in devices)
        return NodeBytes(
            snic=self._read_bytes(node, devices),
            cnic_out=sum(rail[0] for rail in rails) if rails else -1,
            cnic_in=sum(rail[1] for rail in rails) if rails else -1,
            loopback=loopback[1] if loopback and rails else -1,
            rails=rails,
        )

    def _devices(self, node: Node) -> dict[str, tuple[int, int]]:
        """Return (received, sent) bytes of the node's network devices."""
        path = Path(f"/proc/{self._process_ids[node.name]}/net/dev")
        try:
            return parse_devices(path.read_text(encoding="utf-8"))
        except OSError:  # the process has ended
            return {}

    def _read_bytes(self, node: Node, devices: Mapping[str, tuple[int, int]]) -> int:
        machine = self._state.machine
        if SNIC in devices:
            return devices[SNIC][0]
        if machine.cgroups is None:
            return -1
        name = "blkio.throttle.io_service_bytes" if machine.cgroups.version == 1 else "io.stat"
        text = (Path(cgroup_folder(machine.cgroups, node)) / name).read_text(encoding="utf-8")
        return parse_read_bytes(text, machine.device_number)


def parse_devices(text: str) -> dict[str, tuple[int, int]]:
    """Return (received, sent) bytes by device, given /proc/net/dev."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        words = numbers.split()
        found[name.strip()] = (int(words[0]), int(words[8]))
    return found


def parse_read_bytes(text: str, device_number: str) -> int:
    """Return the bytes read from a device, given io_service_bytes (v1) or io.stat (v2)."""
    for line in text.splitlines():
        device, *words = line.split()
        if device != device_number:
            continue
        if words[0] == "Read":
            return int(words[1])
        for word in words:
            if word.startswith("rbytes="):
                return int(word.removeprefix("rbytes="))
    return 0


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
