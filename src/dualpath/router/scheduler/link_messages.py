"""Messages between a front end and the scheduler, in the envelopes of ``core.envelopes``.

A frame has one envelope or more, in order: the messages that either end sends in one iteration of
its event loop go together.

    front end → scheduler   FrontEndRegister Heartbeat BeginRequest BeginAttempt AttemptCall
                            DecodingStarted EndAttempt EndRequest SuspectEngine CallWaits
                            AwaitLiveness HintSession EndsAborted OfferAttempt TakeAttempt
                            WithdrawAttempt, and core.control's deregistration
    scheduler → front end   EnginesUpdate EnginesChanged UnitLoad AttemptEvents AttemptBroken
                            CallResult CallFailed, and core.control's answers to a registration

Sessions are those of engines (``core.sessions``): numbered messages, acknowledged and resent, an
epoch for each end; nothing is carried from one session to the next unless it is begun again.

A turn without a failure has five messages: ``BeginAttempt`` with its request and ``CallResult``,
``AttemptCall`` and ``CallResult``, ``EndRequest`` with its attempt.  A request that is not admitted
at once begins by itself (``BeginRequest``), and an attempt that is followed by another one ends by
itself (``EndAttempt``).
"""

import asyncio
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Generic, TypeVar

import msgspec

from dualpath.core import errors
from dualpath.core.blocks import StoreNamespace
from dualpath.core.control import (
    Deregister,
    Envelope,
    Message,
    Refused,
    Registered,
    encode_batches,
)
from dualpath.core.key_cache import Adapter
from dualpath.core.modes import Mode
from dualpath.core.names import Name
from dualpath.core.session_hints import SessionHints
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduling import (
    Answered,
    Arrived,
    AttemptOrder,
    Recomputed,
    RequestOrder,
    Staged,
)

#: Incremented whenever a message changes its meaning; both ends must agree.
LINK_VERSION = 9


class FrontEndRegister(Message, frozen=True, tag=True):
    """Requests a session; ``registration`` as in ``core.control.Register``."""

    version: int
    name: Name
    epoch: Name
    registration: int = 1


class Heartbeat(Message, frozen=True, tag=True):
    """The front end is alive."""


class BeginRequest(Message, frozen=True, tag=True):
    """A request has arrived, and its first attempt does not begin yet."""

    order: RequestOrder


class BeginAttempt(Message, frozen=True, tag=True):
    """An attempt begins, and is prepared; ``AttemptCall`` continues it.

    Answered with ``CallResult`` or ``CallFailed`` once all hits are in DRAM, unless the attempt is
    closed before.  ``request`` is its request if the scheduler does not know it in this session.
    The scheduler has ``known_keys`` of the keys, from the first one on, of the request or its last
    attempt; the order has those behind.  ``namespace`` is the one that the front end's keys are
    for, ``adapters`` are the adapters' digests that it knows, by name: for engines of another
    model, or with other weights of an adapter, the keys would name other KV.
    """

    call_id: int
    request_id: Name
    order: AttemptOrder
    namespace: StoreNamespace | None
    adapters: dict[str, str]
    request: RequestOrder | None = None
    known_keys: Annotated[int, msgspec.Meta(ge=0)] = 0


class Step(StrEnum):
    """Calls of a ``ScheduledAttempt`` that have a result, after ``prepare``."""

    PREFILLED = "prefilled"
    PREFILL_ABORTED = "prefill_aborted"


class AttemptCall(Message, frozen=True, tag=True):
    """Answered with ``CallResult`` or ``CallFailed``, unless the attempt is closed before."""

    call_id: int
    attempt_id: Name
    step: Step


class DecodingStarted(Message, frozen=True, tag=True):
    """The DE generates: it has computed the append of an attempt without a PE."""

    attempt_id: Name


class EndAttempt(Message, frozen=True, tag=True):
    """An attempt is closed, and its request goes on."""

    attempt_id: Name
    reason: str


class EndRequest(Message, frozen=True, tag=True):
    """A request has ended, and with it the attempt of this id for this reason, if there is one.

    ``answered`` has the keys behind the first ``known_keys``, as in ``BeginAttempt``.
    """

    request_id: Name
    answered: Answered | None = None
    attempt_id: str = ""
    reason: str = ""
    known_keys: Annotated[int, msgspec.Meta(ge=0)] = 0


class SuspectEngine(Message, frozen=True, tag=True):
    """Something failed on this process of an engine."""

    engine_id: Name
    epoch: Name
    why: str
    call_failed: bool = False


class CallWaits(Message, frozen=True, tag=True):
    """This process of an engine has a call and has sent nothing for ``silent_s``."""

    engine_id: Name
    epoch: Name
    silent_s: float


class AwaitLiveness(Message, frozen=True, tag=True):
    """Answered when it is known which of these processes of engines live."""

    call_id: int
    engines: tuple[tuple[str, str], ...]


class HintSession(Message, frozen=True, tag=True):
    """Answered with whether the session is known."""

    call_id: int
    tenant: str
    session_id: str
    hints: SessionHints


class EndsAborted(Message, frozen=True, tag=True):
    """Answered with whether a request whose attempt has failed ends with the tokens it has."""

    call_id: int


class OfferAttempt(Message, frozen=True, tag=True):
    """A prefilled attempt waits for its second leg and no longer belongs to this front end.

    Answered when it does.
    """

    call_id: int
    request_id: Name
    attempt_id: Name
    handover: Name


