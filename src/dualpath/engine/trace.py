"""Chrome trace events (chrome://tracing, Perfetto) of transfers and computation in one engine."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.node.output_files import OutputFile, not_creatable, not_writable
from dualpath.plan.order import Executed

log = logging.getLogger(__name__)

#: Tracks that are not named after the verb of their steps.
STORAGE_TRACK = "storage"
_TRACKS = {"read": STORAGE_TRACK, "persist": "storage-write"}
#: Steps that overlap with computation have the layer in their name.
_BY_LAYER = ("load", "send")


class TraceRecorder:
    """Writes complete events as one JSON file; disabled without a path.

    Events are written to disk immediately, into a file that is renamed when it is complete, so that
    a long trace takes no memory.  An error of the disk ends the trace, not the engine, and leaves
    the partial file.

    Times are those of the machine's clock, so that traces of several engines on one machine can be
    merged.
    """

    def __init__(self, path: str | None, process: str, threads: Threads = OS_THREADS) -> None:
        """Raise ``ConfigError`` for a path at which no file can be written."""
        if path:
            _check(Path(path))
        #: The current time on the clock of ``record``.
        self.now_ns = threads.now_ns
        self._path = Path(path) if path else None
        self._process = process
        self._lock = threads.lock()
        self._file: OutputFile | None = None
        self._ended = path is None

    def record(self, name: str, track: str, start_ns: int, end_ns: int, **args: object) -> None:
        """Add a complete event on ``track`` ("compute", "load", "send", "storage", …)."""
        if self._ended:
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
        encoded = msgspec.json.encode(event)
        with self._lock:
            self._append(encoded)

    def moved(
        self, executed: Sequence[tuple[str, Executed]], track: str = "", **args: object
    ) -> None:
        """Add one event for steps of one kind that were executed together, with their requests.

        The name and, by default, the track are derived from the steps; ``track`` distinguishes
        threads that execute steps of the same kind.
        """
        if self._ended or not executed:
            return
        step = executed[0][1].step
        verb = step.movement.verb
        name = f"{verb} L{step.layer}" if verb in _BY_LAYER else verb
        start_ns = min(done.start_ns for _, done in executed)
        end_ns = max(done.end_ns for _, done in executed)
        steps = [_described(request_id, done) for request_id, done in executed]
        self.record(name, track or _TRACKS.get(verb, verb), start_ns, end_ns, steps=steps, **args)

    def write(self) -> None:
        """End the trace and rename its file; no effect when disabled; idempotent."""
        with self._lock:
            if self._path is None or self._ended:
                return
            if self._file is None:
                self._open(self._path)
            if self._file is not None:
                self._end(self._file)

    def _append(self, event: bytes) -> None:
        assert self._path is not None
        if self._ended:
            return
        first = self._file is None
        if self._file is None:
            self._open(self._path)
        if self._file is not None:
            try:
                self._file.write(event if first else b",\n" + event)
            except OSError as error:
                self._give_up(error)

    def _open(self, path: Path) -> None:
        try:
            self._file = OutputFile(path, folders=True, wait=False)
            self._file.write(b'{"traceEvents": [')
        except OSError as error:
            self._give_up(error)

    def _end(self, file: OutputFile) -> None:
        self._ended = True
        try:
            file.write(b"]}")
            file.commit()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._ended = True
        written = self._path if self._file is None else self._file.leave()
        log.warning(
            "the trace %s ends here (%s); give trace_out a directory with space",
            *(written, error.strerror),
        )


def _check(path: Path) -> None:
    folder = path.expanduser().parent
    if (reason := not_writable(path)) is not None and not os.path.isdir(folder):
        reason = not_creatable(folder)
    if reason is not None:
        raise ConfigError(
            f"{{trace_out}} {str(path)!r} cannot be written ({reason}); give a file in a writable "
            "folder"
        )


def _described(request_id: str, done: Executed) -> dict[str, object]:
    step = done.step
    third = {"third": step.third} if step.third else {}
    return third | {
        "request": request_id,
        "label": step.label,
        "first_block": step.blocks.first,
        "blocks": step.blocks.count,
        "layer": step.layer,
        "whole": step.whole,
        "bytes": step.bytes,
        "ts": done.start_ns / 1000,
        "dur": (done.end_ns - done.start_ns) / 1000,
    }
