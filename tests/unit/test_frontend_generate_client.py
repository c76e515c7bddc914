"""Calls to an engine's token API, against a server that answers as vLLM does."""

import asyncio
import json

import msgspec
import pytest

pytest.importorskip("vllm")

from aiohttp import web
from tests.guard import GUARD_S
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from dualpath.core.cluster import GroupRank, HostProcess, Role
from dualpath.core.errors import (
    BadRequestError,
    DualPathError,
    EngineLostError,
    IncompatibleError,
)
from dualpath.core.key_cache import KeyCache
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, from_transfer_params
from dualpath.router.engines import EngineInfo
from dualpath.router.token_api.client import RANK_HEADER
from dualpath.router.token_api.wire import GENERATE_PATH
from dualpath.vllm.engine_core import make_job
from dualpath.vllm.generate_client import GenerateClient

PROMPT = [*range(1, 71)]
PREFILL_TRANSFER = PrefillTransfer(
    request_id="r#1",
    prompt_tokens=70,
    hit_blocks=1,
    hit_key_tail=b"\x00\xff" * 16,
    hits=(),
    decode_engine="de-0",
    decode_epoch="e",
    de_slots=(3, 4),
)
DECODE_TRANSFER = DecodeTransfer(request_id="r#1", prompt_tokens=70, slots=(3, 4))


