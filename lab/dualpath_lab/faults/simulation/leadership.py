"""Leader election among the schedulers of a simulated cluster, and the check for one leader."""

import asyncio
import base64
import enum
import functools
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dualpath.router.scheduler.leadership import FileLeadership, Leadership, SoleLeader
from dualpath.router.scheduler.leases import EtcdLease, KubernetesLease, LeasedLeadership
from dualpath_lab.faults.simulation.world import TRUE_CLOCK, Clock, Process, World

# ------------------------------------------------------------------------------------ lease server
# Simulated stores of leases, which behave as etcd's JSON gateway and Kubernetes' API.

#: A status and a body.
Response = tuple[int, dict[str, Any]]

_OK, _CREATED, _NOT_FOUND, _CONFLICT = 200, 201, 404, 409
#: etcd revokes expired leases with this delay.
_LATE_S = (0.0, 0.05, 0.5)


class LeaseServer(Protocol):
    """A store with one lease."""

    @property
    def holder(self) -> str:
        """The holder by the store's own state, empty if there is none."""
        ...

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Response:
        """Execute a call and return the response."""
        ...


class SimEtcd:
    """etcd with one key, which is deleted when its lease ends."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers = itertools.count(1)
        self._lasts_s: dict[str, float] = {}
        self._ends_s: dict[str, float] = {}
        self._holder, self._lease_id = "", ""

    @property
    def holder(self) -> str:
        """The process that put the key."""
        self._expire()
        return self._holder

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Response:
        """Answer as etcd 3.4 does."""
        self._expire()
        match path.partition("/v3/")[2]:
            case "kv/range":
                return _OK, {"kvs": [{"value": self._holder}]} if self._lease_id else {}
            case "kv/txn":
                return _OK, self._put(body["success"][0]["request_put"])
            case "lease/grant":
                lease_id = str(next(self._numbers))
                self._lasts_s[lease_id] = float(body["TTL"])
                self._renew(lease_id)
                return _OK, {"ID": lease_id}
            case "lease/keepalive":
                if body["ID"] not in self._ends_s:
                    return _OK, {"result": {"ID": body["ID"]}}
                self._renew(body["ID"])
                return _OK, {"result": {"TTL": str(round(self._lasts_s[body["ID"]]))}}
            case "lease/revoke":
                return (_OK, {}) if self._revoked(body["ID"]) else (_NOT_FOUND, {})
        return _NOT_FOUND, {}

    def _put(self, put: dict[str, Any]) -> dict[str, Any]:
        if self._lease_id or put["lease"] not in self._ends_s:
            return {}
        self._holder, self._lease_id = base64.b64decode(put["value"]).decode(), put["lease"]
        return {"succeeded": True}

    def _renew(self, lease_id: str) -> None:
        late_s = self._world.pick(_LATE_S)
        self._ends_s[lease_id] = self._world.now_s + self._lasts_s[lease_id] + late_s

    def _expire(self) -> None:
        for lease_id in [one for one, end_s in self._ends_s.items() if end_s <= self._world.now_s]:
            self._revoked(lease_id)

    def _revoked(self, lease_id: str) -> bool:
        if lease_id == self._lease_id:
            self._holder, self._lease_id = "", ""
        return self._ends_s.pop(lease_id, None) is not None


class SimKubernetes:
    """Kubernetes with one Lease object; each update names the version that it replaces."""

    def __init__(self) -> None:
        self._versions = itertools.count(1)
        self._lease: dict[str, Any] | None = None

    @property
    def holder(self) -> str:
        """The holder in the Lease, whether it has expired or not."""
        return "" if self._lease is None else self._lease["spec"]["holderIdentity"]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Response:
        """Answer as the API server does."""
        if method == "POST":
            return (_CONFLICT, {}) if self._lease is not None else (_CREATED, self._changed(body))
        if self._lease is None:
            return _NOT_FOUND, {}
        if method == "GET":
            return _OK, self._lease
        known = self._lease["metadata"]["resourceVersion"]
        if body["metadata"].get("resourceVersion") != known:
            return _CONFLICT, {}
        return _OK, self._changed(body)

    def _changed(self, lease: dict[str, Any]) -> dict[str, Any]:
        lease["metadata"]["resourceVersion"] = str(next(self._versions))
        self._lease = lease
        return lease


# ------------------------------------------------------------------------------------- lease calls
# Calls of a simulated scheduler to a store of leases, with injected faults.

_DELAYS_S = (0.0005, 0.002, 0.02)
#: Longer than a holder waits for an answer.
_SLOW_S = (0.05, 0.2, 0.6)


class LeaseFaults:
    """Current probabilities that calls are ``slow``, ``doubled`` or ``unanswered``.

    Calls of processes in ``cut`` do not arrive, and no calls if the store is ``unreachable``.
    """

    def __init__(self) -> None:
        self.slow = self.doubled = self.unanswered = 0.0
        self.unreachable = False
        self.cut: set[str] = set()


class LeaseResponse:
    """The part of aiohttp's response that the clients use."""

    def __init__(self, response: Response) -> None:
        self.status, self._content = response

    async def json(self, content_type: str | None) -> dict[str, Any]:
        """Return the decoded body."""
        return self._content


