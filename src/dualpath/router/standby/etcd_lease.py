"""A lease in etcd v3, by its JSON gateway: a key that goes with its lease, and one creator."""

import base64
from typing import Any

import aiohttp

from dualpath.core.errors import StorageError

_TIMEOUT_S = 2.0


class EtcdLease:
    """The ``LeaseStore`` at ``http://HOST:PORT`` under ``name``."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url.rstrip("/")
        self._key = _text(f"dualpath/{name}")
        self._lease_id = ""
        self._session: aiohttp.ClientSession | None = None

    async def acquire(self, holder: str, lease_s: float) -> bool:
        """Create the key with a lease of its own, unless it is there."""
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
        """Keep the lease alive; etcd answers one that is over with no time to live."""
        kept = await self._call("lease/keepalive", ID=self._lease_id)
        return int(kept.get("result", {}).get("TTL", 0)) > 0

    async def release(self) -> None:
        """Revoke the lease, and the key with it."""
        await self._call("lease/revoke", ID=self._lease_id)

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, **body: object) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), trust_env=False
            )
        try:
            async with self._session.post(f"{self._url}/v3/{method}", json=body) as answer:
                said = await answer.json(content_type=None)
                if answer.status != 200:
                    raise StorageError(
                        f"etcd at {self._url} answered {method} with {answer.status}: "
                        f"{str(said)[:200]}; see its log"
                    )
                return dict(said)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise StorageError(
                f"etcd at {self._url} does not answer ({error!r}); see that it runs there"
            ) from error


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()
