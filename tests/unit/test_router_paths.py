"""The life of a request along every read path, without faults."""

import asyncio

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import BLOCK_TOKENS, expected, job, keys_of

from dualpath.core import control
from dualpath.core import control as request_messages
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.policy.events import TYPICAL_COMPUTED_WEIGHT
from dualpath.router.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(100, 118))  # four full blocks and two tokens


def stored_blocks(made: Cluster, count: int) -> None:
    made.stored.update(keys_of(PROMPT)[:count])


async def test_without_hits_the_prompt_is_computed_and_persisted():
    async with cluster() as made:
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == 0
        await made.settled()
        assert set(keys_of(PROMPT)) <= made.stored
        assert made.service.status()["counters"]["prompt_tokens"] == len(PROMPT)


async def test_basic_mode_reads_on_the_prefill_side():
    async with cluster(mode="basic") as made:
        stored_blocks(made, 3)
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == 3 * BLOCK_TOKENS
        (run,) = made.calls.transfers[0].hits
        assert (run.side, len(run.slots)) == (Role.PREFILL, 3)
        persist = await made.engines["d0"].saw(request_messages.Persist)
        assert (persist.first_block, persist.keys) == (3, keys_of(PROMPT)[3:])
        await made.settled()


async def test_round_robin_reads_on_both_sides_in_turn():
    async with cluster(mode="round-robin") as made:
        stored_blocks(made, 4)
        for name in ("a", "b"):
            assert await made.run(job(name, PROMPT)) == expected(PROMPT, 6)
        sides = {prefill_transfer.hits[0].side for prefill_transfer in made.calls.transfers}
        assert sides == {Role.PREFILL, Role.DECODE}
        await made.settled()


async def test_a_split_reads_a_prefix_on_one_side_and_the_rest_on_the_other():
    async with cluster(mode="split") as made:
        stored_blocks(made, 4)
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        runs = made.calls.transfers[0].hits
        assert {run.side for run in runs} == {Role.PREFILL, Role.DECODE}
        assert sum(len(run.slots) for run in runs) == 4
        await made.settled()


async def test_a_short_first_part_of_a_split_drops_the_second():
    async with cluster(mode="split") as made:
        stored_blocks(made, 4)
        for engine in made.engines.values():
            engine.read_limit = lambda read: (
                (0, "corrupt") if read.keys[0] == keys_of(PROMPT)[0] else (len(read.keys), None)
            )
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert made.calls.transfers[0].hits == ()
        assert made.service.status()["counters"]["recomputed_tokens"] == 4 * BLOCK_TOKENS


async def test_a_failed_read_shortens_the_hit_and_the_rest_is_stored_again():
    async with cluster() as made:
        stored_blocks(made, 4)
        for engine in made.engines.values():
            engine.read_limit = lambda read: (1, "checksum: block 1")
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == BLOCK_TOKENS
        persist = await made.engines["d0"].saw(request_messages.Persist)
        assert persist.first_block == 1
        assert b'reason="checksum"} 12.0' in made.service.exposition()
        await made.settled()


def reads_of(made: Cluster) -> list[tuple[int, int, int]]:
    """First block, blocks and blocks without window layers of each read there was."""
    return [
        (read.run.blocks.first, read.run.blocks.count, read.run.windowless)
        for engine in made.engines.values()
        for read in engine.received
        if isinstance(read, request_messages.Read)
    ]


async def test_window_layers_are_asked_for_the_last_blocks_of_a_hit_only():
    async with cluster() as made:
        stored_blocks(made, 4)
        await made.run(job("a", PROMPT))
        assert reads_of(made) == [(0, 4, 2)]
        await made.settled()


async def test_a_hit_that_ends_early_is_read_once_more_where_its_windows_are_now():
    """Blocks 0 and 1 were read without their window layers, block 2 is bad: block 0 is looked at
    and has to be whole now, and block 1."""
    async with cluster() as made:
        stored_blocks(made, 4)
        for engine in made.engines.values():
            engine.read_limit = lambda read: (min(len(read.keys), 2), "checksum: block 2")
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == 2 * BLOCK_TOKENS
        assert reads_of(made) == [(0, 4, 2), (0, 2, 0)]
        assert all(run.windowless == 0 for run in made.calls.transfers[0].hits)
        assert b'reason="checksum"} 8.0' in made.service.exposition()
        await made.settled()


async def test_a_split_hit_that_ends_early_is_read_once_more_on_the_side_that_has_it():
    async with cluster(mode="split") as made:
        stored_blocks(made, 4)
        third = keys_of(PROMPT)[2]
        for engine in made.engines.values():
            engine.read_limit = lambda read: (
                (0, "missing") if third in read.keys else (len(read.keys), None)
            )
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert sorted(reads_of(made)) == [(0, 2, 0), (0, 2, 2), (2, 2, 0)]
        assert made.calls.transfers[0].hit_blocks == 2
        await made.settled()


