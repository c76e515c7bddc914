"""Simulated stores of leases: what etcd's JSON gateway and Kubernetes' API do with a lease."""

import base64
import itertools
from typing import Any, Protocol

from dualpath.laboratory.chaos.simulation.world import World

#: A status, and what is said with it.
Said = tuple[int, dict[str, Any]]

_OK, _CREATED, _NOT_FOUND, _CONFLICT = 200, 201, 404, 409
#: etcd looks that seldom which leases have run out.
_LATE_S = (0.0, 0.05, 0.5)


class LeaseServer(Protocol):
    """What answers calls about one lease."""

    @property
    def holder(self) -> str:
        """Who has it by the store's own word, empty if nobody."""
        ...

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Said:
        """Do what a call asks, and answer it."""
        ...


class SimEtcd:
    """One key, which goes with the lease that it was put with."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers = itertools.count(1)
        self._lasts_s: dict[str, float] = {}
        self._ends_s: dict[str, float] = {}
        self._holder, self._lease_id = "", ""

    @property
    def holder(self) -> str:
        """Who put the key."""
        self._run_out()
        return self._holder

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Said:
        """Answer as etcd 3.4 does."""
        self._run_out()
        match path.partition("/v3/")[2]:
            case "kv/range":
                return _OK, {"kvs": [{"value": self._holder}]} if self._lease_id else {}
            case "kv/txn":
                return _OK, self._put(body["success"][0]["request_put"])
            case "lease/grant":
                lease_id = str(next(self._numbers))
                self._lasts_s[lease_id] = float(body["TTL"])
                self._kept_alive(lease_id)
                return _OK, {"ID": lease_id}
            case "lease/keepalive":
                if body["ID"] not in self._ends_s:
                    return _OK, {"result": {"ID": body["ID"]}}
                self._kept_alive(body["ID"])
                return _OK, {"result": {"TTL": str(round(self._lasts_s[body["ID"]]))}}
            case "lease/revoke":
                return (_OK, {}) if self._revoked(body["ID"]) else (_NOT_FOUND, {})
        return _NOT_FOUND, {}

    def _put(self, put: dict[str, Any]) -> dict[str, Any]:
        if self._lease_id or put["lease"] not in self._ends_s:
            return {}
        self._holder, self._lease_id = base64.b64decode(put["value"]).decode(), put["lease"]
        return {"succeeded": True}

    def _kept_alive(self, lease_id: str) -> None:
        late_s = self._world.pick(_LATE_S)
        self._ends_s[lease_id] = self._world.now_s + self._lasts_s[lease_id] + late_s

    def _run_out(self) -> None:
        for lease_id in [one for one, end_s in self._ends_s.items() if end_s <= self._world.now_s]:
            self._revoked(lease_id)

    def _revoked(self, lease_id: str) -> bool:
        if lease_id == self._lease_id:
            self._holder, self._lease_id = "", ""
        return self._ends_s.pop(lease_id, None) is not None


class SimKubernetes:
    """One Lease, each change of which names the version that it replaces."""

    def __init__(self) -> None:
        self._versions = itertools.count(1)
        self._lease: dict[str, Any] | None = None

    @property
    def holder(self) -> str:
        """Whom the Lease names; it says nothing of time."""
        return "" if self._lease is None else self._lease["spec"]["holderIdentity"]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Said:
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
