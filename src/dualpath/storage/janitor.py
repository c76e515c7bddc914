"""The janitor: enforces the limits of a storage.  One per storage, elected by a lease.

A step applies the journal events of the engines, continues the survey, and removes blocks if a
limit is exceeded.  A janitor that dies at any point leaves intact blocks; the next janitor restores
the index from the saved one, the events since then, and the survey.  Two janitors at the same time
remove too many blocks at worst, and a removed block is computed again.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, StoreNamespace, TenantTag
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage.block_file import HEADER_BYTES, decode_header
from dualpath.storage.chain_index import (
    COLUMNS,
    ChainIndex,
    Pins,
    Tables,
    above_watermark,
    earlier_weights,
    pinned_ends,
    victims,
)
from dualpath.storage.journal import (
    Journal,
    JournalEvent,
    Removed,
    Used,
    Written,
    decode_segment,
    segments,
)
from dualpath.storage.objects import ObjectInfo, ObjectTree, namespace_of
from dualpath.storage.posix import (
    TEMPORARY_FOLDER,
    is_folder_name,
    is_namespace,
    is_object_name,
    key_of,
    object_name,
)
from dualpath.storage.quotas import StorageLimits, StoredBytes

# ------------------------------------------------------------------------------------------ survey
# The janitor's survey: compares the stored blocks with the index, folder by folder.
#
# The first survey of a storage without an index builds the index.  Later surveys take a day each
# and find changes that were not journaled: events lost with a process, files removed by a person.

#: Duration of a survey, except the first one, which runs without pauses.
SURVEY_S = 24 * 3600.0
#: A block written less than this ago may be missing in a listing.
SETTLED_S = 60.0
_FAN_OUT = re.compile(r"[0-9a-f]{3}")


class Differences(msgspec.Struct):
    """What surveys corrected: blocks missing in the index, and blocks missing in the storage."""

    found_blocks: int = 0
    missing_blocks: int = 0


class Survey:
    """Runs surveys one after another; ``surveyed_s`` is when the last complete one ended.

    ``now_s`` is Unix time.  Times that other clocks, or this one before it was corrected, have
    recorded after ``now_s`` count as ``now_s``.
    """

    def __init__(
        self,
        tree: ObjectTree,
        index: ChainIndex,
        now_s: Callable[[], float],
        surveyed_s: float | None = None,
        period_s: float = SURVEY_S,
    ) -> None:
        self.surveyed_s = surveyed_s
        self.differences = Differences()
        self._tree = tree
        self._index = index
        self._now_s = now_s
        self._period_s = period_s
        self._folders: list[tuple[str, int]] = []
        self._done = 0
        self._began_s = now_s()

    @property
    def progress(self) -> float:
        """Completed share of the current survey, 0 to 1."""
        return self._done / max(len(self._folders), 1)

    def advance(self, budget_s: float) -> None:
        """Survey what is due, for about ``budget_s``; raises ``StorageError``."""
        end_s = self._now_s() + budget_s
        if not self._folders and self._is_due():
            self._begin()
        while self._folders and self._is_due():
            self._compare(*self._folders[self._done])
            self._done += 1
            if self._done == len(self._folders):
                self._finish()
            if self._now_s() >= end_s:
                return

    def run_to_end(self, report: Callable[[float], None] = lambda share: None) -> None:
        """Survey everything now; ``report`` is called with the completed share."""
        self._begin()
        while self._folders:
            self._compare(*self._folders[self._done])
            self._done += 1
            report(self.progress)
            if self._done == len(self._folders):
                self._finish()

    def _is_due(self) -> bool:
        if self.surveyed_s is None:
            return True
        now_s = self._now_s()
        self.surveyed_s, self._began_s = min(self.surveyed_s, now_s), min(self._began_s, now_s)
        if not self._folders:
            return now_s >= self.surveyed_s + self._period_s / 2
        # Wait for half of the period, survey during the other half.
        passed_s = now_s - self._began_s
        return passed_s * 2 >= self._period_s * self.progress

    def _begin(self) -> None:
        self._began_s, self._done = self._now_s(), 0
        found = [name for name in self._tree.folders("") if is_namespace(name)]
        names = sorted({*found, *self._index.used_by_namespace()})
        self._folders = [(name, fan_out) for name in names for fan_out in self._fan_outs(name)]
        if not self._folders:
            self._finish()

    def _fan_outs(self, namespace: str) -> list[int]:
        stored = self._tree.folders(f"{namespace}/")
        indexed = self._index.fan_outs(namespace)
        return sorted({int(name, 16) for name in stored if _FAN_OUT.fullmatch(name)} | {*indexed})

    def _finish(self) -> None:
        self.surveyed_s = self._now_s()
        self._folders, self._done = [], 0

    def _compare(self, namespace: str, fan_out: int) -> None:
        before_s = self._now_s() - SETTLED_S
        found: set[BlockKey] = set()
        for info in self._tree.objects(f"{namespace}/{fan_out:03x}/"):
            key = key_of(info.name)
            if key is None:
                continue
            found.add(key)
            if self._index.row(namespace, key) is None:
                self._note(namespace, key, info)
        for row in self._index.absent(namespace, fan_out, found, before_s).tolist():
            self._index.remove(*self._index.block(row))
            self.differences.missing_blocks += 1

    def _note(self, namespace: str, key: BlockKey, info: ObjectInfo) -> None:
        header = decode_header(self._tree.get(info.name, HEADER_BYTES) or b"")
        # A block without a valid header is removed when it is read, or evicted as an unused one.
        origin = header.origin if header is not None and header.key == key else UNKNOWN_ORIGIN
        written_s = min(info.written_s, self._now_s())
        self._index.add(namespace, key, origin.parent, origin.tenant, info.bytes, written_s)
        self.differences.found_blocks += 1


# ------------------------------------------------------------------------------------ half written
# Removes temporary files that dead writers have left, from storages that are directories.
#
# An engine removes the temporary files of dead processes of its own machine when it starts.  Those
# of a machine that does not come back, and of a janitor that died while it saved, are removed by
# the janitor after ``STALE_S``: liveness of a process can be checked on its own machine only.

#: Far longer than any write takes: the writer of an older temporary file is dead.
STALE_S = 24 * 3600.0
#: The janitor's own folder, which has temporary names as namespaces have.
_JANITOR = "janitor"


def remove_stale_temporaries(tree: ObjectTree, now_s: float) -> int:
    """Remove temporary files older than ``STALE_S`` at ``now_s`` (Unix time); return how many.

    So does one that is as far in the future: the clock of its writer was ahead.  Raises
    ``StorageError``.
    """
    return tree.remove(
        [
            info.name
            for folder in tree.folders("")
            if folder == _JANITOR or is_namespace(folder)
            for info in tree.objects(f"{folder}/{TEMPORARY_FOLDER}/")
            if abs(now_s - info.written_s) > STALE_S
        ]
    )


# -------------------------------------------------------------------------------------- index file
# The janitor's saved ``ChainIndex``: one object per save.
#
# Format: ``DUALIDX1``, 8 bytes with the length of a JSON head, the head, the columns one after the
# other, then the XXH3-64 of everything before.  Name: ``janitor/index/<term>-<number>``; the
# highest one that is intact is loaded.

SAVED = "janitor/index/"
_MAGIC = b"DUALIDX1"
_LENGTH_BYTES = 8


class Progress(msgspec.Struct, frozen=True, rename={"applied": "taken"}):
    """Which journal segments are in the index, and when the storage was surveyed.

    ``applied`` maps each writer to the number of its last applied segment.  ``surveyed_s`` is when
    the last complete survey ended (Unix time), None before the first.
    """

    applied: dict[str, int] = {}
    surveyed_s: float | None = None


class _Head(msgspec.Struct, frozen=True):
    rows: Annotated[int, msgspec.Meta(ge=0)]
    namespaces: tuple[str, ...]
    tenants: tuple[TenantTag, ...]
    progress: Progress


def save(tree: ObjectTree, term: int, number: int, index: ChainIndex, progress: Progress) -> None:
    """Save the index, then remove older saved ones; raises ``StorageError``."""
    name = f"{SAVED}{term:08}-{number:08}"
    tree.replace(name, encode(index, progress))
    tree.remove([info.name for info in tree.objects(SAVED) if info.name < name])


def load(tree: ObjectTree) -> tuple[ChainIndex, Progress] | None:
    """Return the newest intact saved index, None if there is none; raises ``StorageError``."""
    for name in sorted((info.name for info in tree.objects(SAVED)), reverse=True):
        content = tree.get(name)
        found = None if content is None else decode(content)
        if found is not None:
            return found
        log.warning("the storage's saved index %s is damaged; the storage is surveyed again", name)
    return None


def encode(index: ChainIndex, progress: Progress) -> bytes:
    """Return the bytes of a saved index."""
    tables = index.tables()
    head = msgspec.json.encode(
        _Head(len(tables.stored), tuple(index.namespaces), tuple(index.tenants), progress)
    )
    parts = [_MAGIC, len(head).to_bytes(_LENGTH_BYTES, "little"), head]
    parts += [getattr(tables, name).tobytes() for name, _, _ in COLUMNS]
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join((*parts, checksum.digest()))


def decode(content: bytes) -> tuple[ChainIndex, Progress] | None:
    """Return the index, None if the bytes are damaged or of another format."""
    start = len(_MAGIC) + _LENGTH_BYTES
    body = memoryview(content)[:-8]
    if content[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_64_digest(body) != content[-8:]:
        return None
    end = start + int.from_bytes(content[len(_MAGIC) : start], "little")
    columns: dict[str, Any] = {}
    try:
        head = msgspec.json.decode(content[start:end], type=_Head)
        if foreign := [name for name in head.namespaces if not is_folder_name(name)]:
            raise ValueError(f"{foreign[0][:80]!r} is not the name of a namespace")
        for name, kind, width in COLUMNS:
            shape = (head.rows, *width)
            count = int(np.prod(shape))
            columns[name] = np.frombuffer(content, kind, count, end).reshape(shape).copy()
            end += count * np.dtype(kind).itemsize
        index = ChainIndex.of(head.namespaces, head.tenants, Tables(**columns))
    except (ValueError, msgspec.MsgspecError) as error:
        log.warning("a saved index is inconsistent: %s", error)
        return None
    return index, head.progress


# ------------------------------------------------------------------------------------------- lease
# The janitor's lease: elects one of the candidates, and another one after the holder dies.
#
# A *term* is an object ``janitor/lease/<number>``, which exactly one process can create.  Its
# holder is the janitor while no higher term exists, and renews the lease by rewriting a heartbeat
# count.  A candidate that has seen the same count for ``lease_s`` on its own clock creates the next
# term, so that no clocks are compared.  A holder that was only suspended finds the higher term
# before it removes anything else.

TERMS = "janitor/lease/"
#: A holder is considered dead if its count does not change for this long.
LEASE_S = 30.0
#: Shortest interval between heartbeats.
BEAT_S = 5.0


class LeaseRecord(msgspec.Struct, frozen=True):
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
        self._beat = LeaseRecord(holder)
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
            self._tree.replace(_name(self.term), msgspec.json.encode(LeaseRecord("")))
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
                or msgspec.json.decode(content, type=LeaseRecord).holder == self.holder
            )
        except msgspec.MsgspecError:
            return True

    def _newest(self) -> int:
        names = [info.name.removeprefix(TERMS) for info in self._tree.objects(TERMS)]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _is_stale(self, term: int, content: bytes, now_s: float) -> bool:
        if content == msgspec.json.encode(LeaseRecord("")):
            return True
        if self._seen != (term, content):
            self._seen, self._seen_s = (term, content), now_s
        return now_s - self._seen_s >= self._lease_s

    def _create_term(self, term: int, now_s: float) -> bool:
        self._beat = LeaseRecord(self.holder)
        if not self._tree.create(_name(term), msgspec.json.encode(self._beat)):
            return False
        self.term, self._beaten_s = term, now_s
        self._tree.remove([_name(old) for old in range(max(term - 8, 1), term)])
        return True

    def _renew(self, now_s: float) -> None:
        if now_s - self._beaten_s < BEAT_S:
            return
        self._beat = LeaseRecord(self.holder, self._beat.count + 1)
        try:
            self._tree.replace(_name(self.term), msgspec.json.encode(self._beat))
        except StorageError:
            # The disk may be full, and only the janitor frees space on it: it retains the lease.
            return
        self._beaten_s = now_s


def _name(term: int) -> str:
    return f"{TERMS}{term:08}"


# -------------------------------------------------------------------------------------------- pins
# Pins of blocks that must not be evicted: empty objects, each named after what it pins.
#
# ``janitor/pins/namespace/<namespace>``, ``…/tenant/<tag>`` and ``…/chain/<namespace>/<key in
# hex>``.

PINS = "janitor/pins/"
_KINDS = {
    "namespace": re.compile(r"namespace/([A-Za-z0-9._-]+)"),
    "tenant": re.compile(r"tenant/([0-9a-f]{16})"),
    "chain": re.compile(r"chain/([A-Za-z0-9._-]+)/([0-9a-f]{64})"),
}


def pin_name(kind: str, *parts: str) -> str:
    """Return the object name of a pin; raises ``ConfigError`` if it is malformed."""
    name = "/".join((kind, *parts))
    named = kind in _KINDS and _KINDS[kind].fullmatch(name) is not None
    if not (named and is_object_name(name)):
        raise ConfigError(
            f"{name!r} cannot be pinned; give a namespace's folder, a tenant's tag of 16 hex "
            "digits, or a folder and a key of 64 hex digits"
        )
    return PINS + name


def read_pins(tree: ObjectTree) -> Pins:
    """Return all pins; raises ``StorageError``."""
    found: dict[str, set[tuple[str, ...]]] = {kind: set() for kind in _KINDS}
    for info in tree.objects(PINS):
        for kind, pattern in _KINDS.items():
            if named := pattern.fullmatch(info.name.removeprefix(PINS)):
                found[kind].add(named.groups())
    return Pins(
        namespaces=frozenset(name for (name,) in found["namespace"]),
        tenants=frozenset(tag for (tag,) in found["tenant"]),
        chains=frozenset((name, bytes.fromhex(key)) for name, key in found["chain"]),
    )


# ----------------------------------------------------------------------------------------- removal
# Removes blocks from a storage and records the removals in the journal.

#: Blocks removed per step; a removal can be stopped between steps.
BATCH = 256


class Removal:
    """Removes blocks of an index; ``process`` is a unique name that no process had before."""

    def __init__(self, tree: ObjectTree, index: ChainIndex, process: str) -> None:
        self._tree = tree
        self._index = index
        self._process = process
        self._journals: dict[str, Journal] = {}

    def remove(self, rows: Sequence[int]) -> int:
        """Remove blocks, in order; return their bytes.

        Raises ``StorageError``; then the index still has all of them, though some may be removed.
        """
        blocks = [self._index.block(row) for row in rows]
        self._tree.remove([object_name(place, key) for place, key in blocks])
        before_bytes = self._index.used_bytes
        for row, (place, key) in zip(rows, blocks, strict=True):
            # Dated at its last use: a later write of the block by another process stays valid.
            self._journal(place).removed(key, float(self._index.tables().times[row]))
            self._index.remove(place, key)
        return before_bytes - self._index.used_bytes

    def flush_journal(self) -> None:
        """Write the removals since the last call to the journal."""
        for journal in self._journals.values():
            journal.flush()

    def _journal(self, namespace: str) -> Journal:
        if namespace not in self._journals:
            writer = f"{self._process}-{len(self._journals)}"
            self._journals[namespace] = Journal(self._tree, namespace, writer)
        return self._journals[namespace]


# ------------------------------------------------------------------------------------------ status
# The janitor's published status of a storage, read by writers and operators.

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


log = logging.getLogger(__name__)

#: Time budget of a step for the survey, and again for removals.
STEP_BUDGET_S = 0.5
#: The index is saved after this time, or after this many events.
SAVE_S = 600.0
SAVE_EVENTS = 200_000
#: After planning found nothing to remove, the next plan waits for this multiple of its run time.
_REPLAN_FACTOR = 50.0
#: The time to live is checked this many times per ``ttl_s``.
_TTL_CHECKS = 20
#: A writer without events for this long is removed from the index's progress.
_WRITER_EXPIRY_S = 3600.0
#: Interval of the search for stale temporary files.
_CLEAN_UP_S = 3600.0


class Totals(msgspec.Struct):
    """Totals of this janitor since it was created."""

    evicted_blocks: int = 0
    evicted_bytes: int = 0


class Janitor:
    """A candidate for janitor, and the janitor while it holds the lease; not thread-safe.

    ``now_s`` is Unix time, ``steady_s`` a monotonic clock, ``holder`` a unique name.
    """

    def __init__(
        self,
        tree: ObjectTree,
        holder: str,
        limits: StorageLimits,
        now_s: Callable[[], float],
        steady_s: Callable[[], float],
        lease_s: float = LEASE_S,
    ) -> None:
        self.totals = Totals()
        self.lease = Lease(tree, holder, lease_s)
        self._tree = tree
        self._limits = limits
        self._now_s = now_s
        self._steady_s = steady_s
        self._term: _JanitorTerm | None = None

    @property
    def index(self) -> ChainIndex | None:
        """The index, None while this is not the janitor."""
        return None if self._term is None else self._term.index

    @property
    def survey(self) -> Survey | None:
        """The survey, None while this is not the janitor."""
        return None if self._term is None else self._term.survey

    @property
    def is_busy(self) -> bool:
        """Whether the next step has blocks to remove or folders to survey."""
        return self._term is not None and self._term.is_busy

    def step(self) -> bool:
        """Acquire or renew the lease and do what is due; return whether this is the janitor.

        Takes about a second at most.  Raises ``StorageError``; the next step continues.
        """
        if not self.lease.acquire(self._steady_s()):
            self._term = None
            return False
        # Another process may have been the janitor since: it has changed the saved index, and has
        # removed the journal segments that are in it.
        if self._term is None or self._term.number != self.lease.term:
            self._term = _JanitorTerm(
                self._tree, self.lease, self._limits, self.totals, self._now_s, self._steady_s
            )
        self._term.step()
        return True

    def close(self) -> None:
        """Save the index and release the lease."""
        term, self._term = self._term, None
        if term is not None and self.lease.is_held():
            term.save()
            self.lease.release()


class _JanitorTerm:
    """State of the janitor while it holds the lease."""

    def __init__(
        self,
        tree: ObjectTree,
        lease: Lease,
        limits: StorageLimits,
        totals: Totals,
        now_s: Callable[[], float],
        steady_s: Callable[[], float],
    ) -> None:
        self.number = lease.term
        self._tree, self._lease, self._limits, self._totals = tree, lease, limits, totals
        self._now_s, self._steady_s = now_s, steady_s
        self.index, progress = load(tree) or (ChainIndex(), Progress())
        self.index.limit_times(now_s())
        self.survey = Survey(tree, self.index, now_s, progress.surveyed_s)
        self._applied = dict(progress.applied)
        self._last_event_s: dict[str, float] = dict.fromkeys(self._applied, steady_s())
        self._removal = Removal(tree, self.index, f"{lease.holder}-{lease.term}")
        self._plan: deque[int] = deque()
        self._planned: set[int] = set()
        self._namespaces: dict[str, StoreNamespace | None] = {}
        self._plan_again_s = self._check_ttl_s = 0.0
        self._cleaned_s = float("-inf")
        self._saves = 0
        self._saved_s = steady_s()
        self._saved_whole = progress.surveyed_s is not None
        self._events = 0
        log.info(
            "this process is now the storage's janitor; its index has %d blocks, %d bytes%s",
            *(self.index.blocks, self.index.used_bytes),
            "" if self._saved_whole else " and the first survey is under way",
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._plan) or self.survey.surveyed_s is None

    def step(self) -> None:
        self._apply_events()
        self.survey.advance(STEP_BUDGET_S)
        self._remove(self._steady_s() + STEP_BUDGET_S)
        self._removal.flush_journal()
        self._clean_up_if_due()
        self._save_if_due()
        self._publish()

    def save(self) -> None:
        """Save the index, then remove the journal segments that it includes."""
        self._drop_plan()
        ends = pinned_ends(self.index, read_pins(self._tree))
        self.index.compact(self._now_s() - _WRITER_EXPIRY_S, ends)
        now_s = self._steady_s()
        for writer in [
            w for w, last_s in self._last_event_s.items() if now_s - last_s > _WRITER_EXPIRY_S
        ]:
            del self._applied[writer], self._last_event_s[writer]
        self._saves += 1
        progress = Progress(dict(self._applied), self.survey.surveyed_s)
        save(self._tree, self._lease.term, self._saves, self.index, progress)
        self._saved_s, self._events = now_s, 0
        self._saved_whole = self.survey.surveyed_s is not None
        if self._lease.is_held():
            self._tree.remove(
                [n for w, number, n in segments(self._tree) if number <= self._applied.get(w, 0)]
            )

    # ------------------------------------------------------------------ events

    def _apply_events(self) -> None:
        before = dict(self._applied)
        touched, count = apply_events(self._tree, self.index, self._applied, self._now_s())
        now_s = self._steady_s()
        self._last_event_s |= {w: now_s for w, n in self._applied.items() if before.get(w) != n}
        self._events += count
        if not self._planned.isdisjoint(touched):
            # A used block stays, and so do all blocks before it.
            self._drop_plan()

    # ------------------------------------------------------------------ removal

    def _remove(self, end_s: float) -> None:
        if not self._plan:
            self._make_plan()
        while self._plan and self._steady_s() < end_s:
            if not self._lease.is_held():
                self._drop_plan()
                return
            self._remove_batch()

    def _make_plan(self) -> None:
        now_s = self._steady_s()
        if not self._limits.any or now_s < self._plan_again_s:
            return
        # Before the first survey is complete, the oldest indexed block may be the newest stored.
        whole = self.survey.surveyed_s is not None
        full = 0 < self._limits.quota_bytes < self.index.used_bytes
        late = bool(self._limits.ttl_s) and now_s >= self._check_ttl_s
        if not (full or (whole and (late or above_watermark(self.index, self._limits)))):
            return
        self._check_ttl_s = now_s + max(self._limits.ttl_s / _TTL_CHECKS, 1.0)
        pins, namespaces = read_pins(self._tree), self._described()
        # Measure only the planning itself: with the time to read pins included, a slow storage
        # would stay above its quota for many times that long.
        begun_s = self._steady_s()
        self.index.limit_times(self._now_s())
        earlier = earlier_weights(self.index, namespaces)
        rows = victims(self.index, self._limits, pins, self._now_s(), earlier).tolist()
        self._plan, self._planned = deque(rows), set(rows)
        if not rows:
            ended_s = self._steady_s()
            self._plan_again_s = ended_s + _REPLAN_FACTOR * (ended_s - begun_s)

    def _described(self) -> dict[str, StoreNamespace]:
        """Return the namespaces of the index that are described in the storage, by name."""
        for name in self.index.namespaces:
            if name not in self._namespaces:
                self._namespaces[name] = namespace_of(self._tree, name)
        return {name: found for name, found in self._namespaces.items() if found is not None}

    def _remove_batch(self) -> None:
        rows = [self._plan.popleft() for _ in range(min(BATCH, len(self._plan)))]
        try:
            self._totals.evicted_bytes += self._removal.remove(rows)
        except StorageError:
            self._drop_plan()
            raise
        self._planned.difference_update(rows)
        self._totals.evicted_blocks += len(rows)

    def _drop_plan(self) -> None:
        self._plan, self._planned = deque(), set()

    # ------------------------------------------------------------------ upkeep

    def _clean_up_if_due(self) -> None:
        if self._steady_s() - self._cleaned_s >= _CLEAN_UP_S:
            self._cleaned_s = self._steady_s()
            if count := remove_stale_temporaries(self._tree, self._now_s()):
                log.info("removed %d temporary files of dead writers", count)

    def _save_if_due(self) -> None:
        late = self._events and self._steady_s() - self._saved_s >= SAVE_S
        first = not self._saved_whole and self.survey.surveyed_s is not None
        if late or first or self._events >= SAVE_EVENTS:
            self.save()

    def _publish(self) -> None:
        tenants, namespaces, _ = self._limits.quotas(self.index.stored_bytes())
        write_status(
            self._tree,
            Status(
                holder=self._lease.holder,
                time_s=self._now_s(),
                blocks=self.index.blocks,
                used_bytes=self.index.used_bytes,
                limits=self._limits,
                surveyed_s=self.survey.surveyed_s,
                applied_segments=dict(self._applied),
                fullest_namespaces=namespaces.fullest(MAX_NAMED_OWNERS),
                fullest_tenants=tenants.fullest(MAX_NAMED_OWNERS),
            ),
        )


def apply_events(
    tree: ObjectTree, index: ChainIndex, applied: dict[str, int], now_s: float
) -> tuple[set[int], int]:
    """Apply all journal segments after ``applied`` (last segment by writer), which is updated.

    Events of writers with clocks ahead of ``now_s`` (Unix time) count as of ``now_s``.

    Returns the rows of blocks written or used, including the parents of written ones, and the
    number of events.  Raises ``StorageError`` if a segment cannot be read; then none is applied.
    """
    events: list[tuple[str, JournalEvent]] = []
    applied_now = dict(applied)
    for writer, number, name in segments(tree):
        if number <= applied_now.get(writer, 0):
            continue
        content = tree.get(name)
        segment = None if content is None else decode_segment(content)
        if segment is None:
            log.warning("journal segment %s is damaged; the survey finds its blocks", name)
        else:
            events += [(segment.namespace, item) for item in segment.events]
        applied_now[writer] = number
    applied.update(applied_now)
    events.sort(key=lambda item: item[1].time_s)
    touched: set[int] = set()
    for namespace, item in events:
        time_s = min(item.time_s, now_s)
        match item:
            case Written():
                row = index.add(namespace, item.key, item.parent, item.tenant, item.bytes, time_s)
                touched |= {row, int(index.tables().parents[row])}
            case Used():
                touched.add(index.use(namespace, item.key, time_s))
            case Removed():
                index.remove(namespace, item.key, time_s)
    return touched, len(events)
