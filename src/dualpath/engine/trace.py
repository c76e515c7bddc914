"""Chrome trace events (chrome://tracing, Perfetto) of transfers and computation in one engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.plan.order import Executed

#: Tracks of steps that are not called as the step's verb.
STORAGE_TRACK = "storage"
_TRACKS = {"read": STORAGE_TRACK, "persist": "storage-write"}
#: What is moved layer by layer beside the computation has the layer in its name.
_BY_LAYER = ("load", "send")


class TraceRecorder:
    """Collects complete events and writes them as one JSON file; disabled without a path.

    Times are those of one machine's clock, so traces of several engines on that machine
    can be laid over each other.
    """

    def __init__(self, path: str | None, process: str, threads: Threads = OS_THREADS) -> None:
        self._threads = threads
        self._path = Path(path) if path else None
        self._process = process
        self._lock = threads.lock()
        self._events: list[dict[str, Any]] = []

    def record(self, name: str, track: str, start_ns: int, end_ns: int, **args: object) -> None:
        """Add a complete event on ``track`` ("compute", "load", "send", "storage", …)."""
        if self._path is None:
            return
        event = {
            "name": name,
            "ph": "X",
            "pid": self._process,
            "tid": track,
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": args,
        }
        with self._lock:
            self._events.append(event)

    def moved(
        self, executed: Sequence[tuple[str, Executed]], track: str = "", **args: object
    ) -> None:
        """Add one event for steps of a kind that were executed together, with their requests.

        Name and track are those of the steps; ``track`` if several threads execute them.
        """
        if self._path is None or not executed:
            return
        step = executed[0][1].step
        verb = step.movement.verb
        name = f"{verb} L{step.layer}" if verb in _BY_LAYER else verb
        start_ns = min(done.start_ns for _, done in executed)
        end_ns = max(done.end_ns for _, done in executed)
        steps = [_described(request_id, done) for request_id, done in executed]
        self.record(name, track or _TRACKS.get(verb, verb), start_ns, end_ns, steps=steps, **args)

    def now_ns(self) -> int:
        """Return the time that ``record`` expects."""
        return self._threads.now_ns()

    def write(self) -> None:
        """Write everything recorded so far; does nothing when disabled."""
        if self._path is None:
            return
        with self._lock:
            events = list(self._events)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"traceEvents": events}))
        partial.replace(self._path)


def _described(request_id: str, done: Executed) -> dict[str, object]:
    step = done.step
    return {
        "request": request_id,
        "label": step.label,
        "first_block": step.blocks.first,
        "blocks": step.blocks.count,
        "layer": step.layer,
        "bytes": step.bytes,
        "ts": done.start_ns / 1000,
        "dur": (done.end_ns - done.start_ns) / 1000,
    }
