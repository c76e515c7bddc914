"""What is counted is what happened: a cluster's scrape after three turns, one with a damaged block.

The prompt is new in the first turn, a full hit in the second and hits three blocks in the third.
"""

import asyncio

import pytest
from prometheus_client.core import GaugeMetricFamily
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import BLOCK_TOKENS, job, keys_of
from tests.unit.scraped_cluster import (
    GENERATED_TOKENS,
    GOOD_BLOCKS,
    PROMPT,
    TURNS,
    Scrape,
    scrape_after_three_turns,
)

from dualpath.core import control
from dualpath.core.cluster import Role
from dualpath.router.observe.engine_metrics import MOVEMENTS, text_format
from dualpath.router.stages import RequestRecord, Stage

BLOCK_BYTES = 4 * 5 * 16
HIT_BLOCKS = 12
PROMPT_BLOCKS = 13
ENGINE_STAGES = {Stage.READ_QUEUE, Stage.STORAGE_READ, Stage.FORWARD, Stage.TRANSFER, Stage.H2D}


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    return asyncio.run(scrape_after_three_turns(tmp_path_factory.mktemp("storage")))


def test_hits_ideal_and_actual_and_the_reason_of_every_miss(scrape: Scrape) -> None:
    def missed(reason: str) -> float:
        return scrape.value("dualpath:missed_tokens_total", reason=reason)

    assert scrape.value("dualpath:prompt_tokens_total") == TURNS * len(PROMPT)
    assert scrape.value("dualpath:ideal_hit_tokens_total") == 2 * 48
    assert scrape.value("dualpath:hit_tokens_total") == 48 + 4 * GOOD_BLOCKS
    assert (missed("new"), missed("tail"), missed("checksum")) == (48, TURNS, 36)
    assert scrape.value("dualpath:missed_tokens_total") == 48 + TURNS + 36
    assert scrape.value("dualpath:recomputed_tokens_total", reason="checksum") == 36
    assert scrape.value("dualpath:verify_failures_total") == 1


def test_every_byte_has_a_step_a_path_a_link_and_a_class(scrape: Scrape) -> None:
    def moved(**labels: str) -> float:
        return scrape.value("dualpath:kv_bytes_total", **labels) / BLOCK_BYTES

    # The second turn is read by the PE, the third by the DE, which has read less so far.
    assert moved(step="4a.1-2") == moved(step="4a.3-4") == moved(step="4a.5-7") == HIT_BLOCKS
    assert moved(path="pe") == 3 * HIT_BLOCKS
    assert moved(step="4b.3-5") == GOOD_BLOCKS
    assert moved(step="8-9") == TURNS * PROMPT_BLOCKS
    assert moved(step="miss") == PROMPT_BLOCKS + 1 + PROMPT_BLOCKS - GOOD_BLOCKS
    assert moved(link="snic") == moved(traffic_class="storage-read") + moved(step="persist")
    assert moved(link="snic", traffic_class="storage-read") * BLOCK_BYTES == scrape.value(
        "dualpath:snic_read_bytes_total"
    )
    assert scrape.labels("dualpath:kv_bytes_total")["step"] == {row.step for row in MOVEMENTS}


def test_every_stage_is_timed_also_those_only_engines_know(scrape: Scrape) -> None:
    def seconds(stage: Stage) -> float:
        return scrape.value("dualpath:stage_seconds_sum", stage=stage.value)

    def count(stage: Stage) -> float:
        return scrape.value("dualpath:stage_seconds_count", stage=stage.value)

    assert {stage: count(stage) for stage in ENGINE_STAGES} == {
        Stage.READ_QUEUE: 2, Stage.STORAGE_READ: 2,
        Stage.FORWARD: TURNS, Stage.TRANSFER: TURNS, Stage.H2D: TURNS,
    }  # fmt: skip
    assert 0 < seconds(Stage.STORAGE_READ) <= seconds(Stage.READ)
    assert 0 <= seconds(Stage.TRANSFER) <= seconds(Stage.FORWARD) <= seconds(Stage.PREFILL)
    assert 0 < seconds(Stage.H2D) <= seconds(Stage.HANDOVER) <= seconds(Stage.DECODE)


def test_times_to_tokens_are_observed_once_per_request(scrape: Scrape) -> None:
    for name in (
        "time_to_first_token_seconds",
        "time_to_second_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
    ):
        assert scrape.value(f"dualpath:{name}_count") == TURNS
    assert scrape.value("dualpath:generation_tokens_total") == TURNS * GENERATED_TOKENS


def test_decisions_their_reasons_and_their_time(scrape: Scrape) -> None:
    decided = scrape.value("dualpath:assignments_total")
    assert decided == scrape.value("dualpath:scheduler_decision_seconds_count") == TURNS
    spent_s = scrape.value("dualpath:scheduler_seconds_total")
    assert spent_s >= scrape.value("dualpath:scheduler_decision_seconds_sum") > 0
    read = {p: scrape.value("dualpath:assigned_read_tokens_total", path=p) for p in ("pe", "de")}
    assert read == {"pe": 48, "de": 48}


