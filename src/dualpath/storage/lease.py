"""The janitor's lease: elects one of the candidates, and another one after the holder dies.

A *term* is an object ``janitor/lease/<number>``, which exactly one process can create.  Its holder
is the janitor while no higher term exists, and renews the lease by rewriting a heartbeat count.  A
candidate that has seen the same count for ``lease_s`` on its own clock creates the next term, so
that no clocks are compared.  A holder that was only suspended finds the higher term before it
removes anything else.
"""

import msgspec

from dualpath.core.errors import StorageError
from dualpath.storage.objects import ObjectTree

TERMS = "janitor/lease/"
#: A holder whose count does not change for this long is considered dead.
LEASE_S = 30.0
#: Shortest interval between heartbeats.
BEAT_S = 5.0


class Heartbeat(msgspec.Struct, frozen=True):
    """Content of the object of a term."""

    holder: str
    count: int = 0


class Lease:
    """One candidate; ``holder`` is a unique name.  Times are of any monotonic clock."""

    def __init__(self, tree: ObjectTree, holder: str, lease_s: float = LEASE_S) -> None:
        self.holder = holder
        self.term = 0
        self._tree = tree
        self._lease_s = lease_s
        self._beat = Heartbeat(holder)
        self._beaten_s = 0.0
        self._seen: tuple[int, bytes | None] | None = None
        self._seen_s = 0.0

    def acquire(self, now_s: float) -> bool:
        """Acquire or renew the lease if possible; return whether it is held."""
        newest = self._newest()
        if self.term:
            if self._is_ours(newest):
                self._renew(now_s)
                return True
            self.term = 0
        content = self._tree.get(_name(newest)) if newest else None
        if newest and content is not None and not self._is_stale(newest, content, now_s):
            return False
        return self._create_term(newest + 1, now_s)

    def is_held(self) -> bool:
        """Whether the term is still the newest; check before every removal."""
        return bool(self.term) and self._is_ours(self._newest())

    def release(self) -> None:
        """Release the lease: another candidate can acquire it immediately."""
        if self.term:
            self._tree.replace(_name(self.term), msgspec.json.encode(Heartbeat("")))
            self.term = 0

    def _is_ours(self, newest: int) -> bool:
        """Whether no other process has this term or a newer one.

        Two processes may have created the same term on a server without conditional writes.
        """
        if newest != self.term:
            return newest < self.term
        content = self._tree.get(_name(newest))
        try:
            return (
                content is None
                or msgspec.json.decode(content, type=Heartbeat).holder == self.holder
            )
        except msgspec.MsgspecError:
            return True

    def _newest(self) -> int:
        names = [info.name.removeprefix(TERMS) for info in self._tree.objects(TERMS)]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _is_stale(self, term: int, content: bytes, now_s: float) -> bool:
        if content == msgspec.json.encode(Heartbeat("")):
            return True
        if self._seen != (term, content):
            self._seen, self._seen_s = (term, content), now_s
        return now_s - self._seen_s >= self._lease_s

    def _create_term(self, term: int, now_s: float) -> bool:
        self._beat = Heartbeat(self.holder)
        if not self._tree.create(_name(term), msgspec.json.encode(self._beat)):
            return False
        self.term, self._beaten_s = term, now_s
        self._tree.remove([_name(old) for old in range(max(term - 8, 1), term)])
        return True

    def _renew(self, now_s: float) -> None:
        if now_s - self._beaten_s < BEAT_S:
            return
        self._beat = Heartbeat(self.holder, self._beat.count + 1)
        try:
            self._tree.replace(_name(self.term), msgspec.json.encode(self._beat))
        except StorageError:
            # The disk may be full, and only the janitor frees space on it: it keeps the lease.
            return
        self._beaten_s = now_s


def _name(term: int) -> str:
    return f"{TERMS}{term:08}"
