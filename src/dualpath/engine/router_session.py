"""An engine's end of its session with the router: what to say, what to take up, when it is over.

Pure: time comes in, envelopes go out.  ``engine.link`` gives it a socket and a thread.  What
happens when stands in ``core.sessions.ENGINE_TABLE``, which this executes.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from dualpath.core.control import Refused, Welcome
from dualpath.core.envelopes import Envelope, outside
from dualpath.core.message import Message
from dualpath.core.sessions import (
    ENGINE_TABLE,
    GREETING_S,
    HEARTBEAT_S,
    HELLO_GAP_S,
    ROUTER_TIMEOUT_S,
    Action,
    Conversation,
    EngineEnd,
    Event,
    Machine,
)

log = logging.getLogger(__name__)

#: Least time between two reports that follow changes.
REPORT_GAP_S = 0.01
_NEVER = float("-inf")

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class RouterSession(Generic[M, R]):
    """Not thread-safe; one owner calls it, with times in seconds of one clock.

    ``hello`` builds a registration with the number of its greeting, or is None-valued as long as
    the engine cannot serve.  ``report`` gives the current load, ``handle`` carries out a command,
    ``end`` drops everything a session has left, for the reason it is given.
    """

    def __init__(
        self,
        hello: Callable[[int], M | None],
        report: Callable[[], M],
        handle: Callable[[R], None],
        end: Callable[[str], None],
    ) -> None:
        self._hello = hello
        self._report = report
        self._handle = handle
        self._end = end
        self._machine = Machine(ENGINE_TABLE, EngineEnd.AWAY)
        self._talk: Conversation[M, R] = Conversation("")
        self._greeting = 0
        self._greeting_s = _NEVER
        self._asked_s = self._reported_s = self._heard_s = _NEVER
        self._complaint = ""
        self._outbox: list[Envelope[M]] = []
        #: Set it, from any thread, to have the load reported soon.
        self.load_changed = False

    @property
    def state(self) -> EngineEnd:
        """Where the engine stands with the router."""
        return self._machine.state

    @property
    def joined(self) -> bool:
        """Whether a session is open."""
        return self._machine.state is EngineEnd.JOINED

    @property
    def session(self) -> str:
        """The name of the session that is open, empty without one."""
        return self._talk.session if self.joined else ""

    def say(self, message: M, now_s: float) -> Sequence[Envelope[M]]:
        """Return what to send for a message; nothing outside a session, where nobody expects it."""
        return [self._talk.say(message, now_s)] if self.joined else []

    def due(self, now_s: float) -> Sequence[Envelope[M]]:
        """Return what it is time for: a greeting, or a report."""
        if self.joined and now_s - self._heard_s > ROUTER_TIMEOUT_S:
            self._on(
                Event.ROUTER_SILENT, now_s, f"the router was silent for {ROUTER_TIMEOUT_S:g} s"
            )
        if self.state is EngineEnd.GREETING and now_s - self._greeting_s > GREETING_S:
            self._on(Event.UNANSWERED, now_s)
        if self.state in (EngineEnd.AWAY, EngineEnd.GREETING):
            self._greet(now_s)
        gap_s = REPORT_GAP_S if self.load_changed else HEARTBEAT_S
        if now_s - self._reported_s >= gap_s:
            self._outbox += self.load(now_s)
        return self._sent()

    def load(self, now_s: float) -> Sequence[Envelope[M]]:
        """Return a report; nothing outside a session."""
        if not self.joined:
            return []
        self.load_changed = False
        self._reported_s = now_s
        return [self._talk.mention(self._report())]

    def hear(self, envelope: Envelope[R], now_s: float) -> Sequence[Envelope[M]]:
        """Take up what came from the router; return what to send at once."""
        message, current = envelope.message, envelope.session == self._talk.session
        if isinstance(message, Refused):
            self._refused(message, current=current, now_s=now_s)
        elif isinstance(message, Welcome):
            if message.greeting == self._greeting:  # Others answer greetings that are over.
                self._on(Event.WELCOMED, now_s, envelope=envelope)
        elif current:
            self._on(Event.SPOKEN, now_s, envelope=envelope)
        return self._sent()

    def leave(self, goodbye: M, now_s: float) -> Sequence[Envelope[M]]:
        """Return the goodbye, if there is somebody to hear it; nothing is heard any more."""
        if Action.SAY_GOODBYE in self._machine.on(Event.LEAVES):
            return [self._talk.say(goodbye, now_s)]
        return []

    def _refused(self, message: Refused, *, current: bool, now_s: float) -> None:
        if not message.again:
            self._on(Event.REFUSED, now_s, message.reason)
        elif current:
            self._on(Event.SENT_AWAY, now_s, message.reason)
            self._asked_s = _NEVER  # A router is there and waits: greet it at once.

    def _greet(self, now_s: float) -> None:
        if now_s - self._asked_s < HELLO_GAP_S:
            return
        self._asked_s = now_s
        number = self._greeting + (self.state is EngineEnd.AWAY)
        if (hello := self._hello(number)) is None:
            return
        if Action.GREET in self._machine.on(Event.CAN_SERVE):
            self._greeting, self._greeting_s = number, now_s
            self._talk = Conversation("")
        self._outbox.append(outside(hello))

    def _on(
        self, event: Event, now_s: float, reason: str = "", envelope: Envelope[R] | None = None
    ) -> None:
        for action in self._machine.on(event):
            if action is Action.BEGIN and envelope is not None:
                self._begin(envelope, now_s)
            elif action is Action.END:
                self._talk = Conversation("")
                log.warning("the session with the router is over: %s", reason)
                self._end(reason)
            elif action is Action.COMPLAIN and reason != self._complaint:
                self._complaint = reason
                log.error("the router refuses this engine: %s", reason)
            elif action is Action.TAKE and envelope is not None:
                self._take(envelope, now_s)

    def _begin(self, envelope: Envelope[R], now_s: float) -> None:
        self._talk = Conversation(envelope.session)
        self._heard_s, self._reported_s = now_s, _NEVER
        self._handle(envelope.message)

    def _take(self, envelope: Envelope[R], now_s: float) -> None:
        self._heard_s = now_s
        message, again = self._talk.hear(envelope, now_s)
        self._outbox += again
        if message is not None:
            self._handle(message)

    def _sent(self) -> list[Envelope[M]]:
        out, self._outbox = self._outbox, []
        return out