class LeaseSession:
    """The part of ``aiohttp.ClientSession`` that the clients use.

    A cancelled call is executed all the same, perhaps later.
    """

    def __init__(self, process: Process, server: LeaseServer, faults: LeaseFaults) -> None:
        self._process = process
        self._world: World = process.world
        self._server = server
        self._faults = faults

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        json: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        allow_redirects: bool = True,
    ) -> AsyncIterator[LeaseResponse]:
        """Send a request; raises ``OSError`` if the connection is reset."""
        answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        body = msgspec.json.encode(json or {})
        self._later(functools.partial(self._arrive, method, url, body, answered))
        yield LeaseResponse(await answered)

    async def close(self) -> None:
        """Nothing to close."""

    def _arrive(
        self, method: str, url: str, body: bytes, answered: "asyncio.Future[Response]"
    ) -> None:
        self._world.maybe_fault()
        if self._faults.unreachable or self._process.name in self._faults.cut:
            self._break_off(answered)
            return
        response = self._server.answer(method, url, msgspec.json.decode(body))
        if self._happens(self._faults.doubled):
            response = self._server.answer(method, url, msgspec.json.decode(body))
        if self._happens(self._faults.unanswered):
            self._break_off(answered)
            return
        status, content = response[0], msgspec.json.encode(response[1])
        self._reply(answered, lambda: answered.set_result((status, msgspec.json.decode(content))))

    def _break_off(self, answered: "asyncio.Future[Response]") -> None:
        """Reset the connection, or never answer, as when packets are dropped."""
        if self._world.chance.random() < 0.5:
            self._reply(answered, lambda: answered.set_exception(ConnectionResetError("reset")))

    def _reply(self, answered: "asyncio.Future[Response]", how: Callable[[], None]) -> None:
        def reply() -> None:
            if not answered.done():
                how()

        self._later(lambda: self._process.step(reply))

    def _later(self, call: Callable[[], object]) -> None:
        slow = self._happens(self._faults.slow)
        self._world.after(self._world.pick(_SLOW_S if slow else _DELAYS_S), call)

    def _happens(self, often: float) -> bool:
        return bool(often) and self._world.chance.random() < often


#: Duration of a lease: shorter than the stops of processes and the time-outs for a scheduler.
_LEASE_S = 1.0
_NAME = "simulated"
#: Real clocks drift far less, but real leases last longer.
_RATES = (0.9, 1.0, 1.1)
_ZEROS_S = (0.0, -90.0, 1e4)


class LeaderElection(enum.StrEnum):
    """How the leading scheduler is elected; a single scheduler needs no election."""

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
    """Leadership of all schedulers; ``faults`` are those of the store of leases."""

    def __init__(self, world: World, kind: LeaderElection) -> None:
        self.faults = LeaseFaults()
        self._world = world
        self._kind = kind
        self._server = SimEtcd(world) if kind is LeaderElection.ETCD else SimKubernetes()
        self._by_process: dict[Process, Leadership] = {}

    def clock(self) -> Clock:
        """Return the clock of a starting scheduler: clocks of machines differ."""
        if not self._kind.leased:
            return TRUE_CLOCK
        return Clock(self._world.pick(_RATES), self._world.pick(_ZEROS_S))

    def leadership(self, process: Process, now_s: Callable[[], float]) -> Leadership:
        """Return the leadership of a starting scheduler; the first to start gets a lock."""
        self._by_process[process] = leadership = self._new(process, now_s)
        return leadership

    def check(self, process: Process) -> None:
        """Record a problem if a scheduler acts while another one leads.

        A scheduler leads by its own clock or by the state of the store; both are checked.
        """
        for other, leadership in self._by_process.items():
            if other is not process and other.alive and leadership.held:
                self._world.problem(f"{process.name} acts while {other.name} leads")
        if self._kind.leased and self._server.holder != process.name:
            self._world.problem(f"{process.name} acts without the store's lease")

    def _new(self, process: Process, now_s: Callable[[], float]) -> Leadership:
        if self._kind is LeaderElection.ONE:
            return SoleLeader()
        if self._kind is LeaderElection.LOCK:
            return FileLeadership(str(self._folder / "router.lock"))
        store = self._store(now_s)
        store._session = LeaseSession(process, self._server, self.faults)  # type: ignore[assignment]
        return LeasedLeadership(store, _NAME, process.name, now_s, _LEASE_S)

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