class ScriptedEngine:
    """Answers each call with ``status`` and the next of ``chunks``; records what it received."""

    info: EngineInfo

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.status = 200
        self.chunks = []
        self.endless = False
        self.garbage = b""
        self.called = asyncio.Event()
        self.left = asyncio.Event()

    async def answer(self, request):
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        self.called.set()
        if self.garbage:
            return web.Response(body=self.garbage)
        if not self.bodies[-1].get("stream") or self.status != 200:
            return web.json_response(self.chunks[0], status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for chunk in self.chunks:
                await response.write(_event(chunk))
            while self.endless:
                await response.write(_event(chunk_of(1)))
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        return response


def _event(chunk):
    return f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode()


def chunk_of(*tokens, finish_reason=None, stop_reason=None, **more):
    choice = {
        "index": 0,
        "token_ids": list(tokens),
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "logprobs": None,
    }
    return {"request_id": "x", "choices": [{**choice, **more}], "usage": None}


def error_of(message, code):
    return {"error": {"message": message, "type": "X", "param": None, "code": code}}


@pytest.fixture
async def engine():
    script = ScriptedEngine()
    app = web.Application()
    app.router.add_post(GENERATE_PATH, script.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.info = engine_info(runner.addresses[0][1])
    yield script
    script.endless = False
    await runner.cleanup()


@pytest.fixture
async def calls():
    client = GenerateClient(max_logprobs=20)
    yield client
    await client.aclose()


def engine_info(port):
    return EngineInfo(
        engine_id="de-0",
        epoch="e",
        role=Role.DECODE,
        node="n",
        group="g",
        api_url=f"http://127.0.0.1:{port}/",
        process=HostProcess(),
        order=0,
        hbm_tokens=1,
        buffer_tokens=1,
    )


def job_of(cache_salt=None, trace_headers=None, **options):
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=SamplingParams(**{"max_tokens": 8, **options}),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
        trace_headers=trace_headers,
    )
    return make_job(request, KeyCache(64), stateful_sampling=False)


async def collect(events):
    return [event async for event in events]


async def test_prefill_sends_the_transfer_and_returns_the_first_token(engine, calls):
    engine.chunks = [chunk_of(42, finish_reason="length")]
    event = await calls.prefill(engine.info, job_of(cache_salt="tenant"), PREFILL_TRANSFER)
    assert (event.token_ids, event.finish_reason) == ((42,), "length")
    (body,) = engine.bodies
    assert body["token_ids"] == PROMPT
    assert body["cache_salt"] == "tenant"
    assert body["request_id"] == PREFILL_TRANSFER.request_id
    assert body["sampling_params"]["max_tokens"] == 1
    assert from_transfer_params(body["kv_transfer_params"]) == PREFILL_TRANSFER


@pytest.mark.parametrize(("at_server", "header"), [(None, None), (1, "1")])
async def test_a_request_to_a_server_of_several_ranks_names_the_rank(
    engine, calls, at_server, header
):
    engine.chunks = [chunk_of(42, finish_reason="length")]
    place = GroupRank("de-0", "e", 1, 2, at_server)
    info = msgspec.structs.replace(engine.info, dp=place)
    await calls.prefill(info, job_of(), PREFILL_TRANSFER)
    assert engine.headers[0].get(RANK_HEADER) == header


async def test_a_first_token_that_the_decode_engine_samples_is_not_returned(engine, calls):
    engine.chunks = [chunk_of(42, finish_reason="stop")]
    event = await calls.prefill(engine.info, job_of(seed=1), PREFILL_TRANSFER)
    assert (event.token_ids, event.finish_reason) == ((), "length")


async def test_prompt_logprobs_come_from_the_prefill_engine(engine, calls):
    answer = chunk_of(42, finish_reason="length")
    answer["prompt_logprobs"] = [None, {"7": {"logprob": -2.0, "rank": 3, "decoded_token": None}}]
    engine.chunks = [answer]
    job = job_of(prompt_logprobs=0)
    await calls.prefill(engine.info, job, PREFILL_TRANSFER)
    assert job.payload.prompt_logprobs.logprob_token_ids.tolist() == [[7]]


async def test_decode_continues_after_the_first_token(engine, calls):
    engine.chunks = [
        chunk_of(5),
        chunk_of(6, 7),
        chunk_of(8, finish_reason="stop", stop_reason=8),
        "[DONE]",
    ]
    job = job_of(trace_headers={"traceparent": "00-1-2-03"})
    events = await collect(calls.decode(engine.info, job, DECODE_TRANSFER, (42,)))
    # How many tokens an event has depends on what arrives together.
    assert [token for event in events for token in event.token_ids] == [5, 6, 7, 8]
    assert events[-1].token_ids == (8,)
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", 8)
    (body,) = engine.bodies
    assert body["token_ids"] == [*PROMPT, 42]
    assert body["sampling_params"]["max_tokens"] == 7
    assert from_transfer_params(body["kv_transfer_params"]) == DECODE_TRANSFER
    assert engine.headers[0]["traceparent"] == "00-1-2-03"


@pytest.mark.parametrize(("own", "asked"), [(1, None), (8, 8)])
async def test_a_router_that_streams_chunks_requests_chunks_from_engines(engine, own, asked):
    engine.chunks = [chunk_of(9, finish_reason="length"), "[DONE]"]
    calls = GenerateClient(max_logprobs=20, stream_interval=own)
    await collect(calls.decode(engine.info, job_of(), DECODE_TRANSFER, (42,)))
    await calls.prefill(engine.info, job_of(), PREFILL_TRANSFER)
    await calls.aclose()
    decode, prefill = engine.bodies
    assert decode["sampling_params"].get("stream_interval") == asked
    assert "stream_interval" not in prefill["sampling_params"]


async def test_a_retried_job_requests_only_the_remaining_tokens(engine, calls):
    engine.chunks = [chunk_of(9, finish_reason="length"), "[DONE]"]
    job = job_of(min_tokens=4).continued((42, 43, 44))
    await collect(calls.decode(engine.info, job, DECODE_TRANSFER, ()))
    (body,) = engine.bodies
    assert body["token_ids"] == [*PROMPT, 42, 43, 44]
    assert body["sampling_params"]["max_tokens"] == 5
    assert body["sampling_params"]["min_tokens"] == 1


async def test_a_retry_that_lost_sampling_state_fails(engine, calls):
    job = job_of(structured_outputs=StructuredOutputsParams(regex="a+")).continued((42,))
    with pytest.raises(DualPathError, match="cannot continue on another engine"):
        await calls.prefill(engine.info, job, PREFILL_TRANSFER)
    assert engine.bodies == []


async def test_a_line_of_a_megabyte_is_read(engine, calls):
    top = [{"token_id": n, "logprob": -1.0, "rank": n + 1} for n in range(20_000)]
    logprobs = {"content": [{"token_id": 0, "logprob": -1.0, "rank": 1, "top_logprobs": top}]}
    engine.chunks = [chunk_of(0, finish_reason="length", logprobs=logprobs), "[DONE]"]
    (event,) = await collect(calls.decode(engine.info, job_of(logprobs=-1), DECODE_TRANSFER, ()))
    assert event.payload.logprob_token_ids.shape == (1, 20_001)


async def test_closing_the_iterator_closes_the_stream(engine, calls):
    engine.endless = True
    events = calls.decode(engine.info, job_of(), DECODE_TRANSFER, ())
    await anext(events)
    await events.aclose()
    await asyncio.wait_for(engine.left.wait(), GUARD_S)


async def test_cancelling_the_reader_closes_the_stream(engine, calls):
    engine.endless = True
    reader = asyncio.create_task(collect(calls.decode(engine.info, job_of(), DECODE_TRANSFER, ())))
    await asyncio.wait_for(engine.called.wait(), GUARD_S)
    reader.cancel()
    await asyncio.wait_for(engine.left.wait(), GUARD_S)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequestError),
        (422, BadRequestError),
        (403, IncompatibleError),
        (404, IncompatibleError),
        (500, EngineLostError),
        (503, EngineLostError),
    ],
)
async def test_a_refusal_names_the_engine_s_reason(engine, calls, status, kind):
    engine.status, engine.chunks = status, [error_of("prompt of 70 exceeds 64", status)]
    with pytest.raises(kind, match="prompt of 70 exceeds 64"):
        await calls.prefill(engine.info, job_of(), PREFILL_TRANSFER)
    with pytest.raises(kind, match="prompt of 70 exceeds 64"):
        await collect(calls.decode(engine.info, job_of(), DECODE_TRANSFER, ()))


async def test_an_answer_of_another_protocol_is_named(engine, calls):
    engine.garbage = b"<html>"
    with pytest.raises(IncompatibleError, match="vLLM's token API"):
        await calls.prefill(engine.info, job_of(), PREFILL_TRANSFER)


async def test_an_error_chunk_in_a_stream_is_an_error(engine, calls):
    engine.chunks = [chunk_of(5), error_of("KV load failed", 500), "[DONE]"]
    with pytest.raises(EngineLostError, match="KV load failed"):
        await collect(calls.decode(engine.info, job_of(), DECODE_TRANSFER, ()))


async def test_a_broken_stream_is_a_lost_engine(engine, calls):
    engine.chunks = [chunk_of(5)]
    events = calls.decode(engine.info, job_of(), DECODE_TRANSFER, ())
    assert (await anext(events)).token_ids == (5,)
    with pytest.raises(EngineLostError, match="broke off"):
        await anext(events)


async def test_a_refused_connection_is_a_lost_engine(engine, calls, unused_port):
    with pytest.raises(EngineLostError, match="does not answer"):
        await calls.prefill(engine_info(unused_port), job_of(), PREFILL_TRANSFER)


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]
