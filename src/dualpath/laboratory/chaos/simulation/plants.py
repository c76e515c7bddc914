"""Planted bugs, which the simulation must find.

Each disables one mechanism that keeps KV right or the cluster alive.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from dualpath.core.envelopes import Envelope
from dualpath.core.errors import ConfigError
from dualpath.core.request_messages import Release
from dualpath.core.sessions import Channel
from dualpath.engine import follower
from dualpath.engine.active_requests import ActiveRequests
from dualpath.engine.buffer import BlockBuffer
from dualpath.engine.chunk_transfers import BlockHolder, ChunkTransfers
from dualpath.engine.kept_blocks import CachedBlocks
from dualpath.engine.layer_stream import LayerStream
from dualpath.engine.prefill_passes import PassOutcome
from dualpath.engine.rank import Rank
from dualpath.engine.read_queue import ReadQueue
from dualpath.engine.slots import SlotPool
from dualpath.engine.traffic_manager import TrafficManager
from dualpath.laboratory.chaos.simulation.plant import PlantedBug, replaced
from dualpath.laboratory.chaos.simulation.plants_of_dram import DRAM_BUGS
from dualpath.laboratory.chaos.simulation.plants_of_front_ends import FRONT_END_BUGS
from dualpath.laboratory.chaos.simulation.plants_of_storage import STORAGE_BUGS
from dualpath.laboratory.chaos.simulation.plants_of_turns import TURN_BUGS
from dualpath.router.attempts import loading
from dualpath.router.control.registry import Registry
from dualpath.router.control.releases import Releases
from dualpath.router.control.witnesses import Witnesses
from dualpath.router.engine_calls import Job
from dualpath.router.requests import request_life
from dualpath.router.requests.lifecycle import Attempt


def _take_anything(
    self: Channel[Any, Any], envelope: Envelope[Any], now_s: float
) -> tuple[Any, list[Envelope[Any]]]:
    """``Channel.receive`` that handles every message on arrival, duplicates included."""
    while self._unacknowledged and self._unacknowledged[0][0] <= envelope.received:
        self._unacknowledged.popleft()
    self._received = max(self._received, envelope.number)
    return envelope.message, self._resent(now_s)


def _release_at_once(self: Releases, engine_id: str, attempt_id: str, reason: str) -> None:
    self._slots.pop(attempt_id, None)
    self._send(engine_id, Release(request_id=attempt_id, reason=reason))


def _same_name(self: request_life.RequestLife, job: Job) -> Any:  # noqa: ANN401
    """``RequestLife._one_attempt`` that gives all attempts the request's id."""
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
    """``LayerStream.computed`` that does not wait until the layer in its region has been sent."""
    self._computed.add(layer)
    if self._settings.overlap:
        self._send(layer, self._device.record())
    self._layer_start_ns = self._trace.now_ns()


def _any_lease(self: BlockBuffer, request_id: str, slots: Sequence[int]) -> bool:
    self.pin(slots)
    return True


def _over_at_once(
    stream: LayerStream, holder: BlockHolder
) -> tuple[PassOutcome, list[ChunkTransfers]]:
    """``end_stream`` that does not wait; without overlap it still sends."""
    if not stream._settings.overlap:
        stream.finish()
    return PassOutcome(dict(stream.failures), ()), []


#: An attribute that is always empty.
_NONE = property(lambda self: (), lambda self, value: None)
#: An attribute that is always true.
_ALWAYS = property(lambda self: True, lambda self, value: None)

