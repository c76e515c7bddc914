"""The turn is a lease in a store, for schedulers of any machines: over if nobody renews it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol, TypeVar

from dualpath.core.errors import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long a lease lasts that is not renewed.
LEASE_S = 10.0
#: Renewed, or tried for, that often in a lease.
_TRIES = 5
#: The last part of a lease in which its holder no longer counts on it.
_MARGIN = 0.2


class LeaseStore(Protocol):
    """A store that grants one lease to one holder; all raise ``StorageError`` if it is not there.

    Each call may have had its effect though it raises.
    """

    async def acquire(self, holder: str, lease_s: float) -> bool:
        """Take the lease if nobody has it; True if ``holder`` has it now, for ``lease_s``."""
        ...

    async def renew(self) -> bool:
        """Have it for ``lease_s`` from now on; False if it is over."""
        ...

    async def release(self) -> None:
        """Give it up, so that another may have it at once."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class LeasedTurn:
    """The ``Turn`` of ``holder``, a name that no other has; ``clock`` gives monotonic seconds.

    ``name`` is the lease, for people.
    """

    others = True

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
        """Whether it is this scheduler's turn now, by a clock that no stalled task holds up."""
        return self._clock() < self._until_s

    async def taken(self) -> None:
        """Return when it is this scheduler's turn; a store that is not there is tried again."""
        while True:
            asked_s = self._clock()
            if await self._tried("taken", self._store.acquire(self._holder, self._lease_s)):
                break
            await asyncio.sleep(self._gap_s)
        self._granted(asked_s)
        self._renewing = asyncio.create_task(self._renew(), name="standby lease")

    async def lost(self) -> str:
        """Return why the lease is over."""
        assert self._renewing is not None, "taken before"
        return await asyncio.shield(self._renewing)

    async def over(self) -> None:
        """Let the next one; idempotent."""
        renewing, self._renewing = self._renewing, None
        held, self._until_s = self.held, float("-inf")
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            if held:
                await self._tried("given up", self._store.release())
        await self._store.close()

    async def _renew(self) -> str:
        # Not a moment longer than it is held: whoever asks meanwhile is told that the turn is over,
        # and tries again at once, for as long as this process is there to be asked.
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
        return f"the lease {self._name} could not be renewed in time; see that its store is there"

    def _granted(self, asked_s: float) -> None:
        self._until_s = asked_s + self._lease_s * (1 - _MARGIN)

    @property
    def _gap_s(self) -> float:
        return self._lease_s / _TRIES

    async def _tried(
        self, what: str, call: Coroutine[None, None, T], within_s: float | None = None
    ) -> T | None:
        """Return what a call of the store does, None if it fails or takes too long."""
        try:
            async with asyncio.timeout(self._gap_s if within_s is None else within_s):
                return await call
        except (StorageError, TimeoutError) as error:
            logger.warning("the lease %s could not be %s: %s", self._name, what, error)
        return None
