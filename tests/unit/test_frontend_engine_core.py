"""The engine core of the front end: requests become service tasks, tokens come in order."""

import asyncio

import pytest

pytest.importorskip("vllm")

from tests.guard import GUARD_S
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from dualpath.core.errors import BadRequestError, EngineLostError
from dualpath.router.engine_calls import TokenEvent
from dualpath.router.hit_account import HitPlace
from dualpath.vllm.engine_core import RoutedEngineCore


class ListedService:
    """Streams the listed items of a request, raising items that are errors, then waits."""

    def __init__(self, **items):
        self.items = items
        self.closed = []
        self.jobs = []

    async def submit(self, job):
        self.jobs.append(job)
        try:
            for item in self.items[job.request_id]:
                if isinstance(item, Exception):
                    raise item
                if item is ...:
                    await asyncio.Event().wait()
                yield item
        finally:
            self.closed.append(job.request_id)


def request(request_id, tokens=130, **changes):
    fields = {
        "request_id": request_id,
        "prompt_token_ids": list(range(tokens)),
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=8),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**{**fields, **changes})


def core_of(service):
    failures = []
    core = RoutedEngineCore(
        service,
        block_tokens=64,
        stateful_sampling=False,
        on_failure=lambda request_id, error: failures.append((request_id, error)),
    )
    return core, failures


async def outputs_until_idle(core):
    outputs, running = [], None
    while running != 0:
        update = await asyncio.wait_for(core.get_output_async(), GUARD_S)
        outputs += update.outputs
        if update.scheduler_stats is not None:
            running = update.scheduler_stats.num_running_reqs
    return outputs


async def test_tokens_are_output_with_their_finish_reason():
    events = [
        TokenEvent((5,), cached_tokens=64),
        TokenEvent((6, 7)),
        TokenEvent((8,), finish_reason="stop", stop_reason=8),
    ]
    core, failures = core_of(ListedService(r=events))
    await core.add_request_async(request("r"))
    first, second, last = await outputs_until_idle(core)
    assert (first.new_token_ids, second.new_token_ids) == ([5], [6, 7])
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, 8)
    assert failures == []


@pytest.mark.parametrize(
    "fields", [{"extra_args": {"a": "\ud800"}}, {"bad_words": ["\ud800"]}, {"stop": ["\udfff"]}]
)
async def test_a_lone_surrogate_is_the_clients_mistake(fields):
    service = ListedService(r=[TokenEvent((5,), finish_reason="length")])
    core, failures = core_of(service)
    await core.add_request_async(request("r", sampling_params=SamplingParams(**fields)))
    await outputs_until_idle(core)
    ((_, error),) = failures
    assert isinstance(error, BadRequestError)
    assert "lone surrogate" in str(error)
    assert service.jobs == []


async def test_the_first_output_reports_cached_tokens():
    service = ListedService(r=[TokenEvent((5,), finish_reason="length", cached_tokens=64)])
    core, _ = core_of(service)
    await core.add_request_async(request("r"))
    (output,) = await outputs_until_idle(core)
    stats = output.prefill_stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (130, 64)
    assert stats.num_computed_tokens == 66
    assert stats.num_cache_creation_tokens == 64


async def test_the_job_has_the_orchestrators_hints_from_either_place():
    hint = {"protocol_version": "0.1", "message_id": "m", "actions": []}
    arguments = {"kv_transfer_params": {"max_load_tokens": 64, "kv_hint": hint}}
    service = ListedService(
        a=[TokenEvent((5,), finish_reason="length")], b=[TokenEvent((5,), finish_reason="length")]
    )
    core, _ = core_of(service)
    params = SamplingParams(max_tokens=8, extra_args=arguments)
    await core.add_request_async(request("a", sampling_params=params))
    await outputs_until_idle(core)
    envelope = KvHintsEnvelope("0.1", "from-python", [])
    await core.add_request_async(request("b", kv_hints=envelope))
    await outputs_until_idle(core)
    of_http, of_python = (job.kv_hints for job in service.jobs)
    assert (of_http.max_load_tokens, of_http.kv_hint.message_id) == (64, "m")
    assert (of_python.max_load_tokens, of_python.kv_hint.message_id) == (None, "from-python")
    # They change nothing about sampling, and engines do not get them.
    assert service.jobs[0].first_token_from_pe


async def test_a_malformed_hint_is_the_clients_mistake():
    arguments = {"kv_transfer_params": {"max_load_tokens": -1}}
    core, failures = core_of(ListedService(r=[]))
    await core.add_request_async(
        request("r", sampling_params=SamplingParams(max_tokens=8, extra_args=arguments))
    )
    await outputs_until_idle(core)
    ((_, error),) = failures
    assert isinstance(error, BadRequestError)
    assert "max_load_tokens" in str(error)


