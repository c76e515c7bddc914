"""A Lease of Kubernetes (coordination.k8s.io/v1), held as its own components hold theirs.

Who wants it looks how long it stands still *by its own clock*: no times of two machines are
compared.  Each change names the version that it replaces, so that of two only one succeeds.
"""

import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from dualpath.core.errors import ConfigError, StorageError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 2.0
_OK, _CREATED, _NOT_FOUND, _CONFLICT = 200, 201, 404, 409
_NO_LEASE = (_NOT_FOUND, _CONFLICT)


class KubernetesLease:
    """The ``LeaseStore`` of the Lease ``name`` in ``namespace``; ``clock`` gives monotonic seconds.

    ``api`` is the API server, ``account`` the folder of a service account: its ``token``, read for
    each call since it changes, and ``ca.crt``.  Without them they are a pod's.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        clock: Callable[[], float],
        api: str = "",
        account: Path = _ACCOUNT,
    ) -> None:
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._api = (api or _api_of_pod()).rstrip("/")
        self._account = account
        self._clock = clock
        self._holder, self._lease_s = "", 0.0
        self._mine: dict[str, Any] = {}
        self._seen: tuple[str, str] = "", ""
        self._seen_s = 0.0
        self._session: aiohttp.ClientSession | None = None

    async def acquire(self, holder: str, lease_s: float) -> bool:
        """Create the Lease, or replace one that nobody holds or that stood still for its time."""
        self._holder, self._lease_s = holder, lease_s
        status, lease = await self._call("GET", f"{self._leases}/{self._name}")
        if status == _NOT_FOUND:
            new = {"metadata": {"name": self._name}, "spec": self._spec(0)}
            return await self._write("POST", self._leases, new)
        spec = lease.get("spec", {})
        if not self._stands_still(lease) and spec.get("holderIdentity"):
            return False
        return await self._replace(lease, self._spec(int(spec.get("leaseTransitions", 0)) + 1))

    async def renew(self) -> bool:
        """Replace the own version by one of now; False if it is another's."""
        if await self._replace(self._mine, self._spec(self._transitions)):
            return True
        # A change that was made though its answer was lost: it is ours, and of another version.
        _, lease = await self._call("GET", f"{self._leases}/{self._name}")
        if lease.get("spec", {}).get("holderIdentity") != self._holder:
            return False
        self._mine = lease
        return await self._replace(lease, self._spec(self._transitions))

    async def release(self) -> None:
        """Let nobody hold it."""
        await self._replace(self._mine, {**self._spec(self._transitions), "holderIdentity": ""})

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def _transitions(self) -> int:
        return int(self._mine.get("spec", {}).get("leaseTransitions", 0))

    def _stands_still(self, lease: dict[str, Any]) -> bool:
        spec = lease.get("spec", {})
        seen = str(spec.get("holderIdentity", "")), str(lease["metadata"].get("resourceVersion"))
        if seen != self._seen:
            self._seen, self._seen_s = seen, self._clock()
        lasts_s = float(spec.get("leaseDurationSeconds") or self._lease_s)
        return self._clock() - self._seen_s >= lasts_s

    def _spec(self, transitions: int) -> dict[str, Any]:
        return {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": max(round(self._lease_s), 1),
            "renewTime": datetime.now(UTC).isoformat(timespec="microseconds")[:-6] + "Z",
            "leaseTransitions": transitions,
        }

    async def _replace(self, lease: dict[str, Any], spec: dict[str, Any]) -> bool:
        body = {"metadata": lease["metadata"], "spec": spec}
        return await self._write("PUT", f"{self._leases}/{self._name}", body)

    async def _write(self, method: str, path: str, body: dict[str, Any]) -> bool:
        whole = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **body}
        status, lease = await self._call(method, path, whole)
        if status not in (_OK, _CREATED):  # another's, or removed
            return False
        self._mine = lease
        return True

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        try:
            session = self._session = self._session or self._open()
            token = (self._account / "token").read_text(encoding="utf-8").strip()
            async with session.request(
                method,
                f"{self._api}{path}",
                json=body,
                headers={"Authorization": f"Bearer {token}"},
            ) as answer:
                said = await answer.json(content_type=None)
                known = (_CREATED, _CONFLICT) if method == "POST" else (_OK, *_NO_LEASE)
                if answer.status not in known:
                    raise StorageError(
                        f"Kubernetes at {self._api} answered {method} {path} with "
                        f"{answer.status}: {str(said)[:200]}; the service account has to get, "
                        "create and update leases there"
                    )
                return answer.status, said
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise StorageError(
                f"Kubernetes at {self._api} does not answer ({error!r}); see that it is reachable"
            ) from error

    def _open(self) -> aiohttp.ClientSession:
        authority = self._account / "ca.crt"
        context = ssl.create_default_context(cafile=authority) if authority.exists() else True
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            connector=aiohttp.TCPConnector(ssl=context),
            trust_env=False,
        )


def _api_of_pod() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise ConfigError(
            "{standby_lease} is in Kubernetes and KUBERNETES_SERVICE_HOST is not set; run in a "
            "pod, or name an etcd"
        )
    return f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
