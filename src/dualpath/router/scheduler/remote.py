"""``Scheduling`` at a front end that is a process of its own, over a link to the scheduler.

Its session with the scheduler is like those of engines (``core.sessions``).  When it ends, pending
calls and attempts that do not decode yet end with ``SchedulerLostError``: their requests wait for
engines, which are back with the next session, and are placed again.  An attempt that decodes goes
on, because its tokens do not come from the scheduler.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec
import zmq

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.control import Deregister, Envelope, decode_with
from dualpath.core.errors import (
    BadRequestError,
    EngineLostError,
    HitLostError,
    IncompatibleError,
    SchedulerLostError,
)
from dualpath.core.modes import Mode
from dualpath.core.session_hints import SessionHints
from dualpath.core.sessions import REGISTER_INTERVAL_S, ROUTER_TIMEOUT_S
from dualpath.engine.control.link import LINGER_MS, RouterSession, connect_dealer, prepare_dealer
from dualpath.node.cluster_secret import ClusterSecret, check_control_url
from dualpath.router.engines import EngineInfo, LiveEngines, Membership
from dualpath.router.scheduler import link_messages as m
from dualpath.router.scheduler.control_socket import LoopSocket
from dualpath.router.scheduler.link_messages import Frames
from dualpath.router.scheduling import (
    Answered,
    AttemptEvent,
    AttemptListener,
    AttemptOrder,
    HandedOver,
    Placed,
    Prefilled,
    Prepared,
    RequestOrder,
)
from dualpath.router.served_adapters import ServedAdapters, changed

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EnginesView:
    """The ``KnownEngines`` that the scheduler has reported; none without a session.

    ``namespace``, without the version of the weights, and the weights of ``adapters`` are the first
    that it reported, because keys have been made for them since.  ``away`` is the reason why there
    is no session.
    """

    def __init__(self, away: str, adapters: ServedAdapters) -> None:
        self.away = away
        self.adapters = adapters
        self.mode: Mode | None = None
        self.namespace: StoreNamespace | None = None
        self._live = LiveEngines()

    def alive(self, role: Role | None = None) -> Sequence[EngineInfo]:
        """Return the live engines (of one role), by arrival."""
        return self._live.all(role)

    def live(self, engine_id: str, epoch: str) -> EngineInfo | None:
        """Return this process of an engine if it is live."""
        info = self._live.get(engine_id)
        return info if info is not None and info.epoch == epoch else None

    def waits(self) -> Sequence[str]:
        """Return why the scheduler reports no engines, if it does not."""
        return [self.away] if self.away else []

    def update(self, update: m.EnginesUpdate) -> None:
        """Take the scheduler's report; engines with another model or adapter do not count."""
        self.mode, self.away = update.mode, ""
        self._live.clear()
        for info in update.engines:
            self._live.put(info)
        # Keys do not depend on the version of the weights, which changes while engines run.
        reported = None if update.namespace is None else update.namespace.with_weights()
        self.namespace = self.namespace or reported
        if reported not in (None, self.namespace):
            self._refuse("engines of another model")
            return
        served = {adapter.name: adapter.digest for adapter in update.adapters}
        # A scheduler without engines does not know adapters either.
        if update.namespace and (other := changed(self.adapters.digests(), served)) is not None:
            self._refuse(f"no adapter {other!r}, or other weights of it,")
            return
        self.adapters.learn_if_listed(update.adapters)

    def change(self, change: m.EnginesChanged) -> None:
        """Take engines that have joined or were lost, unless none of the scheduler's count."""
        if self.away:
            return
        for engine_id, epoch in change.lost:
            if self.live(engine_id, epoch) is not None:
                self._live.remove(engine_id)
        for info in change.joined:
            self._live.put(info)

    def _refuse(self, what: str) -> None:
        self._live.clear()
        self.away = f"the scheduler has {what} now; restart this front end"
        logger.error("%s", self.away)

    def clear(self, away: str) -> None:
        """The session has ended."""
        self._live.clear()
        self.away = away

    def limit(self, name: str) -> int | None:
        """Return the smallest value of an integer limit over live engines, None if unstated."""
        return self._live.limit(name)


# ------------------------------------------------------------------------ orphaned attempts


