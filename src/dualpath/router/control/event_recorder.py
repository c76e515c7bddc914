"""Records the events of a live router's scheduler with its answers (``policy.event_log``).

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
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, TraceError
from dualpath.core.request import Request
from dualpath.policy import event_log
from dualpath.policy.event_log import (
    Begin,
    Cancelled,
    E,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineResumed,
    EventLog,
    Fetched,
    Finished,
    Line,
    PrefillEnded,
    ReadEnded,
    Reported,
    SlotsGranted,
    Submitted,
    ThresholdsSet,
)
from dualpath.policy.events import (
    Assignment,
    EngineReport,
    EngineSpec,
    Granted,
    SchedulerSettings,
    Thresholds,
)
from dualpath.policy.load import EngineLoad
from dualpath.policy.scheduler import QueueLengths, RequestScheduler

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
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"event log {str(path)!r} cannot be written ({error.strerror}); choose another "
                "file with --event-log, or none"
            ) from error
        self._thread = threading.Thread(target=self._write_all, name="event-log", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Queue a line; does nothing once recording has ended."""
        if self._over:
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._end(f"{self._queue.maxsize} events wait for the disk, which is the most kept")

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
            # Whatever it is: the log ends and says so, serving goes on.
            self._end(f"{type(error).__name__}: {error}")
            while not self._queue.empty():
                self._queue.get()


class RecordedScheduler:
    """A ``RequestScheduler`` whose calls and answers go to a log; same calls, same errors."""

    def __init__(self, settings: SchedulerSettings, log: EventLogWriter) -> None:
        self._scheduler = RequestScheduler(settings)
        self._log = log
        log.write(Begin(version=__version__, settings=settings, format=event_log.FORMAT))

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """Record ``RequestScheduler.set_thresholds``."""
        self._make(ThresholdsSet(thresholds))

    def engine_joined(self, spec: EngineSpec) -> None:
        """Record ``RequestScheduler.engine_joined``."""
        self._make(EngineJoined(spec))

    def engine_lost(self, engine_id: str) -> list[str]:
        """Record ``RequestScheduler.engine_lost``."""
        done = self._make(EngineLost(engine_id))
        return list(done.requests)

    def engine_paused(self, engine_id: str) -> None:
        """Record ``RequestScheduler.engine_paused``."""
        self._make(EnginePaused(engine_id))

    def engine_resumed(self, engine_id: str) -> None:
        """Record ``RequestScheduler.engine_resumed``."""
        self._make(EngineResumed(engine_id))

    def report(self, report: EngineReport) -> None:
        """Record ``RequestScheduler.report``."""
        self._make(Reported(report))

    def submit(self, request: Request) -> None:
        """Record ``RequestScheduler.submit``."""
        self._make(Submitted(request))

    def fetch(self, group: str) -> list[Assignment]:
        """Record ``RequestScheduler.fetch``, unless no request waits."""
        if not self._scheduler.waiting():
            return []
        return list(self._make(Fetched(group)).assignments)

    def granted(self, grant: Granted) -> list[Assignment]:
        """Record ``RequestScheduler.granted``."""
        return list(self._make(SlotsGranted(grant)).assignments)

    def read_done(self, request_id: str) -> None:
        """Record ``RequestScheduler.read_done``."""
        self._make(ReadEnded(request_id))

    def prefill_done(self, request_id: str) -> None:
        """Record ``RequestScheduler.prefill_done``."""
        self._make(PrefillEnded(request_id))

    def finished(self, request_id: str) -> None:
        """Record ``RequestScheduler.finished``."""
        self._make(Finished(request_id))

    def cancel(self, request_id: str) -> None:
        """Record ``RequestScheduler.cancel``."""
        self._make(Cancelled(request_id))

    def waiting(self) -> int:
        """Requests submitted and not assigned yet."""
        return self._scheduler.waiting()

    def request_tokens(self, request: Request, role: Role) -> int:
        """What a request weighs at a role."""
        return self._scheduler.request_tokens(request, role)

    def queue_lengths(self) -> QueueLengths:
        """How many requests wait for what."""
        return self._scheduler.queue_lengths()

    def loads(self) -> tuple[EngineLoad, ...]:
        """The load of every engine."""
        return self._scheduler.loads()

    def unplaceable(self) -> list[str]:
        """Requests that no joined DE can ever hold."""
        return self._scheduler.unplaceable()

    def _make(self, event: E) -> E:
        try:
            done = event.made(self._scheduler)
        except Exception as error:
            # Also a defect: the log of the run that shows it is worth most.
            self._log.write(event_log.refused(event, error))
            raise
        self._log.write(done)
        return done


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
