"""A unit of processes on a node of a Ray cluster, as its supervisor sees it.

One thread per unit does all that takes a call of Ray: it waits for a place, has the processes
started there, carries signals to them and brings their logs here.  Ray says when an actor is lost,
with its worker or its node; the processes of the unit have ended then.
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
from dualpath.ops.launch.unit_processes import NodePlace, Seen
from dualpath.ops.launch.units import Unit

log = logging.getLogger(__name__)

#: How often logs are brought and ends are seen.
LOOK_S = 0.2
#: A call of an actor that lives takes no longer; the next look comes after it.
_CALL_S = 20.0
#: A unit that waits longer for its place is said to wait.
_SAY_AFTER_S = 5.0
_SAY_AGAIN_S = 60.0


class RayProcess(ManagedProcess):
    """A process on some node; its log is brought here."""

    def __init__(self, name: str, log: Path, signals: "queue.SimpleQueue[_Signal]") -> None:
        super().__init__(name, log)
        self._signals = signals
        self._over = threading.Event()
        self._exit_code = 0
        #: How much of its log is here.
        self.brought_bytes = 0
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
        """See the base class; one that waits for a place is ended by any."""
        if self.alive:
            self._signals.put(_Signal(self.name, number))

    def kill(self) -> None:
        """See the base class."""
        if self.alive:
            self._signals.put(_Signal(self.name, signal.SIGKILL, whole_group=True))

    def bring(self, seen: Seen) -> None:
        """Take what a look has found."""
        with self.log.open("ab") as file:
            file.write(seen.log)
        self.brought_bytes += len(seen.log)
        if seen.exit_code is not None:
            self.over(seen.exit_code)

    def over(self, exit_code: int, last_words: str = "") -> None:
        """It has ended; what is said here of why ends its log."""
        if last_words:
            with self.log.open("a") as file:
                file.write(f"{last_words}\n")
        self._exit_code = exit_code
        self._over.set()


class _Signal(msgspec.Struct, frozen=True):
    name: str
    number: int
    whole_group: bool = False


class _ActorPlace:
    """A place as the actor there says."""

    def __init__(self, actor: Any, found: NodePlace) -> None:  # noqa: ANN401 - Ray's handle
        self._actor = actor
        self.host, self.devices = found.host, found.devices

    def claim_port(self) -> int:
        """See ``Place``."""
        port: int = ray.get(self._actor.claim_port.remote(), timeout=_CALL_S)
        return port


class RayUnit:
    """Starts the processes of a unit in an actor, which ``make_actor`` returns at once.

    ``folder`` and ``environment`` are as in ``UnitProcesses.start``.  That a unit waits for its
    place is logged.
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
        """Wait until the actor of processes that have ended is gone too."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._actor = self._make_actor()
            if (place := self._await_place()) is not None:
                self._start(place)
                self._follow()
        except RayTaskError as error:
            self._ended(1, str(error.cause))
        except Exception as error:  # whatever it is, nobody watches these processes any more
            self._ended(-signal.SIGKILL, f"lost on its way or with its node: {_first_line(error)}")
        finally:
            self._let_go()

    def _await_place(self) -> NodePlace | None:
        """Wait for the actor; return where it is, None if the unit was told to end before."""
        answer = self._actor.place.remote()
        say_s, said = time.monotonic() + _SAY_AFTER_S, False
        while not ray.wait([answer], timeout=LOOK_S)[0]:
            with contextlib.suppress(queue.Empty):
                self._ended(-self._signals.get_nowait().number, "ended before it had a place")
                return None
            if time.monotonic() > say_s:
                log.warning("%s waits until Ray has a place for it", self._unit.name)
                say_s, said = time.monotonic() + _SAY_AGAIN_S, True
        found: NodePlace = ray.get(answer, timeout=_CALL_S)
        self._placed = True
        if said:
            log.info("%s has a place, on %s", self._unit.name, found.host)
        return found

    def _start(self, found: NodePlace) -> None:
        launches = self._launches(_ActorPlace(self._actor, found))
        by_name = dict(zip(self._unit.processes, launches, strict=True))
        ray.get(self._actor.start.remote(by_name, *self._start_in), timeout=_CALL_S)

    def _follow(self) -> None:
        """Bring logs and carry signals until all processes have ended."""
        while alive := [process for process in self.processes if process.alive]:
            with contextlib.suppress(queue.Empty):
                self._carry(self._signals.get(timeout=LOOK_S))
            offsets = {process.name: process.brought_bytes for process in alive}
            # A node that does not answer is alive until Ray says otherwise.
            with contextlib.suppress(ActorUnavailableError, GetTimeoutError):
                seen = ray.get(self._actor.look.remote(offsets), timeout=_CALL_S)
                for process in alive:
                    process.bring(seen[process.name])

    def _carry(self, asked: _Signal) -> None:
        if asked.whole_group:
            self._actor.kill.remote(asked.name)
        else:
            self._actor.send_signal.remote(asked.name, asked.number)

    def _ended(self, exit_code: int, last_words: str) -> None:
        for process in self.processes:
            if process.alive:
                process.over(exit_code, last_words)

    def _let_go(self) -> None:
        """End the actor, which holds the unit's resources."""
        if self._actor is None:
            return
        if self._placed:
            with contextlib.suppress(RayError):
                ray.get(self._actor.close.remote(), timeout=_CALL_S)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)


def _first_line(error: Exception) -> str:
    """Return the reason out of Ray's many lines: the one that says why an actor died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    because = [line for line in lines if "because" in line]
    return f"{type(error).__name__}: {(because or lines or ['no reason given'])[0]}"
