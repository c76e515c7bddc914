"""How soon event loops answer while they are under load: asked from a process of its own."""

import http.client
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

_GAP_S = 0.02
_ANSWER_S = 30.0
_PAGE_BYTES = 4096


class Seen(NamedTuple):
    """Of one process: seconds until each ``GET /health`` was answered, most resident bytes."""

    answer_s: list[float]
    before_bytes: int
    max_bytes: int

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the answers."""
        values = sorted(self.answer_s)
        return values[min(int(share * len(values)), len(values) - 1)]


class Probes:
    """What was seen of each process, by its name, once the block is over."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}


@contextmanager
def probing(processes: Mapping[str, tuple[int, int]]) -> Iterator[Probes]:
    """Ask processes in turn during the block; they are given by name: HTTP port, process id."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    asking = context.Process(target=_ask, args=(dict(processes), theirs))
    asking.start()
    probes = Probes()
    try:
        yield probes
        ours.send(None)
        probes.seen = ours.recv()
    finally:
        asking.terminate()
        asking.join()


def _ask(processes: dict[str, tuple[int, int]], told: Connection) -> None:
    answers: dict[str, list[float]] = {name: [] for name in processes}
    before = {name: resident_bytes(pid) for name, (_, pid) in processes.items()}
    most = dict(before)
    while not told.poll(_GAP_S):
        for name, (port, pid) in processes.items():
            answers[name].append(_answer_s(port))
            most[name] = max(most[name], resident_bytes(pid))
    told.send({name: Seen(answers[name], before[name], most[name]) for name in processes})


def _answer_s(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    start_s = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    took_s = time.perf_counter() - start_s
    connection.close()
    return took_s


def resident_bytes(pid: int) -> int:
    """Return what a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