class TakeAttempt(Message, frozen=True, tag=True):
    """Answered with ``HandedOver`` when the attempt of this name belongs to this front end.

    ``engine_id`` is the decode engine to which the second leg was sent.  If the attempt's KV is at
    another one, it is moved first if ``moves``, or the attempt stays offered.
    """

    call_id: int
    handover: Name
    engine_id: Name
    moves: bool = True


class WithdrawAttempt(Message, frozen=True, tag=True):
    """The second leg of an attempt is over: release it unless it was taken."""

    attempt_id: Name
    reason: str


class EnginesUpdate(Message, frozen=True, tag=True):
    """The live engines, by arrival, and what they have in common.

    Sent when a session begins, and when something in common has changed.
    """

    mode: Mode | None
    namespace: StoreNamespace | None
    engines: tuple[EngineInfo, ...]
    caches_answers: bool
    adapters: tuple[Adapter, ...] = ()


class EnginesChanged(Message, frozen=True, tag=True):
    """Engines that have joined or were lost (by id and epoch) since the last message on engines.

    Like all messages of a session it has a number, is resent until it is acknowledged, and is taken
    once and in order: the front end knows the engines that the scheduler knew when it sent this.
    """

    joined: tuple[EngineInfo, ...] = ()
    lost: tuple[tuple[Name, Name], ...] = ()


class UnitLoad(Message, frozen=True, tag=True):
    """Acknowledges, is the scheduler's sign of life, and reports the load of its unit.

    ``others_tokens`` are the prompt tokens of all attempts that are open, those of this front end
    not counted.  ``draining``: an operator has asked that new requests go to other units.  It has
    no number, because the next one replaces it.
    """

    others_tokens: int = 0
    draining: bool = False


class PlacedOn(msgspec.Struct, frozen=True, tag=True):
    """``Placed`` by engine id and epoch: the front end knows the engines already.

    ``prefill`` is None if the DE computes the append.
    """

    prefill: tuple[Name, Name] | None
    decode: tuple[Name, Name]


LinkEvent = PlacedOn | Staged | Recomputed | Arrived


#: Events for the listeners of attempts, by attempt.
EventsByAttempt = dict[Name, tuple[LinkEvent, ...]]


class AttemptEvents(Message, frozen=True, tag=True):
    """Events that no answer to a call (``CallResult``, ``CallFailed``) has taken along in time."""

    events: EventsByAttempt


class AttemptBroken(Message, frozen=True, tag=True):
    """An engine is lost that the attempt needs."""

    attempt_id: Name
    reason: str


class CallResult(Message, frozen=True, tag=True):
    """The result of a call; its type follows from the call.

    ``events`` are all that came before the answer, of any attempt of the front end.
    """

    call_id: int
    result: msgspec.Raw
    events: EventsByAttempt = msgspec.field(default_factory=dict)


class CallFailed(Message, frozen=True, tag=True):
    """The error of a call: the name of a class of ``core.errors`` and its text.

    ``events`` as in ``CallResult``.
    """

    call_id: int
    error: str
    text: str
    events: EventsByAttempt = msgspec.field(default_factory=dict)


FrontEndMessage = (
    FrontEndRegister
    | Heartbeat
    | BeginRequest
    | BeginAttempt
    | AttemptCall
    | DecodingStarted
    | EndAttempt
    | EndRequest
    | SuspectEngine
    | CallWaits
    | AwaitLiveness
    | HintSession
    | EndsAborted
    | OfferAttempt
    | TakeAttempt
    | WithdrawAttempt
    | Deregister
)
SchedulerMessage = (
    Registered
    | Refused
    | EnginesUpdate
    | EnginesChanged
    | UnitLoad
    | AttemptEvents
    | AttemptBroken
    | CallResult
    | CallFailed
)
FromFrontEnd = list[Envelope[FrontEndMessage]]
FromScheduler = list[Envelope[SchedulerMessage]]

_KINDS = {
    kind.__name__: kind
    for kind in (
        errors.BadRequestError,
        errors.DeadlineError,
        errors.EngineLostError,
        errors.HitLostError,
        errors.PromptTooLongError,
        errors.TransportError,
    )
}


def failure(call_id: int, error: Exception) -> CallFailed:
    """Return the message for a call's error; unknown classes become ``EngineLostError``."""
    name = type(error).__name__
    return CallFailed(call_id, name if name in _KINDS else "EngineLostError", str(error))


def raised(failed: CallFailed) -> errors.DualPathError:
    """Return the error of a ``CallFailed``."""
    return _KINDS.get(failed.error, errors.EngineLostError)(failed.text)


# ------------------------------------------------------------------------ frames


M = TypeVar("M", bound=Message)

#: Size of a frame with several messages, far below the scheduler's limit.  A front end sends all of
#: its requests at once when a scheduler is back, and each may have many keys.
_MOST_BYTES = 1 << 20


def frames_of(envelopes: Iterable[Envelope[M]]) -> list[bytes]:
    """Return the frames of these messages, in order."""
    return encode_batches(envelopes, _MOST_BYTES)


class Frames(Generic[M]):
    """Batches envelopes for one receiver; ``send`` gets the frames in the loop's next iteration."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._gathered: list[Envelope[M]] = []

    def add(self, envelopes: Iterable[Envelope[M]]) -> None:
        """Send them after those before."""
        waiting = bool(self._gathered)
        self._gathered += envelopes
        if self._gathered and not waiting:
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send all batched envelopes now."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            for frame in frames_of(gathered):
                self._send(frame)
