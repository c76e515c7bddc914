"""Requests and attempts at a front end behind a link; the scheduler's half is told by messages."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from dualpath.core.errors import EngineLostError
from dualpath.core.transfers import PrefillTransfer
from dualpath.router.engines import EngineInfo
from dualpath.router.links import messages as m
from dualpath.router.links.engines_view import EnginesView
from dualpath.router.scheduling import (
    Answered,
    AttemptEvent,
    AttemptListener,
    AttemptOrder,
    Placed,
    Prefilled,
    RequestOrder,
)

T = TypeVar("T")


class Link(Protocol):
    """The front end's session with the scheduler (``remote.RemoteScheduling``)."""

    engines: EnginesView

    @property
    def session(self) -> str:
        """The session's name; empty without one."""
        ...

    def open(self, attempt: "RemoteAttempt") -> None:
        """Route what the scheduler says of an attempt; raises ``BadRequestError`` for a twin."""
        ...

    def close(self, attempt: "RemoteAttempt") -> bool:
        """Forget an attempt; False if it was forgotten before."""
        ...

    def say(self, message: m.FrontEndMessage) -> None:
        """Say it in the session; without one nobody expects it."""
        ...

    async def call(self, asked: Callable[[int], m.FrontEndMessage], result: type[T]) -> T:
        """Return the answer to a call; raises what it says, or that the scheduler is lost."""
        ...


class RemoteRequest:
    """The ``ScheduledRequest`` of a front end; said again in each session that it lives to see."""

    def __init__(self, link: Link, order: RequestOrder) -> None:
        self._link = link
        self._order = order
        self._begun_in = ""
        self._announce()

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> "RemoteAttempt":
        """Begin an attempt.  Raises ``BadRequestError`` if another one has its name."""
        self._announce()
        return RemoteAttempt(self._link, self._order, order, listener)

    def end(self, answered: Answered | None = None) -> None:
        """It is over; idempotent."""
        if answered is not None:
            self._announce()  # A scheduler that came meanwhile shall know the agent's session too.
        if self._begun_in and self._begun_in == self._link.session:
            self._link.say(m.End(self._order.request_id, answered))
        self._begun_in = ""

    def _announce(self) -> None:
        if (session := self._link.session) != self._begun_in:
            self._begun_in = session
            self._link.say(m.Begin(self._order))


class RemoteAttempt:
    """The ``ScheduledAttempt`` of a front end."""

    def __init__(
        self,
        link: Link,
        request: RequestOrder,
        order: AttemptOrder,
        listener: AttemptListener,
    ) -> None:
        self.order = order
        self.listener = listener
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Its tokens come from the DE: the scheduler's end is not the attempt's.
        self.decoding = False
        self.decode_engine: EngineInfo | None = None
        self._link = link
        self._session = link.session
        link.open(self)
        made_for = link.engines.namespace, link.engines.adapters.digests()
        said = msgspec.structs.replace(order, keys=()) if order.keys == request.keys else order
        link.say(m.Try(request.request_id, said, *made_for))

    def heard(self, event: AttemptEvent) -> None:
        """The scheduler says what has become of the attempt."""
        if isinstance(event, Placed):
            self.decode_engine = event.decode
        self.listener.heard(event)

    def check(self) -> None:
        """Raise ``EngineLostError`` if the attempt is broken off."""
        if self.broken.done():
            self.broken.result()

    def break_off(self, error: EngineLostError) -> None:
        """End the attempt; the first error counts."""
        if not self.broken.done():
            self.broken.set_exception(error)
            self.broken.exception()  # Marks it as seen: the attempt may have ended already.

    async def prepare(self) -> PrefillTransfer:
        """Return what the PE has to be told."""
        return await self._ask(m.Step.PREPARE, PrefillTransfer)

    async def prefilled(self) -> Prefilled:
        """Wait until the KV has arrived."""
        return await self._ask(m.Step.PREFILLED, Prefilled)

    async def given_up(self) -> None:
        """Raise ``TransportError`` if the PE has said why."""
        await self._ask(m.Step.GIVEN_UP, type(None))

    def tokens_came(self) -> None:
        """The DE generates."""
        if not self.decoding:
            self.decoding = True
            self._say(m.TokensCame(self.order.attempt_id))

    async def decoded(self) -> None:
        """Wait for what the DE has said before; after a session nobody knows."""
        if self._session == self._link.session:
            await self._ask(m.Step.DECODED, type(None))

    def over(self, reason: str) -> None:
        """Give everything back; idempotent."""
        if self._link.close(self):
            self._say(m.Over(self.order.attempt_id, reason))

    def _say(self, message: m.FrontEndMessage) -> None:
        """Say it in the attempt's own session: no other one knows the attempt."""
        if self._session == self._link.session:
            self._link.say(message)

    async def _ask(self, step: m.Step, result: type[T]) -> T:
        self.check()
        name = self.order.attempt_id
        return await self._link.call(lambda call_id: m.Ask(call_id, name, step), result)
