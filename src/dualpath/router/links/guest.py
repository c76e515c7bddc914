"""What one front end has under way at the scheduler, for as long as its session lasts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from dualpath.core.errors import BadRequestError, DualPathError, EngineLostError
from dualpath.router.control.served_adapters import changed
from dualpath.router.engines import EngineInfo
from dualpath.router.links import messages as m
from dualpath.router.scheduler import ArrivedRequest, Scheduler
from dualpath.router.scheduling import AttemptEvent, Placed, ScheduledAttempt

logger = logging.getLogger(__name__)


class _Listener:
    """Tells where an attempt was placed at once, and the rest before what is said of it next."""

    def __init__(
        self, attempt_id: str, placed: set[str], say: Callable[[m.SchedulerMessage], None]
    ) -> None:
        self._attempt_id = attempt_id
        self._placed = placed
        self._say = say
        self._events: list[AttemptEvent] = []

    def heard(self, event: AttemptEvent) -> None:
        self._events.append(event)
        if isinstance(event, Placed):
            self._placed.add(self._attempt_id)
            self.tell()

    def tell(self) -> None:
        if self._events:
            events, self._events = tuple(self._events), []
            self._say(m.Happened(self._attempt_id, events))


class Guest:
    """Carries out what a front end says; ``say`` answers it."""

    def __init__(self, scheduler: Scheduler, say: Callable[[m.SchedulerMessage], None]) -> None:
        self._scheduler = scheduler
        self._say = say
        self._requests: dict[str, ArrivedRequest] = {}
        self._keys: dict[str, tuple[bytes, ...]] = {}
        self._listeners: dict[str, _Listener] = {}
        self._attempts: dict[str, ScheduledAttempt] = {}
        self._placed: set[str] = set()
        self._refused: dict[str, DualPathError] = {}
        self._works: dict[asyncio.Task[None], str] = {}
        self._left = False

    def take(self, message: m.FrontEndMessage) -> None:
        """Carry out one message; they come in order, each once."""
        match message:
            case m.Begin():
                name = message.order.request_id
                self._requests[name] = self._scheduler.begin(message.order)
                self._keys[name] = message.order.keys
            case m.Try():
                self._try(message)
            case m.Ask():
                self._answer(message.call_id, lambda: self._step(message), message.attempt_id)
            case m.TokensCame() if message.attempt_id in self._attempts:
                self._attempts[message.attempt_id].tokens_came()
            case m.Over():
                self._over(message.attempt_id, message.reason)
            case m.End() if message.request_id in self._requests:
                self._keys.pop(message.request_id)
                self._requests.pop(message.request_id).end(message.answered)
            case m.Suspect():
                for engine in self._named([(message.engine_id, message.epoch)]):
                    self._scheduler.suspect(engine, message.why, call_failed=message.call_failed)
            case m.Settle():
                engines = self._named(message.engines)
                self._answer(message.call_id, lambda: self._scheduler.settled(engines))
            case m.Hint():
                hint = (message.tenant, message.session_id, message.hints)
                self._answer(message.call_id, lambda: self._scheduler.hint_session(*hint))

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait, and how many have their engines."""
        running = len(self._placed)
        return max(len(self._requests) - running, 0), running

    def leave(self, reason: str) -> None:
        """The session is over: everything is given back."""
        self._left = True
        for work in list(self._works):
            work.cancel()
        for attempt_id in list(self._attempts):
            self._over(attempt_id, f"its front end is lost: {reason}")
        for request in self._requests.values():
            request.end()
        self._requests.clear()
        self._keys.clear()

    def _named(self, names: Iterable[tuple[str, str]]) -> list[EngineInfo]:
        wanted = set(names)
        return [e for e in self._scheduler.registry.alive() if (e.engine_id, e.epoch) in wanted]

    def _try(self, message: m.Try) -> None:
        name, request = message.order.attempt_id, self._requests.get(message.request_id)
        if request is None:
            return
        if message.namespace != self._scheduler.registry.namespace:
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
        order = message.order
        if not order.keys:
            order = msgspec.structs.replace(order, keys=self._keys[message.request_id])
        listener = _Listener(name, self._placed, self._say)
        try:
            attempt = request.attempt(order, listener)
        except BadRequestError as error:
            self._refused[name] = error
            return
        self._attempts[name], self._listeners[name] = attempt, listener
        attempt.broken.add_done_callback(lambda broken: self._broken(name, attempt, broken))

    def _broken(self, name: str, attempt: ScheduledAttempt, broken: "asyncio.Future[None]") -> None:
        if self._attempts.get(name) is attempt and not broken.cancelled():
            self._tell(name)
            self._say(m.Broken(name, str(broken.exception())))

    async def _step(self, ask: m.Ask) -> object:
        if (refused := self._refused.get(ask.attempt_id)) is not None:
            raise refused
        attempt = self._attempts.get(ask.attempt_id)
        if attempt is None:
            raise EngineLostError(f"attempt {ask.attempt_id} is over")
        steps: dict[m.Step, Callable[[], Awaitable[object]]] = {
            m.Step.PREPARE: attempt.prepare,
            m.Step.PREFILLED: attempt.prefilled,
            m.Step.GIVEN_UP: attempt.given_up,
            m.Step.DECODED: attempt.decoded,
        }
        return await steps[ask.step]()

    def _answer(
        self, call_id: int, work: Callable[[], Awaitable[object]], attempt_id: str = ""
    ) -> None:
        # Not the awaitable itself: nobody would await it where the task is cancelled at once.
        task = asyncio.create_task(self._carried_out(call_id, work, attempt_id))
        self._works[task] = attempt_id
        task.add_done_callback(self._works.pop)

    async def _carried_out(
        self, call_id: int, work: Callable[[], Awaitable[object]], attempt_id: str
    ) -> None:
        answer: m.Answer | m.Failure
        try:
            result = await work()
        except DualPathError as error:
            answer = m.failure(call_id, error)
        except Exception as error:
            # Whoever asked would wait for ever.
            logger.exception("a call of a front end failed")
            answer = m.failure(call_id, error)
        else:
            answer = m.Answer(call_id, msgspec.Raw(msgspec.msgpack.encode(result)))
        self._tell(attempt_id)
        self._say(answer)

    def _tell(self, attempt_id: str) -> None:
        if (listener := self._listeners.get(attempt_id)) is not None:
            listener.tell()

    def _over(self, attempt_id: str, reason: str) -> None:
        self._refused.pop(attempt_id, None)
        self._placed.discard(attempt_id)
        self._listeners.pop(attempt_id, None)
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            for work, name in list(self._works.items()):
                if name == attempt_id:
                    work.cancel()
            attempt.over(reason)
