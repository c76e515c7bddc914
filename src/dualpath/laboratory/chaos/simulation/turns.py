"""Whose turn it is among the schedulers of a simulated cluster, and that it is one's alone."""

import enum
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from dualpath.laboratory.chaos.simulation.clock import TRUE_CLOCK, Clock
from dualpath.laboratory.chaos.simulation.lease_calls import LeaseFaults, LeaseSession
from dualpath.laboratory.chaos.simulation.lease_server import SimEtcd, SimKubernetes
from dualpath.laboratory.chaos.simulation.world import Process, World
from dualpath.router.standby.etcd_lease import EtcdLease
from dualpath.router.standby.file_turn import FileTurn
from dualpath.router.standby.kubernetes_lease import KubernetesLease
from dualpath.router.standby.leased_turn import LeasedTurn
from dualpath.router.standby.turn import OnlyOne, Turn

#: Shorter than a process stands still, and than anybody waits for a scheduler.
_LEASE_S = 1.0
_NAME = "simulated"
#: A clock goes wrong by far less, but for longer than a lease lasts here.
_RATES = (0.9, 1.0, 1.1)
_ZEROS_S = (0.0, -90.0, 1e4)


class TurnKind(enum.StrEnum):
    """What decides whose turn it is; where there is one scheduler, nothing has to."""

    ONE = "one scheduler"
    LOCK = "a lock"
    ETCD = "a lease in etcd"
    KUBERNETES = "a lease in Kubernetes"

    @property
    def schedulers(self) -> int:
        """How many there are, as long as none has ended."""
        return 1 if self is TurnKind.ONE else 2

    @property
    def leased(self) -> bool:
        """Whether a store decides that time may forbid to reach."""
        return self in (TurnKind.ETCD, TurnKind.KUBERNETES)


class Turns:
    """The turns of all schedulers; stores of leases have ``faults``."""

    def __init__(self, world: World, kind: TurnKind) -> None:
        self.faults = LeaseFaults()
        self._world = world
        self._kind = kind
        self._server = SimEtcd(world) if kind is TurnKind.ETCD else SimKubernetes()
        self._turns: dict[Process, Turn] = {}

    def clock(self) -> Clock:
        """Return the clock of a scheduler that starts: those of several machines are not alike."""
        if not self._kind.leased:
            return TRUE_CLOCK
        return Clock(self._world.pick(_RATES), self._world.pick(_ZEROS_S))

    def turn(self, process: Process, now_s: Callable[[], float]) -> Turn:
        """Return the turn of a scheduler that starts: by a lock those before it go first."""
        self._turns[process] = turn = self._made(process, now_s)
        return turn

    def check(self, process: Process) -> None:
        """Call it a problem if a scheduler acts in its turn and is not alone in it.

        The word of a store says nothing of a holder that looks at its own clock, and the other way
        round: both have to say so.
        """
        for other, turn in self._turns.items():
            if other is not process and other.alive and turn.held:
                self._world.problem(f"{process.name} acts in the turn of {other.name}")
        if self._kind.leased and self._server.holder != process.name:
            self._world.problem(f"{process.name} acts, and the store grants it no turn")

    def _made(self, process: Process, now_s: Callable[[], float]) -> Turn:
        if self._kind is TurnKind.ONE:
            return OnlyOne()
        if self._kind is TurnKind.LOCK:
            return FileTurn(str(self._folder / "router.lock"))
        store = self._store(now_s)
        store._session = LeaseSession(process, self._server, self.faults)  # type: ignore[assignment]
        return LeasedTurn(store, _NAME, process.name, now_s, _LEASE_S)

    def _store(self, now_s: Callable[[], float]) -> EtcdLease | KubernetesLease:
        if self._kind is TurnKind.ETCD:
            return EtcdLease("http://etcd", _NAME)
        (self._folder / "token").write_text("a service account's")
        return KubernetesLease("default", _NAME, now_s, "http://kubernetes", self._folder)

    @functools.cached_property
    def _folder(self) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="dualpath-simulated-")
        self._world.at_the_end(folder.cleanup)
        return Path(folder.name)