#: By name, in the order of docs/reference/simulated-faults.md.
PLANTED_BUGS: dict[str, PlantedBug] = {
    "no-resend": PlantedBug(
        "frames that a reset has lost are not sent again",
        replaced(Channel, "_resent", lambda self, now_s: []),
    ),
    "duplicates-handled": PlantedBug(
        "a message that arrives twice is handled twice",
        replaced(Channel, "receive", _take_anything),
    ),
    "session-end-keeps": PlantedBug(
        "an engine keeps its requests after its session has ended",
        replaced(TrafficManager, "end_session", lambda self, reason: None),
    ),
    "silence-ignored": PlantedBug(
        "a silent engine is not declared lost",
        replaced(Registry, "silent", lambda self, now_s, timeout_s: []),
    ),
    "ranks-apart": PlantedBug(
        "ranks of a group join, and are declared lost, one by one",
        lambda: mock.patch.multiple(
            Registry,
            group=lambda self, info: [self.get(info.engine_id)],
            waits_for=lambda self, info: None,
        ),
    ),
    "one-attempt-id": PlantedBug(
        "all attempts of a request have the same id",
        replaced(request_life.RequestLife, "_one_attempt", _same_name),
    ),
    "retry-forgets-tokens": PlantedBug(
        "an attempt after streamed tokens starts with the old prompt",
        replaced(Job, "continued", lambda self, generated: self),
    ),
    "freed-at-once": PlantedBug(
        "a DE's slots are freed before its PE has reported that it writes no more",
        replaced(Releases, "release_when_safe", _release_at_once),
    ),
    "no-quarantine": PlantedBug(
        "slots that a lost engine may still write to are freed at once",
        replaced(SlotPool, "quarantine", SlotPool.release),
    ),
    "in-doubt-unreported": PlantedBug(
        "a PE does not report the transfers that its ended session has left in flight",
        replaced(ActiveRequests, "unsettled", lambda self: ()),
    ),
    "no-death-confirmation": PlantedBug(
        "no engine is asked whether a lost process has exited",
        replaced(Witnesses, "ask", lambda self, writers: []),
    ),
    "released-in-pass": PlantedBug(
        "a request is released at its PE while a forward pass transfers its KV",
        replaced(ActiveRequests, "ask_release", lambda self, release: True),
    ),
    "rank-unawaited": PlantedBug(
        "a PE reports a prompt's KV as sent when its first rank has, while others still send",
        replaced(follower, "end_stream", _over_at_once),
    ),
    "ranks-unnamed": PlantedBug(
        "a lost engine counts as dead when its first rank is dead",
        lambda: mock.patch.object(Rank, "other_processes", _NONE, create=True),
    ),
    "load-before-send": PlantedBug(
        "a layer is computed before the previous layer in its region has been sent",
        replaced(LayerStream, "computed", _computed_at_once),
    ),
    "next-pass-at-once": PlantedBug(
        "a pass loads its first layers before the last ones of the previous pass have been sent",
        replaced(LayerStream, "when_left", lambda self, region, then: then()),
    ),
    "no-pins": PlantedBug(
        "slots are not pinned while they are read or written",
        lambda: mock.patch.multiple(
            BlockBuffer,
            pin=lambda self, slots: None,
            pin_to_write=lambda self, request_id, slot: self._pool.may_write(request_id, slot),
            unpin=lambda self, slots: None,
        ),
    ),
    "abandoned-read-continues": PlantedBug(
        "an abandoned read continues into the request's own slots",
        replaced(ReadQueue, "_replace_slots", lambda self, task: True),
    ),
    "late-slots-free": PlantedBug(
        "a request leaves its forward pass while abandoned transfers still move",
        replaced(LayerStream, "late", property(lambda self: [])),
    ),
    "slots-unchecked": PlantedBug(
        "a DE does not check that a request still holds the slots it decodes from",
        replaced(BlockBuffer, "pin_lease", _any_lease),
    ),
    "keys-ignored": PlantedBug(
        "a request is granted cached blocks without comparing their keys",
        replaced(CachedBlocks, "cached_slots", lambda self, keys: list(self._blocks)[: len(keys)]),
    ),
    "cached-once-read": PlantedBug(
        "a DE caches blocks as soon as they are read, although the PE may recompute them",
        lambda: mock.patch.object(ReadQueue, "_caches", _ALWAYS, create=True),
    ),
    "windows-unread": PlantedBug(
        "a shortened hit is used without the window layers of its last blocks",
        replaced(loading, "to_read_whole", lambda hits, whole_from: ()),
    ),
    **DRAM_BUGS,
    **STORAGE_BUGS,
    **FRONT_END_BUGS,
    **TURN_BUGS,
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug within ``with``; none for an empty name.

    Raises ``ConfigError`` for an unknown name.
    """
    if not name:
        yield
        return
    if name not in PLANTED_BUGS:
        raise ConfigError(f"{{plant}} is {name!r}; choose one of {', '.join(PLANTED_BUGS)}")
    with PLANTED_BUGS[name].patch():
        yield
