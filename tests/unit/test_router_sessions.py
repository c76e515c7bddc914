"""The router's orders to decode engines for agents that wait for tools."""

import asyncio
import json

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import NAMESPACE, FakeEngine, job, keys_of

from dualpath.core import control
from dualpath.core.cluster import Role
from dualpath.core.rates import Rate, RateOrigin, Rates
from dualpath.core.session_hints import SessionHints
from dualpath.router.requests.session_calls import session_call
from dualpath.router.settings import RouterSettings

PROMPT = list(range(100, 118))
#: A block in a second.
SLOW = Rates(read_bytes=Rate(NAMESPACE.geometry.full_block_bytes, RateOrigin.SET))


def orders(engine: FakeEngine) -> list[control.Retain]:
    return [m for m in engine.received if isinstance(m, control.Retain)]


def behind(prompt: list[int], keys: tuple[bytes, ...]) -> tuple[bytes, tuple[bytes, ...]]:
    """Return how an order names a context: the prompt's last key, and the keys behind it."""
    blocks = len(keys_of(prompt))
    return keys[blocks - 1], keys[blocks:]


async def turn(made: Cluster, name: str, prompt: list[int], **hints: object) -> list[int]:
    """Run a turn; return its whole context once its engines have been notified of it."""
    given = SessionHints(**hints)  # type: ignore[arg-type]
    generated = await made.run(job(name, prompt, hints=given))
    await asyncio.sleep(0.1)
    return [*prompt, *generated]


@pytest.mark.virtual_time
async def test_an_agent_finds_its_kv_back_when_its_tool_is_through():
    async with cluster(rates=SLOW) as made:
        decode = made.engines["d0"]
        context = await turn(made, "r0", PROMPT)
        await asyncio.sleep(60)
        context = await turn(made, "r1", [*context, *PROMPT])
        assert orders(decode) == []
        # It is read in as many seconds as it has blocks, by an engine that reads nothing else.
        keys = keys_of(context[:-1])
        await asyncio.sleep(60 - 2 * len(keys) - 5)
        assert orders(decode) == []
        await asyncio.sleep(10)
        (order,) = orders(decode)
        assert (order.prompt_tail, order.keys) == behind([*context[:-6]], keys)
        assert order.fetch
        assert order.retain_s > 60


@pytest.mark.virtual_time
async def test_a_session_is_retained_by_its_clients_hints_and_ended_by_them():
    async with cluster() as made:
        decode = made.engines["d0"]
        context = await turn(made, "r0", PROMPT, session_id="a", retain_s=30.0)
        keys = keys_of(context[:-1])
        named = behind(PROMPT, keys)
        assert orders(decode) == [control.Retain(*named, 30.0, fetch=False, expected_s=30.0)]
        assert (await session_call(made.service, "a", b"", over=True))[0] == 200
        await asyncio.sleep(0.1)
        assert orders(decode)[1:] == [control.Retain(*named, 0.0, fetch=False)]
        assert (await session_call(made.service, "a", b"", over=True))[0] == 404


@pytest.mark.virtual_time
async def test_a_hint_that_does_not_exist_is_refused_with_the_nearest_one():
    async with cluster() as made:
        body = b'{"next_turn": 20}'
        status, answer = await session_call(made.service, "a", body, over=False)
    assert status == 400
    assert "'next_turn' is no hint; did you mean next_turn_s?" in str(answer)


@pytest.mark.virtual_time
async def test_a_client_may_ask_for_its_kv_while_its_tool_runs():
    settings = RouterSettings(prefetch_sessions=False)
    async with cluster(settings=settings) as made:
        await turn(made, "r0", PROMPT, session_id="a")
        body = json.dumps({"next_turn_s": 20}).encode()
        assert (await session_call(made.service, "a", body, over=False))[0] == 200
        await asyncio.sleep(19)
        (retained,) = orders(made.engines["d0"])
        assert not retained.fetch
        await asyncio.sleep(2)
        _, order = orders(made.engines["d0"])
        assert order.fetch


@pytest.mark.virtual_time
async def test_no_orders_are_sent_for_a_lost_engine_or_failed_turns():
    async with cluster(decode=2) as made:
        await turn(made, "r0", PROMPT, session_id="a", next_turn_s=30.0, retain_s=0.0)
        (used,) = [e for e in made.engines.values() if e.persisted and e.role is Role.DECODE]
        made.lose(used.engine_id, certain=True)
        await used.kill()
        await asyncio.sleep(60)
        assert [o for e in made.engines.values() for o in orders(e)] == []


@pytest.mark.virtual_time
async def test_another_tenant_cannot_end_a_session():
    async with cluster() as made:
        await turn(made, "r0", PROMPT, session_id="a")
        status, _ = await session_call(made.service, "a", b'{"cache_salt": "mine"}', over=True)
        assert status == 404
        assert (await session_call(made.service, "a", b"", over=True))[0] == 200


@pytest.mark.virtual_time
@pytest.mark.parametrize("body", [b"[]", b"{", b'{"retain_s": "x"}', b'{"cache_salt": 5}'])
async def test_a_call_that_cannot_be_is_refused(body: bytes):
    async with cluster() as made:
        await turn(made, "r0", PROMPT, session_id="a")
        status, answer = await session_call(made.service, "a", body, over=False)
        assert status == 400
        assert isinstance(answer, dict)
