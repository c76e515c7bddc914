"""The protocol of sessions between router and engines, without sockets or clocks.

A *session* connects one engine process with one router process.  It begins empty: the engine counts
no request and holds no slot.  It survives a reset of its connection: messages are numbered, stored
until the other end has acknowledged them, and resent.  It ends when either end dies, is silent for
too long or ends it.  Then both ends drop all of its requests; slots to which a transfer may still
write are quarantined (``router.control.releases``).  A request in its decode phase holds no slot
and has no transfer, so it is no longer part of the session: it goes on until the client of its HTTP
stream has all tokens or disconnects.

There are two mechanisms.  Within a session every message is delivered once and in order.  Between
sessions only the names of in-doubt attempts are carried over (``Register``).  Reconciling every
request at every registration would need a rule for each pair of states of the two ends; ending the
session needs none, and its attempts are retried in any case.

Ranks of a data-parallel group compute in lock step and fail together.  Their sessions begin
together, when all ranks of one start of the group have registered, and end together; an engine
without a group is complete by itself.  One exception: when a group has no requests left, the first
``Deregister`` takes the group out of the cluster, but the sessions of the other ranks stay open, so
that each of them can deregister, in any order.

Two tables define the life of a session, one for each end.  ``engine.router_session`` and
``router.control.control_server`` execute them, ``docs/generate_control_protocol.py`` prints them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from dualpath.core.control import Envelope, Message

#: Interval of heartbeats of both ends, unless ``Ack`` has another one; each heartbeat acknowledges
#: received messages.
HEARTBEAT_S = 0.5
#: A router receives and sends at most so many heartbeats per second: the interval grows with the
#: number of engines.
MOST_HEARTBEATS_PER_S = 1000
#: The least number of heartbeats within the time after which a silent end counts as lost; it limits
#: the interval.
HEARTBEATS_PER_TIMEOUT = 4
#: Resend an unacknowledged message after this time, when a message of the other end arrives.  The
#: other end acknowledges within ``ACKNOWLEDGE_S`` or with its next report.
RESEND_AFTER_S = 1.0
#: Messages resent at a time; their acknowledgement triggers the next ones.
MAX_RESENT_AT_ONCE = 64
#: A live router sends a heartbeat at least every 2.5 s; after this time of silence it is lost.
ROUTER_TIMEOUT_S = 10.0
#: Interval between two ``Register`` messages, and the time after which a registration without an
#: answer is abandoned.
REGISTER_INTERVAL_S = 0.25
REGISTER_TIMEOUT_S = 5.0

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class Channel(Generic[M, R]):
    """One end of a session: sends messages of type ``M``, receives those of type ``R``.

    Go-back-N without timers: an envelope from the other end that lacks acknowledgements triggers a
    resend.  While the other end is silent nothing is resent.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        self._sent = 0
        self._received = 0
        self._acknowledged = 0
        #: Unacknowledged messages: number, message, time of the last transmission in seconds.
        self._unacknowledged: deque[tuple[int, M, float]] = deque()

    @property
    def unacknowledged(self) -> int:
        """Messages that the other end has not acknowledged."""
        return len(self._unacknowledged)

    @property
    def ack_pending(self) -> bool:
        """Whether messages of the other end are received but not acknowledged yet."""
        return self._acknowledged < self._received

    def has_received(self, number: int) -> bool:
        """Whether the other end has acknowledged the message of this number."""
        return not self._unacknowledged or number < self._unacknowledged[0][0]

    def send(self, message: M, now_s: float) -> Envelope[M]:
        """Number a message and store it until it is acknowledged; return its envelope."""
        self._sent += 1
        self._unacknowledged.append((self._sent, message, now_s))
        first = self._unacknowledged[0][0]
        assert first + len(self._unacknowledged) == self._sent + 1, "a number is missing"
        return self._envelope(self._sent, message)

    def send_lossy(self, message: M) -> Envelope[M]:
        """Return the envelope of a message that may be lost, as a newer one supersedes it."""
        return self._envelope(0, message)

    def end(self) -> None:
        """The session is over: free the messages that will not be resent."""
        self._unacknowledged.clear()

    def receive(self, envelope: Envelope[R], now_s: float) -> tuple[R | None, list[Envelope[M]]]:
        """Return the message to deliver, if any, and the envelopes to resend.

        Duplicates are dropped.  So is a message that arrives before its predecessors: the other
        end resends them and the message after them.
        """
        unacknowledged = self._unacknowledged
        if envelope.received <= self._sent:
            while unacknowledged and unacknowledged[0][0] <= envelope.received:
                unacknowledged.popleft()
        delivered: R | None = None
        if envelope.number == 0:
            delivered = envelope.message
        elif envelope.number == self._received + 1:
            self._received += 1
            delivered = envelope.message
        return delivered, self._resent(now_s)

    def _resent(self, now_s: float) -> list[Envelope[M]]:
        waiting = self._unacknowledged
        if not waiting or now_s - waiting[0][2] < RESEND_AFTER_S:
            return []
        resent = [waiting.popleft() for _ in range(min(len(waiting), MAX_RESENT_AT_ONCE))]
        waiting.extendleft((number, message, now_s) for number, message, _ in reversed(resent))
        return [self._envelope(number, message) for number, message, _ in resent]

    def _envelope(self, number: int, message: M) -> Envelope[M]:
        self._acknowledged = self._received
        return Envelope(self.session, number, self._received, message)


