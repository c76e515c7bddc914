"""Phase `plain`: a vLLM without dualpath; its answers, TTFT, and how often it parts from itself."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dualpath_lab.gpu.answers import CONVERSATION, PlainAnswer, equal_tokens, likeliest_gap
from dualpath_lab.gpu.model import model_of, next_turn, prompts
from dualpath_lab.gpu.results import Check
from dualpath_lab.gpu.settings import engine_devices

_REPEATS = 3


def plain(check: Check) -> None:
    """Answer every prompt cold, and again with KV of the cache."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if devices := engine_devices(check.settings):
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[0]
    check.put("rehearsal", check.settings.rehearse)
    model = model_of(check.settings)
    from vllm import LLM, SamplingParams, TokensPrompt

    started_s = time.monotonic()
    llm = LLM(
        model=model,
        dtype=check.settings.dtype,
        max_model_len=check.settings.max_model_len,
        block_size=64,
        kv_cache_memory_bytes=check.settings.hbm_bytes,
        enable_prefix_caching=True,
        enforce_eager=check.settings.rehearse,
    )
    check.put("start_s", time.monotonic() - started_s)
    count = check.settings.sizes.answer_tokens
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2)
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def answer(prompt: list[int], sampling: Any) -> Any:  # noqa: ANN401 - vLLM's
        (found,) = llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)
        return found.outputs[0]

    answer([5] * 200, greedy)  # The first request compiles kernels.
    found: dict[str, PlainAnswer] = {}
    rows = []
    asked = prompts(check.settings)
    asked[CONVERSATION] = _conversation(check, next(iter(asked.values())), answer)
    check.put(CONVERSATION, {"prompt": asked[CONVERSATION]})
    for name, prompt in asked.items():
        llm.reset_prefix_cache()
        started_s = time.perf_counter()
        answer(prompt, first)
        ttft_s = time.perf_counter() - started_s
        cached = answer(prompt, greedy)
        llm.reset_prefix_cache()
        cold = answer(prompt, greedy)
        steps = cold.logprobs or []
        gaps = [likeliest_gap([one.logprob for one in step.values()]) for step in steps]
        found[name] = PlainAnswer(
            len(prompt), ttft_s, list(cold.token_ids), list(cached.token_ids), gaps
        )
        rows.append(
            {
                "prompt": name,
                "prompt_tokens": len(prompt),
                "ttft_s": ttft_s,
                "equal_in_other_pieces": equal_tokens(cold.token_ids, cached.token_ids),
                "of": count,
                "least_gap": min(gaps, default=0.0),
                "distinct_tokens": len(set(cold.token_ids)),
            }
        )
        check.put("answers", rows)
        check.put("tokens", msgspec.to_builtins(found))
    check.put("decode", [_decode(check, llm)])


def _conversation(
    check: Check, prompt: list[int], answer: Callable[[list[int], Any], Any]
) -> list[int]:
    """Return a prompt that continues the plain engine's answer to another prompt."""
    from vllm import SamplingParams

    count = check.settings.sizes.turn_tokens
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return next_turn(prompt, answer(prompt, sampling).token_ids)


def _decode(check: Check, llm: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Return the time per token of one decoding request, and how vLLM schedules it.

    Decode engines of dualpath schedule synchronously, so that a part of the difference between
    this time and theirs is due to asynchronous scheduling.
    """
    from vllm import SamplingParams, TokensPrompt

    count = check.settings.sizes.decode_tokens
    prompt = TokensPrompt(prompt_token_ids=next(iter(prompts(check.settings).values())))

    def seconds(tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        started_s = time.perf_counter()
        llm.generate(prompt, sampling, use_tqdm=False)
        return time.perf_counter() - started_s

    seconds(1)  # Its KV is in HBM from now on.
    tpots_ms = [1e3 * (seconds(count) - seconds(1)) / (count - 1) for _ in range(_REPEATS)]
    return {
        "tokens": count,
        "median_tpot_ms": statistics.median(tpots_ms),
        "max_tpot_ms": max(tpots_ms),
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }
