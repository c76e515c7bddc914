"""What the janitor of a storage says of it, for whoever writes there or looks after it."""

import msgspec

from dualpath.policy.quotas import StorageLimits, StoredBytes
from dualpath.storage.objects import ObjectTree

STATUS = "janitor/status"
#: Of each kind of quota so many owners are named, which keeps the object below 100 kB.
MOST_NAMED = 1000


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``time_s`` and ``surveyed_s`` are Unix times, the latter None until all is known.

    ``seen``: of each writer the number of the last journal segment that is counted in.
    ``fullest_namespaces`` and ``fullest_tenants``: bytes of those with the most, at most
    ``MOST_NAMED`` each, where there is a quota for them.  Janitors before these two name nobody,
    and writers before them look at the whole only: either way blocks are written that the janitor
    removes again.
    """

    holder: str
    time_s: float
    blocks: int
    used_bytes: int
    limits: StorageLimits
    surveyed_s: float | None
    seen: dict[str, int]
    fullest_namespaces: dict[str, int] = {}
    fullest_tenants: dict[str, int] = {}

    @property
    def stored(self) -> StoredBytes:
        """What is said to lie there; of who is not named nothing is known."""
        return StoredBytes(self.used_bytes, self.fullest_namespaces, self.fullest_tenants)


def write_status(tree: ObjectTree, status: Status) -> None:
    """Put it where the last one was; raises ``StorageError``."""
    tree.replace(STATUS, msgspec.json.encode(status))


def read_status(tree: ObjectTree) -> Status | None:
    """Return what was said last, None if nothing; raises ``StorageError``."""
    content = tree.get(STATUS)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=Status)
    except msgspec.MsgspecError:
        return None
