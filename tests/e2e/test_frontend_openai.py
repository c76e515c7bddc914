"""The official OpenAI client against the router's HTTP application, without any engine.

A scripted service stands in for the router: it streams the tokens of a known reply, one by one.
Everything between those tokens and the client is vLLM's own code, running as in production.
"""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

pytest.importorskip("vllm")

from openai import APIError, APIStatusError, BadRequestError, NotFoundError, OpenAI
from tests.e2e.frontend_endpoint import BLOCK_TOKENS, REPLY, Endpoint
from tests.guard import GUARD_S
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT

from dualpath.core.blocks import tenant_tag
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError as RefusedError
from dualpath.core.errors import DeadlineError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.core.session_hints import SessionHints
from dualpath.vllm.generate_client import decode_sampling
from dualpath_lab.models.random_models import make_tiny_model


@pytest.fixture(scope="module")
def running():
    endpoint = Endpoint(make_tiny_model("qwen2"))
    yield endpoint
    endpoint.stop()


@pytest.fixture
def endpoint(running):
    running.service.reset()
    return running


@pytest.fixture
def service(endpoint):
    return endpoint.service


@pytest.fixture
def client(endpoint):
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as openai:
        yield openai


def chat(text="hello"):
    return [{"role": "user", "content": text}]


@pytest.fixture
def keep_alive(endpoint):
    """As with ``--vllm-args --sse-keep-alive-interval 1``."""
    endpoint.args.sse_keep_alive_interval = 1
    yield
    endpoint.args.sse_keep_alive_interval = 0


@pytest.mark.parametrize("hold_before", [0, 3])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [("completions", {"prompt": "x"}), ("chat/completions", {"messages": chat()})],
)
def test_a_stream_that_waits_gets_vllms_comments(
    endpoint, service, keep_alive, path, prompt, hold_before
):
    """Before its first token, in the queue and in prefill, and between tokens."""
    service.hold_before = hold_before
    body = {"model": "tiny", "max_tokens": 200, "stream": True, **prompt}
    call = urllib.request.Request(
        f"{endpoint.url}/v1/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    before = 0
    with urllib.request.urlopen(call, timeout=GUARD_S) as response:
        assert response.status == 200
        while before < 2:
            before += response.readline() == SSE_KEEP_ALIVE_COMMENT.encode()[:-1]
        service.goes_on.set()
        lines = response.read().split(b"\n")
    assert service.held.is_set()
    events = [line[6:] for line in lines if line.startswith(b"data: {")]
    assert json.loads(events[-1])["choices"][0]["finish_reason"] == "stop"


def test_models_lists_the_served_name(client):
    models = client.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [("tiny", 2048)]


def test_completion_returns_text_and_usage(client):
    answer = client.completions.create(model="tiny", prompt="go on", max_tokens=200)
    assert answer.choices[0].text == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_token_prompt_reaches_the_service_as_it_is(client, service):
    tokens = [*range(10, 10 + 2 * BLOCK_TOKENS + 3)]
    answer = client.completions.create(
        model="tiny",
        prompt=tokens,
        max_tokens=4,
        extra_body={"return_token_ids": True, "priority": -3},
    )
    (job,) = service.jobs
    assert job.priority == -3
    assert job.prompt_token_ids == tuple(tokens)
    assert job.max_new_tokens == 4
    assert len(job.keys) == 2
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].token_ids) == 4


def test_cached_tokens_are_reported(client, endpoint):
    def cached(source):
        name = "vllm:prompt_tokens_cached_by_source_total"
        labels = f'{{engine="0",model_name="tiny",source="{source}"}}'
        lines = endpoint.get("/metrics")[1].decode().splitlines()
        (value,) = [line.split(" ")[1] for line in lines if line.startswith(f"{name}{labels}")]
        return float(value)

    before = cached("disk")
    answer = client.completions.create(model="tiny", prompt=[5] * 100, max_tokens=2)
    assert answer.usage.prompt_tokens_details.cached_tokens == BLOCK_TOKENS
    assert cached("disk") == before + BLOCK_TOKENS
    assert (cached("device"), cached("external_unspecified")) == (0, 0)