class EngineSideState(StrEnum):
    """State of a session at the engine."""

    UNREGISTERED = "unregistered"
    REGISTERING = "registering"
    REGISTERED = "registered"
    LEFT = "left"


class RouterSideState(StrEnum):
    """State of an engine's session at the router."""

    UNKNOWN = "unknown"
    REGISTERING = "registering"
    LIVE = "live"
    LEAVING = "leaving"
    LOST = "lost"
    DEAD = "dead"


class Event(StrEnum):
    """Events of a session; the tables of the reference show the values."""

    # at the engine
    HTTP_READY = "its HTTP server accepts connections"
    REGISTERED = "`Registered` with the number of its registration"
    REFUSED = "`Refused`"
    MUST_REREGISTER = "`Refused` with `reregister`"
    REGISTER_TIMED_OUT = f"no answer to its registration for {REGISTER_TIMEOUT_S:g} s"
    ROUTER_SILENT = f"nothing from the router for {ROUTER_TIMEOUT_S:g} s"
    SHUTS_DOWN = "the engine shuts down"
    # at the router
    REGISTERS = "first `Register`"
    REGISTER_RESENT = "`Register` with the same registration number"
    REREGISTERS = "`Register` with a higher registration number"
    RESTARTED = "`Register` of a new process; the former one has ended, or was on another machine"
    REPLACED = "`Register` of a new process on the machine of the former one, which may still run"
    GROUP_COMPLETE = "all ranks of its group have registered, or it has no group"
    OTHER_RANK_LOST = "another rank of its group is lost"
    OTHER_RANK_LEFT = "`Deregister` of another rank of its group, which has no requests left"
    SILENT = "nothing from the engine for `engine_timeout_s`"
    FAILED = "it does not answer, or reports that it is unhealthy"
    DRAIN_TIMED_OUT = "it does not drain within `engine_timeout_s` after its group has left"
    DEREGISTERED = "`Deregister`, `settled`"
    DEREGISTERED_UNSETTLED = "`Deregister`, not `settled`"
    CONFIRMED_DEAD = "proof that its process has ended"
    # at both
    MESSAGE = "a message of the session"


