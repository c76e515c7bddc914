"""An engine's end of its session with the router, without sockets or threads.

Methods get the time and return envelopes to send; ``engine.link`` adds a socket and a thread.  It
executes the state machine ``core.sessions.ENGINE_TABLE``.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from dualpath.core.control import Refused, Registered
from dualpath.core.envelopes import Envelope, unnumbered
from dualpath.core.message import Message
from dualpath.core.sessions import (
    ENGINE_TABLE,
    HEARTBEAT_S,
    REGISTER_INTERVAL_S,
    REGISTER_TIMEOUT_S,
    ROUTER_TIMEOUT_S,
    Action,
    Channel,
    EngineSideState,
    Event,
    StateMachine,
)

log = logging.getLogger(__name__)

#: Minimum interval between reports after changes of the load.
REPORT_GAP_S = 0.01
_NEVER = float("-inf")

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class RouterSession(Generic[M, R]):
    """Not thread-safe; its owner passes times in seconds of one clock.

    ``register`` returns a ``Register`` message with the given registration number, None while the
    engine cannot serve.  ``report`` returns the current load, ``handle`` executes a command,
    ``end`` drops the state of a session that is over, for the given reason.
    """

    def __init__(
        self,
        register: Callable[[int], M | None],
        report: Callable[[], M],
        handle: Callable[[R], None],
        end: Callable[[str], None],
    ) -> None:
        self._register_message = register
        self._report = report
        self._handle = handle
        self._end = end
        self._machine = StateMachine(ENGINE_TABLE, EngineSideState.UNREGISTERED)
        self._channel: Channel[M, R] = Channel("")
        self._registration = 0
        self._registration_s = _NEVER
        self._register_sent_s = self._reported_s = self._received_s = _NEVER
        self._logged_refusal = ""
        self._outbox: list[Envelope[M]] = []
        #: Set by any thread to have the load reported soon.
        self.load_changed = False

    @property
    def state(self) -> EngineSideState:
        """The state of the session."""
        return self._machine.state

    @property
    def joined(self) -> bool:
        """Whether a session is open."""
        return self._machine.state is EngineSideState.REGISTERED

    @property
    def session(self) -> str:
        """The name of the open session, empty without one."""
        return self._channel.session if self.joined else ""

    def send(self, message: M, now_s: float) -> Sequence[Envelope[M]]:
        """Return the envelope of a message; without a session the message is dropped."""
        return [self._channel.send(message, now_s)] if self.joined else []

    def due(self, now_s: float) -> Sequence[Envelope[M]]:
        """Return the envelopes that are due: a ``Register`` or a report."""
        if self.joined and now_s - self._received_s > ROUTER_TIMEOUT_S:
            self._on(
                Event.ROUTER_SILENT, now_s, f"the router was silent for {ROUTER_TIMEOUT_S:g} s"
            )
        registering_s = now_s - self._registration_s
        if self.state is EngineSideState.REGISTERING and registering_s > REGISTER_TIMEOUT_S:
            self._on(Event.REGISTER_TIMED_OUT, now_s)
        if self.state in (EngineSideState.UNREGISTERED, EngineSideState.REGISTERING):
            self._register(now_s)
        gap_s = REPORT_GAP_S if self.load_changed else HEARTBEAT_S
        if now_s - self._reported_s >= gap_s:
            self._outbox += self.load(now_s)
        return self._take_outbox()

    def load(self, now_s: float) -> Sequence[Envelope[M]]:
        """Return a report; nothing without a session."""
        if not self.joined:
            return []
        self.load_changed = False
        self._reported_s = now_s
        return [self._channel.send_lossy(self._report())]

    def receive(self, envelope: Envelope[R], now_s: float) -> Sequence[Envelope[M]]:
        """Process an envelope of the router; return envelopes to send at once."""
        message, current = envelope.message, envelope.session == self._channel.session
        if isinstance(message, Refused):
            self._refused(message, current=current, now_s=now_s)
        elif isinstance(message, Registered):
            if message.registration == self._registration:  # others answer earlier registrations
                self._on(Event.REGISTERED, now_s, envelope=envelope)
        elif current:
            self._on(Event.MESSAGE, now_s, envelope=envelope)
        return self._take_outbox()

    def leave(self, deregister: M, now_s: float) -> Sequence[Envelope[M]]:
        """End the session; return the envelope of ``deregister`` if a session was open."""
        if Action.DEREGISTER in self._machine.on(Event.SHUTS_DOWN):
            return [self._channel.send(deregister, now_s)]
        return []

    def _refused(self, message: Refused, *, current: bool, now_s: float) -> None:
        if not message.reregister:
            self._on(Event.REFUSED, now_s, message.reason)
        elif current:
            self._on(Event.MUST_REREGISTER, now_s, message.reason)
            self._register_sent_s = _NEVER  # the router is ready: register at once

    def _register(self, now_s: float) -> None:
        if now_s - self._register_sent_s < REGISTER_INTERVAL_S:
            return
        self._register_sent_s = now_s
        number = self._registration + (self.state is EngineSideState.UNREGISTERED)
        if (message := self._register_message(number)) is None:
            return
        if Action.REGISTER in self._machine.on(Event.HTTP_READY):
            self._registration, self._registration_s = number, now_s
            self._channel = Channel("")
        self._outbox.append(unnumbered(message))

    def _on(
        self, event: Event, now_s: float, reason: str = "", envelope: Envelope[R] | None = None
    ) -> None:
        for action in self._machine.on(event):
            if action is Action.BEGIN_SESSION and envelope is not None:
                self._begin(envelope, now_s)
            elif action is Action.END_SESSION:
                self._channel = Channel("")
                log.warning("the session with the router is over: %s", reason)
                self._end(reason)
            elif action is Action.LOG_REFUSAL and reason != self._logged_refusal:
                self._logged_refusal = reason
                log.error("the router refuses this engine: %s", reason)
            elif action is Action.DELIVER and envelope is not None:
                self._deliver(envelope, now_s)

    def _begin(self, envelope: Envelope[R], now_s: float) -> None:
        self._channel = Channel(envelope.session)
        self._received_s, self._reported_s = now_s, _NEVER
        self._handle(envelope.message)

    def _deliver(self, envelope: Envelope[R], now_s: float) -> None:
        self._received_s = now_s
        message, resent = self._channel.receive(envelope, now_s)
        self._outbox += resent
        if message is not None:
            self._handle(message)

    def _take_outbox(self) -> list[Envelope[M]]:
        out, self._outbox = self._outbox, []
        return out
