"""Simulated stores of leases: what etcd's JSON gateway and Kubernetes' API do with a lease."""

import base64
import itertools
from typing import Any, Protocol

from dualpath.laboratory.chaos.simulation.world import World

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
    """One key, which is deleted when the lease it was put with ends."""

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
    """One Lease object, whose updates name the version that they replace."""

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
