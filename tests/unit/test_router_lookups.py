"""Which engine is asked how much is stored, for how long, and what becomes of half an answer."""

import asyncio

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import FakeEngine, expected, job, keys_of

from dualpath.core import control
from dualpath.router.scheduler.exchange import AttemptChannel
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(100, 118))  # four full blocks and two tokens
SETTINGS = RouterSettings()


def asked(made: Cluster) -> list[tuple[str, control.Lookup]]:
    """Look-ups so far, by the engine that got them, in the order of their calls."""
    found = [
        (name, message)
        for name, engine in made.engines.items()
        for message in engine.received
        if isinstance(message, control.Lookup)
    ]
    return sorted(found, key=lambda item: item[1].call_id)


def silence(*engines: FakeEngine) -> None:
    for engine in engines:
        engine.unanswered.add(control.Lookup)


def failures(made: Cluster, reason: str) -> bool:
    line = f'lookup_failures_total{{reason="{reason}"}} 1.0'
    return line.encode() in made.service.exposition()


async def test_the_de_that_served_the_last_turn_is_asked_first():
    async with cluster(decode=3) as made:
        tokens = PROMPT
        for turn in range(6):
            tokens = tokens + await made.run(job(f"a{turn}", tokens)) + [7, 8, 9]
        lookups = [engine_id for engine_id, _ in asked(made)]
        assert lookups[1:] == made.calls.decodes[:-1]
        assert len(lookups) == 6


async def test_the_de_that_writes_a_shared_prefix_is_asked_by_another_conversation():
    async with cluster(decode=3) as made:
        shared = PROMPT[:12]  # three full blocks
        for number in range(4):
            await made.run(job(f"a{number}", [*shared, *range(10 * number, 10 * number + 8)]))
        lookups = [engine_id for engine_id, _ in asked(made)]
        assert lookups[1:] == [made.calls.decodes[0]] * 3


async def test_where_several_des_go_on_from_one_prompt_all_are_asked_for_the_longest_continuation():
    async with cluster(decode=3) as made:
        await asyncio.gather(*(made.run(job(f"a{number}", PROMPT)) for number in range(3)))
        assert sorted(made.calls.decodes) == ["d0", "d1", "d2"]
        longer = [*PROMPT, *range(50, 61)]  # seven full blocks, the fifth of which d0 has generated
        made.stored.update(keys_of(longer)[:5])
        silence(*made.engines.values())

        async def answer(writer: FakeEngine, stored_blocks: int) -> None:
            lookup = await writer.saw(control.Lookup, lambda seen: len(seen.keys) == 7)
            writer.send(control.LookupDone(call_id=lookup.call_id, hit_blocks=stored_blocks))

        run = asyncio.create_task(made.run(job("b", longer)))
        known = {"d0": 5, "d1": 4, "d2": 4}
        await asyncio.gather(*(answer(made.engines[name], known[name]) for name in known))
        assert await run == expected(longer, 6)
        assert made.calls.transfers[3].hit_blocks == 5


async def test_a_de_that_is_lost_is_not_asked():
    async with cluster(decode=2) as made:
        await made.run(job("a", PROMPT))
        (writer,) = made.calls.decodes
        await made.settled(writer)
        made.lose(writer)
        before = len(asked(made))
        assert await made.run(job("b", PROMPT)) == expected(PROMPT, 6)
        assert [name for name, _ in asked(made)[before:]] != [writer]
        assert made.calls.transfers[1].hit_blocks == 4


async def test_an_engine_is_given_less_time_than_the_router_has():
    async with cluster(settings=RouterSettings(lookup_timeout_s=4.0)) as made:
        await made.run(job("a", PROMPT))
        ((_, lookup),) = asked(made)
        assert lookup.deadline_s == 1.5  # two engines can be asked


async def test_for_a_silent_engine_another_is_asked_within_the_same_time():
    async with cluster() as made:
        made.stored.update(keys_of(PROMPT))
        silence(made.engines["d0"])
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert [name for name, _ in asked(made)] == ["d0", "p0"]
        assert made.calls.transfers[0].hit_blocks == 4
        assert not failures(made, "timeout")


async def test_without_any_answer_the_prompt_counts_as_not_stored_after_the_time_of_one_look_up():
    async with cluster(prefill=3) as made:
        made.stored.update(keys_of(PROMPT))
        silence(*made.engines.values())
        began_s = asyncio.get_running_loop().time()
        made.calls.gates["prefill"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        waited_s = asyncio.get_running_loop().time() - began_s
        assert SETTINGS.lookup_timeout_s <= waited_s < SETTINGS.lookup_timeout_s + 0.5
        made.calls.gates["prefill"].set()
        assert await run == expected(PROMPT, 6)
        assert made.calls.transfers[0].hit_blocks == 0
        assert failures(made, "timeout")


async def test_a_partial_answer_is_used_and_no_other_engine_is_asked():
    async with cluster() as made:
        made.stored.update(keys_of(PROMPT))
        d0 = made.engines["d0"]
        silence(d0)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        lookup = await d0.saw(control.Lookup)
        d0.send(control.LookupDone(call_id=lookup.call_id, hit_blocks=2, partial=True))
        assert await run == expected(PROMPT, 6)
        assert made.calls.transfers[0].hit_blocks == 2
        assert len(asked(made)) == 1
        assert failures(made, "timeout")


async def test_a_lost_engine_leaves_all_the_time_to_the_next():
    async with cluster(decode=2) as made:
        made.stored.update(keys_of(PROMPT))
        silence(made.engines["d0"], made.engines["d1"])
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        while not asked(made):
            await asyncio.sleep(0.01)
        ((first, _),) = asked(made)
        other = "d1" if first == "d0" else "d0"
        made.lose(first)
        second = await made.engines[other].saw(control.Lookup)
        assert second.deadline_s > 0.7 * SETTINGS.lookup_timeout_s
        made.engines[other].send(control.LookupDone(call_id=second.call_id, hit_blocks=4))
        assert await run == expected(PROMPT, 6)
        assert made.calls.transfers[0].hit_blocks == 4


async def test_engines_that_all_vanish_before_the_look_up_end_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as made:
        exchange = made.service.scheduler.exchange
        opened = exchange.open

        def lose_all(channel: AttemptChannel) -> None:
            opened(channel)
            made.lose("d0")
            made.lose("p0")

        monkeypatch.setattr(exchange, "open", lose_all)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.service.saw_loss("p0")
        await made.revive("d0")
        await made.revive("p0")
        assert await run == expected(PROMPT, 6)
        assert failures(made, "engine-lost")
        assert not asked(made)


async def test_a_late_answer_of_the_engine_asked_first_counts_while_another_is_asked():
    async with cluster() as made:
        made.stored.update(keys_of(PROMPT))
        d0, p0 = made.engines["d0"], made.engines["p0"]
        silence(d0, p0)
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await p0.saw(control.Lookup)
        ((_, lookup), _) = asked(made)
        d0.send(control.LookupDone(call_id=lookup.call_id, hit_blocks=3))
        assert await run == expected(PROMPT, 6)
        assert made.calls.transfers[0].hit_blocks == 3
        assert not failures(made, "timeout")
