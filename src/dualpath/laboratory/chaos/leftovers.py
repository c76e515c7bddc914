"""What is left in a cluster that nobody asks anything: there must be nothing."""

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


class Holdings(msgspec.Struct, frozen=True):
    """What a process holds of its kernel."""

    pid: int
    descriptors: int
    threads: int


class Leftovers:
    """Looks for what is left; knows what an idle cluster looked like.

    ``status`` is that of the cluster before any load.
    """

    def __init__(self, cluster: ChaosCluster, status: Status) -> None:
        self._cluster = cluster
        self._full = {
            e["engine_id"]: (e["free_buffer_tokens"], e["free_hbm_tokens"])
            for e in status["engines"]
        }
        self._held: dict[str, Holdings] = {}

    async def found(self) -> list[str]:
        """Return what is still left a while after the last request, in words."""
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
        return [*in_status(status, self._full), *self._half_written()]

    def _half_written(self) -> Iterator[str]:
        pids = {str(self._cluster.process(name).pid) for name in self._cluster.engines}
        for path in self._cluster.storage.glob("*/tmp/*"):
            if path.name.split("-")[-2:-1] and path.name.split("-")[-2] in pids:
                yield f"half-written file {path.name} of a live process"

    def _growth(self) -> list[str]:
        """Compare each process with what it held when it was first seen idle."""
        left = []
        for name in self._cluster.names:
            now = holdings(self._cluster.process(name).pid)
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


def in_status(status: Status, full: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yield what a router's status says is held; ``full`` is (buffer, HBM) of idle engines."""
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
        for what, all_tokens in zip(("buffer", "hbm"), full[name], strict=True):
            if (free := engine[f"free_{what}_tokens"]) < all_tokens:
                yield f"{name}: {all_tokens - free} of {all_tokens} {what} tokens are not free"


def holdings(pid: int) -> Holdings:
    """Return what a live process holds; nothing if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        threads = next(int(row.split()[1]) for row in status.splitlines() if row[:8] == "Threads:")
        return Holdings(pid, len(os.listdir(f"/proc/{pid}/fd")), threads)
    except (FileNotFoundError, ProcessLookupError):
        return Holdings(pid, 0, 0)