class Action(StrEnum):
    """Actions of an end; the tables of the reference show the values."""

    # at the engine
    REGISTER = "begins a registration, sends `Register` every 0.25 s"
    BEGIN_SESSION = "begins the session"
    END_SESSION = (
        "ends the session: drops requests that do not decode yet, quarantines in-doubt slots"
    )
    LOG_REFUSAL = "logs the reason, goes on registering"
    DEREGISTER = "sends `Deregister`"
    # at the router
    CHECK_GROUP = "checks whether its group is complete, else answers `Refused` with missing ranks"
    OPEN_SESSION = "opens a session, sends `Registered`"
    RESEND_REGISTERED = "resends `Registered`"
    ADD_ENGINE = "adds it to the cluster"
    REMOVE_ENGINE = "fails its attempts, sends `PeerDown` to the peers that know it"
    REPORT_LOST = "reports it as lost, and the ranks that leave with it"
    CONFIRM_DEAD = "releases the slots that its process could have written to"
    REQUEST_REREGISTER = "answers `Refused` with `reregister`"
    # at both
    DELIVER = "delivers it once, in order"


State = TypeVar("State", bound=StrEnum)


class Transition(msgspec.Struct, Generic[State], frozen=True):
    """In ``state``, on ``event``: go to ``next_state`` and do ``actions``, in order."""

    state: State
    event: Event
    next_state: State
    actions: tuple[Action, ...] = ()


def heartbeat_s(engines: int, timeout_s: float) -> float:
    """Return the interval of heartbeats in a cluster of so many engines, in seconds.

    ``timeout_s`` is the time after which the router declares a silent engine lost.
    """
    longest_s = min(timeout_s, ROUTER_TIMEOUT_S) / HEARTBEATS_PER_TIMEOUT
    return max(HEARTBEAT_S, min(engines / MOST_HEARTBEATS_PER_S, longest_s))


def _engine_transitions() -> Sequence[Transition[EngineSideState]]:
    unregistered, registering, registered, left = EngineSideState
    return (
        Transition(unregistered, Event.HTTP_READY, registering, (Action.REGISTER,)),
        Transition(registering, Event.REGISTERED, registered, (Action.BEGIN_SESSION,)),
        Transition(registering, Event.REFUSED, registering, (Action.LOG_REFUSAL,)),
        Transition(registering, Event.MUST_REREGISTER, unregistered),
        Transition(registering, Event.REGISTER_TIMED_OUT, unregistered),
        Transition(registered, Event.MESSAGE, registered, (Action.DELIVER,)),
        Transition(registered, Event.MUST_REREGISTER, unregistered, (Action.END_SESSION,)),
        Transition(registered, Event.ROUTER_SILENT, unregistered, (Action.END_SESSION,)),
        Transition(registered, Event.SHUTS_DOWN, left, (Action.DEREGISTER,)),
        Transition(unregistered, Event.SHUTS_DOWN, left),
        Transition(registering, Event.SHUTS_DOWN, left),
    )


