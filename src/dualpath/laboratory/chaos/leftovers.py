"""Leak check: a cluster without requests must hold no requests, slots, tokens or files."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from dualpath.laboratory.chaos.cluster import ChaosCluster
from dualpath.laboratory.chaos.cluster_calls import Status

_CALM_S = 20.0
_POLL_S = 0.25
#: Pools of connections and of threads grow to what the load needs.
_FEW_DESCRIPTORS = 40
_FEW_THREADS = 12


class ProcessResources(msgspec.Struct, frozen=True):
    """Kernel resources of a process."""

    pid: int
    descriptors: int
    threads: int


class LeakCheck:
    """Compares an idle cluster with ``status``, its status before any load."""

    def __init__(self, cluster: ChaosCluster, status: Status) -> None:
        self._cluster = cluster
        self._idle = {
            e["engine_id"]: (e["free_buffer_tokens"], e["free_hbm_tokens"])
            for e in status["engines"]
        }
        self._held: dict[str, ProcessResources] = {}

    async def leaks(self) -> list[str]:
        """Return descriptions of what is still held a while after the last request."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _CALM_S
        while left := await self._now():
            if loop.time() > deadline_s:
                break
            await asyncio.sleep(_POLL_S)
        return left + self._growth()

    async def _now(self) -> list[str]:
        status = await self._cluster.status()
        if status is None:
            return ["the router does not answer"]
        return [*held_in_status(status, self._idle), *self._half_written()]

    def _half_written(self) -> Iterator[str]:
        pids = {str(self._cluster.process(name).pid) for name in self._cluster.engines}
        for path in self._cluster.storage.glob("*/tmp/*"):
            if path.name.split("-")[-2:-1] and path.name.split("-")[-2] in pids:
                yield f"half-written file {path.name} of a live process"

    def _growth(self) -> list[str]:
        """Compare each process with its resources when it was idle for the first time."""
        left = []
        for name in self._cluster.names:
            now = process_resources(self._cluster.process(name).pid)
            first = self._held.get(name)
            if first is None or first.pid != now.pid:
                self._held[name] = now
            elif (
                now.descriptors > first.descriptors + _FEW_DESCRIPTORS
                or now.threads > first.threads + _FEW_THREADS
            ):
                left.append(
                    f"{name} holds {now.descriptors} descriptors and {now.threads} threads, "
                    f"{first.descriptors} and {first.threads} before"
                )
        return left


def held_in_status(status: Status, idle: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yield what is held by a router's status; ``idle`` has free (buffer, HBM) of idle engines."""
    for what in ("waiting", "running"):
        if status[what]:
            yield f"router: {status[what]} requests {what}"
    for engine in status["engines"]:
        name = engine["engine_id"]
        if not engine["alive"]:
            yield f"{name} is not alive"
            continue
        for what in ("seq", "tok", "read_queue_tokens"):
            if engine[what]:
                yield f"{name}: {what} is {engine[what]}"
        for what, all_tokens in zip(("buffer", "hbm"), idle[name], strict=True):
            if (free := engine[f"free_{what}_tokens"]) < all_tokens:
                yield f"{name}: {all_tokens - free} of {all_tokens} {what} tokens are not free"


def process_resources(pid: int) -> ProcessResources:
    """Return the resources of a live process; zeros if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        threads = next(int(row.split()[1]) for row in status.splitlines() if row[:8] == "Threads:")
        return ProcessResources(pid, len(os.listdir(f"/proc/{pid}/fd")), threads)
    except (FileNotFoundError, ProcessLookupError):
        return ProcessResources(pid, 0, 0)
