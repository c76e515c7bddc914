"""What front ends and the scheduler may expect of each other, for each way they are connected.

The front end of these tests is written out: it calls the interface and does the model work by hand.
``as data`` sends every value through its wire form, so that nothing but data can pass.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from tests.control_network import ControlNetwork
from tests.front_end_links import Link, link_server
from tests.guard import GUARD_S
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import WITHOUT_WINDOWS, job, keys_of

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, EngineLostError
from dualpath.core.session_hints import NO_HINTS
from dualpath.core.transfers import DecodeTransfer
from dualpath.policy.units import UnitPolicy
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.scheduler import Scheduler
from dualpath.router.scheduler.units import Units
from dualpath.router.scheduler.weights import (
    Action,
    EngineCall,
    Running,
    WeightsRequest,
    WeightUpdates,
)
from dualpath.router.scheduling import (
    Answered,
    Arrived,
    AttemptEvent,
    AttemptListener,
    AttemptOrder,
    Placed,
    RequestOrder,
    ScheduledAttempt,
    ScheduledRequest,
    Scheduling,
)
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(1, 18))
#: Of virtual time, for all of a test.
T = TypeVar("T")


def through_wire(value: T, form: Any = None) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=form or type(value))


class AsData:
    """A ``Scheduling`` and its parts, with every argument and result sent through its wire form."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, order: RequestOrder) -> "AsData":
        return AsData(self._inner.begin(through_wire(order)))

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> "AsData":
        return AsData(self._inner.attempt(through_wire(order), Decoded(listener)))

    async def prepare(self) -> Any:
        return through_wire(await self._inner.prepare())

    async def prefilled(self) -> Any:
        return through_wire(await self._inner.prefilled())

    async def ends_aborted(self) -> bool:
        return through_wire(bool(await self._inner.ends_aborted()))

    def end(self, answered: Answered | None = None) -> None:
        self._inner.end(None if answered is None else through_wire(answered))

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        self._inner.suspect(through_wire(engine), why, call_failed=call_failed)


class Decoded:
    def __init__(self, listener: AttemptListener) -> None:
        self._listener = listener

    def notify(self, event: AttemptEvent) -> None:
        self._listener.notify(through_wire(event, AttemptEvent))


Connect = Callable[[Scheduler], contextlib.AbstractAsyncContextManager[Scheduling]]


@contextlib.asynccontextmanager
async def direct(scheduler: Scheduler) -> AsyncIterator[Scheduling]:
    yield scheduler


@contextlib.asynccontextmanager
async def as_data(scheduler: Scheduler) -> AsyncIterator[Scheduling]:
    yield AsData(scheduler)


@contextlib.asynccontextmanager
async def remote(scheduler: Scheduler) -> AsyncIterator[Scheduling]:
    async with link_server(scheduler) as opened, opened.link("f") as link:
        yield link


@contextlib.asynccontextmanager
async def one_of_two_units(scheduler: Scheduler) -> AsyncIterator[Scheduling]:
    """The other unit's scheduler does not answer."""
    async with link_server(scheduler) as opened, opened.link("f") as link:
        other = Link(ControlNetwork().connect(), "f")
        other.start()
        links = {"other": other, "unit": link}
        units = Units(links, UnitPolicy(), lambda choice: None, lambda unit, serves: None)
        yield units
        await other.stop()


CONNECTIONS: dict[str, Connect] = {
    "direct": direct,
    "as data": as_data,
    "remote": remote,
    "one of two units": one_of_two_units,
}


class SilentEngines:
    """Engines that answer no call of a trainer: its operation stays under way."""

    async def post(
        self, engine_id: str, api_url: str, call: EngineCall, timeout_s: float
    ) -> object:
        await asyncio.Event().wait()
        raise AssertionError

    async def weights(self, engine_id: str, api_url: str, timeout_s: float) -> str:
        raise AssertionError


class HandMade:
    """A front end that executes the steps of a test."""

    def __init__(self, made: Cluster, scheduling: Scheduling) -> None:
        self.made, self.scheduling = made, scheduling
        self.events: list[AttemptEvent] = []

    def notify(self, event: AttemptEvent) -> None:
        self.events.append(event)

    def begins(self, name: str) -> ScheduledRequest:
        return self.scheduling.begin(RequestOrder(name, keys_of(PROMPT)))

    def attempt(self, request: ScheduledRequest, name: str) -> ScheduledAttempt:
        order = AttemptOrder(name, 1, len(PROMPT), 6, keys_of(PROMPT))
        return request.attempt(order, self)

    def placed(self) -> Placed:
        (placed,) = (event for event in self.events if isinstance(event, Placed))
        return placed

    async def prefill(self, attempt: ScheduledAttempt, name: str) -> DecodeTransfer:
        """Execute the PE's part of an attempt; return what the DE has to be sent."""
        prepared = await attempt.prepare()
        prefill_engine = self.placed().prefill
        assert prefill_engine is not None
        assert prepared.prefill is not None
        await self.made.calls.prefill(prefill_engine, job(name, PROMPT), prepared.prefill)
        done = await attempt.prefilled()
        assert done.account.prompt_tokens == len(PROMPT)
        return prepared.decode

    async def decode(self, attempt: ScheduledAttempt, name: str, transfer: DecodeTransfer) -> None:
        decode = self.made.calls.decode(self.placed().decode, job(name, PROMPT), transfer, ())
        async for _ in decode:
            attempt.decoding_started()

    async def arrives(self) -> None:
        """Wait until the DE is known to have the prompt's KV in HBM."""
        while not any(isinstance(event, Arrived) for event in self.events):
            await asyncio.sleep(0.05)

    async def everything_is_free(self) -> None:
        # The end of an attempt waits for that of its request, so that one message has both.
        await asyncio.sleep(0.1)
        # Earlier messages have been handled when this is answered.
        assert not await self.scheduling.hint_session("", "nobody", NO_HINTS)
        await self.made.settled()
        context = self.made.service.scheduler
        assert context.releases.held == 0
        assert context.dispatch.idle()


