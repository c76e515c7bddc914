"""Sampling parameters and logprobs are unchanged on the way to an engine and back."""

import json

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import EngineCoreRequest

from dualpath.core.errors import BadRequestError
from dualpath.core.key_cache import KeyCache
from dualpath.router.token_api.wire import ChoiceLogprobs, Logprob, PromptLogprob, SampledLogprob
from dualpath.vllm.engine_core import can_continue, is_stateless, make_job
from dualpath.vllm.generate_client import (
    ROUTER_SIDE_FIELDS,
    decode_sampling,
    prefill_sampling,
    prompt_logprobs,
    sampled_logprobs,
)

EVERYTHING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 17,
    "min_p": 0.01,
    "seed": 1234,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.125,
    "stop_token_ids": [5, 9],
    "ignore_eos": True,
    "max_tokens": 16,
    "min_tokens": 3,
    "logprobs": 4,
    "logit_bias": {7: -1.5, 11: 2.0},
    "allowed_token_ids": [3, 4, 5],
    "bad_words": ["never"],
    "structured_outputs": StructuredOutputsParams(json={"type": "object"}),
    "extra_args": {"own": {"deep": [1, "two"]}},
    "thinking_token_budget": 50,
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3),
}

ROUTER_SIDE = {
    "stop": ["END", "\n\n"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "output_kind": RequestOutputKind.DELTA,
    "stream_interval": 4,
    "skip_clone": True,
}

MEMORY = KeyCache(64)


def at_the_engine(fields):
    """The parameters an engine decodes from the JSON: its own parser and its own defaults."""
    body = json.loads(msgspec.json.encode({"token_ids": [1, 2], "sampling_params": fields}))
    request = GenerateRequest.model_validate(body)
    assert request.is_sampling_param_provided("max_tokens")
    return request.sampling_params


def test_every_parameter_that_affects_tokens_is_sent_unchanged():
    sent = SamplingParams(**EVERYTHING, **ROUTER_SIDE)
    received = at_the_engine(decode_sampling(sent, generated=0, max_tokens=16, max_logprobs=20))
    for name in set(EVERYTHING) - {"logprobs"}:
        assert getattr(received, name) == getattr(sent, name), name
    assert received.logprobs == sent.logprobs + 1


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_each_single_parameter_is_sent_unchanged(name):
    sent = SamplingParams(**{"max_tokens": 16, name: EVERYTHING[name]})
    received = at_the_engine(decode_sampling(sent, generated=0, max_tokens=16, max_logprobs=4))
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in ROUTER_SIDE_FIELDS | {"detokenize"}:
            assert getattr(received, field.name) == getattr(sent, field.name), field.name


def test_text_stays_at_the_router():
    fields = decode_sampling(
        SamplingParams(max_tokens=4, **ROUTER_SIDE), generated=0, max_tokens=4, max_logprobs=20
    )
    assert fields.pop("stream_interval") == ROUTER_SIDE["stream_interval"]
    assert fields == {"max_tokens": 4, "min_tokens": 0, "detokenize": False, "n": 1}


@pytest.mark.parametrize(
    ("clients", "routers", "engines"), [(None, 1, 1), (4, 1, 4), (None, 8, 8), (4, 8, 8)]
)
def test_engines_collect_as_many_tokens_as_the_router(clients, routers, engines):
    sent = SamplingParams(max_tokens=16, stream_interval=clients)
    fields = decode_sampling(
        sent, generated=0, max_tokens=16, max_logprobs=20, stream_interval=routers
    )
    assert (at_the_engine(fields).stream_interval or 1) == engines


def test_a_client_cannot_send_transfer_parameters_to_an_engine():
    forged = {"kv_transfer_params": {"dualpath": {}}, "ec_transfer_params": {}, "own": 1}
    sent = SamplingParams(max_tokens=4, extra_args=forged)
    fields = decode_sampling(sent, generated=0, max_tokens=4, max_logprobs=20)
    assert fields["extra_args"] == {"own": 1}


def test_prefill_samples_one_token_with_the_same_distribution():
    sent = SamplingParams(temperature=0.7, max_tokens=40, logprobs=2, prompt_logprobs=1)
    received = at_the_engine(prefill_sampling(sent, first_token=True, max_logprobs=20))
    assert (received.max_tokens, received.min_tokens) == (1, 0)
    assert (received.temperature, received.logprobs, received.prompt_logprobs) == (0.7, 3, 1)


def test_prefill_with_a_discarded_token_needs_no_sampling_state():
    sent = SamplingParams(max_tokens=40, seed=1, structured_outputs=StructuredOutputsParams("{}"))
    received = at_the_engine(prefill_sampling(sent, first_token=False, max_logprobs=20))
    assert received.max_tokens == 1
    assert received.seed is None
    assert received.structured_outputs is None


def test_decode_continues_where_earlier_tokens_ended():
    sent = SamplingParams(max_tokens=40, min_tokens=10, prompt_logprobs=3)
    received = at_the_engine(decode_sampling(sent, generated=4, max_tokens=36, max_logprobs=20))
    assert (received.max_tokens, received.min_tokens) == (36, 6)
    assert received.prompt_logprobs is None
    assert not received.skip_reading_prefix_cache


def position(token, rank, *others):
    own = Logprob(token, -float(rank), rank)
    return SampledLogprob(token, -float(rank), rank, [own, *(Logprob(*o) for o in others)])


def test_logprob_rows_are_those_of_the_sampler():
    wire = ChoiceLogprobs([position(8, 2, (5, -1.0, 1), (9, -3.0, 3))])
    lists = sampled_logprobs(wire, SamplingParams(logprobs=2))
    assert lists is not None
    assert lists.logprob_token_ids.tolist() == [[8, 5, 8]]
    assert lists.logprobs.tolist() == [[-2.0, -1.0, -2.0]]
    assert lists.sampled_token_ranks.tolist() == [2]


def test_a_sampled_token_outside_the_top_does_not_displace_a_candidate():
    wire = ChoiceLogprobs([position(8, 40, (5, -1.0, 1), (9, -3.0, 2))])
    lists = sampled_logprobs(wire, SamplingParams(logprobs=2))
    assert lists is not None
    assert lists.logprob_token_ids.tolist() == [[8, 5, 9]]


def test_without_candidates_only_the_sampled_token_remains():
    lists = sampled_logprobs(ChoiceLogprobs([position(8, 3)]), SamplingParams(logprobs=0))
    assert lists is not None
    assert lists.logprob_token_ids.tolist() == [[8]]
    assert sampled_logprobs(None, SamplingParams(logprobs=2)) is None
    assert sampled_logprobs(ChoiceLogprobs([position(8, 3)]), SamplingParams()) is None


def test_without_a_limit_an_extra_candidate_is_requested_as_well():
    sent = SamplingParams(max_tokens=4, logprobs=50)
    assert decode_sampling(sent, generated=0, max_tokens=4, max_logprobs=-1)["logprobs"] == 51
    assert decode_sampling(sent, generated=0, max_tokens=4, max_logprobs=50)["logprobs"] == 50


@pytest.mark.parametrize(
    "params",
    [SamplingParams(logprob_token_ids=[9, 5, 9]), SamplingParams(logprobs=2, max_tokens=4)],
    ids=["named", "ranked"],
)
def test_prefill_and_decode_engines_are_asked_for_the_same_logprobs(params):
    prefill = prefill_sampling(params, first_token=True, max_logprobs=20)
    decode = decode_sampling(params, generated=0, max_tokens=4, max_logprobs=20)
    for name in ("logprobs", "logprob_token_ids"):
        assert prefill.get(name) == decode.get(name)


def test_named_logprobs_leave_room_for_the_sampled_token():
    sent = SamplingParams(max_tokens=4, logprob_token_ids=[9, 5])
    received = at_the_engine(decode_sampling(sent, generated=0, max_tokens=4, max_logprobs=20))
    assert (received.logprob_token_ids, received.logprobs) == ([9, 5, 9], 3)
    # The engine sends the sampled token first, then the named ones; their ranks are positions.
    wire = ChoiceLogprobs([position(8, 40, (9, -3.0, 1), (5, -1.0, 2))])
    lists = sampled_logprobs(wire, sent)
    assert lists is not None
    assert lists.logprob_token_ids.tolist() == [[8, 9, 5]]
    assert lists.logprobs.tolist() == [[-40.0, -3.0, -1.0]]
    assert lists.sampled_token_ranks.tolist() == [40]


def test_too_many_named_logprobs_are_refused():
    sent = SamplingParams(max_tokens=4, logprob_token_ids=list(range(20)))
    with pytest.raises(BadRequestError, match="20 tokens, but engines return at most 19"):
        decode_sampling(sent, generated=0, max_tokens=4, max_logprobs=20)
    unlimited = decode_sampling(sent, generated=0, max_tokens=4, max_logprobs=-1)
    assert unlimited["logprobs"] == 21


def test_prompt_logprobs_skip_the_first_position():
    wire = [
        None,
        {"7": PromptLogprob(-4.0, 9), "5": PromptLogprob(-1.0, 1)},
        {"5": PromptLogprob(-0.5, 1)},
    ]
    tensors = prompt_logprobs(wire, 1)
    assert tensors is not None
    assert tensors.logprob_token_ids.tolist() == [[7, 5], [5, 5]]
    assert tensors.selected_token_ranks.tolist() == [9, 1]


def request(**changes):
    fields = {
        "request_id": "r",
        "prompt_token_ids": list(range(130)),
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=8),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**{**fields, **changes})


