"""Chrome trace events (chrome://tracing, Perfetto) of transfers and computation in one engine."""

import json
import threading
import time
from pathlib import Path
from typing import Any


class TraceRecorder:
    """Collects complete events and writes them as one JSON file; disabled without a path.

    Times are ``time.monotonic_ns`` of one machine, so traces of several engines on that machine
    can be laid over each other.
    """

    def __init__(self, path: str | None, process: str) -> None:
        self._path = Path(path) if path else None
        self._process = process
        self._lock = threading.Lock()
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

    def now_ns(self) -> int:
        """Return the time that ``record`` expects."""
        return time.monotonic_ns()

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