def _router_transitions() -> Sequence[Transition[RouterSideState]]:
    unknown, registering, live, leaving, lost, dead = RouterSideState
    check_group = (Action.CHECK_GROUP,)
    return (
        Transition(unknown, Event.REGISTERS, registering, check_group),
        Transition(registering, Event.REGISTER_RESENT, registering, check_group),
        Transition(registering, Event.REREGISTERS, registering, check_group),
        Transition(registering, Event.RESTARTED, registering, (Action.CONFIRM_DEAD, *check_group)),
        Transition(registering, Event.REPLACED, registering, check_group),
        Transition(
            registering, Event.GROUP_COMPLETE, live, (Action.OPEN_SESSION, Action.ADD_ENGINE)
        ),
        Transition(registering, Event.SILENT, lost),
        Transition(registering, Event.CONFIRMED_DEAD, dead, (Action.CONFIRM_DEAD,)),
        Transition(live, Event.REGISTER_RESENT, live, (Action.RESEND_REGISTERED,)),
        Transition(live, Event.REREGISTERS, registering, (Action.REMOVE_ENGINE, *check_group)),
        Transition(
            live,
            Event.RESTARTED,
            registering,
            (Action.REMOVE_ENGINE, Action.CONFIRM_DEAD, *check_group),
        ),
        Transition(live, Event.REPLACED, registering, (Action.REMOVE_ENGINE, *check_group)),
        Transition(live, Event.MESSAGE, live, (Action.DELIVER,)),
        Transition(live, Event.SILENT, lost, (Action.REMOVE_ENGINE,)),
        Transition(live, Event.FAILED, lost, (Action.REMOVE_ENGINE,)),
        Transition(live, Event.OTHER_RANK_LOST, lost, (Action.REMOVE_ENGINE,)),
        Transition(live, Event.OTHER_RANK_LEFT, leaving, (Action.REMOVE_ENGINE,)),
        Transition(live, Event.DEREGISTERED_UNSETTLED, lost, (Action.REMOVE_ENGINE,)),
        Transition(live, Event.DEREGISTERED, dead, (Action.REMOVE_ENGINE, Action.CONFIRM_DEAD)),
        Transition(live, Event.CONFIRMED_DEAD, dead, (Action.REMOVE_ENGINE, Action.CONFIRM_DEAD)),
        Transition(leaving, Event.REGISTER_RESENT, leaving, (Action.RESEND_REGISTERED,)),
        Transition(leaving, Event.REREGISTERS, registering, (Action.REPORT_LOST, *check_group)),
        Transition(
            leaving,
            Event.RESTARTED,
            registering,
            (Action.REPORT_LOST, Action.CONFIRM_DEAD, *check_group),
        ),
        Transition(leaving, Event.REPLACED, registering, (Action.REPORT_LOST, *check_group)),
        Transition(leaving, Event.MESSAGE, leaving, (Action.DELIVER,)),
        Transition(leaving, Event.SILENT, lost, (Action.REPORT_LOST,)),
        Transition(leaving, Event.FAILED, lost, (Action.REPORT_LOST,)),
        Transition(leaving, Event.DRAIN_TIMED_OUT, lost, (Action.REPORT_LOST,)),
        Transition(leaving, Event.OTHER_RANK_LOST, lost, (Action.REPORT_LOST,)),
        Transition(leaving, Event.DEREGISTERED_UNSETTLED, lost),
        Transition(leaving, Event.DEREGISTERED, dead, (Action.CONFIRM_DEAD,)),
        Transition(leaving, Event.CONFIRMED_DEAD, dead, (Action.REPORT_LOST, Action.CONFIRM_DEAD)),
        Transition(lost, Event.REGISTER_RESENT, lost, (Action.REQUEST_REREGISTER,)),
        Transition(lost, Event.REREGISTERS, registering, check_group),
        Transition(lost, Event.RESTARTED, registering, (Action.CONFIRM_DEAD, *check_group)),
        Transition(lost, Event.REPLACED, registering, check_group),
        Transition(lost, Event.MESSAGE, lost, (Action.REQUEST_REREGISTER,)),
        Transition(lost, Event.DEREGISTERED, dead, (Action.CONFIRM_DEAD,)),
        Transition(lost, Event.CONFIRMED_DEAD, dead, (Action.CONFIRM_DEAD,)),
        Transition(dead, Event.REREGISTERS, registering, check_group),
        Transition(dead, Event.RESTARTED, registering, check_group),
        Transition(dead, Event.REPLACED, registering, check_group),
    )


ENGINE_TABLE = _engine_transitions()
ROUTER_TABLE = _router_transitions()


class StateMachine(Generic[State]):
    """The state machine of one end of a session; an event without a transition changes nothing.

    ``changed`` is called when the state has changed, before the actions of the transition.
    """

    def __init__(
        self,
        table: Sequence[Transition[State]],
        start: State,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = start
        self._changed = changed
        self._rows = {(row.state, row.event): row for row in table}

    def on(self, event: Event) -> tuple[Action, ...]:
        """Go to the next state; return the actions to take now."""
        row = self._rows.get((self.state, event))
        if row is None:
            return ()
        before, self.state = self.state, row.next_state
        if self.state is not before:
            self._changed()
        return row.actions