def test_a_job_carries_the_keys_of_its_full_blocks():
    job = make_job(request(), MEMORY, stateful_sampling=False)
    assert (job.prompt_tokens, job.max_new_tokens, len(job.keys)) == (130, 8, 2)
    assert job.keys_for(job.prompt_token_ids) == list(job.keys)
    salted = make_job(request(cache_salt="tenant"), MEMORY, stateful_sampling=False)
    assert not set(job.keys) & set(salted.keys)
    assert salted.keys_for(salted.prompt_token_ids) == list(salted.keys)


@pytest.mark.parametrize(
    ("options", "first_from_pe", "survives_a_retry"),
    [
        ({}, True, True),
        ({"temperature": 0.0, "stop": ["x"], "logit_bias": {3: 1.0}}, True, True),
        ({"allowed_token_ids": [1, 2]}, True, True),
        ({"min_tokens": 2}, False, True),
        ({"seed": 1}, False, False),
        ({"presence_penalty": 0.1}, False, False),
        ({"frequency_penalty": 0.1}, False, False),
        ({"repetition_penalty": 1.1}, False, False),
        ({"bad_words": ["x"]}, False, False),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, False, False),
        ({"thinking_token_budget": 3}, False, False),
        ({"extra_args": {"own": 1}}, False, False),
    ],
)
def test_sampling_with_state_starts_on_the_decode_engine(options, first_from_pe, survives_a_retry):
    params = SamplingParams(max_tokens=8, **options)
    assert is_stateless(params) is first_from_pe
    assert can_continue(params) is survives_a_retry
    job = make_job(request(sampling_params=params), MEMORY, stateful_sampling=False)
    assert job.first_token_from_pe is first_from_pe
    assert not make_job(
        request(sampling_params=params), MEMORY, stateful_sampling=True
    ).first_token_from_pe


def test_prompt_logprobs_ask_for_a_full_computation():
    params = SamplingParams(max_tokens=8, prompt_logprobs=1)
    assert not make_job(request(sampling_params=params), MEMORY, stateful_sampling=False).cacheable


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_embeds": object()}, "embeddings"),
        ({"resumable": True}, "streaming inputs"),
        ({"sampling_params": None}, "pooling"),
    ],
)
def test_unsupported_requests_are_refused(changes, named):
    with pytest.raises(BadRequestError, match=named):
        make_job(request(**changes), MEMORY, stateful_sampling=False)
