"""Bugs that can be planted, to see that the simulation finds them.

Each takes back one thing that keeps KV right or the cluster alive.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from dualpath.core.envelopes import Envelope
from dualpath.core.errors import ConfigError
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
from dualpath.laboratory.chaos.simulation.plant import Plant, instead
from dualpath.laboratory.chaos.simulation.plants_of_dram import DRAM_PLANTS
from dualpath.laboratory.chaos.simulation.plants_of_front_ends import FRONT_END_PLANTS
from dualpath.laboratory.chaos.simulation.plants_of_storage import STORAGE_PLANTS
from dualpath.laboratory.chaos.simulation.plants_of_turns import TURN_PLANTS
from dualpath.router.attempts import loading
from dualpath.router.control.registry import Registry
from dualpath.router.control.releases import Releases
from dualpath.router.control.witnesses import Witnesses
from dualpath.router.engine_calls import Job
from dualpath.router.requests import request_life
from dualpath.router.requests.lifecycle import Attempt


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


#: An attribute that is empty whatever it is set to.
_NONE = property(lambda self: (), lambda self, value: None)
#: An attribute that is true whatever it is set to.
_ALWAYS = property(lambda self: True, lambda self, value: None)

#: By name, in the order of the reference.
PLANTS: dict[str, Plant] = {
    "no-resend": Plant(
        "what a reset has lost is not said again",
        instead(Conversation, "_missing", lambda self, now_s: []),
    ),
    "doubles-taken": Plant(
        "a message that comes twice is taken up twice",
        instead(Conversation, "hear", _take_anything),
    ),
    "session-end-keeps": Plant(
        "an engine keeps its requests when its session is over",
        instead(TrafficManager, "end_session", lambda self, reason: None),
    ),
    "silence-ignored": Plant(
        "an engine that falls silent is not lost",
        instead(Registry, "silent", lambda self, now_s, timeout_s: []),
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
        instead(request_life.RequestLife, "_one_attempt", _same_name),
    ),
    "retry-forgets-tokens": Plant(
        "an attempt after streamed tokens begins with the old prompt",
        instead(Job, "continued", lambda self, generated: self),
    ),
    "released-at-once": Plant(
        "a DE's slots are free before its PE has said that it writes no more",
        instead(Releases, "release_when_safe", _release_at_once),
    ),
    "no-quarantine": Plant(
        "slots that a lost engine may still write to are free at once",
        instead(SlotPool, "quarantine", SlotPool.release),
    ),
    "doubts-unsaid": Plant(
        "a PE does not name the transfers that its session has left under way",
        instead(ActiveRequests, "unsettled", lambda self: ()),
    ),
    "no-witness": Plant(
        "nobody is asked whether a lost process has ended",
        instead(Witnesses, "ask", lambda self, writers: []),
    ),
    "released-in-pass": Plant(
        "a request is released at its PE while a forward pass moves its KV",
        instead(ActiveRequests, "ask_release", lambda self, release: True),
    ),
    "rank-unawaited": Plant(
        "a PE has sent a prompt's KV when its first rank has, though others still send",
        instead(follower, "end_stream", _over_at_once),
    ),
    "ranks-unnamed": Plant(
        "a lost engine is gone when its first rank is",
        lambda: mock.patch.object(Rank, "other_processes", _NONE, create=True),
    ),
    "load-before-send": Plant(
        "a layer is computed before the one that used its region has left",
        instead(LayerStream, "computed", _computed_at_once),
    ),
    "next-pass-at-once": Plant(
        "a pass loads its first layers before the last ones of the pass before have left",
        instead(LayerStream, "when_left", lambda self, region, then: then()),
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
        instead(ReadQueue, "_set_aside", lambda self, task: True),
    ),
    "late-slots-free": Plant(
        "a request leaves its forward pass while transfers that were given up still move",
        instead(LayerStream, "late", property(lambda self: [])),
    ),
    "slots-unchecked": Plant(
        "a DE does not check that a request still has the slots it is to decode from",
        instead(BlockBuffer, "pin_lease", _any_lease),
    ),
    "keys-ignored": Plant(
        "a request is granted kept blocks without a look at their keys",
        instead(KeptBlocks, "head", lambda self, keys: list(self._blocks)[: len(keys)]),
    ),
    "whole-once-read": Plant(
        "a DE keeps what it has read at once, though the PE may compute it again",
        lambda: mock.patch.object(ReadQueue, "_keeps", _ALWAYS, create=True),
    ),
    "windows-unread": Plant(
        "a hit that ends early is used without the window layers of its last blocks",
        instead(loading, "to_read_whole", lambda hits, whole_from: ()),
    ),
    **DRAM_PLANTS,
    **STORAGE_PLANTS,
    **FRONT_END_PLANTS,
    **TURN_PLANTS,
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
