"""Sessions between router and engines: what both ends agree on, without sockets or clocks.

A *session* is one conversation of one engine process with one router process.  It begins with
nothing under way: no request counts at the engine, no slot is held for one.  It survives a reset of
its connection: messages are numbered, kept until the other end has acknowledged them, and said
again.  It ends when either end dies, falls silent or says so; everything of it is then over at
both ends, and what transfers may still write to stays in quarantine (``router.control.releases``).
A request that decodes has nothing in the session any more, no slot and no transfer: it is a matter
between the engine and whoever listens to its tokens, and ends with them.

So there are two mechanisms and no third one: within a session nothing is lost, doubled or out of
order; between sessions nothing is carried over but the names of what is in doubt (``Hello``).
Reconciling every request at every greeting would need an answer for each state a request may be in
at either end; ending the session needs none, and costs attempts that are made again anyway.

Ranks of a data-parallel group compute in lock step: one that ends takes the others with it.  So
their sessions begin together, when all ranks of one start of the group have greeted, and end
together; an engine in no group is complete by itself.  Where nothing is left on a group, though,
the first goodbye ends no more than the group's part in the cluster: the others may still talk, so
that each can say itself that it is through, in whatever order they go.

The life of a session is two tables, one for each end.  ``engine.router_session`` and
``router.control.control_server`` execute them, ``docs/generate_control_protocol.py`` prints them.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from dualpath.core.envelopes import Envelope
from dualpath.core.message import Message

#: Heartbeats of both ends; each tells the other how far its messages have come.
HEARTBEAT_S = 0.5
#: A message is said again to who lives and has not acknowledged it for so long.
REPEAT_AFTER_S = 0.5
#: At most that many at a time: the acknowledgement of the first ones brings the next.
REPEATED_AT_ONCE = 64
#: A router that lives speaks every ``HEARTBEAT_S``; one that is silent for so long is lost.
ROUTER_TIMEOUT_S = 10.0
#: Between two hellos; a greeting without an answer is given up after ``GREETING_S``.
HELLO_GAP_S = 0.25
GREETING_S = 5.0

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class Conversation(Generic[M, R]):
    """One end of a session: says messages of type ``M``, hears those of type ``R``.

    Go-back-N without timers: who hears from the other end that messages are missing repeats them.
    While the other end is silent nothing is repeated, since nobody would hear it.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        self._said = 0
        self._heard = 0
        self._told = 0
        self._kept: deque[tuple[int, M, float]] = deque()

    @property
    def unacknowledged(self) -> int:
        """Messages that the other end has not acknowledged."""
        return len(self._kept)

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether the other end does not know yet how far its messages have come."""
        return self._told < self._heard

    def say(self, message: M, now_s: float) -> Envelope[M]:
        """Return a message's next number and form; it is kept until it is acknowledged."""
        self._said += 1
        self._kept.append((self._said, message, now_s))
        return self._envelope(self._said, message)

    def mention(self, message: M) -> Envelope[M]:
        """Return a message that may be lost: a newer one of its kind makes it worthless."""
        return self._envelope(0, message)

    def hear(self, envelope: Envelope[R], now_s: float) -> tuple[R | None, list[Envelope[M]]]:
        """Return what is to be taken up, and what the other end misses and is to be sent again.

        A message that came before is dropped; so is one that came before its predecessors, as
        these are said again and it with them.
        """
        if envelope.received <= self._said:
            while self._kept and self._kept[0][0] <= envelope.received:
                self._kept.popleft()
        taken: R | None = None
        if envelope.number == 0:
            taken = envelope.message
        elif envelope.number == self._heard + 1:
            self._heard += 1
            taken = envelope.message
        return taken, self._missing(now_s)

    def _missing(self, now_s: float) -> list[Envelope[M]]:
        if not self._kept or now_s - self._kept[0][2] < REPEAT_AFTER_S:
            return []
        again = [self._kept.popleft() for _ in range(min(len(self._kept), REPEATED_AT_ONCE))]
        self._kept.extendleft((number, message, now_s) for number, message, _ in reversed(again))
        return [self._envelope(number, message) for number, message, _ in again]

    def _envelope(self, number: int, message: M) -> Envelope[M]:
        self._told = self._heard
        return Envelope(self.session, number, self._heard, message)


