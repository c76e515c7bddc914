"""Leadership by a lease in etcd or Kubernetes, for schedulers on any machines."""

import asyncio
import base64
import logging
import os
import ssl
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from dualpath.core.addresses import http_url
from dualpath.core.errors import ConfigError, StorageError
from dualpath.node.certificates import trusting
from dualpath.node.http_client import client_session

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Duration of a lease that is not renewed.
LEASE_S = 10.0
#: Renewals, or attempts to acquire it, per duration of a lease.
_TRIES = 5
#: The last part of a lease in which its holder no longer relies on it.
_MARGIN = 0.2


class LeaseStore(Protocol):
    """A store that grants one lease to one holder.

    All calls raise ``StorageError`` if the store is unreachable, and may have had their effect all
    the same.
    """

    async def acquire(self, holder: str, lease_s: float) -> bool:
        """Take the lease if it is free; True if ``holder`` has it now, for ``lease_s``."""
        ...

    async def renew(self) -> bool:
        """Extend it to ``lease_s`` from now on; False if it has expired."""
        ...

    async def release(self) -> None:
        """Release it, so that another may acquire it at once."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class LeasedLeadership:
    """The ``Leadership`` of ``holder``, a unique name; ``clock`` gives monotonic seconds.

    ``name`` is the lease in log lines.
    """

    contended = True

    def __init__(
        self,
        store: LeaseStore,
        name: str,
        holder: str,
        clock: Callable[[], float],
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._name = name
        self._holder = holder
        self._clock = clock
        self._lease_s = lease_s
        self._until_s = float("-inf")
        self._renewing: asyncio.Task[str] | None = None

    @property
    def held(self) -> bool:
        """Whether this scheduler is the leader now, by the clock, which no stalled task delays."""
        return self._clock() < self._until_s

    async def acquired(self) -> None:
        """Return when this scheduler is the leader; an unreachable store is tried again."""
        while True:
            asked_s = self._clock()
            if await self._tried("acquired", self._store.acquire(self._holder, self._lease_s)):
                break
            await asyncio.sleep(self._gap_s)
        self._granted(asked_s)
        self._renewing = asyncio.create_task(self._renew(), name="standby lease")

    async def lost(self) -> str:
        """Return why the lease has ended."""
        assert self._renewing is not None, "acquired before"
        return await asyncio.shield(self._renewing)

    async def release(self) -> None:
        """Let the next scheduler lead; idempotent."""
        renewing, self._renewing = self._renewing, None
        held, self._until_s = self.held, float("-inf")
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            if held:
                await self._tried("released", self._store.release())
        await self._store.close()

    async def _renew(self) -> str:
        # Not a moment longer than it is held: requests that come meanwhile fail because this is no
        # longer the leader, and are retried at once, as long as this process answers.
        while (left_s := self._until_s - self._clock()) > 0:
            await asyncio.sleep(min(self._gap_s, left_s))
            asked_s = self._clock()
            within_s = min(self._gap_s, self._until_s - asked_s)
            renewed = await self._tried("renewed", self._store.renew(), within_s)
            if renewed:
                self._granted(asked_s)
            elif renewed is not None:
                self._until_s = float("-inf")
                return f"the lease {self._name} was not renewed in time, and is another's"
        return f"the lease {self._name} could not be renewed in time; check its store"

    def _granted(self, asked_s: float) -> None:
        self._until_s = asked_s + self._lease_s * (1 - _MARGIN)

    @property
    def _gap_s(self) -> float:
        return self._lease_s / _TRIES

    async def _tried(
        self, what: str, call: Coroutine[None, None, T], within_s: float | None = None
    ) -> T | None:
        """Return the result of a call of the store, None if it fails or takes too long."""
        try:
            async with asyncio.timeout(self._gap_s if within_s is None else within_s):
                return await call
        except (StorageError, TimeoutError) as error:
            logger.warning("the lease %s could not be %s: %s", self._name, what, error)
        return None


# ------------------------------------------------------------------------ etcd


_TIMEOUT_S = 2.0


class EtcdAccess(msgspec.Struct, frozen=True):
    """How a scheduler proves to etcd who it is, and etcd to the scheduler.

    ``ca_file``: certificates of the authorities that may have signed etcd's; empty: the system's.
    ``cert_file`` and ``key_file``: the scheduler's own certificate.  ``user`` and ``password``:
    of etcd's users.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"EtcdAccess({self.user!r})"

    def context(self) -> ssl.SSLContext:
        """Return what verifies etcd's certificate; raises ``ConfigError`` for unusable files."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file or None)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{{lease_ca_file}} {self.ca_file!r}, {{lease_cert_file}} {self.cert_file!r} and "
                f"{{lease_key_file}} cannot be used ({error}); give files in PEM format, the key "
                "without a passphrase"
            ) from error
        return context


_NO_ACCESS = EtcdAccess()
#: etcd's statuses for a token that has expired, or that is older than a change of its users.
_TOKEN_REFUSED = (400, 401)


class EtcdLease:
    """A key of etcd v3 that expires with its lease, by etcd's JSON gateway at ``url``.

    ``url`` is http://HOST:PORT or https://HOST:PORT.  Raises ``ConfigError`` if the files of
    ``access`` cannot be used.
    """

    def __init__(self, url: str, name: str, access: EtcdAccess = _NO_ACCESS) -> None:
        self._url = url.rstrip("/")
        self._access = access
        self._ssl = access.context() if url.startswith("https:") else None
        self._token = ""
        self._key = _text(f"dualpath/{name}")
        self._lease_id = ""
        self._session: aiohttp.ClientSession | None = None

    async def acquire(self, holder: str, lease_s: float) -> bool:
        """Create the key with a lease of its own, unless it exists."""
        if (await self._call("kv/range", key=self._key)).get("kvs"):
            return False
        granted = await self._call("lease/grant", TTL=max(round(lease_s), 1), ID=0)
        lease_id = str(granted["ID"])
        put = {"key": self._key, "value": _text(holder), "lease": lease_id}
        absent = {"key": self._key, "target": "CREATE", "create_revision": "0"}
        done = await self._call("kv/txn", compare=[absent], success=[{"request_put": put}])
        if done.get("succeeded"):
            self._lease_id = lease_id
            return True
        await self._call("lease/revoke", ID=lease_id)
        return False

    async def renew(self) -> bool:
        """Extend the lease; etcd answers an expired one with no time to live."""
        answer = await self._call("lease/keepalive", ID=self._lease_id)
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def release(self) -> None:
        """Revoke the lease, and the key with it."""
        await self._call("lease/revoke", ID=self._lease_id)

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, **body: object) -> dict[str, Any]:
        had_token = bool(self._token)
        if self._access.user and not had_token:
            await self._authenticate()
        status, answer = await self._post(method, body)
        if status in _TOKEN_REFUSED and had_token:
            await self._authenticate()
            status, answer = await self._post(method, body)
        if status != 200:
            raise self._refused(method, status, answer)
        return answer

    async def _authenticate(self) -> None:
        self._token = ""
        named = {"name": self._access.user, "password": self._access.password}
        status, answer = await self._post("auth/authenticate", named)
        if status != 200 or not answer.get("token"):
            raise self._refused("auth/authenticate", status, answer)
        self._token = str(answer["token"])

    def _refused(self, method: str, status: int, answer: dict[str, Any]) -> StorageError:
        return StorageError(
            f"etcd at {self._url} answered {method} with {status}: {str(answer)[:200]}; see its "
            "log, and check --lease-user, its password and its permission on dualpath/"
        )

    async def _post(self, method: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self._session is None:
            self._session = client_session(
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), tls=self._ssl
            )
        headers = {"Authorization": self._token} if self._token else {}
        try:
            async with self._session.request(
                "POST",
                f"{self._url}/v3/{method}",
                json=body,
                headers=headers,
                allow_redirects=False,  # They would carry the password to another server.
            ) as answer:
                try:
                    return answer.status, dict(await answer.json(content_type=None))
                except ValueError:
                    if answer.status == 200:
                        raise
                    # etcd's gateway refuses some requests in plain text.
                    return answer.status, {"error": await answer.text()}
        except (aiohttp.ClientError, OSError, TimeoutError, TypeError, ValueError) as error:
            raise StorageError(
                f"etcd at {self._url} does not answer ({error!r}); check that it runs there, and "
                "with etcds:// that its certificate is of --lease-ca-file and names this host"
            ) from error


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


# ------------------------------------------------------------------------ Kubernetes


_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_OK, _CREATED, _NOT_FOUND, _CONFLICT = 200, 201, 404, 409
_NO_LEASE = (_NOT_FOUND, _CONFLICT)


class KubernetesLease:
    """The Lease ``name`` (coordination.k8s.io/v1) in ``namespace``, as Kubernetes itself holds its.

    A candidate observes *by its own clock* how long the Lease has not changed: times of two
    machines are never compared.  Each change names the version that it replaces, so that of two
    only one succeeds.  ``clock`` gives monotonic seconds; ``api`` is the API server, ``account``
    the folder of a service account: its ``token``, read for each call since it changes, and
    ``ca.crt``.  Without them they are those of the pod.
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
        """Create the Lease, or replace one that is free or has not changed for its duration."""
        self._holder, self._lease_s = holder, lease_s
        status, lease = await self._call("GET", f"{self._leases}/{self._name}")
        if status == _NOT_FOUND:
            new = {"metadata": {"name": self._name}, "spec": self._spec(0, holder)}
            return await self._write("POST", self._leases, new)
        spec = lease.get("spec", {})
        if not self._unchanged(lease) and spec.get("holderIdentity"):
            return False
        transitions = int(spec.get("leaseTransitions", 0)) + 1
        return await self._replace(lease, self._spec(transitions, holder))

    async def renew(self) -> bool:
        """Replace our version by a new one; False if another holds the Lease."""
        return await self._replace_own(self._holder)

    async def release(self) -> None:
        """Write it without a holder."""
        await self._replace_own("")

    async def _replace_own(self, holder: str) -> bool:
        if await self._replace(self._mine, self._spec(self._transitions, holder)):
            return True
        # A change may have been made though its answer was lost, or a release has cancelled the
        # renewal that waited for it: then the Lease is ours, with a new version.
        _, lease = await self._call("GET", f"{self._leases}/{self._name}")
        if lease.get("spec", {}).get("holderIdentity") != self._holder:
            return False
        self._mine = lease
        return await self._replace(lease, self._spec(self._transitions, holder))

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def _transitions(self) -> int:
        return int(self._mine.get("spec", {}).get("leaseTransitions", 0))

    def _unchanged(self, lease: dict[str, Any]) -> bool:
        spec = lease.get("spec", {})
        seen = str(spec.get("holderIdentity", "")), str(lease["metadata"].get("resourceVersion"))
        if seen != self._seen:
            self._seen, self._seen_s = seen, self._clock()
        lasts_s = float(spec.get("leaseDurationSeconds") or self._lease_s)
        return self._clock() - self._seen_s >= lasts_s

    def _spec(self, transitions: int, holder: str) -> dict[str, Any]:
        return {
            "holderIdentity": holder,
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
                allow_redirects=False,
            ) as answer:
                body_read = await answer.json(content_type=None)
                known = (_CREATED, _CONFLICT) if method == "POST" else (_OK, *_NO_LEASE)
                if answer.status not in known:
                    raise StorageError(
                        f"Kubernetes at {self._api} answered {method} {path} with "
                        f"{answer.status}: {str(body_read)[:200]}; the service account has to get, "
                        "create and update leases there"
                    )
                return answer.status, body_read
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise StorageError(
                f"Kubernetes at {self._api} does not answer ({error!r}); check that it is reachable"
            ) from error

    def _open(self) -> aiohttp.ClientSession:
        authority = self._account / "ca.crt"
        return client_session(
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            tls=trusting(str(authority) if authority.exists() else ""),
        )


def _api_of_pod() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise ConfigError(
            "{standby_lease} is in Kubernetes and KUBERNETES_SERVICE_HOST is not set; run in a "
            "pod, or name an etcd"
        )
    return http_url(host, int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")), tls=True)