async def test_hits_are_reported_once_by_vllms_names_of_their_sources():
    sources = {HitPlace.DE_DRAM: 64, HitPlace.PE_STORAGE: 128, HitPlace.DE_STORAGE: 64}
    events = [
        TokenEvent((5,), cached_tokens=256, cached_by_source=sources),
        TokenEvent((6,), finish_reason="length"),
    ]
    core, _ = core_of(ListedService(r=events))
    await core.add_request_async(request("r", tokens=300))
    given, running = [], None
    while running != 0:
        update = await asyncio.wait_for(core.get_output_async(), GUARD_S)
        if (stats := update.scheduler_stats) is not None:
            given.append(stats.connector_prefix_cache_stats)
            running = stats.num_running_reqs
    (hits,) = [each for each in given if each.requests]
    assert (hits.queries, hits.hits) == (300, 256)
    assert hits.hits_by_source == {CacheHitSource.HOST: 64, CacheHitSource.DISK: 192}


async def test_hits_without_known_sources_are_not_attributed_to_one():
    event = TokenEvent((5,), finish_reason="length", cached_tokens=64, cached_by_source={})
    core, _ = core_of(ListedService(r=[event]))
    await core.add_request_async(request("r"))
    update = await asyncio.wait_for(core.get_output_async(), GUARD_S)
    hits = update.scheduler_stats.connector_prefix_cache_stats
    assert hits.hits_by_source == {CacheHitSource.EXTERNAL_UNSPECIFIED: 64}


async def test_the_count_of_requests_is_given_only_when_it_changes():
    class OnRequest:
        def __init__(self):
            self.next = asyncio.Semaphore(1)

        async def submit(self, job):
            for finish_reason in (None, None, "length"):
                await self.next.acquire()
                yield TokenEvent((5,), finish_reason=finish_reason)

    service = OnRequest()
    core, _ = core_of(service)
    await core.add_request_async(request("r"))
    given = []
    for _ in range(3):
        given.append((await core.get_output_async()).scheduler_stats)
        service.next.release()
    first, second, third = given
    assert (first.num_running_reqs, second, third.num_running_reqs) == (1, None, 0)


async def test_a_failure_is_reported_after_the_outputs_before_it():
    lost = EngineLostError("engine lost")
    core, failures = core_of(ListedService(r=[TokenEvent((5,)), lost]))
    await core.add_request_async(request("r"))
    while not core._outputs or core._tasks:
        await asyncio.sleep(0)
    assert [o.new_token_ids for o in (await core.get_output_async()).outputs] == [[5]]
    assert failures == []
    assert (await core.get_output_async()).outputs == []
    assert failures == [("r", lost)]


async def test_a_refused_request_never_reaches_the_service():
    service = ListedService()
    core, failures = core_of(service)
    await core.add_request_async(request("r", resumable=True))
    assert await outputs_until_idle(core) == []
    assert [(name, type(error)) for name, error in failures] == [("r", BadRequestError)]
    assert service.jobs == []


async def test_a_stream_without_a_finish_reason_is_a_failure():
    core, failures = core_of(ListedService(r=[TokenEvent((5,))]))
    await core.add_request_async(request("r"))
    await outputs_until_idle(core)
    await core.get_output_async()
    assert isinstance(failures[0][1], EngineLostError)


async def test_an_abort_closes_the_stream_and_is_not_a_failure():
    service = ListedService(r=[TokenEvent((5,)), ...], other=[...])
    core, failures = core_of(service)
    await core.add_request_async(request("r"))
    await core.add_request_async(request("other"))
    assert (await core.get_output_async()).scheduler_stats.num_running_reqs == 2
    await core.abort_requests_async(["r", "long gone"])
    assert (await core.get_output_async()).scheduler_stats.num_running_reqs == 1
    assert service.closed == ["r"]
    assert failures == []
    await core.aclose()


async def test_shutdown_fails_what_is_running():
    service = ListedService(r=[...])
    core, failures = core_of(service)
    await core.add_request_async(request("r"))
    await asyncio.to_thread(core.shutdown)
    assert core.resources.engine_dead
    await core.aclose()
    assert failures[0][0] == "r"
    assert "shutting down" in str(failures[0][1])


async def test_operations_on_one_engine_are_refused():
    core, _ = core_of(ListedService())
    with pytest.raises(NotImplementedError, match="collective_rpc applies to one engine"):
        await core.collective_rpc_async("method")
    with pytest.raises(AttributeError):
        _ = core.no_such_thing
