"""vLLM internals that the front end uses; a vLLM upgrade that changes one fails here."""

import ast
import inspect
import textwrap

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    RequestOutputCollector,
    RequestState,
)
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dualpath.vllm.engine_core import RoutedEngineCore
from dualpath.vllm.generate_client import ROUTER_SIDE_FIELDS


def _parse(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _attributes_set_on_self(function):
    targets = []
    for node in ast.walk(_parse(function)):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
    }


def _engine_core_attributes(tree):
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "attr", getattr(node.value, "id", "")) == "engine_core"
    }


def test_async_llm_sets_up_what_our_constructor_replaces():
    assert _attributes_set_on_self(AsyncLLM.__init__) == {
        "_client_count",
        "_elastic_ep_lock",
        "_frontend_profiler_injected",
        "_frontend_profiler_worker_name",
        "_profile_lock",
        "_profile_session_active",
        "_profile_session_guard_enabled",
        "admission_stats",
        "engine_core",
        "input_processor",
        "log_requests",
        "log_stats",
        "logger_manager",
        "model_config",
        "observability_config",
        "output_handler",
        "output_processor",
        "profiler",
        "renderer",
        "scheduler_config",
        "vllm_config",
    }


def test_serving_a_request_uses_only_the_engine_core_methods_we_have():
    serving = (
        AsyncLLM.add_request,
        AsyncLLM._add_request,
        AsyncLLM._run_output_handler,
        AsyncLLM.abort,
        AsyncLLM.generate,
        AsyncLLM.get_supported_tasks,
        AsyncLLM.shutdown,
        AsyncLLM.get_kv_event_sources,
        AsyncLLM.reset_mm_cache,
    )
    used = set().union(*(_engine_core_attributes(_parse(method)) for method in serving))
    assert used == {
        "abort_requests_async",
        "add_request_async",
        "get_kv_event_sources",
        "get_output_async",
        "get_supported_tasks_async",
        "reset_mm_cache_async",
        "shutdown",
    }
    assert all(name in vars(RoutedEngineCore) for name in used)


def test_all_other_engine_core_methods_are_refused_or_answered():
    used = _engine_core_attributes(_parse(AsyncLLM))
    missing = {name for name in used if not name.endswith("_async")} - set(vars(RoutedEngineCore))
    # `resources` and `engine_ranks_managed` are attributes, the rest is elastic expert parallelism.
    assert (
        missing
        == {
            "commit_elastic_ep",
            "engine_ranks_managed",
            "get_status",
            "handle_fault",
            "prepare_elastic_ep",
            "resources",
        }
        & missing
    )
    assert {"resources", "engine_ranks_managed"} <= missing


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (AsyncLLM._run_output_handler, ["self"]),
        (OutputProcessor.abort_requests, ["self", "request_ids", "internal"]),
        (RequestOutputCollector.put, ["self", "output"]),
        (LogprobsLists, ["logprob_token_ids", "logprobs", "sampled_token_ranks"]),
        (LogprobsTensors, ["logprob_token_ids", "logprobs", "selected_token_ranks"]),
    ],
)
def test_signatures_we_rely_on(function, parameters):
    assert list(inspect.signature(function).parameters)[: len(parameters)] == parameters


def test_request_state_names_its_queue_and_its_parent():
    assert {"queue", "parent_req", "external_req_id"} <= _attributes_set_on_self(
        RequestState.__init__
    )
    assert "request_states" in _attributes_set_on_self(OutputProcessor.__init__)


def test_structs_we_fill_have_the_fields_we_fill():
    assert {
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "prompt_embeds",
        "sampling_params",
        "lora_request",
        "cache_salt",
        "priority",
        "trace_headers",
        "resumable",
        "reasoning_ended",
        "reasoning_parser_kwargs",
    } <= set(EngineCoreRequest.__struct_fields__)
    assert {
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "finish_reason",
        "stop_reason",
        "events",
        "prefill_stats",
    } <= set(EngineCoreOutput.__struct_fields__)
    assert {"outputs", "scheduler_stats"} <= set(EngineCoreOutputs.__struct_fields__)
    assert {str(reason) for reason in FinishReason} == {
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    }
    assert "num_cached_tokens" in inspect.signature(RequestOutput.__init__).parameters


def test_every_sampling_parameter_is_known_to_the_wire():
    """A new parameter needs a decision: does it change tokens, or the router's output?"""
    shapes_tokens = {
        "allowed_token_ids",
        "bad_words",
        "detokenize",
        "extra_args",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "routed_experts_prompt_start",
        "seed",
        "skip_reading_prefix_cache",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "trace_decode_token_ids",
    }
    refused = {"prompt_logprob_token_ids", "prompt_logprob_start"}
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert fields == shapes_tokens | refused | ROUTER_SIDE_FIELDS
