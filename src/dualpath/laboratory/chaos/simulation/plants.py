"""Bugs that can be planted, to see that the simulation finds them.

Each takes back one thing that keeps KV right or the cluster alive.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec

from dualpath.core.blocks import BlockKey, BlockOrigin
from dualpath.core.envelopes import Envelope
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.request_messages import Release
from dualpath.core.sessions import Conversation
from dualpath.engine import follower
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.chunk_transfers import BlockHolder, ChunkTransfers
from dualpath.engine.kept_blocks import KeptBlocks
from dualpath.engine.layer_stream import LayerStream
from dualpath.engine.prefill_passes import PassOutcome
from dualpath.engine.rank import Rank
from dualpath.engine.read_queue import ReadQueue
from dualpath.engine.slots import SlotPool
from dualpath.engine.traffic_manager import TrafficManager
from dualpath.policy.chain_index import ChainIndex, Rows
from dualpath.policy.eviction import NO_PINS, Pins, StorageLimits, victims
from dualpath.router.attempts import loading
from dualpath.router.control.registry import Registry
from dualpath.router.control.releases import Releases
from dualpath.router.control.witnesses import Witnesses
from dualpath.router.engine_calls import Job
from dualpath.router.requests import request_life
from dualpath.router.requests.lifecycle import Attempt
from dualpath.storage import janitor
from dualpath.storage.block_file import PlainBlocks
from dualpath.storage.directory import NamespaceDirectory, refused
from dualpath.storage.janitor import take_news
from dualpath.storage.journal import segments
from dualpath.storage.lease import Lease
from dualpath.storage.objects import ObjectTree
from dualpath.storage.posix import PosixStorage
from dualpath.storage.system_calls import create_file


class Plant(msgspec.Struct, frozen=True):
    """``what`` is taken back, in words; ``patch`` takes it back as long as it is entered."""

    what: str
    patch: Callable[[], AbstractContextManager[object]]


def _instead(owner: object, name: str, other: object) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, other)


def _take_anything(
    self: Conversation[Any, Any], envelope: Envelope[Any], now_s: float
) -> tuple[Any, list[Envelope[Any]]]:
    """``Conversation.hear`` that takes messages up as they come, again and again."""
    while self._kept and self._kept[0][0] <= envelope.received:
        self._kept.popleft()
    self._heard = max(self._heard, envelope.number)
    return envelope.message, self._missing(now_s)


def _release_at_once(self: Releases, engine_id: str, attempt_id: str, reason: str) -> None:
    self._slots.pop(attempt_id, None)
    self._send(engine_id, Release(request_id=attempt_id, reason=reason))


def _same_name(self: request_life.RequestLife, job: Job) -> Any:  # noqa: ANN401
    """``RequestLife._one_attempt`` that makes all attempts under one name."""
    attempt = Attempt(
        self._context,
        job,
        job.request_id,
        self._scheduled,
        self.record,
        self._emit,
        self._trace,
    )
    self._attempt = attempt
    return attempt.run()


def _computed_at_once(self: LayerStream, layer: int) -> None:
    """``LayerStream.computed`` that does not wait for the layer that leaves its region."""
    self._send(layer, self._device.record())
    self._layer_start_ns = self._trace.now_ns()


def _any_lease(self: BlockBuffer, request_id: str, slots: Sequence[int]) -> bool:
    self.pin(slots)
    return True


def _over_at_once(
    stream: LayerStream, holder: BlockHolder
) -> tuple[PassOutcome, list[ChunkTransfers]]:
    """``end_stream`` that waits for nothing; without overlap it sends all the same."""
    if not stream._settings.overlap:
        stream.finish()
    return PassOutcome(dict(stream.failures), ()), []


def _written_in_place(
    self: PosixStorage, key: BlockKey, source: memoryview, origin: BlockOrigin
) -> bool:
    """``PosixStorage._write_one`` without a temporary name."""
    if self.is_stored(key):
        return False
    path = str(self.block_path(key))
    try:
        self._calls.makedirs(os.path.dirname(path), exist_ok=True)
        create_file(path, self._form.encoded(key, self._order.of(source), origin), self._calls)
    except OSError as error:
        raise refused("write", path, source.nbytes, error, self._calls) from error
    return True


def _heard_anyway(
    tree: ObjectTree, index: ChainIndex, taken: dict[str, int]
) -> tuple[set[int], int]:
    """``janitor.take_news`` that does not come back to what it could not read."""
    try:
        return take_news(tree, index, taken)
    except StorageError:
        taken.update({writer: number for writer, number, _ in segments(tree)})
        raise


def _unprotected(index: ChainIndex, limits: StorageLimits, pins: Pins, now_s: float) -> Rows:
    return victims(index, msgspec.structs.replace(limits, protect_s=0.0), pins, now_s)


#: An attribute that is empty whatever it is set to.
_NONE = property(lambda self: (), lambda self, value: None)
#: An attribute that is true whatever it is set to.
_ALWAYS = property(lambda self: True, lambda self, value: None)

#: By name, in the order of the reference.
PLANTS: dict[str, Plant] = {
    "no-resend": Plant(
        "what a reset has lost is not said again",
        _instead(Conversation, "_missing", lambda self, now_s: []),
    ),
    "doubles-taken": Plant(
        "a message that comes twice is taken up twice",
        _instead(Conversation, "hear", _take_anything),
    ),
    "session-end-keeps": Plant(
        "an engine keeps its requests when its session is over",
        _instead(TrafficManager, "end_session", lambda self, reason: None),
    ),
    "silence-ignored": Plant(
        "an engine that falls silent is not lost",
        _instead(Registry, "silent", lambda self, now_s, timeout_s: []),
    ),
    "ranks-apart": Plant(
        "ranks of a group take part, and are lost, one by one",
        lambda: mock.patch.multiple(
            Registry,
            group=lambda self, info: [self.get(info.engine_id)],
            waits_for=lambda self, info: None,
        ),
    ),
    "one-name": Plant(
        "all attempts of a request have one name",
        _instead(request_life.RequestLife, "_one_attempt", _same_name),
    ),
    "retry-forgets-tokens": Plant(
        "an attempt after streamed tokens begins with the old prompt",
        _instead(Job, "continued", lambda self, generated: self),
    ),
    "released-at-once": Plant(
        "a DE's slots are free before its PE has said that it writes no more",
        _instead(Releases, "release_when_safe", _release_at_once),
    ),
    "no-quarantine": Plant(
        "slots that a lost engine may still write to are free at once",
        _instead(SlotPool, "quarantine", SlotPool.release),
    ),
    "doubts-unsaid": Plant(
        "a PE does not name the transfers that its session has left under way",
        _instead(ActiveRequests, "unsettled", lambda self: ()),
    ),
    "no-witness": Plant(
        "nobody is asked whether a lost process has ended",
        _instead(Witnesses, "ask", lambda self, writers: []),
    ),
    "released-in-pass": Plant(
        "a request is released at its PE while a forward pass moves its KV",
        _instead(ActiveRequests, "ask_release", lambda self, release: True),
    ),
    "rank-unawaited": Plant(
        "a PE has sent a prompt's KV when its first rank has, though others still send",
        _instead(follower, "end_stream", _over_at_once),
    ),
    "ranks-unnamed": Plant(
        "a lost engine is gone when its first rank is",
        lambda: mock.patch.object(Rank, "other_processes", _NONE, create=True),
    ),
    "load-before-send": Plant(
        "a layer is computed before the one that used its region has left",
        _instead(LayerStream, "computed", _computed_at_once),
    ),
    "next-pass-at-once": Plant(
        "a pass loads its first layers before the last ones of the pass before have left",
        _instead(LayerStream, "when_left", lambda self, region, then: then()),
    ),
    "no-pins": Plant(
        "nobody pins slots while reading or writing them",
        lambda: mock.patch.multiple(
            BlockBuffer,
            pin=lambda self, slots: None,
            pin_to_write=lambda self, request_id, slot: self._pool.may_write(request_id, slot),
            unpin=lambda self, slots: None,
        ),
    ),
    "late-read-stays": Plant(
        "a read that is given up goes on into the request's own slots",
        _instead(ReadQueue, "_set_aside", lambda self, task: True),
    ),
    "late-slots-free": Plant(
        "a request leaves its forward pass while transfers that were given up still move",
        _instead(LayerStream, "late", property(lambda self: [])),
    ),
    "slots-unchecked": Plant(
        "a DE does not check that a request still has the slots it is to decode from",
        _instead(BlockBuffer, "pin_lease", _any_lease),
    ),
    "keys-ignored": Plant(
        "a request is granted kept blocks without a look at their keys",
        _instead(KeptBlocks, "head", lambda self, keys: list(self._blocks)[: len(keys)]),
    ),
    "whole-once-read": Plant(
        "a DE keeps what it has read at once, though the PE may compute it again",
        lambda: mock.patch.object(ReadQueue, "_keeps", _ALWAYS, create=True),
    ),
    "windows-unread": Plant(
        "a hit that ends early is used without the window layers of its last blocks",
        _instead(loading, "to_read_whole", lambda hits, whole_from: ()),
    ),
    "checksum-ignored": Plant(
        "a stored block's checksum is not compared",
        _instead(PlainBlocks, "defect", lambda self, key, header, payload: None),
    ),
    "written-in-place": Plant(
        "a block has its name before it is whole",
        _instead(PosixStorage, "_write_one", _written_in_place),
    ),
    "stale-stays": Plant(
        "an engine that starts leaves what ended ones have half-written",
        _instead(NamespaceDirectory, "_remove_stale", lambda self: None),
    ),
    "unlink-forgotten": Plant(
        "a temporary name stays when its block has its own",
        _instead(NamespaceDirectory, "remove_temporary", lambda self, temporary: None),
    ),
    "lease-unchecked": Plant(
        "a janitor stays one, though another has taken its place",
        _instead(Lease, "_is_ours", lambda self, newest: True),
    ),
    "janitor-dead": Plant(
        "nobody takes the place of a janitor that is gone",
        _instead(Lease, "_is_stale", lambda self, term, content, now_s: False),
    ),
    "pins-unheard": Plant(
        "what is pinned is removed as everything is",
        _instead(janitor, "read_pins", lambda tree: NO_PINS),
    ),
    "unprotected": Plant(
        "what was used a moment ago is removed as everything is",
        _instead(janitor, "victims", _unprotected),
    ),
    "news-forgotten": Plant(
        "news that cannot be read at once are never taken in",
        _instead(janitor, "take_news", _heard_anyway),
    ),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for a while, none for an empty name; raises ``ConfigError`` for an unknown."""
    if not name:
        yield
        return
    if name not in PLANTS:
        raise ConfigError(f"{{plant}} is {name!r}; choose one of {', '.join(PLANTS)}")
    with PLANTS[name].patch():
        yield