@pytest.fixture(params=list(CONNECTIONS))
def connect(request: pytest.FixtureRequest) -> Connect:
    return CONNECTIONS[request.param]


@contextlib.asynccontextmanager
async def front_end(connect: Connect, **options: Any) -> AsyncIterator[HandMade]:
    async with (
        cluster(**options) as made,
        asyncio.timeout(GUARD_S),
        connect(made.service.scheduler) as scheduling,
    ):
        yield HandMade(made, scheduling)


async def test_an_attempt_is_four_calls_and_leaves_nothing_behind(connect: Connect) -> None:
    async with front_end(connect) as own:
        request = own.begins("a")
        attempt = own.attempt(request, "a")
        await own.decode(attempt, "a", await own.prefill(attempt, "a"))
        await own.arrives()
        attempt.close("finished")
        request.end()
        await own.everything_is_free()
        assert own.made.stored >= set(keys_of(PROMPT)), "the prompt's blocks are stored"


async def test_what_was_stored_is_loaded_by_the_next_attempt(connect: Connect) -> None:
    async with front_end(connect) as own:
        own.made.stored.update(keys_of(PROMPT))
        attempt = own.attempt(own.begins("a"), "a")
        prefill = (await attempt.prepare()).prefill
        assert prefill is not None
        assert prefill.hit_blocks == 4
        attempt.close("cancelled")
        await own.everything_is_free()


async def test_an_append_at_the_decode_engine_needs_no_prefill_engine(connect: Connect) -> None:
    settings = RouterSettings(append_at_decode_tokens=4)
    async with front_end(connect, settings=settings, namespace=WITHOUT_WINDOWS) as own:
        await own.made.caches("d0", keys_of(PROMPT))
        attempt = own.attempt(own.begins("a"), "a")
        prepared = await attempt.prepare()
        assert prepared.prefill is None
        assert (own.placed().prefill, prepared.decode.prompt_tokens) == (None, 16)
        done = await attempt.prefilled()
        assert (done.account.hit_tokens, done.forward_s) == (16, 0.0)
        await own.decode(attempt, "a", prepared.decode)
        attempt.close("finished")
        await own.everything_is_free()
        assert own.made.calls.prefills == []


@pytest.mark.parametrize("lost", ["p0", "d0"])
async def test_a_lost_engine_breaks_the_attempt_that_needs_it(connect: Connect, lost: str) -> None:
    async with front_end(connect) as own:
        attempt = own.attempt(own.begins("a"), "a")
        await attempt.prepare()
        own.made.lose(lost)
        with pytest.raises(EngineLostError, match=f"engine {lost} is lost"):
            await asyncio.wait_for(asyncio.shield(attempt.broken), 1.0)
        with pytest.raises(EngineLostError, match=f"engine {lost} is lost"):
            attempt.check()
        attempt.close("failed")
        await own.everything_is_free()


async def test_ending_twice_or_before_the_begin_has_no_effect(connect: Connect) -> None:
    async with front_end(connect) as own:
        request = own.begins("a")
        own.attempt(request, "a").close("cancelled")
        first = own.attempt(request, "a")
        first.close("cancelled")
        second = own.attempt(request, "a")
        first.close("resent, late")
        await own.decode(second, "a", await own.prefill(second, "a"))
        second.close("finished")
        second.close("finished")
        request.end()
        request.end()
        await own.everything_is_free()


async def test_two_attempts_of_one_name_are_never_under_way(connect: Connect) -> None:
    async with front_end(connect) as own:
        attempt = own.attempt(own.begins("a"), "a")
        with pytest.raises(BadRequestError, match="in use by a running request"):
            own.attempt(own.begins("b"), "a")
        attempt.close("cancelled")


async def test_what_waits_for_engines_ends_when_it_is_cancelled(connect: Connect) -> None:
    async with front_end(connect, decode=0) as own:
        attempt = own.attempt(own.begins("a"), "a")
        waiting = asyncio.ensure_future(attempt.prepare())
        while not own.made.service.scheduler.dispatch.waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        attempt.close("cancelled")
        await own.everything_is_free()
        assert own.made.service.scheduler.dispatch.waiting == 0


async def test_a_request_ends_with_its_tokens_while_a_trainer_has_running_ones_aborted(
    connect: Connect,
) -> None:
    async with front_end(connect) as own:
        request = own.begins("a")
        own.attempt(request, "a").close("failed")
        assert not await request.ends_aborted()
        scheduler = own.made.service.scheduler
        scheduler.weights = WeightUpdates(scheduler, SilentEngines(), scheduler.clock)
        scheduler.weights.request(WeightsRequest(Action.SLEEP, Running.ABORT))
        await asyncio.sleep(0.01)
        assert await request.ends_aborted()
        await scheduler.weights.stop()
        scheduler.weights.request(WeightsRequest(Action.SLEEP, Running.KEEP))
        await asyncio.sleep(0.01)
        assert not await request.ends_aborted()


async def test_an_engine_that_a_call_failed_on_answers_and_rests(connect: Connect) -> None:
    async with front_end(connect, prefill=2) as own:
        suspected = own.scheduling.engines.alive(Role.PREFILL)[0]
        own.scheduling.suspect(suspected, "no route")
        await own.scheduling.await_liveness([suspected])
        state = own.made.service.registry.get(suspected.engine_id)
        assert state is not None
        assert state.pauses, "it rests for a while, as another one takes requests"
        assert suspected in own.scheduling.engines.alive(Role.PREFILL)