def test_an_orchestrators_hints_arrive_and_all_else_in_transfer_parameters_is_dropped(
    client, service
):
    hint = {"protocol_version": "0.1", "message_id": "m", "actions": []}
    params = {"max_load_tokens": 64, "kv_hint": hint, "dualpath": {"decode_transfer": {}}}
    client.completions.create(
        model="tiny", prompt="x", max_tokens=2, extra_body={"kv_transfer_params": params}
    )
    (job,) = service.jobs
    assert (job.kv_hints.max_load_tokens, job.kv_hints.kv_hint.message_id) == (64, "m")
    sent = decode_sampling(job.payload.sampling, generated=0, max_tokens=2, max_logprobs=20)
    assert "kv_transfer_params" not in (sent.get("extra_args") or {})
    refused = {"kv_transfer_params": {"max_load_tokens": -1}}
    with pytest.raises(BadRequestError, match="max_load_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=2, extra_body=refused)


def test_chat_goes_through_the_chat_template(client, service):
    answer = client.chat.completions.create(model="tiny", messages=chat(), max_tokens=200)
    assert answer.choices[0].message.content == REPLY
    rendered = service.tokenizer.decode(service.jobs[0].prompt_token_ids)
    assert rendered.startswith("<|im_start|>")
    assert rendered.endswith("<|im_start|>assistant\n")


def test_a_streamed_chat_adds_up_to_the_reply(client):
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=chat(),
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == REPLY
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens > 1


def test_a_streamed_completion_adds_up_to_the_reply(client):
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == REPLY


def test_a_tool_call_is_parsed(client, service):
    service.reply = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    function = {"name": "read", "parameters": {"type": "object", "properties": {}}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=chat(),
        max_tokens=200,
        tools=[{"type": "function", "function": function}],
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("read", '{"path": "a"}')
    assert answer.choices[0].finish_reason == "tool_calls"


def test_two_samples_are_two_jobs(client, service):
    answer = client.chat.completions.create(
        model="tiny", messages=chat(), max_tokens=200, n=2, temperature=1.0
    )
    assert [choice.message.content for choice in answer.choices] == [REPLY, REPLY]
    assert len({job.request_id for job in service.jobs}) == 2
    assert len({job.prompt_token_ids for job in service.jobs}) == 1


def test_a_stop_string_cuts_the_text_and_aborts_the_job(client, service):
    service.endless = True
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=1000, stop=["cache, block"]
    )
    assert answer.choices[0].text == "The storage holds the "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "cache, block"
    assert service.closed.wait(GUARD_S)


def test_a_client_that_leaves_a_stream_aborts_the_job(client, service):
    service.endless = True
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=1000, stream=True)
    next(iter(stream))
    stream.close()
    assert service.closed.wait(GUARD_S)


def test_completion_logprobs(client, service):
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 3
    first = service.tokenizer.decode([300])
    assert logprobs.top_logprobs[0][first] == -1.0
    assert len(logprobs.top_logprobs[0]) == 3


@pytest.mark.parametrize("prompt", ["x y z", "x"])
def test_an_echo_has_the_logprobs_of_its_prompt(client, prompt):
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=2, echo=True, logprobs=1
    )
    logprobs, echoed = answer.choices[0].logprobs, answer.usage.prompt_tokens
    assert logprobs.token_logprobs == [None, *[-0.25] * (echoed - 1), -0.5, -0.5]
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert answer.choices[0].text.startswith(prompt)


def test_chat_logprobs_streamed(client):
    stream = client.chat.completions.create(
        model="tiny", messages=chat(), max_tokens=3, logprobs=True, top_logprobs=2, stream=True
    )
    content = [
        entry
        for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.logprob for entry in content] == [-0.5] * 3
    assert [len(entry.top_logprobs) for entry in content] == [2] * 3


def test_sampling_with_state_is_marked_for_the_service(client, service):
    client.completions.create(model="tiny", prompt="x", max_tokens=2, seed=3)
    client.completions.create(model="tiny", prompt="x", max_tokens=2, temperature=0)
    assert [job.first_token_from_pe for job in service.jobs] == [False, True]


def test_session_hints_of_a_client_reach_the_service_by_any_way(client, service):
    xargs = {"session_id": "agent-1", "retain_s": 30, "prefetch": False, "done": True}
    ways: list[dict[str, Any]] = [
        {"extra_body": {"session_id": "agent-1"}},
        {"extra_headers": {"X-Session-ID": "agent-1"}},
        {"extra_body": {"vllm_xargs": xargs}},
    ]
    for way in ways:
        client.chat.completions.create(model="tiny", messages=chat(), max_tokens=2, **way)
    named, headed, hinted = [job.hints for job in service.jobs]
    assert named == headed == SessionHints(session_id="agent-1")
    assert hinted == SessionHints("agent-1", retain_s=30.0, prefetch=False, done=True)
    # A hint is not a sampling parameter and is not sent to engines.
    assert all(job.first_token_from_pe for job in service.jobs)
    sampling = service.jobs[2].payload.sampling
    sent = decode_sampling(sampling, generated=0, max_tokens=2, max_logprobs=20)
    assert "extra_args" not in sent


def test_a_hint_that_cannot_be_is_a_bad_request(client, service):
    with pytest.raises(BadRequestError, match="retain_s"):
        client.completions.create(
            model="tiny", prompt="x", extra_body={"vllm_xargs": {"retain_s": -1}}
        )
    assert service.jobs == []


