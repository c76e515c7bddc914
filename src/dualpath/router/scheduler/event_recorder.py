"""Records the events of a live router's scheduler with their effects (``policy.event_log``).

A thread encodes and writes, so that the event loop only appends to a queue.  What it has got so
far is in the file a moment later, also when the router is killed.  Recording never harms serving:
where the file cannot be written any more, or not fast enough, it ends with a line in the router's
log, and the file holds the run up to there.
"""

import logging
import lzma
import queue
import threading
from pathlib import Path
from typing import BinaryIO

from dualpath import __version__
from dualpath.core.errors import ConfigError, TraceError
from dualpath.node.output_files import open_in_place
from dualpath.policy import event_log
from dualpath.policy.event_log import Begin, Entry, EventLog, Line
from dualpath.policy.events import Effects, Event, SchedulerSettings
from dualpath.policy.scheduler import RequestScheduler

logger = logging.getLogger(__name__)

#: Events that may wait for the disk, some 100 MB of memory.
WAITING_EVENTS = 1 << 18
#: How long ``close`` waits for the disk.
CLOSE_S = 10.0


class EventLogWriter:
    """A log file that is written by a thread of its own; an existing file is replaced."""

    def __init__(self, path: Path, waiting_events: int = WAITING_EVENTS) -> None:
        """Raises ``ConfigError`` if the file cannot be written."""
        self._path = path
        self._queue: queue.Queue[Line | None] = queue.Queue(waiting_events)
        self._over = False
        try:
            # Readable by this user only: it has the keys of all prompts' blocks.
            self._file: BinaryIO = open_in_place(path, wait=False, private=True)
        except OSError as error:
            raise ConfigError(
                f"event log {str(path)!r} cannot be written ({error.strerror}); choose another "
                "file with --event-log, or none"
            ) from error
        self._thread = threading.Thread(target=self._write_all, name="event-log", daemon=True)
        self._thread.start()

    def begin(self, settings: SchedulerSettings) -> None:
        """Record the settings of the scheduler before its events."""
        self.write(Begin(version=__version__, settings=settings, format=event_log.FORMAT))

    def apply(self, scheduler: RequestScheduler, event: Event) -> Effects:
        """Apply an event, and record it with its effects or the error that it raises."""
        try:
            effects = scheduler.apply(event)
        except Exception as error:
            # Any error, also a defect: the log of the run that shows it is worth most.
            self.write(event_log.refusal(event, error))
            raise
        self.write(Entry(event, effects))
        return effects

    def write(self, line: Line) -> None:
        """Queue a line; does nothing once recording has ended."""
        if self._over:
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._end(f"{self._queue.maxsize} events wait for the disk, which is the limit")

    def close(self) -> None:
        """Write what is queued and close the file; idempotent."""
        self._over = True
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=CLOSE_S)
            except queue.Full:
                logger.exception("event log %s: its end could not be written", self._path)
            self._thread.join(CLOSE_S)

    def _end(self, why: str) -> None:
        self._over = True
        logger.error("event log %s ends here: %s; requests go on unrecorded", self._path, why)

    def _write_all(self) -> None:
        try:
            # Closing writes as well, and fails again where writing has failed.
            with self._file as file:
                while (line := self._queue.get()) is not None:
                    file.write(event_log.encode_line(line))
                    if self._queue.empty():
                        file.flush()
        except Exception as error:
            # On any error the log ends with a line in the router's log; serving goes on.
            self._end(f"{type(error).__name__}: {error}")
            while not self._queue.empty():
                self._queue.get()


def read_event_log(path: Path) -> EventLog:
    """Return the log in a file, plain or .xz; raises ``TraceError`` if it cannot be read."""
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            lines = file.readlines()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise TraceError(
            f"event log {str(path)!r} cannot be read ({error}); give the file that --event-log "
            "named"
        ) from error
    return event_log.decode(lines)