def test_engines_are_alive_idle_and_have_verified_what_arrived(scrape: Scrape) -> None:
    assert scrape.value("dualpath:engine_up") == 2
    assert scrape.value("dualpath:engine_losses_total") == 0
    assert 0 <= scrape.value("dualpath:engine_silence_seconds", role="prefill") < 60
    assert scrape.value("dualpath:buffer_usage_ratio") == 0
    assert scrape.value("dualpath:read_queue_tokens") == 0
    assert scrape.value("dualpath:snic_bytes_per_second", role="prefill") == 1e9
    assert scrape.value("dualpath:verified_layer_blocks_total", role="decode") > 0
    assert scrape.value("dualpath:wrong_layer_blocks_total") == 0


def test_odd_names_of_engines_survive_the_text_format() -> None:
    family = GaugeMetricFamily("dualpath:engine_up", "Up.", labels=["engine"])
    names = {'a"b', "c\\d", "e\nf", "plain"}
    for name in names:
        family.add_metric([name], 1)
    parsed = Scrape(text_format([family]).decode())
    assert parsed.labels("dualpath:engine_up")["engine"] == names
    assert parsed.families["dualpath:engine_up"].documentation == "Up."


@pytest.mark.virtual_time
async def test_a_prefill_transfer_is_timed_also_when_all_tokens_come_before_its_report() -> None:
    async with cluster() as made:
        made.engines["d0"].tokens_come_first = True
        made.calls.pause = lambda: asyncio.sleep(0.1)  # before a forward pass and each token
        await made.run(job("a", range(100, 118)))
        now = Scrape(made.service.exposition().decode())

        def seconds(stage: Stage) -> float:
            assert now.value("dualpath:stage_seconds_count", stage=stage.value) == 1
            return now.value("dualpath:stage_seconds_sum", stage=stage.value)

        assert seconds(Stage.HANDOVER) == pytest.approx(0.2)
        assert seconds(Stage.DECODE) == pytest.approx(0.6)


@pytest.mark.virtual_time
async def test_a_request_waits_runs_and_is_no_longer_counted() -> None:
    async with cluster() as made:
        seen: list[tuple[float, float]] = []

        def queues() -> tuple[float, float]:
            now = Scrape(made.service.exposition().decode())
            return now.value("dualpath:requests_waiting"), now.value("dualpath:requests_running")

        async def look() -> None:
            seen.append(queues())

        made.calls.pause = look  # before a forward pass and each token
        for engine in made.engines.values():
            engine.unanswered = {control.Lookup}
        answer = asyncio.create_task(made.run(job("a", range(100, 118), 2)))
        await asyncio.sleep(1e-3)  # of virtual time, in which nothing but the look-up can end
        assert queues() == (1, 0), "it has no engines before its look-up is over"
        await answer
        assert set(seen) == {(0, 1)}
        assert queues() == (0, 0)


@pytest.mark.virtual_time
async def test_a_lost_engine_is_down_and_one_that_left_is_not_missed() -> None:
    async with cluster(prefill=2, decode=2) as made:
        made.lose("p1")
        made.engines["d1"].send(control.Deregister(reason="enough"))
        await made.service.saw_loss("d1")
        now = Scrape(made.service.exposition().decode())
        assert now.value("dualpath:engine_up") == 2
        assert now.labels("dualpath:engine_up")["engine"] == {"p0", "p1", "d0"}
        assert now.value("dualpath:engine_up", engine="p1") == 0
        losses = {r: now.value("dualpath:engine_losses_total", role=r.value) for r in Role}
        assert losses == {Role.PREFILL: 1, Role.DECODE: 0}


@pytest.mark.virtual_time
async def test_evicted_blocks_and_unanswered_look_ups_have_their_own_reasons() -> None:
    prompt = list(range(100, 118))  # four full blocks and two tokens
    async with cluster() as made:
        await made.run(job("a", prompt))
        await made.settled("d0")
        made.stored.difference_update(keys_of(prompt)[3:])
        await made.run(job("b", prompt))
        for engine in made.engines.values():
            engine.unanswered = {control.Lookup}
        await made.run(job("c", prompt))
        now = Scrape(made.service.exposition().decode())
        missed = now.labels("dualpath:missed_tokens_total")["reason"]
        assert missed == {"new", "tail", "gone", "lookup-timeout"}
        blocks = {
            reason: now.value("dualpath:missed_tokens_total", reason=reason) / BLOCK_TOKENS
            for reason in missed - {"tail"}
        }
        assert blocks == {"new": 4, "gone": 1, "lookup-timeout": 4}
        assert now.value("dualpath:ideal_hit_tokens_total") == 8 * BLOCK_TOKENS


def test_a_record_knows_its_gaps_only_from_enough_tokens() -> None:
    times_s = iter((10.0, 11.0, 13.0, 14.0, 16.0, 17.0))
    record = RequestRecord("a", 5, lambda: next(times_s))
    gaps = []
    for _ in range(4):
        record.streamed(1)
        gaps.append((record.ttft_s, record.ttst_s, record.tpot_s))
    assert gaps == [(1.0, None, None), (1.0, 2.0, None), (1.0, 2.0, 1.0), (1.0, 2.0, 1.5)]
    assert record.latency_s is None
    record.close("finished")
    assert record.latency_s == 7.0
