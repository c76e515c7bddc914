"""The supervisor's side of a unit of processes on a node of a Ray cluster.

One thread per unit makes all calls to Ray: it waits for a place, starts the processes there,
forwards signals to them and copies their logs here.  Ray reports when an actor is lost, with its
worker or its node; the processes of the unit have exited then.
"""

import contextlib
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from dualpath.ops.launch.executor import Launches
from dualpath.ops.launch.managed_process import ManagedProcess
from dualpath.ops.launch.unit_processes import NodePlace, ProcessUpdate
from dualpath.ops.launch.units import Unit

log = logging.getLogger(__name__)

#: Interval of polls for logs and exit codes.
POLL_S = 0.2
#: Timeout of a call to an actor.
_CALL_S = 20.0
#: Log a warning if a unit waits longer for its place, and repeat it at an interval.
_WARN_AFTER_S = 5.0
_WARN_AGAIN_S = 60.0


class RayProcess(ManagedProcess):
    """A process on a node of the Ray cluster; its log is copied here."""

    def __init__(self, name: str, log: Path, signals: "queue.SimpleQueue[_Signal]") -> None:
        super().__init__(name, log)
        self._signals = signals
        self._over = threading.Event()
        self._exit_code = 0
        #: Bytes of its log that were copied.
        self.fetched_bytes = 0
        log.touch()

    @property
    def exit_code(self) -> int | None:
        """See the base class."""
        return self._exit_code if self._over.is_set() else None

    def wait(self, timeout_s: float) -> int | None:
        """See the base class."""
        self._over.wait(timeout_s)
        return self.exit_code

    def send_signal(self, number: int) -> None:
        """See the base class; any signal ends a process that waits for a place."""
        if self.alive:
            self._signals.put(_Signal(self.name, number))

    def kill(self) -> None:
        """See the base class."""
        if self.alive:
            self._signals.put(_Signal(self.name, signal.SIGKILL, whole_group=True))

    def update(self, update: ProcessUpdate) -> None:
        """Append fetched output to the log; finish if the process has exited."""
        with self.log.open("ab") as file:
            file.write(update.log)
        self.fetched_bytes += len(update.log)
        if update.exit_code is not None:
            self.finish(update.exit_code)

    def finish(self, exit_code: int, last_line: str = "") -> None:
        """Mark as exited; ``last_line`` is appended to its log."""
        if last_line:
            with self.log.open("a") as file:
                file.write(f"{last_line}\n")
        self._exit_code = exit_code
        self._over.set()


class _Signal(msgspec.Struct, frozen=True):
    name: str
    number: int
    whole_group: bool = False


class _ActorPlace:
    """The place of an actor."""

    def __init__(self, actor: Any, found: NodePlace) -> None:  # noqa: ANN401 - Ray's handle
        self._actor = actor
        self.host, self.devices = found.host, found.devices

    def claim_port(self) -> int:
        """See ``Place``."""
        port: int = ray.get(self._actor.claim_port.remote(), timeout=_CALL_S)
        return port


class RayUnit:
    """Starts the processes of a unit in an actor; ``make_actor`` must not block.

    ``folder`` and ``environment``: see ``UnitProcesses.start``.  Waiting for a place is logged.
    """

    def __init__(
        self,
        unit: Unit,
        make_actor: Callable[[], Any],
        launches: Launches,
        logs: Path,
        folder: str,
        environment: Mapping[str, str],
    ) -> None:
        self._unit = unit
        self._launches = launches
        self._start_in = (folder, dict(environment))
        self._signals: queue.SimpleQueue[_Signal] = queue.SimpleQueue()
        self.processes = tuple(
            RayProcess(name, logs / f"{name}.log", self._signals) for name in unit.processes
        )
        self._make_actor = make_actor
        self._actor: Any = None
        self._placed = False
        self._thread = threading.Thread(target=self._run, name=f"ray-{unit.name}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the actor has stopped, after its processes have exited."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._actor = self._make_actor()
            if (place := self._await_place()) is not None:
                self._start(place)
                self._follow()
        except RayTaskError as error:
            self._ended(1, str(error.cause))
        except Exception as error:  # without this thread the processes are unsupervised
            self._ended(-signal.SIGKILL, f"lost with its actor or node: {_first_line(error)}")
        finally:
            self._release()

    def _await_place(self) -> NodePlace | None:
        """Wait for the actor; return its place, None if the unit was stopped before."""
        answer = self._actor.place.remote()
        warn_s, warned = time.monotonic() + _WARN_AFTER_S, False
        while not ray.wait([answer], timeout=POLL_S)[0]:
            with contextlib.suppress(queue.Empty):
                self._ended(-self._signals.get_nowait().number, "ended before it had a place")
                return None
            if time.monotonic() > warn_s:
                log.warning("%s waits for Ray to place it", self._unit.name)
                warn_s, warned = time.monotonic() + _WARN_AGAIN_S, True
        found: NodePlace = ray.get(answer, timeout=_CALL_S)
        self._placed = True
        if warned:
            log.info("%s was placed on %s", self._unit.name, found.host)
        return found

    def _start(self, found: NodePlace) -> None:
        launches = self._launches(_ActorPlace(self._actor, found))
        by_name = dict(zip(self._unit.processes, launches, strict=True))
        ray.get(self._actor.start.remote(by_name, *self._start_in), timeout=_CALL_S)

    def _follow(self) -> None:
        """Copy logs and forward signals until all processes have exited."""
        while alive := [process for process in self.processes if process.alive]:
            with contextlib.suppress(queue.Empty):
                self._forward(self._signals.get(timeout=POLL_S))
            offsets = {process.name: process.fetched_bytes for process in alive}
            # A node that does not answer counts as alive until Ray reports its loss.
            with contextlib.suppress(ActorUnavailableError, GetTimeoutError):
                updates = ray.get(self._actor.poll.remote(offsets), timeout=_CALL_S)
                for process in alive:
                    process.update(updates[process.name])

    def _forward(self, asked: _Signal) -> None:
        if asked.whole_group:
            self._actor.kill.remote(asked.name)
        else:
            self._actor.send_signal.remote(asked.name, asked.number)

    def _ended(self, exit_code: int, last_line: str) -> None:
        for process in self.processes:
            if process.alive:
                process.finish(exit_code, last_line)

    def _release(self) -> None:
        """Stop the actor, which releases the unit's resources."""
        if self._actor is None:
            return
        if self._placed:
            with contextlib.suppress(RayError):
                ray.get(self._actor.close.remote(), timeout=_CALL_S)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)


def _first_line(error: Exception) -> str:
    """Return the line of Ray's error message that has the reason of an actor's death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    because = [line for line in lines if "because" in line]
    return f"{type(error).__name__}: {(because or lines or ['no reason given'])[0]}"
