"""The janitor's published status of a storage, read by writers and operators."""

import msgspec

from dualpath.policy.quotas import StorageLimits, StoredBytes
from dualpath.storage.objects import ObjectTree

STATUS = "janitor/status"
#: Limit of owners listed per kind of quota, so that the object stays below 100 kB.
MAX_NAMED_OWNERS = 1000


class Status(msgspec.Struct, frozen=True, kw_only=True, rename={"applied_segments": "seen"}):
    """``time_s`` and ``surveyed_s`` are Unix times, the latter None before the first full survey.

    ``applied_segments``: the last journal segment of each writer that is counted.
    ``fullest_namespaces`` and ``fullest_tenants``: bytes of the largest owners, at most
    ``MAX_NAMED_OWNERS`` each, if there is a quota for them.  Old janitors do not write these two,
    and old writers ignore them: then blocks beyond a quota are written and evicted again.
    """

    holder: str
    time_s: float
    blocks: int
    used_bytes: int
    limits: StorageLimits
    surveyed_s: float | None
    applied_segments: dict[str, int]
    fullest_namespaces: dict[str, int] = {}
    fullest_tenants: dict[str, int] = {}

    @property
    def stored(self) -> StoredBytes:
        """Stored bytes as far as the status lists them."""
        return StoredBytes(self.used_bytes, self.fullest_namespaces, self.fullest_tenants)


def write_status(tree: ObjectTree, status: Status) -> None:
    """Replace the published status; raises ``StorageError``."""
    tree.replace(STATUS, msgspec.json.encode(status))


def read_status(tree: ObjectTree) -> Status | None:
    """Return the published status, None if there is none; raises ``StorageError``."""
    content = tree.get(STATUS)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=Status)
    except msgspec.MsgspecError:
        return None
