"""Bytes over the links of all nodes during a run, from the kernel's counters."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dualpath.laboratory.lab.cluster import LabState
from dualpath.laboratory.lab.machine import Node
from dualpath.laboratory.lab.steps import SNIC, cgroup_folder, cnics

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

    ``process_ids`` has one live process per node, through whose /proc the node's network is read.
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