class EngineEnd(StrEnum):
    """Where an engine stands with the router."""

    AWAY = "away"
    GREETING = "greeting"
    JOINED = "joined"
    GONE = "gone"


class RouterEnd(StrEnum):
    """Where the router stands with an engine."""

    UNKNOWN = "unknown"
    GREETED = "greeted"
    LIVE = "live"
    LEAVING = "leaving"
    LOST = "lost"
    DEAD = "dead"


class Event(StrEnum):
    """What happens to a session; the values stand in the tables of the reference."""

    # at the engine
    CAN_SERVE = "its HTTP server accepts connections"
    WELCOMED = "`Welcome` to its greeting"
    REFUSED = "`Refused`"
    SENT_AWAY = "`Refused` with `again`"
    UNANSWERED = f"no answer to its greeting for {GREETING_S:g} s"
    ROUTER_SILENT = f"nothing from the router for {ROUTER_TIMEOUT_S:g} s"
    LEAVES = "it is to leave"
    # at the router
    GREETS = "`Hello`, the first one"
    GREETS_AGAIN = "`Hello` with the same greeting"
    GREETS_ANEW = "`Hello` with a later greeting"
    RESTARTED = "`Hello` of a new process; the former one is gone, or was on another machine"
    SUCCEEDED = "`Hello` of a new process on the machine of the former one, which may live"
    COMPLETE = "all ranks of its group have greeted, or it is in none"
    SIBLING_LOST = "another rank of its group is lost"
    SIBLING_LEFT = "another rank of its group, on which nothing is left, says `Goodbye`"
    SILENT = "nothing from the engine for `engine_timeout_s`"
    FAILED = "it does not answer, or says that it is unhealthy"
    STAYS = "it does not drain within `engine_timeout_s` after its group has left"
    GOODBYE = "`Goodbye`, `settled`"
    UNSETTLED = "`Goodbye`, not `settled`"
    DIED = "proof that its process is gone"
    # at both
    SPOKEN = "a message of the session"


class Action(StrEnum):
    """What an end does; the values stand in the tables of the reference."""

    # at the engine
    GREET = "begins a greeting, says `Hello` every 0.25 s"
    BEGIN = "begins the session, connects to peers"
    END = "ends the session: drops what does not decode yet, doubtful slots go into quarantine"
    COMPLAIN = "logs the reason, goes on greeting"
    SAY_GOODBYE = "says `Goodbye`"
    # at the router
    GATHER = "sees whether its group is complete, else answers `Refused` with who is missing"
    OPEN = "opens a session, says `Welcome`"
    WELCOME = "says `Welcome` again"
    JOIN = "lets it take part, tells peers `PeerUp`"
    LOSE = "breaks its attempts, tells peers `PeerDown`"
    MISS = "reports it as lost, and the ranks that leave with it"
    BURY = "lets go what its process could have written to"
    SEND_AWAY = "answers `Refused` with `again`"
    # at both
    TAKE = "takes it up once, in order"


State = TypeVar("State", bound=StrEnum)


class Row(msgspec.Struct, Generic[State], frozen=True):
    """In ``state``, on ``event``: go to ``following`` and do ``actions``, in order."""

    state: State
    event: Event
    following: State
    actions: tuple[Action, ...] = ()


def _engine_rows() -> Sequence[Row[EngineEnd]]:
    away, greeting, joined, gone = EngineEnd
    return (
        Row(away, Event.CAN_SERVE, greeting, (Action.GREET,)),
        Row(greeting, Event.WELCOMED, joined, (Action.BEGIN,)),
        Row(greeting, Event.REFUSED, greeting, (Action.COMPLAIN,)),
        Row(greeting, Event.SENT_AWAY, away),
        Row(greeting, Event.UNANSWERED, away),
        Row(joined, Event.SPOKEN, joined, (Action.TAKE,)),
        Row(joined, Event.SENT_AWAY, away, (Action.END,)),
        Row(joined, Event.ROUTER_SILENT, away, (Action.END,)),
        Row(joined, Event.LEAVES, gone, (Action.SAY_GOODBYE,)),
        Row(away, Event.LEAVES, gone),
        Row(greeting, Event.LEAVES, gone),
    )