#: A live engine has noticed by then that there is another scheduler, and registered with it.
REGISTERED_AGAIN_S = 3 * ROUTER_TIMEOUT_S
_NEVER_S = float("inf")


class OrphanedAttempts:
    """Attempts that still decode after the session in which they were placed has ended.

    Their tokens come from their engine, and no scheduler knows them any more.  Only the connection
    to the engine can show that it is lost, and it shows nothing if a whole machine is gone.  So the
    front end looks for the engine among those that the next scheduler reports, and breaks the
    attempts of engines that are gone.  ``clock`` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: Deadline for the engine to be reported; None once it was, never without a scheduler.
        self._due_s: dict[RemoteAttempt, float | None] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._due_s)

    def begin(self, attempts: "Iterable[RemoteAttempt]") -> None:
        """The session has ended: none of the engines is known to be alive."""
        self._due_s = dict.fromkeys(attempts, _NEVER_S)

    def discard(self, attempt: "RemoteAttempt") -> None:
        """It is closed; idempotent."""
        self._due_s.pop(attempt, None)

    def update(self, engines: Iterable[EngineInfo]) -> None:
        """A scheduler reports the live engines: one that it no longer reports is lost."""
        epochs = {engine.engine_id: engine.epoch for engine in engines}
        for attempt, due_s in list(self._due_s.items()):
            wanted = attempt.decode_engine
            if wanted is not None and epochs.get(wanted.engine_id) == wanted.epoch:
                self._due_s[attempt] = None
            elif due_s is None or (wanted is not None and wanted.engine_id in epochs):
                self._break_off(attempt, "is lost")
            elif due_s == _NEVER_S:
                self._due_s[attempt] = self._clock() + REGISTERED_AGAIN_S

    def expire(self) -> None:
        """Break attempts that have waited too long for their engine to register again."""
        now_s = self._clock()
        for attempt, due_s in list(self._due_s.items()):
            if due_s is not None and now_s > due_s:
                self._break_off(
                    attempt, f"has not registered again within {REGISTERED_AGAIN_S:g} s"
                )

    def _break_off(self, attempt: "RemoteAttempt", how: str) -> None:
        del self._due_s[attempt]
        engine = attempt.decode_engine
        name = engine.engine_id if engine is not None else "of an attempt"
        attempt.break_off(EngineLostError(f"engine {name} {how}; check that it runs, and its log"))


# ------------------------------------------------------------------------ requests and attempts


#: How long the begin of a request waits for that of its first attempt, and the end of an attempt
#: for that of its request, so that one message has both.
_TOGETHER_S = 0.02


class RemoteRequest:
    """The ``ScheduledRequest`` of a front end; sent again in each session during its life."""

    def __init__(self, link: "RemoteScheduling", order: RequestOrder) -> None:
        self.order = order
        self._link = link
        self._begun_in = ""
        #: The last keys that the scheduler was sent of the request in this session.
        self._sent_keys: tuple[bytes, ...] = ()
        #: The attempt that is closed and why, until the scheduler is sent it.
        self._closed: tuple[RemoteAttempt, str] | None = None
        self._timer = self._later(self._announce)

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> "RemoteAttempt":
        """Return an attempt, which begins with ``prepare``.

        Raises ``BadRequestError`` if another attempt of this front end has its name.
        """
        self._send_closed()
        return RemoteAttempt(self._link, self, order, listener)

    async def ends_aborted(self) -> bool:
        """Return whether the request ends with the tokens it has after a failed attempt."""
        return await self._link.ends_aborted()

    def end(self, answered: Answered | None = None) -> None:
        """The request has ended; idempotent."""
        self._timer.cancel()
        if answered is not None:
            self._announce()  # A newer scheduler must know the agent's session too.
        if self._begun_in and self._begun_in == self._link.session:
            attempt_id, reason = self._take_closed()
            known_keys = 0
            if answered is not None:
                known_keys, keys = self.keys_behind(answered.keys)
                answered = msgspec.structs.replace(answered, keys=keys)
            request_id = self.order.request_id
            end = m.EndRequest(request_id, answered, attempt_id, reason, known_keys)
            self._link.send(end)
        self._begun_in = ""

    def not_begun(self) -> RequestOrder | None:
        """Return the request if the scheduler is to be sent it, None if it knows it."""
        if (session := self._link.session) == self._begun_in:
            return None
        self._begun_in, self._sent_keys = session, self.order.keys
        return self.order

    def keys_behind(self, keys: tuple[bytes, ...]) -> tuple[int, tuple[bytes, ...]]:
        """Return how many of ``keys``, from the first on, the scheduler has, and those behind.

        It is sent them now.
        """
        known, self._sent_keys = self._sent_keys, keys
        common = min(len(known), len(keys))
        if known[:common] != keys[:common]:
            common = 0
        return common, keys[common:]

    def closed(self, attempt: "RemoteAttempt", reason: str) -> None:
        """An attempt is closed: let the scheduler know with the end of the request, or soon."""
        self._send_closed()
        self._closed = attempt, reason
        self._timer.cancel()
        self._timer = self._later(self._send_closed)

    def _announce(self) -> None:
        if (order := self.not_begun()) is not None:
            self._link.send(m.BeginRequest(order))

    def _send_closed(self) -> None:
        attempt_id, reason = self._take_closed()
        if attempt_id:
            self._link.send(m.EndAttempt(attempt_id, reason))

    def _take_closed(self) -> tuple[str, str]:
        """Return name and reason of the closed attempt if this session's scheduler knows it."""
        closed, self._closed = self._closed, None
        if closed is None or closed[0].session != self._link.session:
            return "", ""
        return closed[0].order.attempt_id, closed[1]

    def _later(self, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(_TOGETHER_S, call)


class RemoteAttempt:
    """The ``ScheduledAttempt`` of a front end."""

    def __init__(
        self,
        link: "RemoteScheduling",
        request: RemoteRequest,
        order: AttemptOrder,
        listener: AttemptListener,
    ) -> None:
        self.order = order
        self.listener = listener
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Its tokens come from the DE: the attempt survives the scheduler.
        self.decoding = False
        #: It ended because a block of its hit was evicted, which is no fault of its engines.
        self.hit_lost = False
        self.decode_engine: EngineInfo | None = None
        #: The session in which its scheduler knows it: no message about it is sent in another one.
        self.session = link.session
        self._link = link
        self._request = request
        self._begun = self._appends = False
        link.open(self)

    def _begin(self, call_id: int) -> m.BeginAttempt:
        engines, request = self._link.engines, self._request
        self._begun, self.session = True, self._link.session
        begins = request.not_begun()
        known_keys, keys = request.keys_behind(self.order.keys)
        return m.BeginAttempt(
            call_id,
            request.order.request_id,
            msgspec.structs.replace(self.order, keys=keys),
            engines.namespace,
            engines.adapters.digests(),
            begins,
            known_keys,
        )

    def notify(self, event: m.LinkEvent) -> None:
        """Take an event of the attempt from the scheduler."""
        if not isinstance(event, m.PlacedOn):
            self.listener.notify(event)
            return
        placed = [name for name in (event.prefill, event.decode) if name is not None]
        live = [self._link.engines.live(*name) for name in placed]
        for (engine_id, epoch), engine in zip(placed, live, strict=True):
            if engine is None:
                error = f"engine {engine_id} (epoch {epoch}) is lost; see its log"
                self.break_off(EngineLostError(error))
                return
        *prefill, decode = live
        assert decode is not None
        self.decode_engine, self._appends = decode, event.prefill is None
        self.listener.notify(Placed(prefill[0] if prefill else None, decode))

    def check(self) -> None:
        """Raise ``EngineLostError`` if the attempt is broken."""
        if self.broken.done():
            self.broken.result()

    def break_off(self, error: EngineLostError) -> None:
        """End the attempt; the first error counts."""
        if not self.broken.done():
            self.broken.set_exception(error)
            self.broken.exception()  # Marks it as seen: the attempt may have ended already.

    async def prepare(self) -> Prepared:
        """Return the transfers, once all hits are in DRAM."""
        self.check()
        return await self._noting_lost_hit(self._link.call(self._begin, Prepared))

    async def prefilled(self) -> Prefilled:
        """Wait until the KV has arrived."""
        return await self._call(m.Step.PREFILLED, Prefilled)

    async def prefill_aborted(self) -> None:
        """Raise ``TransportError`` if the PE has reported why."""
        await self._call(m.Step.PREFILL_ABORTED, type(None))

    def decoding_started(self) -> None:
        """The DE generates: the scheduler needs to know that of an append only."""
        if self.decoding:
            return
        self.decoding = True
        if self._appends and self.session == self._link.session:
            self._link.send(m.DecodingStarted(self.order.attempt_id))

    def close(self, reason: str) -> None:
        """Release everything; idempotent."""
        if self._link.close(self) and self._begun:
            self._request.closed(self, reason)

    async def offer(self, request_id: str) -> None:
        """Let a prefilled attempt wait for its second leg; it leaves this front end."""
        name, handover = self.order.attempt_id, self.order.handover
        self.check()
        try:
            await self._link.call(
                lambda call_id: m.OfferAttempt(call_id, request_id, name, handover), type(None)
            )
        except asyncio.CancelledError:
            # No second leg has this name: it is in the answer to the first one, which is not sent.
            if handover == name and self.session == self._link.session:
                self._link.send(m.WithdrawAttempt(name, "its first leg was cancelled"))
            raise
        self._link.close(self)

    async def _call(self, step: m.Step, result: type[T]) -> T:
        self.check()
        name = self.order.attempt_id
        return await self._noting_lost_hit(
            self._link.call(lambda call_id: m.AttemptCall(call_id, name, step), result)
        )

    async def _noting_lost_hit(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except HitLostError:
            self.hit_lost = True
            raise


class TakenAttempt(RemoteAttempt):
    """An attempt for its second leg: another front end has run the first one.

    ``transfer`` is what its decode engine, ``engine``, has to know; ``note`` as in ``HandedOver``.
    """

    def __init__(self, link: "RemoteScheduling", handed: HandedOver) -> None:
        transfer = handed.transfer
        order = AttemptOrder(transfer.request_id, 1, transfer.prompt_tokens, 1, ())
        super().__init__(link, TakenRequest(link, handed.request_id), order, _Unnoted())
        self.transfer = transfer
        self.engine = self.decode_engine = handed.decode
        self.note = handed.note
        self._begun = True

    def close(self, reason: str) -> None:
        """Release everything; idempotent."""
        super().close(reason)
        self._request.end()


class TakenRequest(RemoteRequest):
    """The request of a ``TakenAttempt``, which the scheduler knows in this session."""

    def __init__(self, link: "RemoteScheduling", request_id: str) -> None:
        super().__init__(link, RequestOrder(request_id, ()))
        self._timer.cancel()
        self._begun_in = link.session


class _Unnoted:
    """The ``AttemptListener`` of an attempt without a record."""

    def notify(self, event: AttemptEvent) -> None:
        """Do nothing."""


# ------------------------------------------------------------------------ the link


class ZmqLinkConnection:
    """The ``LinkConnection`` of a live front end: a ZMQ DEALER socket in its event loop.

    Raises ``ConfigError`` for an address ZMQ cannot connect to, and for one of another machine
    without a secret.
    """

    def __init__(self, scheduler: str, secret: ClusterSecret | None = None) -> None:
        check_control_url(scheduler, secret)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        prepare_dealer(self._socket, secret)
        connect_dealer(self._socket, scheduler, "scheduler")
        self._in_loop = LoopSocket(self._socket)

    def send(self, frame: bytes) -> None:
        """Pass a frame to ZMQ, which queues it until it is connected."""
        with contextlib.suppress(zmq.Again):
            self._in_loop.send((frame,))

    async def receive(self) -> bytes:
        """Return the next frame."""
        frames = await self._in_loop.receive(lambda: self._socket.recv_multipart(zmq.NOBLOCK))
        return frames[-1]

    def close(self) -> None:
        """Close; pending frames are sent for up to ``LINGER_MS``."""
        self._in_loop.close()
        self._socket.close()
        self._context.destroy(linger=LINGER_MS)


_DECODER: msgspec.msgpack.Decoder[m.FromScheduler] = msgspec.msgpack.Decoder(m.FromScheduler)
#: Limit for calls that do not wait for engines; beyond it the session counts as lost.
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
        """Stop receiving."""
        ...


class RemoteScheduling:
    """One front end's link to the scheduler; ``name`` and ``epoch`` are this process's.

    ``clock`` gives monotonic seconds, ``address`` is the scheduler's, for error messages.
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
        self.engines = EnginesView(self._away("is not connected"), adapters or ServedAdapters({}))
        self.caches_answers = False
        #: As the scheduler has reported it last in this session.
        self.load = m.UnitLoad()
        self._connection = connection
        self._frames: Frames[m.FrontEndMessage] = Frames(connection.send)
        self._clock = clock
        self.membership = Membership(self.engines)
        self._session: RouterSession[m.FrontEndMessage, m.SchedulerMessage] = RouterSession(
            self._register, m.Heartbeat, self._take, self._ended
        )
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._attempts: dict[str, RemoteAttempt] = {}
        self.orphans = OrphanedAttempts(clock)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Register, and retry until there is a session."""
        self._tasks = [asyncio.create_task(loop()) for loop in (self._receive, self._tick)]

    async def stop(self) -> None:
        """Deregister and close; calls that wait raise ``SchedulerLostError``; idempotent."""
        if not self._tasks:
            return
        self._post(self._session.leave(Deregister("the front end ends"), self._clock()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._frames.flush()
        self._connection.close()
        self._ended("the front end has left")

    async def wait_for_engines(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for live engines; raises ``DeadlineError`` with what is missing."""
        await self.membership.wait(prefill, decode, timeout_s, self._address)

    def begin(self, order: RequestOrder) -> "RemoteRequest":
        """Register a request that has arrived."""
        return RemoteRequest(self, order)

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine."""
        self.send(m.SuspectEngine(engine.engine_id, engine.epoch, why, call_failed))

    def call_waits(self, engine: EngineInfo, silent_s: float) -> None:
        """An engine has a call and has sent nothing for a while."""
        self.send(m.CallWaits(engine.engine_id, engine.epoch, silent_s))

    async def await_liveness(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live."""
        names = tuple((engine.engine_id, engine.epoch) for engine in engines)
        await self.call(lambda call_id: m.AwaitLiveness(call_id, names), type(None))

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Apply a client's hints on a session; False if the session is unknown."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self.call(
                    lambda call_id: m.HintSession(call_id, tenant, session_id, hints), bool
                )
        except TimeoutError as error:
            raise SchedulerLostError(
                self._away(f"does not answer within {_ANSWER_S:g} s")
            ) from error

    async def ends_aborted(self) -> bool:
        """Return whether requests whose attempts have failed end with the tokens that they have.

        False if the scheduler does not answer: such requests are continued.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self.call(m.EndsAborted, bool)
        except (TimeoutError, SchedulerLostError):
            return False

    async def take(
        self, handover: str, engine_id: str, *, moves: bool = True
    ) -> "TakenAttempt | HandedOver":
        """Return the attempt of this name for its second leg, at this decode engine.

        If its KV is at another decode engine, it is moved.  If it cannot be, or if not ``moves``,
        ``HandedOver`` names that engine, and the attempt stays offered: ``withdraw`` releases it if
        the leg ends without that engine.  Waits for the first
        leg, as ``Handovers.take`` does, and raises its errors.  If the wait is cancelled, the
        attempt is released as soon as it comes.
        """
        call = asyncio.create_task(
            self.call(
                lambda call_id: m.TakeAttempt(call_id, handover, engine_id, moves), HandedOver
            )
        )
        try:
            handed = await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(lambda call: self._unwanted(call, engine_id))
            raise
        if handed.decode.engine_id != engine_id:
            return handed
        return TakenAttempt(self, handed)

    def withdraw(self, handed: HandedOver, reason: str) -> None:
        """Release an offered attempt whose second leg is over, unless its engine has taken it."""
        self.send(m.WithdrawAttempt(handed.transfer.request_id, reason))

    def _unwanted(self, call: "asyncio.Task[HandedOver]", engine_id: str) -> None:
        if call.cancelled() or call.exception() is not None:
            return
        handed, reason = call.result(), "its second leg was cancelled"
        if handed.decode.engine_id == engine_id:
            TakenAttempt(self, handed).close(reason)
        else:
            self.withdraw(handed, reason)

    def break_unplaced(self, why: str) -> None:
        """Break off the attempts that have no engines yet, so that they are placed elsewhere."""
        for attempt in self._attempts.values():
            if attempt.decode_engine is None:
                attempt.break_off(SchedulerLostError(why))

    @property
    def pending(self) -> tuple[int, int]:
        """The attempts that are open, and the calls without a result."""
        return len(self._attempts), len(self._calls)

    @property
    def silent_s(self) -> float:
        """For how long the scheduler has sent nothing in this session or registration."""
        return self._session.silent_s(self._clock())

    @property
    def session(self) -> str:
        """The session's name; empty without one."""
        return self._session.session

    def open(self, attempt: "RemoteAttempt") -> None:
        """Route an attempt's events; raises ``BadRequestError`` if its name is in use."""
        name = attempt.order.attempt_id
        if name in self._attempts:
            raise BadRequestError(
                f"request id {name!r} is in use by a running request; send it under another id"
            )
        self._attempts[name] = attempt

    def close(self, attempt: "RemoteAttempt") -> bool:
        """Remove an attempt; False if it was removed before."""
        name = attempt.order.attempt_id
        if self._attempts.get(name) is not attempt:
            return False
        del self._attempts[name]
        self.orphans.discard(attempt)
        return True

    def send(self, message: m.FrontEndMessage) -> None:
        """Send in the session; without a session the message is dropped."""
        self._post(self._session.send(message, self._clock()))

    async def call(self, message: Callable[[int], m.FrontEndMessage], result: type[T]) -> T:
        """Return the result of a call; raises its error, or ``SchedulerLostError``."""
        if not self._session.joined:
            raise SchedulerLostError(self._away("is not connected"))
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.send(message(call_id))
            return msgspec.msgpack.decode(await answer, type=result)
        finally:
            self._calls.pop(call_id, None)

    def _register(self, registration: int) -> m.FrontEndRegister:
        return m.FrontEndRegister(m.LINK_VERSION, self._name, self._epoch, registration)

    def _take(self, message: m.SchedulerMessage) -> None:
        match message:
            case m.EnginesUpdate():
                self.caches_answers = message.caches_answers
                self.engines.update(message)
                self._engines_changed()
            case m.EnginesChanged():
                self.engines.change(message)
                self._engines_changed()
            case m.UnitLoad():
                self.load = message
            case m.AttemptEvents():
                self._notify(message.events)
            case m.AttemptBroken() if message.attempt_id in self._attempts:
                self._attempts[message.attempt_id].break_off(EngineLostError(message.reason))
            case m.CallResult() | m.CallFailed():
                self._answered(message)

    def _engines_changed(self) -> None:
        if len(self.orphans):
            self.orphans.update(self.engines.alive())
        self.membership.changed()

    def _notify(self, events: m.EventsByAttempt) -> None:
        for attempt_id, own in events.items():
            if (attempt := self._attempts.get(attempt_id)) is not None:
                for event in own:
                    attempt.notify(event)

    def _answered(self, message: m.CallResult | m.CallFailed) -> None:
        self._notify(message.events)
        future = self._calls.get(message.call_id)
        if future is None or future.done():
            return
        if isinstance(message, m.CallResult):
            future.set_result(message.result)
        else:
            future.set_exception(m.raised(message))

    def _ended(self, reason: str) -> None:
        """The session has ended; attempts that decode go on."""
        why = self._away(f"is lost: {reason}")
        self.engines.clear(why)
        self.load = m.UnitLoad()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(SchedulerLostError(why))
        for attempt in self._attempts.values():
            if not attempt.decoding:
                attempt.break_off(SchedulerLostError(why))
        self.orphans.begin(a for a in self._attempts.values() if a.decoding)
        self.membership.changed()

    def _away(self, how: str) -> str:
        return f"the scheduler at {self._address} {how}; check that it runs there, and its log"

    def _post(self, envelopes: Sequence[Envelope[m.FrontEndMessage]]) -> None:
        self._frames.add(envelopes)

    async def _tick(self) -> None:
        while True:
            self._post(self._session.due(self._clock()))
            self.orphans.expire()
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
                # Ending the loop here would leave all requests waiting without an error.
                logger.exception("a message of the scheduler failed")
