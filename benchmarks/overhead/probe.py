"""Latency of event loops under load, measured by a separate process."""

import http.client
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

_GAP_S = 0.02
_TIMEOUT_S = 30.0
_PAGE_BYTES = 4096


class ProcessSamples(NamedTuple):
    """A process's latency of each ``GET /health``, and its initial and peak resident memory."""

    latency_s: list[float]
    before_bytes: int
    max_bytes: int

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latencies."""
        values = sorted(self.latency_s)
        return values[min(int(share * len(values)), len(values) - 1)]


class Probes:
    """Samples by process name, available after the block."""

    def __init__(self) -> None:
        self.by_process: dict[str, ProcessSamples] = {}


@contextmanager
def probing(processes: Mapping[str, tuple[int, int]]) -> Iterator[Probes]:
    """Probe processes, given by name as (HTTP port, process id), in turn during the block."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    prober = context.Process(target=_probe, args=(dict(processes), theirs))
    prober.start()
    probes = Probes()
    try:
        yield probes
        ours.send(None)
        probes.by_process = ours.recv()
    finally:
        prober.terminate()
        prober.join()


def _probe(processes: dict[str, tuple[int, int]], control: Connection) -> None:
    latencies: dict[str, list[float]] = {name: [] for name in processes}
    before = {name: resident_bytes(pid) for name, (_, pid) in processes.items()}
    peak = dict(before)
    while not control.poll(_GAP_S):
        for name, (port, pid) in processes.items():
            latencies[name].append(_latency_s(port))
            peak[name] = max(peak[name], resident_bytes(pid))
    control.send(
        {name: ProcessSamples(latencies[name], before[name], peak[name]) for name in processes}
    )


def _latency_s(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    start_s = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    duration_s = time.perf_counter() - start_s
    connection.close()
    return duration_s


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
