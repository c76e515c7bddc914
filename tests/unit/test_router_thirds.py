"""Third DEs of a request: reserved, read from, released once, and what happens when one fails.

Of three DEs d0 serves the request; d1 and d2 are third DEs.  Ten blocks of its prompt are stored.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import GUARD_S, FakeEngine, expected, job, keys_of

from dualpath.core import control
from dualpath.policy.event_log import difference
from dualpath.policy.events import SlotsGranted
from dualpath.router.scheduler.event_recorder import read_event_log
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

#: Ten full blocks and one token.
PROMPT = list(range(1, 42))
BLOCKS = 10
TIMEOUT_S = 5.0


@contextlib.asynccontextmanager
async def with_thirds(thirds: int = 2, log: str = "", **options: Any) -> AsyncIterator[Cluster]:
    settings = RouterSettings(third_engine_reads=thirds, engine_timeout_s=TIMEOUT_S, event_log=log)
    options = {"decode": 3, "mode": "split", **options}
    async with cluster(settings=settings, **options) as made:
        made.stored.update(keys_of(PROMPT)[:BLOCKS])
        yield made


def sent(engine: FakeEngine, kind: type[control.Message]) -> list[Any]:
    return [message for message in engine.received if isinstance(message, kind)]


def reads(made: Cluster, number: int = -1) -> dict[str, int]:
    """How many tokens each third engine serves, and each side, in an assignment."""
    found: dict[str, int] = {}
    for run in made.service.status()["assignments"][number]["reads"]:
        where = run.get("third_engine", run["side"])
        found[where] = found.get(where, 0) + run["tokens"]
    return found


async def ends_well(made: Cluster) -> None:
    """Nothing is held anywhere."""
    await made.settled()
    scheduler = made.service.scheduler
    assert scheduler.releases.held == 0
    assert scheduler.idle
    assert all(not engine.quarantined for engine in made.engines.values())


async def test_third_engines_read_a_part_and_release_it_when_the_prompt_is_computed() -> None:
    async with with_thirds() as made:
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == BLOCKS * 4
        assert sum(reads(made).values()) == BLOCKS * 4
        at_decode = sum(tokens for where, tokens in reads(made).items() if where != "prefill")
        assert events[0].cached_by_source == {
            "pe-storage": reads(made)["prefill"],
            "de-storage": at_decode,
        }
        assert {"d1", "d2"} < reads(made).keys()
        (transfer,) = made.calls.transfers
        assert [third.engine_id for third in transfer.thirds] == ["d1", "d2"]
        for name in ("d1", "d2"):
            third = made.engines[name]
            kinds = [type(m) for m in third.received if getattr(m, "request_id", "") == "a"]
            assert kinds == [control.ReserveThird, control.Read, control.Release]
            assert not third.tenants
        await ends_well(made)


async def test_without_the_setting_no_message_names_third_engines() -> None:
    async with with_thirds(0) as made:
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        (assign,) = sent(made.engines["d0"], control.Assign)
        assert assign.read is not None, "its read begins with the grant"
        assert made.calls.transfers[0].thirds == ()
        assert not [m for e in made.engines.values() for m in sent(e, control.ReserveThird)]
        await ends_well(made)


@pytest.mark.parametrize("mode", ["basic", "layerwise", "round-robin"])
async def test_baselines_have_no_third_engines(mode: str) -> None:
    async with with_thirds(mode=mode) as made:
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert not [m for e in made.engines.values() for m in sent(e, control.ReserveThird)]
        await ends_well(made)


async def test_what_a_third_engine_caches_is_not_read() -> None:
    async with with_thirds(1) as made:
        await made.caches("d2", keys_of(PROMPT)[:BLOCKS])
        # d2 would be chosen for what it caches.
        made.service.scheduler.pause_engine("d2", paused=True)
        first = asyncio.create_task(made.run(job("a", PROMPT)))
        made.engines["d0"].unanswered = {control.Assign}
        assign = await made.engines["d0"].saw(control.Assign)
        made.service.scheduler.pause_engine("d2", paused=False)
        made.engines["d0"].unanswered = set()
        made.engines["d0"].answer(assign)
        assert await first == expected(PROMPT, 6)
        assert reads(made) == {"d2": BLOCKS * 4}
        (reserve,) = sent(made.engines["d2"], control.ReserveThird)
        assert (len(reserve.keys), reserve.cached_blocks) == (BLOCKS, BLOCKS)
        assert not [m for e in made.engines.values() for m in sent(e, control.Read)]
        await ends_well(made)


async def test_a_third_engine_that_refuses_is_left_out_and_the_others_are_released() -> None:
    async with with_thirds() as made:
        made.engines["d1"].third_refusal = "its buffer is full"
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert reads(made).keys() == {"prefill", "decode"}
        (release,) = sent(made.engines["d2"], control.Release)
        assert release.request_id == "a"
        assert not sent(made.engines["d2"], control.Read)
        assert len(made.calls.prefills) == 1
        await ends_well(made)


async def test_a_third_engine_that_does_not_answer_is_left_out() -> None:
    async with with_thirds() as made:
        made.engines["d1"].unanswered = {control.ReserveThird}
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert reads(made).keys() == {"prefill", "decode"}
        await ends_well(made)


async def test_a_third_engine_that_reads_too_little_costs_an_attempt_that_does_not_count() -> None:
    async with with_thirds() as made:
        made.engines["d1"].read_limit = lambda read: (1, "deadline")
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == BLOCKS * 4
        (record,) = made.service.records
        assert (record.attempts, record.failures) == (2, [])
        assert reads(made).keys() == {"prefill", "decode"}
        assert [transfer.request_id for transfer in made.calls.transfers] == ["a.2"]
        await ends_well(made)


async def kill(made: Cluster, name: str) -> None:
    await made.engines[name].kill()
    made.lose(name, certain=True)


async def restart(made: Cluster, name: str) -> None:
    await kill(made, name)
    await made.revive(name)


async def lose_session(made: Cluster, name: str) -> None:
    made.lose(name)


LOSSES = [kill, restart, lose_session]


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_third_engine_that_is_lost_between_grant_and_read_costs_an_attempt(
    loss: Callable[[Cluster, str], Any],
) -> None:
    async with with_thirds() as made:
        made.engines["d1"].unanswered = {control.Read}
        answer = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.engines["d1"].saw(control.Read)
        await loss(made, "d1")
        assert await answer == expected(PROMPT, 6)
        assert [transfer.request_id for transfer in made.calls.transfers] == ["a.2"]
        assert reads(made).keys() == {"prefill", "decode"}
        if loss is not kill:
            await ends_well(made)


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_third_engine_that_is_lost_while_the_pe_loads_costs_an_attempt(
    loss: Callable[[Cluster, str], Any],
) -> None:
    async with with_thirds() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        answer = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        await loss(made, "d1")
        await made.engines["d2"].saw(control.Release)
        made.calls.gates["prefill"].set()
        assert await answer == expected(PROMPT, 6)
        assert made.calls.transfers[-1].thirds == ()
        if loss is not kill:
            await ends_well(made)


async def test_a_third_engine_that_is_lost_after_the_prompt_is_computed_costs_nothing() -> None:
    async with with_thirds() as made:
        made.calls.gates["decode"] = asyncio.Event()
        answer = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("decode")
        await restart(made, "d1")
        made.calls.gates["decode"].set()
        assert await answer == expected(PROMPT, 6)
        assert len(made.calls.transfers) == 1
        await ends_well(made)


async def test_no_token_is_sent_before_each_third_engine_has_confirmed_that_it_held_its_slots() -> (
    None
):
    """Its session may be over without anyone knowing, and its slots may have other blocks."""
    async with with_thirds() as made:
        made.engines["d1"].unanswered = {control.Release}
        stream = made.service.submit(job("a", PROMPT))
        first = asyncio.ensure_future(anext(stream))
        release = await made.engines["d1"].saw(control.Release)
        await made.delivered(made.engines["d1"])
        assert not first.done()
        made.engines["d1"].unanswered = set()
        made.engines["d1"].answer(release)
        assert (await first).token_ids == (expected(PROMPT, 1)[0],)
        assert [t async for e in stream for t in e.token_ids] == expected(PROMPT, 6)[1:]
        (record,) = made.service.records
        assert record.attempts == 1
        await ends_well(made)


async def test_a_third_engine_that_never_confirms_costs_an_attempt_that_does_not_count() -> None:
    async with with_thirds() as made:
        made.engines["d1"].unanswered = {control.Release}
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        (record,) = made.service.records
        assert (record.attempts, record.failures) == (2, [])


async def test_a_pe_that_could_not_load_costs_an_attempt_that_does_not_count() -> None:
    async with with_thirds() as made:
        made.calls.gives_up_once, made.calls.send_failure = "abort", "a transfer with d1 failed"
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        (record,) = made.service.records
        assert (record.attempts, record.failures) == (2, [])
        assert made.calls.transfers[-1].thirds == ()
        await ends_well(made)


@pytest.mark.parametrize("silent", [False, True])
async def test_slots_of_third_engines_stay_until_the_pe_has_ended_its_loads_or_is_late(
    silent: bool,
) -> None:
    async with with_thirds() as made:
        p0, d1 = made.engines["p0"], made.engines["d1"]
        made.calls.gates["prefill"] = asyncio.Event()
        answer = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        p0.unanswered = {control.Release}
        answer.cancel()
        release = await p0.saw(control.Release)
        await made.delivered(d1)
        assert not sent(d1, control.Release)
        if not silent:
            p0.unanswered = set()
            p0.answer(release)
        await asyncio.wait_for(d1.saw(control.Release), GUARD_S)
        await made.delivered(d1)
        assert len(sent(d1, control.Release)) == 1
        assert d1.idle()
        p0.unanswered = set()
        p0.answer(release)
        await ends_well(made)


async def test_answers_that_come_twice_or_late_change_nothing() -> None:
    async with with_thirds() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        answer = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        for name in ("d1", "d2"):
            made.engines[name].send(control.Reserved("a", (60, 61), 0.0))
            made.engines[name].send(control.ThirdRefused("a", "late"))
        await made.delivered(made.engines["d1"])
        made.calls.gates["prefill"].set()
        assert await answer == expected(PROMPT, 6)
        made.engines["d1"].send(control.Released("a"))
        await made.delivered(made.engines["d1"])
        assert len(made.calls.transfers) == 1
        await ends_well(made)


async def test_the_event_log_of_a_router_with_third_engines_gives_the_same_decisions_again(
    tmp_path: Path,
) -> None:
    """Served, refused and cached: each plan and each re-plan is recorded."""
    log = tmp_path / "events.jsonl"
    async with with_thirds(log=str(log)) as made:
        await made.run(job("a", PROMPT))
        made.engines["d1"].third_refusal = "its buffer is full"
        await made.run(job("b", PROMPT))
        made.engines["d1"].third_refusal = ""
        await made.caches("d2", keys_of(PROMPT)[:BLOCKS])
        await made.run(job("c", PROMPT))
        await ends_well(made)
    recorded = read_event_log(log)
    assert difference(recorded) is None
    planned = [
        (entry.event.request_id, entry.event.use_thirds, bool(made.thirds))
        for entry in recorded.entries
        if isinstance(entry.event, SlotsGranted)
        for made in entry.effects.assignments
    ]
    # The second plan of "b" is to be without reads by third engines, and thus without any.
    assert planned[:3] == [("a", True, True), ("b", True, True), ("b", True, False)]
