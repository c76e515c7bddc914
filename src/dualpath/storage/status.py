"""What the janitor of a storage says of it, for whoever writes there or looks after it."""

import msgspec

from dualpath.policy.eviction import StorageLimits
from dualpath.storage.objects import ObjectTree

STATUS = "janitor/status"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``time_s`` and ``surveyed_s`` are Unix times, the latter None until all is known.

    ``seen``: of each writer the number of the last journal segment that is counted in.
    """

    holder: str
    time_s: float
    blocks: int
    used_bytes: int
    limits: StorageLimits
    surveyed_s: float | None
    seen: dict[str, int]


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