async def test_without_the_windows_of_where_it_ends_now_a_hit_is_none():
    async with cluster() as made:
        stored_blocks(made, 4)
        first_reads: set[str] = set()

        def limit(read: request_messages.Read) -> tuple[int, str | None]:
            again = read.request_id in first_reads
            first_reads.add(read.request_id)
            return (1, "missing") if again else (2, "checksum")

        for engine in made.engines.values():
            engine.read_limit = limit
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert (events[0].cached_tokens, made.calls.transfers[0].hits) == (0, ())
        persist = await made.engines["d0"].saw(request_messages.Persist)
        assert persist.first_block == 0
        assert b'reason="checksum"} 16.0' in made.service.exposition()
        await made.settled()


async def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute():
    async with cluster() as made:
        prompt = PROMPT[:16]
        made.stored.update(keys_of(prompt))
        assert await made.run(job("a", prompt)) == expected(prompt, 6)
        assert made.calls.transfers[0].hit_blocks == 3


async def test_a_job_that_must_not_be_cached_hits_nothing():
    async with cluster() as made:
        stored_blocks(made, 4)
        await made.run(job("a", PROMPT, cacheable=False))
        assert made.calls.transfers[0].hit_blocks == 0
        assert not any(
            isinstance(m, control.Lookup) and m.keys
            for e in made.engines.values()
            for m in e.received
        )


async def test_oracle_reserves_and_reads_nothing_but_records_keys():
    async with cluster(mode="oracle", buffer_blocks=0) as made:
        stored_blocks(made, 3)
        events = await made.events(job("a", PROMPT))
        assert len(events) == 6
        assert events[0].cached_tokens == 3 * BLOCK_TOKENS
        prefill_transfer = made.calls.transfers[0]
        assert (prefill_transfer.hit_blocks, prefill_transfer.hits, prefill_transfer.de_slots) == (
            3,
            (),
            (),
        )
        received = [m for e in made.engines.values() for m in e.received]
        assert not any(isinstance(m, request_messages.Read) for m in received)
        assert all(
            m.reserve_blocks == 0 for m in received if isinstance(m, request_messages.Assign)
        )
        await made.settled()
        assert set(keys_of(PROMPT)) <= made.stored
        assert "meaningless" in made.service.status()["mode_note"]


async def believed_to_be_kept(made: Cluster, engine_id: str, blocks: int) -> None:
    """Report blocks to the router that the engine has evicted when they are requested."""
    stored_blocks(made, blocks)
    cached = tuple(key[: control.CACHE_UPDATE_KEY_BYTES] for key in keys_of(PROMPT)[:blocks])
    made.engines[engine_id].send(control.CacheUpdate(added=cached))
    await made.service.saw(control.CacheUpdate)


async def test_blocks_evicted_at_the_decode_engine_are_read_on_both_sides():
    async with cluster(mode="split") as made:
        await believed_to_be_kept(made, "d0", 4)
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        hits = made.calls.transfers[0].hits
        assert [(run.side, run.blocks.count) for run in hits] == [
            (Role.PREFILL, 2),
            (Role.DECODE, 2),
        ]
        note = made.service.status()["assignments"][-1]
        tokens = [part["tokens"] for part in note["reads"]]
        assert (note["read_reason"], tokens) == ("split", [8, 8])
        await made.settled()
        assert made.service.scheduler.dispatch.idle()


async def test_a_pe_is_notified_of_a_request_once_the_decode_engines_cached_blocks_are_known():
    async with cluster(mode="split") as made:
        await believed_to_be_kept(made, "d0", 4)
        prefill, decode = made.engines["p0"], made.engines["d0"]
        decode.unanswered.add(request_messages.Assign)
        running = asyncio.create_task(made.run(job("a", PROMPT)))
        asked = await decode.saw(request_messages.Assign)
        await made.delivered(prefill)
        assert not any(isinstance(m, request_messages.Assign) for m in prefill.received)
        decode.unanswered.clear()
        decode.answer(asked)
        assert await running == expected(PROMPT, 6)
        await made.settled()


async def test_a_prompt_beyond_the_pe_buffer_is_loaded_as_far_as_it_fits():
    async with cluster(prefill=0, mode="basic") as made:
        await made.add("p0", Role.PREFILL, buffer_blocks=2, mode="basic")
        stored_blocks(made, 4)
        assert await made.run(job("a", PROMPT)) == expected(PROMPT, 6)
        assert made.calls.transfers[0].hit_blocks == 2


