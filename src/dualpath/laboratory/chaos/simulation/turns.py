"""Leader election among the schedulers of a simulated cluster, and the check for one leader."""

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

#: Shorter than the time for which processes are stopped, and than time-outs for a scheduler.
_LEASE_S = 1.0
_NAME = "simulated"
#: Real clocks drift far less, but real leases last longer.
_RATES = (0.9, 1.0, 1.1)
_ZEROS_S = (0.0, -90.0, 1e4)


class LeaderElection(enum.StrEnum):
    """How the leading scheduler is elected; not at all if there is only one."""

    ONE = "one scheduler"
    LOCK = "a lock"
    ETCD = "a lease in etcd"
    KUBERNETES = "a lease in Kubernetes"

    @property
    def schedulers(self) -> int:
        """Number of schedulers."""
        return 1 if self is LeaderElection.ONE else 2

    @property
    def leased(self) -> bool:
        """Whether the election uses a lease in a store."""
        return self in (LeaderElection.ETCD, LeaderElection.KUBERNETES)


class SchedulerLeadership:
    """Leadership of all schedulers; the stores of leases have ``faults``."""

    def __init__(self, world: World, kind: LeaderElection) -> None:
        self.faults = LeaseFaults()
        self._world = world
        self._kind = kind
        self._server = SimEtcd(world) if kind is LeaderElection.ETCD else SimKubernetes()
        self._by_process: dict[Process, Turn] = {}

    def clock(self) -> Clock:
        """Return the clock of a starting scheduler: clocks of machines differ."""
        if not self._kind.leased:
            return TRUE_CLOCK
        return Clock(self._world.pick(_RATES), self._world.pick(_ZEROS_S))

    def leadership(self, process: Process, now_s: Callable[[], float]) -> Turn:
        """Return the leadership of a starting scheduler: a lock is granted in order of starts."""
        self._by_process[process] = leadership = self._new(process, now_s)
        return leadership

    def check(self, process: Process) -> None:
        """Record a problem if a scheduler acts and another one also leads.

        Both are checked: the leader's own view, by its clock, and the store's.
        """
        for other, leadership in self._by_process.items():
            if other is not process and other.alive and leadership.held:
                self._world.problem(f"{process.name} acts while {other.name} leads")
        if self._kind.leased and self._server.holder != process.name:
            self._world.problem(f"{process.name} acts without the store's lease")

    def _new(self, process: Process, now_s: Callable[[], float]) -> Turn:
        if self._kind is LeaderElection.ONE:
            return OnlyOne()
        if self._kind is LeaderElection.LOCK:
            return FileTurn(str(self._folder / "router.lock"))
        store = self._store(now_s)
        store._session = LeaseSession(process, self._server, self.faults)  # type: ignore[assignment]
        return LeasedTurn(store, _NAME, process.name, now_s, _LEASE_S)

    def _store(self, now_s: Callable[[], float]) -> EtcdLease | KubernetesLease:
        if self._kind is LeaderElection.ETCD:
            return EtcdLease("http://etcd", _NAME)
        (self._folder / "token").write_text("a service account's")
        return KubernetesLease("default", _NAME, now_s, "http://kubernetes", self._folder)

    @functools.cached_property
    def _folder(self) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="dualpath-simulated-")
        self._world.on_end(folder.cleanup)
        return Path(folder.name)
