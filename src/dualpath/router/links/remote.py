"""``Scheduling`` at a front end that is a process of its own.

Its session with the scheduler is that of engines (``engine.router_session``).  When it ends, calls
that wait and attempts that do not decode yet end with ``SchedulerLostError``: their requests wait
for engines, which are there again with the next session, and are placed anew.  An attempt that
decodes goes on: its tokens do not come from the scheduler.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from dualpath.core.control import Deregister, Envelope, decode_with
from dualpath.core.errors import (
    BadRequestError,
    EngineLostError,
    IncompatibleError,
    SchedulerLostError,
)
from dualpath.core.session_hints import SessionHints
from dualpath.core.sessions import REGISTER_INTERVAL_S
from dualpath.engine.control.link import RouterSession
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.engines import EngineInfo, Presence
from dualpath.router.links import messages as m
from dualpath.router.links.engines_view import EnginesView
from dualpath.router.links.frames import Frames
from dualpath.router.links.remote_requests import RemoteAttempt, RemoteRequest
from dualpath.router.links.strays import StrayAttempts
from dualpath.router.scheduling import (
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


class RemoteScheduling:
    """One front end's link to the scheduler; ``name`` and ``epoch`` are this process's.

    ``clock`` gives monotonic seconds, ``address`` is where the scheduler is, for people.
    ``adapters`` are those that clients may name.
    """

    def __init__(
        self,
        connection: LinkConnection,
        name: str,
        epoch: str,
        clock: Callable[[], float],
        address: str,
        adapters: ServedAdapters | None = None,
    ) -> None:
        self._name, self._epoch, self._address = name, epoch, address
        self.engines = EnginesView(self._away("is not there"), adapters or ServedAdapters({}))
        self.keeps_answers = False
        self._connection = connection
        self._frames: Frames[m.FrontEndMessage] = Frames(connection.send)
        self._clock = clock
        self._presence = Presence(self.engines)
        self._session: RouterSession[m.FrontEndMessage, m.SchedulerMessage] = RouterSession(
            self._hello, m.Beat, self._take, self._ended
        )
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._attempts: dict[str, RemoteAttempt] = {}
        self._strays = StrayAttempts(clock)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Greet, and go on doing so until there is a session."""
        self._tasks = [asyncio.create_task(loop()) for loop in (self._receive, self._tick)]

    async def stop(self) -> None:
        """Say goodbye and close; idempotent."""
        if not self._tasks:
            return
        self._post(self._session.leave(Deregister("the front end ends"), self._clock()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._frames.flush()
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
            raise SchedulerLostError(self._away(f"says nothing for {_ANSWER_S:g} s")) from error

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
        self._strays.forget(attempt)
        return True

    def say(self, message: m.FrontEndMessage) -> None:
        """Say it in the session; without one nobody expects it."""
        self._post(self._session.send(message, self._clock()))

    async def call(self, asked: Callable[[int], m.FrontEndMessage], result: type[T]) -> T:
        """Return the answer to a call; raises what it says, or that the scheduler is lost."""
        if not self._session.joined:
            raise SchedulerLostError(self._away("is not there"))
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.say(asked(call_id))
            return msgspec.msgpack.decode(await answer, type=result)
        finally:
            self._calls.pop(call_id, None)

    def _hello(self, registration: int) -> m.FrontEndHello:
        return m.FrontEndHello(m.LINK_VERSION, self._name, self._epoch, registration)

    def _take(self, message: m.SchedulerMessage) -> None:
        match message:
            case m.EnginesNow():
                self._know(message)
            case m.Happened() if message.attempt_id in self._attempts:
                for event in message.events:
                    self._attempts[message.attempt_id].heard(event)
            case m.Broken() if message.attempt_id in self._attempts:
                self._attempts[message.attempt_id].break_off(EngineLostError(message.reason))
            case m.Answer() | m.Failure():
                self._answered(message)

    def _know(self, now: m.EnginesNow) -> None:
        self.engines.tell(now)
        self.keeps_answers = now.keeps_answers
        self._strays.look(now.engines)
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
                future.set_exception(SchedulerLostError(why))
        for attempt in self._attempts.values():
            if not attempt.decoding:
                attempt.break_off(SchedulerLostError(why))
        self._strays.begin(a for a in self._attempts.values() if a.decoding)

    def _away(self, how: str) -> str:
        return f"the scheduler at {self._address} {how}; see that it runs there, and its log"

    def _post(self, envelopes: Sequence[Envelope[m.FrontEndMessage]]) -> None:
        self._frames.add(envelopes)

    async def _tick(self) -> None:
        while True:
            self._post(self._session.due(self._clock()))
            self._strays.expire()
            await asyncio.sleep(REGISTER_INTERVAL_S)

    async def _receive(self) -> None:
        while True:
            frame = await self._connection.receive()
            try:
                for envelope in decode_with(_DECODER, frame):
                    self._post(self._session.receive(envelope, self._clock()))
            except IncompatibleError as error:
                logger.error("%s", error)
            except Exception:
                # A link that ended here would leave its requests waiting, and say nothing.
                logger.exception("a message of the scheduler failed")
