"""``Scheduling`` at a front end that is a process of its own.

Its session with the scheduler is that of engines (``engine.router_session``).  When it ends, calls
that wait and attempts that do not decode yet end with ``EngineLostError``: their requests wait for
engines, which are there again with the next session, and are placed anew.  An attempt that decodes
goes on: its tokens do not come from the scheduler.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.control import Goodbye
from dualpath.core.envelopes import Envelope, decode_with, encode
from dualpath.core.errors import BadRequestError, EngineLostError, IncompatibleError
from dualpath.core.modes import Mode
from dualpath.core.session_hints import SessionHints
from dualpath.core.sessions import HELLO_GAP_S
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.router_session import RouterSession
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.engines import EngineInfo, Presence
from dualpath.router.links import messages as m
from dualpath.router.scheduling import (
    Answered,
    AttemptListener,
    AttemptOrder,
    Prefilled,
    RequestOrder,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
_DECODER: msgspec.msgpack.Decoder[m.FromScheduler] = msgspec.msgpack.Decoder(m.FromScheduler)
#: Calls that no engine is waited for are answered by then, or the session is as good as lost.
_ANSWER_S = 10.0


class LinkConnection(Protocol):
    """Frames to and from the scheduler."""

    def send(self, frame: bytes) -> None:
        """Send without waiting; it may be lost."""
        ...

    async def receive(self) -> bytes:
        """Return the next frame."""
        ...

    def close(self) -> None:
        """Receive nothing any more."""
        ...


class EnginesView:
    """The ``KnownEngines`` that the scheduler told last; none without a session.

    ``namespace`` is the first that it told, for which keys have been made since.  ``away`` says why
    there is no session.  Adapters are not served over links: their weights would have to be told.
    """

    def __init__(self, away: str) -> None:
        self.away = away
        self.adapters = ServedAdapters({})
        self.mode: Mode | None = None
        self.namespace: StoreNamespace | None = None
        self.engines: tuple[EngineInfo, ...] = ()

    def alive(self, role: Role | None = None) -> Sequence[EngineInfo]:
        """Return the live engines (of one role), by arrival."""
        return [engine for engine in self.engines if role in (None, engine.role)]

    def waits(self) -> Sequence[str]:
        """Say why the scheduler tells of no engines, if so."""
        return [self.away] if self.away else []

    def tell(self, now: m.EnginesNow) -> None:
        """Take down what the scheduler says; engines of another model are none."""
        self.mode, self.engines, self.away = now.mode, now.engines, ""
        if self.namespace is None:
            self.namespace = now.namespace
        elif now.namespace not in (None, self.namespace):
            self.engines = ()
            self.away = "the scheduler has engines of another model now; restart this front end"
            logger.error("%s", self.away)

    def lose(self, away: str) -> None:
        """There is no session any more."""
        self.engines, self.away = (), away

    def limit(self, name: str) -> int | None:
        """Return the smallest value of an integer limit over live engines, None if unstated."""
        values = [engine.limits.get(name) for engine in self.engines]
        return min((v for v in values if isinstance(v, int)), default=None)


class RemoteScheduling:
    """One front end's link to the scheduler; ``name`` and ``epoch`` are this process's.

    ``clock`` gives monotonic seconds, ``address`` is where the scheduler is, for people.
    """

    def __init__(
        self,
        connection: LinkConnection,
        name: str,
        epoch: str,
        clock: Callable[[], float],
        address: str,
    ) -> None:
        self._name, self._epoch, self._address = name, epoch, address
        self.engines = EnginesView(self._away("is not there"))
        self.keeps_answers = False
        self._connection = connection
        self._clock = clock
        self._presence = Presence(self.engines)
        self._session: RouterSession[m.FrontEndMessage, m.SchedulerMessage] = RouterSession(
            self._hello, m.Beat, self._take, self._ended
        )
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._attempts: dict[str, RemoteAttempt] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Greet, and go on doing so until there is a session."""
        self._tasks = [asyncio.create_task(loop()) for loop in (self._receive, self._tick)]

    async def stop(self) -> None:
        """Say goodbye and close; idempotent."""
        if not self._tasks:
            return
        self._post(self._session.leave(Goodbye("the front end ends"), self._clock()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._connection.close()

    async def engines_present(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for live engines; raises ``DeadlineError`` with what is missing."""
        await self._presence.wait(prefill, decode, timeout_s, self._address)

    def begin(self, order: RequestOrder) -> "RemoteRequest":
        """Take note of a request that has arrived."""
        return RemoteRequest(self, order)

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine."""
        self.say(m.Suspect(engine.engine_id, engine.epoch, why, call_failed))

    async def settled(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live."""
        names = tuple((engine.engine_id, engine.epoch) for engine in engines)
        await self.call(lambda call_id: m.Settle(call_id, names), type(None))

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Take what a client says of a session; False if nobody knows it."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self.call(
                    lambda call_id: m.Hint(call_id, tenant, session_id, hints), bool
                )
        except TimeoutError as error:
            raise EngineLostError(self._away(f"says nothing for {_ANSWER_S:g} s")) from error

    @property
    def session(self) -> str:
        """The session's name; empty without one."""
        return self._session.session

    def open(self, attempt: "RemoteAttempt") -> None:
        """Route what the scheduler says of an attempt; raises ``BadRequestError`` for a twin."""
        name = attempt.order.attempt_id
        if name in self._attempts:
            raise BadRequestError(
                f"request id {name!r} is in use by a running request; send it under another id"
            )
        self._attempts[name] = attempt

    def close(self, attempt: "RemoteAttempt") -> bool:
        """Forget an attempt; False if it was forgotten before."""
        name = attempt.order.attempt_id
        if self._attempts.get(name) is not attempt:
            return False
        del self._attempts[name]
        return True

    def say(self, message: m.FrontEndMessage) -> None:
        """Say it in the session; without one nobody expects it."""
        self._post(self._session.say(message, self._clock()))

    async def call(self, asked: Callable[[int], m.FrontEndMessage], result: type[T]) -> T:
        """Return the answer to a call; raises what it says, or that the scheduler is lost."""
        if not self._session.joined:
            raise EngineLostError(self._away("is not there"))
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.say(asked(call_id))
            return msgspec.msgpack.decode(await answer, type=result)
        finally:
            self._calls.pop(call_id, None)

    def _hello(self, greeting: int) -> m.FrontEndHello:
        return m.FrontEndHello(m.LINK_VERSION, self._name, self._epoch, greeting)

    def _take(self, message: m.SchedulerMessage) -> None:
        match message:
            case m.EnginesNow():
                self._know(message)
            case m.Happened() if message.attempt_id in self._attempts:
                self._attempts[message.attempt_id].listener.heard(message.event)
            case m.Broken() if message.attempt_id in self._attempts:
                self._attempts[message.attempt_id].break_off(message.reason)
            case m.Answer() | m.Failure():
                self._answered(message)

    def _know(self, now: m.EnginesNow) -> None:
        self.engines.tell(now)
        self.keeps_answers = now.keeps_answers
        self._presence.changed()

    def _answered(self, message: m.Answer | m.Failure) -> None:
        future = self._calls.get(message.call_id)
        if future is None or future.done():
            return
        if isinstance(message, m.Answer):
            future.set_result(message.result)
        else:
            future.set_exception(m.raised(message))

    def _ended(self, reason: str) -> None:
        """The session is over; what decodes goes on."""
        why = self._away(f"is lost: {reason}")
        self.engines.lose(why)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineLostError(why))
        for attempt in self._attempts.values():
            if not attempt.decoding:
                attempt.break_off(why)

    def _away(self, how: str) -> str:
        return f"the scheduler at {self._address} {how}; see that it runs there, and its log"

    def _post(self, envelopes: Sequence[Envelope[m.FrontEndMessage]]) -> None:
        for envelope in envelopes:
            self._connection.send(encode(envelope))

    async def _tick(self) -> None:
        while True:
            self._post(self._session.due(self._clock()))
            await asyncio.sleep(HELLO_GAP_S)

    async def _receive(self) -> None:
        while True:
            frame = await self._connection.receive()
            try:
                self._post(self._session.hear(decode_with(_DECODER, frame), self._clock()))
            except IncompatibleError as error:
                logger.error("%s", error)
            except Exception:
                # A link that ended here would leave its requests waiting, and say nothing.
                logger.exception("a message of the scheduler failed")


class RemoteRequest:
    """The ``ScheduledRequest`` of a front end; said again in each session that it lives to see."""

    def __init__(self, link: RemoteScheduling, order: RequestOrder) -> None:
        self._link = link
        self._order = order
        self._begun_in = ""
        self._announce()

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> "RemoteAttempt":
        """Begin an attempt.  Raises ``BadRequestError`` if another one has its name."""
        self._announce()
        return RemoteAttempt(self._link, self._order.request_id, order, listener)

    def end(self, answered: Answered | None = None) -> None:
        """It is over; idempotent."""
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
        link: RemoteScheduling,
        request_id: str,
        order: AttemptOrder,
        listener: AttemptListener,
    ) -> None:
        self.order = order
        self.listener = listener
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Its tokens come from the DE: the scheduler's end is not the attempt's.
        self.decoding = False
        self._link = link
        self._session = link.session
        link.open(self)
        link.say(m.Try(request_id, order, link.engines.namespace))

    def check(self) -> None:
        """Raise ``EngineLostError`` if the attempt is broken off."""
        if self.broken.done():
            self.broken.result()

    def break_off(self, reason: str) -> None:
        """End the attempt; the first reason counts."""
        if not self.broken.done():
            self.broken.set_exception(EngineLostError(reason))
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
