"""Leadership by a lease in a store that may become silent."""

import asyncio

import pytest

from dualpath.core.errors import StorageError
from dualpath.router.scheduler.leases import LeasedLeadership

pytestmark = pytest.mark.virtual_time
LEASE_S = 10.0


class Store:
    """Grants the lease, and then fails ``late_s`` after it is asked."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s

    async def acquire(self, holder: str, lease_s: float) -> bool:
        return True

    async def renew(self) -> bool:
        await asyncio.sleep(self._late_s)
        raise StorageError("injected by the test")

    async def release(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("late_s", [0.5, 100.0])
async def test_a_scheduler_ends_with_its_leadership(late_s: float) -> None:
    now_s = asyncio.get_running_loop().time
    leadership = LeasedLeadership(Store(late_s), "a lease", "f", now_s, LEASE_S)
    await leadership.acquired()
    taken_s = now_s()
    assert "could not be renewed in time" in await leadership.lost()
    # It must have stopped when others may begin; until then it refuses requests.
    assert now_s() - taken_s == pytest.approx(0.8 * LEASE_S)
    await leadership.release()
