"""The scheduler's server for front ends that are processes of their own.

Each front end has one session, by the table of engines' sessions (``core.sessions.ROUTER_TABLE``).
When it ends, all its attempts are closed: engines release them, as if clients had disconnected.
"""

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from dualpath.core.control import (
    Deregister,
    Envelope,
    Refused,
    Registered,
    decode_with,
    unnumbered,
)
from dualpath.core.errors import BadRequestError, DualPathError, EngineLostError, IncompatibleError
from dualpath.core.sessions import (
    HEARTBEAT_S,
    ROUTER_TABLE,
    Action,
    Channel,
    Event,
    RouterSideState,
    StateMachine,
)
from dualpath.node.cluster_secret import ClusterSecret
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusal, ControlRefusals
from dualpath.router.scheduler import link_messages as m
from dualpath.router.scheduler.control_socket import (
    ACKNOWLEDGE_S,
    CHECKS_PER_TIMEOUT,
    ControlSocket,
    OwnStalls,
    SessionLoops,
)
from dualpath.router.scheduler.link_messages import Frames, frames_of
from dualpath.router.scheduling import Arrived, AttemptEvent, HandedOver, Placed, RequestOrder
from dualpath.router.served_adapters import changed

if TYPE_CHECKING:
    from dualpath.router.scheduler.attempt import EngineAttempt
    from dualpath.router.scheduler.scheduler import ArrivedRequest, Scheduler

logger = logging.getLogger(__name__)


#: How long a placement, or the arrival of KV, waits for an answer that takes it along.
EVENTS_WAIT_S = 0.1


class _Events:
    """Events of one front end's attempts, which the next answer to it takes along.

    Without an answer within ``EVENTS_WAIT_S`` they are sent by themselves, but for those that only
    the record of a request needs.
    """

    def __init__(self, send: Callable[[m.SchedulerMessage], None]) -> None:
        self._send = send
        self._events: dict[str, list[m.LinkEvent]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, attempt_id: str, event: m.LinkEvent) -> None:
        self._events.setdefault(attempt_id, []).append(event)
        if isinstance(event, m.PlacedOn | Arrived) and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(EVENTS_WAIT_S, self.flush)

    def take(self) -> m.EventsByAttempt:
        """Return the events that were not sent; the caller sends them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken = {attempt_id: tuple(events) for attempt_id, events in self._events.items()}
        self._events.clear()
        return taken

    def flush(self) -> None:
        if events := self.take():
            self._send(m.AttemptEvents(events))

    def discard(self, attempt_id: str) -> None:
        """Remove the events of an attempt."""
        self._events.pop(attempt_id, None)


class _Listener:
    """The listener of an attempt whose front end is at the other end of ``events``."""

    def __init__(self, attempt_id: str, placed: set[str], events: _Events) -> None:
        self._attempt_id = attempt_id
        self._placed = placed
        self._events = events
        self._over = False

    def notify(self, event: AttemptEvent) -> None:
        if self._over:
            return
        if isinstance(event, Placed):
            prefill = None if event.prefill is None else event.prefill.writer.id
            self._placed.add(self._attempt_id)
            self._events.add(self._attempt_id, m.PlacedOn(prefill, event.decode.writer.id))
        else:
            self._events.add(self._attempt_id, event)

    def move(self, placed: set[str], events: _Events) -> None:
        """Send to another front end from now on, which needs none of the earlier events."""
        self._events.discard(self._attempt_id)
        self._placed, self._events = placed, events

    def end(self) -> None:
        """The attempt is closed: send no more events, also not of the stages that end now."""
        self._over = True
        self._events.discard(self._attempt_id)


class OfferedAttempt:
    """An attempt between its legs, with its request."""

    def __init__(
        self,
        request_id: str,
        request: "ArrivedRequest",
        attempt: "EngineAttempt",
        listener: _Listener,
    ) -> None:
        self.request_id, self.request = request_id, request
        self.attempt, self.listener = attempt, listener
        #: About the last move of its KV, as in ``HandedOver``, until a front end has it.
        self.note = ""
        listener.move(set(), _Events(lambda message: None))

    @property
    def attempt_id(self) -> str:
        """The attempt's own name."""
        return self.attempt.attempt_id

    @property
    def prompt_digest(self) -> bytes:
        """Identifies the prompt."""
        return self.attempt.decode_transfer.prompt_digest

    @property
    def broken(self) -> "asyncio.Future[None]":
        """Ends in ``EngineLostError`` when an engine is lost that the attempt needs."""
        return self.attempt.broken

    @property
    def decode_engine(self) -> EngineInfo:
        """The engine that has the prompt's KV in its buffer."""
        return self.attempt.decode_engine

    async def move(self, engine_id: str) -> bool:
        """Move the KV to another decode engine; return whether it is there; see ``Offered``."""
        source = self.attempt.decode_engine.engine_id
        refusal = await self.attempt.move(engine_id)
        self.note = refusal or f"moved from {source}"
        return not refusal

    def close(self, reason: str) -> None:
        """Release the attempt at its engines, and end the request."""
        self.attempt.close(reason)
        self.request.end()