def test_a_client_may_send_session_hints_between_two_turns(endpoint, service):
    assert call(endpoint, "POST", "agent-1", {"next_turn_s": 5}) == 200
    assert call(endpoint, "DELETE", "agent-1", {"cache_salt": "mine"}) == 200
    assert call(endpoint, "DELETE", "agent-2", {}) == 404
    assert call(endpoint, "POST", "agent-1", {"retain_s": "long"}) == 400
    first, second, _ = service.hinted
    assert first == ("", "agent-1", SessionHints("agent-1", next_turn_s=5.0))
    assert second == (tenant_tag("mine"), "agent-1", SessionHints("agent-1", done=True))


def call(endpoint, method, session_id, body):
    request = urllib.request.Request(
        f"{endpoint.url}/dualpath/v1/sessions/{session_id}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [5] * 3000}, "2048"),
        ({"max_tokens": -1}, "-1"),
        ({"max_tokens": 10**9}, "2048"),
        ({"n": 0}, "n must be at least 1"),
        ({"temperature": 9}, "[0, 2]"),
        ({"logprobs": 21}, "20"),
        ({"prompt": [99999]}, "out of vocabulary"),
        ({"prompt": ""}, "non-empty"),
    ],
)
def test_absurd_requests_are_refused_with_value_and_limit(client, service, options, message):
    with pytest.raises(BadRequestError) as refusal:
        client.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 4, **options})
    assert message in str(refusal.value)
    assert service.jobs == []


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="x")


def test_an_unknown_field_is_ignored_as_vllm_does(client):
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=2, extra_body={"frobnicate": 1}
    )
    assert answer.choices


def test_malformed_json_is_a_bad_request(endpoint):
    request = urllib.request.Request(
        f"{endpoint.url}/v1/completions",
        data=b'{"model": "tiny", ',
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=GUARD_S)
    assert refusal.value.code == 400
    assert json.loads(refusal.value.read())["error"]["type"] == "Bad Request"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RefusedError("prompt of 99 tokens exceeds 64; send less"), 400),
        (EngineLostError("engine pe-0 is lost; restart it"), 503),
        (DeadlineError("request took 600 s; raise the deadline"), 504),
        (RuntimeError("secret internals"), 500),
    ],
)
def test_a_failed_request_has_status_and_message(client, service, error, status):
    service.error = error
    with pytest.raises(APIStatusError) as failure:
        client.completions.create(model="tiny", prompt="x", max_tokens=8)
    assert failure.value.status_code == status
    message = "internal error" if status == 500 else str(error)
    assert message in str(failure.value)
    assert "secret" not in str(failure.value)


def test_a_failed_stream_reports_the_error_in_its_last_chunk(client, service):
    service.error, service.fail_after = EngineLostError("engine de-0 is lost; restart it"), 3
    stream = client.chat.completions.create(
        model="tiny", messages=chat(), max_tokens=200, stream=True
    )
    with pytest.raises(APIError, match="engine de-0 is lost") as failure:
        list(stream)
    assert "503" in str(failure.value.body)


def test_one_failed_sample_ends_its_siblings(client, endpoint, service):
    service.error, service.fail_after = EngineLostError("engine de-0 is lost"), 2
    with pytest.raises(APIStatusError, match="engine de-0"):
        client.completions.create(model="tiny", prompt="x", max_tokens=200, n=3, temperature=1.0)
    assert endpoint.llm.output_processor.request_states == {}
    assert endpoint.llm.output_processor.parent_requests == {}


def test_after_a_failure_the_next_request_is_served(client, service):
    service.error = EngineLostError("engine de-0 is lost")
    with pytest.raises(APIStatusError):
        client.completions.create(model="tiny", prompt="x", max_tokens=8)
    service.error = None
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=200)
    assert answer.choices[0].text == REPLY


def test_health_names_the_missing_role(endpoint, service):
    assert endpoint.get("/health")[0] == 200
    service.registry.live_roles = {Role.PREFILL}
    status, body = endpoint.get("/health")
    assert status == 503
    assert "no live decode engine" in json.loads(body)["reason"]
    assert endpoint.get("/ping")[0] == 503


def test_status_and_metrics(endpoint, client):
    client.completions.create(model="tiny", prompt="x", max_tokens=4)
    assert json.loads(endpoint.get("/dualpath/v1/status")[1])["mode"] == "dualpath"
    metrics = endpoint.get("/metrics")[1].decode()
    assert "dualpath:requests 7" in metrics
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in metrics


def test_oracle_warns_that_its_text_is_worthless(client, service):
    service.registry.mode = Mode.ORACLE
    answer = client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=2)
    assert answer.headers["x-dualpath-mode"] == "oracle"
    assert "meaningless" in answer.headers["x-dualpath-note"]
    service.registry.mode = Mode.DUALPATH
    with client.completions.with_streaming_response.create(
        model="tiny", prompt="x", max_tokens=2, stream=True
    ) as stream:
        assert stream.headers["x-dualpath-mode"] == "dualpath"
        assert "x-dualpath-note" not in stream.headers


def test_operations_on_one_engine_are_refused(endpoint):
    with pytest.raises(NotImplementedError, match="the engine's own server"):
        asyncio.run(endpoint.llm.engine_core.sleep_async(1))
