"""Times one vLLM engine in this process: prefill passes after cached tokens, and decode steps.

The cached prefix comes from vLLM's own prefix cache; a pass takes the same time after a cached
prefix as after KV loaded from storage.  Every measured step is one call of ``LLMEngine.step``,
including scheduling and sampling, as in a live engine.  The sampled tokens are on the host when it
returns, so the time is complete on a GPU as well.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import InprocClient

from dualpath.core.errors import ConfigError
from dualpath.policy.batching import AttentionGeometry
from dualpath.vllm.engine_arguments import HASH_ALGORITHM, ignore_kv_space_variable
from dualpath.vllm.profile_settings import (
    WARM_STEPS,
    EngineFacts,
    Measurement,
    PassTime,
    ProfileSettings,
    StepTime,
)

Progress = Callable[[int, int, str], None]
"""Called with (completed points, total points, description of the last point)."""

_PREFILL = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def measure(settings: ProfileSettings, progress: Progress) -> Measurement:
    """Start an engine, run both grids and return all measurements.

    Set ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` before vLLM is imported.  Raises ``ConfigError`` for
    settings out of range, a model that vLLM refuses, or KV memory too small for the grids.
    """
    stopwatch = _Stopwatch(settings, _start(settings))
    facts = stopwatch.facts()
    done = itertools.count(1)
    passes, steps = [], []
    for cached in settings.cached_tokens:
        for bsz in settings.chunk_tokens:
            passes.append(stopwatch.time_pass(cached, bsz))
            progress(next(done), settings.points, f"prefill of {bsz} after {cached} tokens")
    for context_tokens in sorted(settings.decode_context_tokens):
        for requests in sorted(settings.decode_requests):
            steps.append(stopwatch.time_decode(requests, context_tokens))
            progress(next(done), settings.points, f"decode of {requests} x {context_tokens} tokens")
    return Measurement(facts, tuple(passes), tuple(steps))


def _start(settings: ProfileSettings) -> LLM:
    ignore_kv_space_variable(settings.hbm_bytes or None)
    try:
        return LLM(
            model=settings.model,
            dtype=settings.dtype,
            block_size=settings.block_tokens,
            kv_cache_memory_bytes=settings.hbm_bytes or None,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=max(*settings.chunk_tokens, *settings.decode_requests, 2048),
            max_num_seqs=max(settings.decode_requests),
            enable_prefix_caching=True,
            prefix_caching_hash_algo=HASH_ALGORITHM,
            enforce_eager=settings.enforce_eager,
            async_scheduling=False,
            skip_tokenizer_init=True,
            seed=settings.seed,
            disable_log_stats=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        gist = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"vLLM cannot run model {settings.model!r} with {settings.hbm_bytes} bytes of KV: "
            f"{gist}; correct the model, {{hbm_bytes}} or {{max_model_len}}"
        ) from error


class _Stopwatch:
    """Owns the engine, steps it and times the measured steps."""

    def __init__(self, settings: ProfileSettings, llm: LLM) -> None:
        self._settings = settings
        self._engine = llm.llm_engine
        self._config = llm.llm_engine.vllm_config
        self._numbers = itertools.count()
        self._random = np.random.default_rng(settings.seed)
        vocabulary = self._config.model_config.get_vocab_size()
        self._token_low, self._token_high = min(1000, vocabulary // 2), vocabulary
        self._check_room()
        longest = settings.longest_tokens
        rows = max(settings.decode_requests)
        self._texts = self._random.integers(self._token_low, self._token_high, (rows, longest))

    def facts(self) -> EngineFacts:
        """Return the properties that the engine reports."""
        model, parallel = self._config.model_config, self._config.parallel_config
        groups = _core(self._engine).scheduler.kv_cache_config.kv_cache_groups
        kv_bytes = sum(
            len(g.layer_names) * g.kv_cache_spec.page_size_bytes / g.kv_cache_spec.block_size
            for g in groups
        )
        head_size = model.get_head_size()
        return EngineFacts(
            model=str(self._settings.model).rstrip("/").rpartition("/")[2],
            layers=model.get_num_layers(parallel),
            kv_bytes_per_token=float(kv_bytes),
            context_limit_tokens=model.max_model_len,
            attention=AttentionGeometry.from_heads(
                model.get_num_layers(parallel),
                model.get_num_attention_heads(parallel),
                head_size,
                head_size,
            ),
            device=current_platform.get_device_name(),
            software=f"vLLM {vllm.__version__}, torch {torch.__version__}, {model.dtype}",
        )

    def time_pass(self, cached: int, bsz: int) -> PassTime:
        """Return the median time of a pass of ``bsz`` new tokens after ``cached`` cached ones."""
        prefix = self._texts[0, :cached].tolist()
        if prefix:
            self._run([*prefix, *self._draw(1)])
        seconds = []
        for _ in range(1 + self._settings.repeat):
            self._add([*prefix, *self._draw(bsz)], _PREFILL)
            started_s = time.perf_counter()
            outputs = self._engine.step()
            seconds.append(time.perf_counter() - started_s)
            if len(outputs) != 1 or outputs[0].num_cached_tokens != cached:
                found = [output.num_cached_tokens for output in outputs]
                raise ConfigError(
                    f"a pass of {bsz} tokens after {cached} cached ones had {found} cached tokens; "
                    "give the engine more KV memory with {hbm_bytes}"
                )
        return PassTime(cached, bsz, statistics.median(seconds[1:]))

    def time_decode(self, requests: int, context_tokens: int) -> StepTime:
        """Return the median time of a decode step of requests with about that context each."""
        steps = self._settings.decode_steps
        budget = SamplingParams(
            max_tokens=self._settings.longest_tokens, temperature=0, ignore_eos=True
        )
        names = [
            self._add(self._texts[row, :context_tokens].tolist(), budget) for row in range(requests)
        ]
        lengths: dict[str, int] = {}
        while len(lengths) < requests:
            lengths |= self._step()
        for _ in range(WARM_STEPS):
            lengths |= self._step()
        seconds = []
        for _ in range(steps):
            started_s = time.perf_counter()
            stepped = self._step()
            seconds.append(time.perf_counter() - started_s)
            if len(stepped) != requests:
                raise ConfigError(
                    f"{len(stepped)} of {requests} requests took part in a decode step; give the "
                    "engine more KV memory with {hbm_bytes}"
                )
        mean_tokens = context_tokens + statistics.fmean(lengths.values()) + (steps - 1) / 2
        self._engine.abort_request(names)
        return StepTime(requests, mean_tokens, statistics.median(seconds))

    def _check_room(self) -> None:
        settings, cache = self._settings, self._config.cache_config
        limit = self._config.model_config.max_model_len
        if settings.longest_tokens > limit:
            raise ConfigError(
                f"the grids need a context of {settings.longest_tokens} tokens, but the model's "
                f"limit is {limit}; measure shorter contexts with {{cached_tokens}}, "
                "{chunk_tokens} and {decode_context_tokens}"
            )
        if cache.num_gpu_blocks is not None and settings.blocks >= cache.num_gpu_blocks:
            raise ConfigError(
                f"the grids need {settings.blocks} KV blocks of {settings.block_tokens} tokens, "
                f"but the engine has {cache.num_gpu_blocks}; raise {{hbm_bytes}} or lower "
                "{decode_requests}"
            )

    def _run(self, prompt: Sequence[int]) -> None:
        self._add(prompt, _PREFILL)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _step(self) -> dict[str, int]:
        """Run one step and return how many tokens each of its requests has generated so far."""
        return {
            output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()
        }

    def _add(self, prompt: Sequence[int], sampling: SamplingParams) -> str:
        name = f"profile-{next(self._numbers)}"
        # There is no tokenizer to detokenise with.
        sampling = sampling.clone()
        sampling.detokenize = False
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), sampling)
        return name

    def _draw(self, tokens: int) -> list[int]:
        drawn: list[int] = self._random.integers(self._token_low, self._token_high, tokens).tolist()
        return drawn


def _core(engine: "vllm.v1.engine.llm_engine.LLMEngine") -> "vllm.v1.engine.core.EngineCore":
    if not isinstance(engine.engine_core, InprocClient):
        raise ConfigError(
            "the engine runs in a separate process; set VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    return engine.engine_core.engine_core
