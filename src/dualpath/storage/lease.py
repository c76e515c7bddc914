"""Who is the janitor of a storage: one of those who could be, another soon after it is gone.

A *term* is an object ``janitor/lease/<number>``, which one alone can create.  Its holder is the
janitor while no higher term exists, and shows that it lives by a count that it writes again and
again.  Who has seen the same count for ``lease_s`` of its own clock opens the next term: no clocks
are compared.  Where the holder only slept, it finds the higher term before it removes anything
more.
"""

import msgspec

from dualpath.core.errors import StorageError
from dualpath.storage.objects import ObjectTree

TERMS = "janitor/lease/"
#: A holder whose count stands still for that long is taken for dead.
LEASE_S = 30.0
#: How often the holder counts, at most.
BEAT_S = 5.0


class Beat(msgspec.Struct, frozen=True):
    """What the object of a term holds."""

    holder: str
    count: int = 0


class Lease:
    """One candidate; ``holder`` is a name that no other has.  Times are of any steady clock."""

    def __init__(self, tree: ObjectTree, holder: str, lease_s: float = LEASE_S) -> None:
        self.holder = holder
        self.term = 0
        self._tree = tree
        self._lease_s = lease_s
        self._beat = Beat(holder)
        self._beaten_s = 0.0
        self._seen: tuple[int, bytes | None] | None = None
        self._seen_s = 0.0

    def hold(self, now_s: float) -> bool:
        """Return whether this is the janitor now, having become it if it could."""
        newest = self._newest()
        if self.term:
            if self._is_ours(newest):
                self._keep(now_s)
                return True
            self.term = 0
        content = self._tree.get(_name(newest)) if newest else None
        if newest and content is not None and not self._is_stale(newest, content, now_s):
            return False
        return self._open(newest + 1, now_s)

    def is_held(self) -> bool:
        """Whether the term is still the newest; ask before what nobody can undo."""
        return bool(self.term) and self._is_ours(self._newest())

    def give_up(self) -> None:
        """Let another have it at once."""
        if self.term:
            self._tree.replace(_name(self.term), msgspec.json.encode(Beat("")))
            self.term = 0

    def _is_ours(self, newest: int) -> bool:
        """Whether no other holds a term as new; two may, where creating is not conditional."""
        if newest != self.term:
            return newest < self.term
        content = self._tree.get(_name(newest))
        try:
            return content is None or msgspec.json.decode(content, type=Beat).holder == self.holder
        except msgspec.MsgspecError:
            return True

    def _newest(self) -> int:
        names = [info.name.removeprefix(TERMS) for info in self._tree.objects(TERMS)]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _is_stale(self, term: int, content: bytes, now_s: float) -> bool:
        if content == msgspec.json.encode(Beat("")):
            return True
        if self._seen != (term, content):
            self._seen, self._seen_s = (term, content), now_s
        return now_s - self._seen_s >= self._lease_s

    def _open(self, term: int, now_s: float) -> bool:
        self._beat = Beat(self.holder)
        if not self._tree.create(_name(term), msgspec.json.encode(self._beat)):
            return False
        self.term, self._beaten_s = term, now_s
        self._tree.remove([_name(old) for old in range(max(term - 8, 1), term)])
        return True

    def _keep(self, now_s: float) -> None:
        if now_s - self._beaten_s < BEAT_S:
            return
        self._beat = Beat(self.holder, self._beat.count + 1)
        try:
            self._tree.replace(_name(self.term), msgspec.json.encode(self._beat))
        except StorageError:
            # A full disk takes no count, and only the janitor makes room on it.
            return
        self._beaten_s = now_s


def _name(term: int) -> str:
    return f"{TERMS}{term:08}"