class FrontEndSession:
    """The requests and attempts of one front end during its session; ``send`` reaches it."""

    def __init__(self, scheduler: "Scheduler", send: Callable[[m.SchedulerMessage], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._requests: dict[str, ArrivedRequest] = {}
        #: The last keys of each request.
        self._keys: dict[str, tuple[bytes, ...]] = {}
        self._events = _Events(send)
        self._listeners: dict[str, _Listener] = {}
        self._attempts: dict[str, EngineAttempt] = {}
        self._placed: set[str] = set()
        #: Prompt tokens of the attempts.
        self.prompt_tokens = 0
        self._refused: dict[str, DualPathError] = {}
        #: Calls that have no answer yet, by attempt ("" for others).
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    def take(self, message: m.FrontEndMessage) -> None:
        """Handle one message; they come in order, each once."""
        match message:
            case m.BeginRequest():
                self._begin_request(message.order)
            case m.BeginAttempt():
                self._begin_attempt(message)
                name = message.order.attempt_id
                self._answer(message.call_id, lambda: self._attempt(name).prepare(), name)
            case m.AttemptCall():
                self._answer(message.call_id, lambda: self._call(message), message.attempt_id)
            case m.DecodingStarted() if message.attempt_id in self._attempts:
                self._attempts[message.attempt_id].decoding_started()
            case m.EndAttempt():
                self._close(message.attempt_id, message.reason)
            case m.EndRequest():
                self._close(message.attempt_id, message.reason)
                if (request := self._requests.pop(message.request_id, None)) is not None:
                    answered = message.answered
                    if answered is not None:
                        known = self._keys[message.request_id][: message.known_keys]
                        answered = msgspec.structs.replace(answered, keys=known + answered.keys)
                    self._keys.pop(message.request_id)
                    request.end(answered)
            case m.SuspectEngine():
                for engine in self._named([(message.engine_id, message.epoch)]):
                    self._scheduler.suspect(engine, message.why, call_failed=message.call_failed)
            case m.CallWaits():
                for engine in self._named([(message.engine_id, message.epoch)]):
                    self._scheduler.call_waits(engine, message.silent_s)
            case m.AwaitLiveness():
                engines = self._named(message.engines)
                self._answer(message.call_id, lambda: self._scheduler.await_liveness(engines))
            case m.OfferAttempt():
                self._answer(message.call_id, lambda: self._offer(message))
            case m.TakeAttempt():
                self._answer(message.call_id, lambda: self._take(message))
            case m.WithdrawAttempt():
                self._scheduler.handovers.withdraw(message.attempt_id, message.reason)
            case m.EndsAborted():
                self._answer(message.call_id, self._ends_aborted)
            case m.HintSession():
                hint = (message.tenant, message.session_id, message.hints)
                self._answer(message.call_id, lambda: self._scheduler.hint_session(*hint))

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many have their engines."""
        running = len(self._placed)
        return max(len(self._requests) - running, 0), running

    def close(self, reason: str) -> None:
        """The session has ended: release everything."""
        for work in [work for works in self._tasks.values() for work in works]:
            work.cancel()
        for attempt_id in list(self._attempts):
            self._close(attempt_id, f"its front end is lost: {reason}")
        for request in self._requests.values():
            request.end()
        self._requests.clear()
        self._keys.clear()
        self._events.take()
        held = len(self._attempts) + len(self._placed) + len(self._listeners) + self.prompt_tokens
        assert held == 0, "a closed session holds no attempt"

    def _named(self, names: Iterable[tuple[str, str]]) -> list[EngineInfo]:
        found = ((self._scheduler.registry.live(name), epoch) for name, epoch in names)
        return [info for info, epoch in found if info is not None and info.epoch == epoch]

    def _begin_request(self, order: RequestOrder) -> None:
        self._requests[order.request_id] = self._scheduler.begin(order)
        self._keys[order.request_id] = order.keys

    def _begin_attempt(self, message: m.BeginAttempt) -> None:
        if message.request is not None:
            self._begin_request(message.request)
        name, request = message.order.attempt_id, self._requests.get(message.request_id)
        if request is None:
            return
        keys = self._keys[message.request_id][: message.known_keys] + message.order.keys
        order = msgspec.structs.replace(message.order, keys=keys)
        self._keys[message.request_id] = keys
        known = self._scheduler.registry.namespace
        if message.namespace != (None if known is None else known.with_weights()):
            self._refused[name] = EngineLostError(
                "the front end knows engines of another model than the scheduler; restart it"
            )
            return
        served = self._scheduler.registry.adapters.digests()
        if (adapter := changed(message.adapters, served)) is not None:
            self._refused[name] = EngineLostError(
                f"the front end knows other weights of adapter {adapter!r} than the scheduler; "
                "restart it"
            )
            return
        listener = _Listener(name, self._placed, self._events)
        try:
            attempt = request.attempt(order, listener)
        except BadRequestError as error:
            self._refused[name] = error
            return
        if order.handover:
            self._scheduler.handovers.first_leg_began(order.handover, name)
        self._own(name, attempt, listener)

    def _own(self, name: str, attempt: "EngineAttempt", listener: _Listener) -> None:
        self._attempts[name], self._listeners[name] = attempt, listener
        self.prompt_tokens += attempt.prompt_tokens
        attempt.broken.add_done_callback(lambda broken: self._broken(name, attempt, broken))

    async def _ends_aborted(self) -> bool:
        return self._scheduler.weights.aborts

    async def _offer(self, message: m.OfferAttempt) -> None:
        """Let an attempt wait for its second leg; it belongs to no front end until then."""
        attempt = self._attempts.pop(message.attempt_id, None)
        request = self._requests.pop(message.request_id, None)
        if attempt is None or request is None:
            raise EngineLostError(f"attempt {message.attempt_id} is closed")
        self.prompt_tokens -= attempt.prompt_tokens
        self._keys.pop(message.request_id)
        self._placed.discard(message.attempt_id)
        listener = self._listeners.pop(message.attempt_id)
        handovers = self._scheduler.handovers
        handovers.first_leg_ended(message.attempt_id)
        handovers.offer(
            message.handover, OfferedAttempt(message.request_id, request, attempt, listener)
        )

    async def _take(self, message: m.TakeAttempt) -> HandedOver:
        """Own an attempt for its second leg, once its KV is at the front end's decode engine."""
        offered = await self._scheduler.handovers.take(
            message.handover, message.engine_id, moves=message.moves
        )
        assert isinstance(offered, OfferedAttempt), "what this server has offered"
        attempt, name = offered.attempt, offered.attempt.attempt_id
        note, offered.note = offered.note, ""
        handed = HandedOver(
            offered.request_id, attempt.decode_engine, attempt.decode_transfer, note
        )
        if handed.decode.engine_id != message.engine_id:
            return handed
        self._requests[offered.request_id] = offered.request
        self._keys[offered.request_id] = ()
        self._placed.add(name)
        offered.listener.move(self._placed, self._events)
        self._own(name, attempt, offered.listener)
        return handed

    def _broken(self, name: str, attempt: "EngineAttempt", broken: "asyncio.Future[None]") -> None:
        if self._attempts.get(name) is attempt and not broken.cancelled():
            self._events.flush()
            self._send(m.AttemptBroken(name, str(broken.exception())))

    def _attempt(self, attempt_id: str) -> "EngineAttempt":
        """Return an attempt; raises the error with which it was refused, or ended."""
        if (refused := self._refused.get(attempt_id)) is not None:
            raise refused
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            raise EngineLostError(f"attempt {attempt_id} is closed")
        return attempt

    async def _call(self, call: m.AttemptCall) -> object:
        attempt = self._attempt(call.attempt_id)
        steps: dict[m.Step, Callable[[], Awaitable[object]]] = {
            m.Step.PREFILLED: attempt.prefilled,
            m.Step.PREFILL_ABORTED: attempt.prefill_aborted,
        }
        return await steps[call.step]()

    def _answer(
        self, call_id: int, work: Callable[[], Awaitable[object]], attempt_id: str = ""
    ) -> None:
        # Not the awaitable itself: it would never be awaited if the task is cancelled at once.
        task = asyncio.create_task(self._run(call_id, work))
        self._tasks.setdefault(attempt_id, set()).add(task)
        task.add_done_callback(lambda done: self._answered(done, attempt_id))

    def _answered(self, task: "asyncio.Task[None]", attempt_id: str) -> None:
        works = self._tasks[attempt_id]
        works.discard(task)
        if not works:
            del self._tasks[attempt_id]

    async def _run(self, call_id: int, work: Callable[[], Awaitable[object]]) -> None:
        answer: m.CallResult | m.CallFailed
        try:
            result = await work()
        except DualPathError as error:
            answer = m.failure(call_id, error)
        except Exception as error:
            # Without an answer the front end would wait for ever.
            logger.exception("a call of a front end failed")
            answer = m.failure(call_id, error)
        else:
            answer = m.CallResult(call_id, msgspec.Raw(msgspec.msgpack.encode(result)))
        self._send(msgspec.structs.replace(answer, events=self._events.take()))

    def _close(self, attempt_id: str, reason: str) -> None:
        self._refused.pop(attempt_id, None)
        self._placed.discard(attempt_id)
        if (listener := self._listeners.pop(attempt_id, None)) is not None:
            listener.end()
        self._scheduler.handovers.first_leg_ended(attempt_id)
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            self.prompt_tokens -= attempt.prompt_tokens
            for work in self._tasks.get(attempt_id, ()):
                work.cancel()
            attempt.close(reason)


# ------------------------------------------------------------------------ sessions


_DECODER: msgspec.msgpack.Decoder[m.FromFrontEnd] = msgspec.msgpack.Decoder(m.FromFrontEnd)
#: Front ends that are remembered by name, engines among them, and their former processes.
MOST_FRONT_ENDS = 4096
_FORMER_EPOCHS = 64


class _FrontEndState:
    """One front end: its process, its connection and its session.

    ``post`` sends a frame to a connection.
    """

    def __init__(self, name: str, post: Callable[[bytes, bytes], None]) -> None:
        self.name = name
        self.epoch, self.registration, self.identity = "", 0, b""
        self.former_epochs: deque[str] = deque(maxlen=_FORMER_EPOCHS)
        self.heard_s = self.spoken_s = float("-inf")
        self.machine = StateMachine(ROUTER_TABLE, RouterSideState.UNKNOWN)
        self.talk: Channel[m.SchedulerMessage, m.FrontEndMessage] = Channel("")
        self.session: FrontEndSession | None = None
        self.frames: Frames[m.SchedulerMessage] = Frames(lambda frame: post(self.identity, frame))

    @property
    def live(self) -> bool:
        return self.machine.state is RouterSideState.LIVE

    def registers(self, hello: m.FrontEndRegister) -> Event | None:
        """Take a registration; return the event that it is, None if it is older than the last."""
        if not self.epoch:
            event = Event.REGISTERS
        elif hello.epoch != self.epoch:
            self.former_epochs.append(self.epoch)
            event = Event.RESTARTED
        elif hello.registration == self.registration:
            event = Event.REGISTER_RESENT
        elif hello.registration > self.registration:
            event = Event.REREGISTERS
        else:
            return None
        self.epoch, self.registration = hello.epoch, hello.registration
        return event


class FrontEndServer:
    """Sessions with front ends over a ``ControlSocket``; ``timeout_s`` of silence ends one."""

    def __init__(
        self,
        scheduler: "Scheduler",
        socket: ControlSocket,
        clock: Callable[[], float],
        timeout_s: float,
        epoch: str = "",
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._timeout_s = timeout_s
        self._epoch = epoch or uuid.uuid4().hex
        self._sessions = itertools.count(1)
        self._front_ends: dict[str, _FrontEndState] = {}
        #: By the name of the last session of each.
        self._by_session: dict[str, _FrontEndState] = {}
        self._check_gap_s = timeout_s / CHECKS_PER_TIMEOUT
        self._stalls = OwnStalls(clock(), self._check_gap_s)
        self.loops = SessionLoops(socket, self._received)
        self.refusals = ControlRefusals()
        self.address = ""
        #: What the engines had in common at the last change.
        self._sent_common: tuple[object, ...] = ()

    async def start(self, host: str, port: int, secret: ClusterSecret | None = None) -> None:
        """Bind and serve, if it does not yet; raises ``ConfigError`` as ``ControlServer.start``."""
        if self.loops.tasks:
            return
        timers = {self._check_liveness: self._check_gap_s, self._acknowledge: ACKNOWLEDGE_S}
        self.address = await self.loops.start(host, port, secret, self.refusals, timers)
        self._scheduler.membership.listeners.append(self._engines_changed)

    async def stop(self) -> None:
        """End all sessions, then close; idempotent, also while it does."""
        if not self.loops.tasks:
            return
        self._scheduler.membership.listeners.remove(self._engines_changed)
        # Later messages are for the next scheduler.  Front ends are notified before the engines'
        # sessions end, else attempts that break there would be retried in an ended session.
        for front_end in self._front_ends.values():
            front_end.frames.flush()
            if front_end.live:
                self._request_reregister(front_end.identity, front_end.talk.session)
        await self.loops.stop()
        for front_end in self._front_ends.values():
            self._lose(front_end, "the scheduler ends")

    def counts(self) -> tuple[int, int]:
        """Return how many requests of all front ends wait, and how many have their engines."""
        each = [f.session.counts() for f in self._front_ends.values() if f.session is not None]
        return sum(waiting for waiting, _ in each), sum(running for _, running in each)

    def _engines_changed(
        self, joined: Sequence[EngineInfo] = (), lost: Sequence[EngineInfo] = ()
    ) -> None:
        """Send front ends the engines that have joined or were lost."""
        message: m.EnginesUpdate | m.EnginesChanged = m.EnginesChanged(
            tuple(joined), tuple(info.writer.id for info in lost)
        )
        if (common := self._in_common()) != self._sent_common:
            message, self._sent_common = self._engines_update(), common
        for front_end in self._front_ends.values():
            self._send(front_end, message)

    def _in_common(self) -> tuple[object, ...]:
        registry = self._scheduler.registry
        caches = self._scheduler.caches_answers
        return registry.mode, registry.namespace, caches, registry.adapters.known()

    def _engines_update(self) -> m.EnginesUpdate:
        registry = self._scheduler.registry
        return m.EnginesUpdate(
            registry.mode,
            registry.namespace,
            registry.alive(),
            self._scheduler.caches_answers,
            registry.adapters.known(),
        )

    def _send(self, front_end: _FrontEndState, message: m.SchedulerMessage) -> None:
        if front_end.live:
            self._post(front_end, front_end.talk.send(message, self._clock()))

    def _post(self, front_end: _FrontEndState, envelope: Envelope[m.SchedulerMessage]) -> None:
        front_end.spoken_s = self._clock()
        front_end.frames.add([envelope])

    def _send_unnumbered(
        self, identity: bytes, message: m.SchedulerMessage, session: str = ""
    ) -> None:
        for frame in frames_of([unnumbered(message, session)]):
            self.loops.post(identity, frame)

    def _check_liveness(self) -> None:
        """End sessions of front ends that were silent too long."""
        now_s = self._clock()
        late_s = self._stalls.late_s(now_s)
        for front_end in self._front_ends.values():
            front_end.heard_s = min(front_end.heard_s + late_s, now_s)
            if front_end.live and now_s - front_end.heard_s > self._timeout_s:
                self._on(front_end, Event.SILENT, f"silent for {self._timeout_s:g} s")

    def _acknowledge(self) -> None:
        now_s = self._clock()
        self._report_load(
            front_end
            for front_end in self._front_ends.values()
            if front_end.talk.ack_pending or now_s - front_end.spoken_s >= HEARTBEAT_S
        )

    def load_changed(self) -> None:
        """Report the load of this unit to all front ends now."""
        self._report_load(self._front_ends.values())

    def _report_load(self, receivers: Iterable[_FrontEndState]) -> None:
        live = [one for one in receivers if one.session is not None]
        if not live:
            return
        sessions = [one.session for one in self._front_ends.values() if one.session is not None]
        tokens = self._scheduler.own_prompt_tokens() + sum(one.prompt_tokens for one in sessions)
        for front_end in live:
            assert front_end.session is not None
            others_tokens = tokens - front_end.session.prompt_tokens
            load = m.UnitLoad(others_tokens, self._scheduler.draining)
            self._post(front_end, front_end.talk.send_lossy(load))

    def _received(self, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            envelopes = decode_with(_DECODER, frames[-1] if frames else b"")
        except IncompatibleError as error:
            self._malformed(identity, error)
        else:
            for envelope in envelopes:
                self._handle(identity, envelope)

    def _malformed(self, identity: bytes, error: IncompatibleError) -> None:
        self.refusals.count(ControlRefusal.MALFORMED)
        if self.refusals.complain(identity, self._clock()):
            logger.warning("refused, further times are only counted: %s", error)
        self._send_unnumbered(identity, Refused(str(error)))

    def _handle(self, identity: bytes, envelope: Envelope[m.FrontEndMessage]) -> None:
        message = envelope.message
        if isinstance(message, m.FrontEndRegister):
            self._register(identity, message)
            return
        if (front_end := self._by_session.get(envelope.session)) is None:
            self._request_reregister(identity, envelope.session)
            return
        front_end.identity = identity
        if Action.DELIVER in self._on(front_end, Event.MESSAGE):
            front_end.heard_s = self._clock()
            taken, repeated = front_end.talk.receive(envelope, front_end.heard_s)
            for one in repeated:
                self._post(front_end, one)
            if isinstance(taken, Deregister):
                self._on(front_end, Event.DEREGISTERED, f"left: {taken.reason}")
            elif taken is not None and front_end.session is not None:
                front_end.session.take(taken)

    def _register(self, identity: bytes, hello: m.FrontEndRegister) -> None:
        if (reason := self._refusal(hello)) is not None:
            if self.refusals.complain(hello.name.encode(), self._clock()):
                logger.warning("front end refused, further times are only counted: %s", reason)
            self._send_unnumbered(identity, Refused(reason))
            return
        front_end = self._front_ends.get(hello.name)
        if front_end is None:
            front_end = _FrontEndState(hello.name, self.loops.post)
            self._front_ends[hello.name] = front_end
        if (event := front_end.registers(hello)) is not None:
            front_end.identity = identity
            self._on(front_end, event, "it has registered again")

    def _refusal(self, hello: m.FrontEndRegister) -> str | None:
        if hello.version != m.LINK_VERSION:
            return (
                f"front end {hello.name!r} speaks version {hello.version}, this scheduler "
                f"{m.LINK_VERSION}; run the same dualpath version on both"
            )
        known = self._front_ends.get(hello.name)
        # Two processes of one name would otherwise end each other's sessions again and again.  Once
        # the later one is lost, the earlier one may register.
        if known is not None and known.live and hello.epoch in known.former_epochs:
            return (
                f"front end {hello.name!r} in epoch {hello.epoch} has been replaced by epoch "
                f"{known.epoch}; give one of the two another --front-end-name, or stop it"
            )
        if known is not None or len(self._front_ends) < MOST_FRONT_ENDS:
            return None
        # Anyone can invent names: front ends that are gone are removed.
        self._front_ends = {n: f for n, f in self._front_ends.items() if f.live}
        self._by_session = {f.talk.session: f for f in self._front_ends.values()}
        if len(self._front_ends) < MOST_FRONT_ENDS:
            return None
        return (
            f"front end {hello.name!r} would be one more than {MOST_FRONT_ENDS}; stop some, or "
            "start another scheduler for them"
        )

    def _on(self, front_end: _FrontEndState, event: Event, reason: str = "") -> tuple[Action, ...]:
        actions = front_end.machine.on(event)
        for action in actions:
            match action:
                case Action.REMOVE_ENGINE:
                    self._lose(front_end, reason)
                case Action.CHECK_GROUP:
                    self._on(front_end, Event.GROUP_COMPLETE)
                case Action.OPEN_SESSION:
                    self._by_session.pop(front_end.talk.session, None)
                    front_end.talk = Channel(f"{self._epoch}-{next(self._sessions):08}")
                    self._by_session[front_end.talk.session] = front_end
                    front_end.heard_s = self._clock()
                    self._send_registered(front_end)
                case Action.RESEND_REGISTERED:
                    self._send_registered(front_end)
                case Action.ADD_ENGINE:
                    self._join(front_end)
                case Action.REQUEST_REREGISTER:
                    self._request_reregister(front_end.identity, front_end.talk.session)
        return actions

    def _request_reregister(self, identity: bytes, session: str) -> None:
        self._send_unnumbered(identity, Refused("no such session", reregister=True), session)

    def _send_registered(self, front_end: _FrontEndState) -> None:
        self._post(front_end, front_end.talk.send_lossy(Registered(front_end.registration)))

    def _join(self, front_end: _FrontEndState) -> None:
        logger.info("front end %s joined (epoch %s)", front_end.name, front_end.epoch)
        front_end.session = FrontEndSession(
            self._scheduler, lambda message: self._send(front_end, message)
        )
        self._send(front_end, self._engines_update())
        self._report_load([front_end])

    def _lose(self, front_end: _FrontEndState, reason: str) -> None:
        session, front_end.session = front_end.session, None
        if session is not None:
            logger.warning("front end %s is lost: %s", front_end.name, reason)
            session.close(reason)
            front_end.talk.end()