@pytest.mark.parametrize(("limit_s", "deadline_s", "loaded"), [(9, 60, 0), (0, 60, 4), (9, 1, 3)])
async def test_a_hit_is_computed_where_storage_takes_longer(limit_s, deadline_s, loaded):
    """Storage reads a token in 3 s.  16 tokens take 48 s, and 3 s to compute, one block 0.75 s."""
    settings = RouterSettings(
        alpha_tokens=1,
        beta_tokens=5 * int(16 * TYPICAL_COMPUTED_WEIGHT) // 3,
        recompute_limit_s=limit_s,
        read_deadline_s=deadline_s,
    )
    async with cluster(settings=settings) as made:
        stored_blocks(made, 4)
        events = await made.events(job("a", PROMPT))
        assert [t for e in events for t in e.token_ids] == expected(PROMPT, 6)
        assert events[0].cached_tokens == loaded * BLOCK_TOKENS
        counters = made.service.status()["counters"]
        assert counters["recomputed_tokens"] == (4 - loaded) * BLOCK_TOKENS
        missed = f'missed_tokens_total{{reason="recompute"}} {(4 - loaded) * BLOCK_TOKENS:.1f}'
        assert (missed.encode() in made.service.exposition()) == (loaded < 4)
        reason = made.service.status()["assignments"][-1]["read_reason"]
        assert (reason == "recompute") == (loaded < 4)
        await made.settled()


@pytest.mark.parametrize("blocks", [5, 6])
async def test_a_buffer_for_one_request_serves_sixteen_concurrent_ones(blocks):
    async with cluster(mode="split", buffer_blocks=blocks) as made:
        stored_blocks(made, 2)
        jobs = [job(f"r{i}", [*PROMPT[:8], i, *PROMPT[9:]]) for i in range(16)]
        answers = await asyncio.gather(*(made.run(j) for j in jobs))
        assert answers == [expected(j.prompt_token_ids, 6) for j in jobs]
        await made.settled()
        assert made.service.scheduler.releases.held == 0


async def test_the_pe_token_ends_a_request_for_one_token_without_decode():
    async with cluster() as made:
        (event,) = await made.events(job("a", PROMPT, max_new_tokens=1))
        assert event.finish_reason == "length"
        assert made.calls.decodes == []
        await made.settled()
        assert set(keys_of(PROMPT)) <= made.stored


async def test_an_end_token_from_the_pe_ends_the_request():
    async with cluster() as made:
        made.calls.end_token = expected(PROMPT, 1)[0]
        (event,) = await made.events(job("a", PROMPT))
        assert event.finish_reason == "stop"
        assert made.calls.decodes == []


async def test_without_the_pe_token_the_de_generates_all():
    async with cluster() as made:
        tokens = await made.run(job("a", PROMPT, first_token_from_pe=False))
        assert tokens == expected(PROMPT, 6)
        assert made.calls.decodes == ["d0"]


async def test_requests_beyond_the_limit_wait_their_turn():
    settings = RouterSettings(max_concurrent_requests=1)
    async with cluster(settings=settings) as made:
        made.calls.gates["prefill"] = asyncio.Event()
        runs = [asyncio.create_task(made.run(job(f"r{i}", PROMPT))) for i in range(3)]
        await made.arrives("prefill")
        assert len(made.calls.prefills) == 1
        status = made.service.status()
        assert (status["running"], status["waiting"]) == (1, 2)
        made.calls.gates["prefill"].set()
        assert await asyncio.gather(*runs) == [expected(PROMPT, 6)] * 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (job("a", PROMPT, max_new_tokens=999), "context holds 1000"),
        (job("a", PROMPT, max_new_tokens=0), "at least 1"),
        (job("a", []), "at least 1"),
        (job("a", list(range(300))), "buffer holds 64"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_its_limit(bad, message):
    async with cluster() as made:
        with pytest.raises(BadRequestError, match=message):
            await made.run(bad)
        assert made.calls.prefills == []


async def test_two_running_requests_cannot_share_an_id():
    async with cluster() as made:
        made.calls.gates["prefill"] = asyncio.Event()
        first = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.arrives("prefill")
        with pytest.raises(BadRequestError, match="in use"):
            await made.run(job("a", PROMPT))
        made.calls.gates["prefill"].set()
        assert await first == expected(PROMPT, 6)


async def test_status_and_records_show_what_happened():
    async with cluster() as made:
        stored_blocks(made, 2)
        made.calls.gates["decode"], made.calls.gate_after_tokens = asyncio.Event(), 1
        run = asyncio.create_task(made.run(job("a", PROMPT)))
        await made.service.saw(request_messages.KvInHbm)
        made.calls.gates["decode"].set()
        await run
        await made.settled()
        status = made.service.status()
        (assignment,) = status["assignments"]
        assert assignment["request_id"] == "a"
        assert assignment["pe_reason"] == "short-queue"
        assert assignment["hit_tokens"] == 2 * BLOCK_TOKENS
        assert status["counters"]["hit_tokens"] == 2 * BLOCK_TOKENS
        assert {e["engine_id"]: e["alive"] for e in status["engines"]} == {"p0": True, "d0": True}
        (record,) = made.service.records
        assert record.outcome == "finished"
        stages = [stage.stage.value for stage in record.stages]
        for stage in ("lookup", "queue", "buffer_wait", "read", "prefill", "handover", "decode"):
            assert stage in stages
        text = made.service.exposition().decode()
        assert 'dualpath:requests_total{outcome="finished"} 1.0' in text
        assert 'dualpath:engines_up{role="decode"} 1.0' in text