def _router_rows() -> Sequence[Row[RouterEnd]]:
    unknown, greeted, live, leaving, lost, dead = RouterEnd
    gather = (Action.GATHER,)
    return (
        Row(unknown, Event.GREETS, greeted, gather),
        Row(greeted, Event.GREETS_AGAIN, greeted, gather),
        Row(greeted, Event.GREETS_ANEW, greeted, gather),
        Row(greeted, Event.RESTARTED, greeted, (Action.BURY, *gather)),
        Row(greeted, Event.SUCCEEDED, greeted, gather),
        Row(greeted, Event.COMPLETE, live, (Action.OPEN, Action.JOIN)),
        Row(greeted, Event.SILENT, lost),
        Row(greeted, Event.DIED, dead, (Action.BURY,)),
        Row(live, Event.GREETS_AGAIN, live, (Action.WELCOME,)),
        Row(live, Event.GREETS_ANEW, greeted, (Action.LOSE, *gather)),
        Row(live, Event.RESTARTED, greeted, (Action.LOSE, Action.BURY, *gather)),
        Row(live, Event.SUCCEEDED, greeted, (Action.LOSE, *gather)),
        Row(live, Event.SPOKEN, live, (Action.TAKE,)),
        Row(live, Event.SILENT, lost, (Action.LOSE,)),
        Row(live, Event.FAILED, lost, (Action.LOSE,)),
        Row(live, Event.SIBLING_LOST, lost, (Action.LOSE,)),
        Row(live, Event.SIBLING_LEFT, leaving, (Action.LOSE,)),
        Row(live, Event.UNSETTLED, lost, (Action.LOSE,)),
        Row(live, Event.GOODBYE, dead, (Action.LOSE, Action.BURY)),
        Row(live, Event.DIED, dead, (Action.LOSE, Action.BURY)),
        Row(leaving, Event.GREETS_AGAIN, leaving, (Action.WELCOME,)),
        Row(leaving, Event.GREETS_ANEW, greeted, (Action.MISS, *gather)),
        Row(leaving, Event.RESTARTED, greeted, (Action.MISS, Action.BURY, *gather)),
        Row(leaving, Event.SUCCEEDED, greeted, (Action.MISS, *gather)),
        Row(leaving, Event.SPOKEN, leaving, (Action.TAKE,)),
        Row(leaving, Event.SILENT, lost, (Action.MISS,)),
        Row(leaving, Event.FAILED, lost, (Action.MISS,)),
        Row(leaving, Event.STAYS, lost, (Action.MISS,)),
        Row(leaving, Event.SIBLING_LOST, lost, (Action.MISS,)),
        Row(leaving, Event.UNSETTLED, lost),
        Row(leaving, Event.GOODBYE, dead, (Action.BURY,)),
        Row(leaving, Event.DIED, dead, (Action.MISS, Action.BURY)),
        Row(lost, Event.GREETS_AGAIN, lost, (Action.SEND_AWAY,)),
        Row(lost, Event.GREETS_ANEW, greeted, gather),
        Row(lost, Event.RESTARTED, greeted, (Action.BURY, *gather)),
        Row(lost, Event.SUCCEEDED, greeted, gather),
        Row(lost, Event.SPOKEN, lost, (Action.SEND_AWAY,)),
        Row(lost, Event.GOODBYE, dead, (Action.BURY,)),
        Row(lost, Event.DIED, dead, (Action.BURY,)),
        Row(dead, Event.GREETS_ANEW, greeted, gather),
        Row(dead, Event.RESTARTED, greeted, gather),
        Row(dead, Event.SUCCEEDED, greeted, gather),
    )


ENGINE_TABLE = _engine_rows()
ROUTER_TABLE = _router_rows()


class Machine(Generic[State]):
    """One end of a session, driven by its table; an event without a row changes nothing."""

    def __init__(self, table: Sequence[Row[State]], start: State) -> None:
        self.state = start
        self._rows = {(row.state, row.event): row for row in table}

    def on(self, event: Event) -> tuple[Action, ...]:
        """Go to the next state; return what is to be done now."""
        row = self._rows.get((self.state, event))
        if row is None:
            return ()
        self.state = row.following
        return row.actions
