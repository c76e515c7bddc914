"""What a front end and the scheduler send each other, in the envelopes of ``core.envelopes``.

A frame has one envelope or more, in order: what either end says in one turn of its event loop goes
together (``links.frames``).

    front end → scheduler   FrontEndHello Beat Begin Try Ask TokensCame Over End Suspect Settle Hint
                            Deregister
    scheduler → front end   Registered Refused Ack EnginesNow Happened Broken Answer Failure

Sessions are those of engines (``core.sessions``): numbered messages, acknowledged and said again,
an epoch for each end, nothing carried over from one session to the next but what is begun anew.
"""

from enum import StrEnum

import msgspec

from dualpath.core import errors
from dualpath.core.blocks import StoreNamespace
from dualpath.core.control import Ack, Deregister, Envelope, Message, Refused, Registered
from dualpath.core.key_cache import Adapter
from dualpath.core.modes import Mode
from dualpath.core.names import Name
from dualpath.core.session_hints import SessionHints
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduling import Answered, AttemptEvent, AttemptOrder, RequestOrder

#: Raised by one whenever a message changes its meaning; both ends must agree.
LINK_VERSION = 3


class FrontEndHello(Message, frozen=True, tag=True):
    """Asks for a session; ``registration`` as in ``core.control.Register``."""

    version: int
    name: Name
    epoch: Name
    registration: int = 1


class Beat(Message, frozen=True, tag=True):
    """The front end lives."""


class Begin(Message, frozen=True, tag=True):
    """A request has arrived."""

    order: RequestOrder


class Try(Message, frozen=True, tag=True):
    """An attempt begins; ``Ask`` goes on with it.

    The order has no keys where they are those of ``Begin``, as a first attempt's are.
    ``namespace`` is the one that the front end has made its keys for, ``adapters`` are the digests
    that it knows of adapters, by name: to engines of another model, or with other weights of an
    adapter, they would be names of other KV.
    """

    request_id: Name
    order: AttemptOrder
    namespace: StoreNamespace | None
    adapters: dict[str, str]


class Step(StrEnum):
    """Calls of a ``ScheduledAttempt`` that are answered."""

    PREPARE = "prepare"
    PREFILLED = "prefilled"
    GIVEN_UP = "given_up"
    DECODED = "decoded"


class Ask(Message, frozen=True, tag=True):
    """Answered with ``Answer`` or ``Failure``, unless the attempt is over before."""

    call_id: int
    attempt_id: Name
    step: Step


class TokensCame(Message, frozen=True, tag=True):
    """The DE generates."""

    attempt_id: Name


class Over(Message, frozen=True, tag=True):
    """An attempt is over."""

    attempt_id: Name
    reason: str


class End(Message, frozen=True, tag=True):
    """A request is over."""

    request_id: Name
    answered: Answered | None = None


class Suspect(Message, frozen=True, tag=True):
    """Something failed on this process of an engine."""

    engine_id: Name
    epoch: Name
    why: str
    call_failed: bool = False


class Settle(Message, frozen=True, tag=True):
    """Answered when it is known which of these processes of engines live."""

    call_id: int
    engines: tuple[tuple[str, str], ...]


class Hint(Message, frozen=True, tag=True):
    """Answered with whether anybody knows the session."""

    call_id: int
    tenant: str
    session_id: str
    hints: SessionHints


class EnginesNow(Message, frozen=True, tag=True):
    """The live engines, by arrival, and their adapters; follows ``Registered`` and each change."""

    mode: Mode | None
    namespace: StoreNamespace | None
    engines: tuple[EngineInfo, ...]
    keeps_answers: bool
    adapters: tuple[Adapter, ...] = ()


class Happened(Message, frozen=True, tag=True):
    """An attempt's listener is to hear this.

    What only the record of the request needs waits for the next message about the attempt.
    """

    attempt_id: Name
    events: tuple[AttemptEvent, ...]


class Broken(Message, frozen=True, tag=True):
    """An engine is lost that the attempt needs."""

    attempt_id: Name
    reason: str


class Answer(Message, frozen=True, tag=True):
    """What a call returns; its type follows from the call."""

    call_id: int
    result: msgspec.Raw


class Failure(Message, frozen=True, tag=True):
    """What a call raises: the name of an error of ``core.errors`` and its text."""

    call_id: int
    error: str
    text: str


FrontEndMessage = (
    FrontEndHello
    | Beat
    | Begin
    | Try
    | Ask
    | TokensCame
    | Over
    | End
    | Suspect
    | Settle
    | Hint
    | Deregister
)
SchedulerMessage = Registered | Refused | Ack | EnginesNow | Happened | Broken | Answer | Failure
FromFrontEnd = list[Envelope[FrontEndMessage]]
FromScheduler = list[Envelope[SchedulerMessage]]

_KINDS = {
    kind.__name__: kind
    for kind in (
        errors.BadRequestError,
        errors.DeadlineError,
        errors.EngineLostError,
        errors.PromptTooLongError,
        errors.TransportError,
    )
}


def failure(call_id: int, error: Exception) -> Failure:
    """Return the wire form of what a call raises; what the other end does not know is a loss."""
    name = type(error).__name__
    return Failure(call_id, name if name in _KINDS else "EngineLostError", str(error))


def raised(said: Failure) -> errors.DualPathError:
    """Return the error of a ``Failure``."""
    return _KINDS.get(said.error, errors.EngineLostError)(said.text)
