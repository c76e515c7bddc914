"""Determines a prefill engine's pass costs: from a file, from the cache, or by timing passes."""

import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
import vllm
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.rates import Rate, RateOrigin
from dualpath.engine.ranks.group import ONE_RANK, RankGroup
from dualpath.engine.settings import PROFILE_AUTO, PROFILE_OFF, EngineSettings
from dualpath.node.cache_directory import cache_directory
from dualpath.node.machine import cpu_model
from dualpath.node.output_files import write_whole
from dualpath.policy.batching import AttentionGeometry
from dualpath.vllm.metadata import StepMetadata
from dualpath.vllm.pass_costs import (
    PassCosts,
    TimedPass,
    fitted_attention,
    from_passes,
    read_file,
    rough_attention,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# ------------------------------------------------------------------------------------- costs cache
# Caches an engine's measured pass costs in a file, keyed by all that the measurement depends on.
#
# A busy machine makes passes look slower, never faster: the fastest of the first ``STARTS`` starts
# is used.  Costs older than ``MAX_AGE_S`` are measured again.

#: Number of starts that measure; later starts use the cached costs.
STARTS = 3
#: Seconds for which cached costs are valid: drivers, clocks and other load of a machine change.
MAX_AGE_S = 7 * 24 * 3600.0


class CachedCosts(msgspec.Struct, frozen=True):
    """The fastest ``costs`` of ``starts`` starts, measured at ``measured_s`` (Unix time).

    ``of`` are the names and values that the costs depend on.
    """

    of: dict[str, str]
    costs: PassCosts
    measured_s: float = 0.0
    starts: int = 1

    @property
    def suffices(self) -> bool:
        """Whether later starts use the costs without timing passes."""
        return self.starts >= STARTS and self.costs.besides_attention is not None


class CostsCache:
    """One file per ``of``: the names and values that the costs depend on.

    A file that cannot be read or written is ignored with a warning.  After the file is removed, the
    next start measures again.
    """

    def __init__(self, directory: Path, of: Mapping[str, str]) -> None:
        """``directory`` need not exist."""
        self._of = dict(sorted(of.items()))
        digest = hashlib.sha256(msgspec.json.encode(self._of)).hexdigest()[:24]
        self.file = directory / f"costs-{digest}.json"

    def load(self, now_s: float) -> CachedCosts | None:
        """Return the cached costs; None if there are none or they are too old."""
        try:
            found = msgspec.json.decode(self.file.read_bytes(), type=CachedCosts)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("measured costs in %s are not used: %s", self.file, error)
            return None
        costs = found.costs
        usable = costs.prefill_tokens_per_s > 0 and costs.attention.flops_per_s > 0
        # A time in the future comes from a wrong clock, so the age is unknown.
        fresh = 0 <= now_s - found.measured_s <= MAX_AGE_S
        return found if found.of == self._of and usable and fresh else None

    def store(self, costs: PassCosts, now_s: float) -> CachedCosts:
        """Write the fastest costs so far to the file atomically; return them."""
        before = self.load(now_s)
        best = CachedCosts(self._of, costs, now_s)
        if before is not None:
            if before.costs.besides_attention is None:  # of an earlier version
                former = msgspec.structs.replace(
                    before.costs,
                    besides_attention=costs.besides_attention,
                    recompute_weight=costs.recompute_weight,
                )
                before = msgspec.structs.replace(before, costs=former)
            faster = before.costs.prefill_tokens_per_s > costs.prefill_tokens_per_s
            best = msgspec.structs.replace(before if faster else best, starts=before.starts + 1)
        self._write(best)
        return best

    def _write(self, best: CachedCosts) -> None:
        content = msgspec.json.format(msgspec.json.encode(best))
        try:
            write_whole(self.file, content, folders=True, private=True)
        except OSError as error:
            log.warning("measured costs cannot be written to %s: %s", self.file, error)


# ------------------------------------------------------------------------------------ self profile
# Times a few forward passes of a prefill engine at start, before the engine joins (§A.4).
#
# Each pass is one request in a handmade ``SchedulerOutput``, as in vLLM's own warm-up: tokens to
# compute after tokens that are marked as cached; their KV need not be valid for timing.  The
# connector's hooks before and after each layer's attention measure the share of attention.  One
# pass is of one block, so that a pass's time is known apart from that of its tokens.

#: Tokens computed in a pass, if the limits allow as many.
PASS_TOKENS = 512
#: Seconds of measured passes after which no other pass is started, without compilation.
BUDGET_S = 3.0
_REPEATS, _MOST_REPEATS = 2, 4
#: If the last run is faster than the one before by this factor, kernels were compiled in that one:
#: on GPUs Triton compiles a kernel at its first use with a new shape.
_COMPILED_FACTOR = 1.5
#: Values that the first rank broadcasts in place of a number of cached tokens: to end profiling,
#: and for a pass of one block after no cached tokens.
NO_MORE_PASSES = -1
SHORT_PASS = -2
#: How long a rank of a data-parallel group waits for the others, before the first pass and after
#: each of them.  They come to it within seconds of each other, as vLLM's warm-up is in lock step.
GROUP_WAIT_S = 60.0
_REQUEST = "dualpath-profile"


class PassRunner(Protocol):
    """The calls that run one step of a vLLM worker."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:  # noqa: ANN401 - vLLM's
        """Run the forward pass."""

    def sample_tokens(self, grammar_output: None) -> Any:  # noqa: ANN401 - vLLM's
        """Sample; the tokens are on the host when it returns."""


class AttentionStopwatch:
    """Sums the time between the hooks before and after each layer's attention."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        """``synchronize`` waits until the device has computed all that is queued."""
        self.synchronize = synchronize
        self._began_s = 0.0
        self.seconds = 0.0

    def begin(self) -> None:
        """Start timing; called before a layer's attention."""
        self.synchronize()
        self._began_s = time.perf_counter()

    def end(self) -> None:
        """Stop timing; called when a layer's attention has been queued."""
        self.synchronize()
        self.seconds += time.perf_counter() - self._began_s


class MeasuredPass(NamedTuple):
    """A pass of a serving engine; the times of begin and end are on the trace's clock."""

    predicted_s: float
    measured_s: float
    start_ns: int
    end_ns: int


class AttentionClock:
    """Measures the attention of a serving engine's passes without waiting for its device.

    ``on_gpu``: a GPU times events in its stream; a pass is known once the last of them has passed.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        #: Passes whose events may not have passed; the oldest are dropped if a GPU falls behind.
        self._passes: deque[tuple[list[tuple[Any, Any]], float, int, int]] = deque(maxlen=16)

    def begin(self) -> None:
        """A layer's attention begins."""
        self._began = self._mark()

    def end(self) -> None:
        """A layer's attention has been computed, or queued on a GPU."""
        self._spans.append((self._began, self._mark()))

    def pass_over(self, predicted_s: float, start_ns: int, end_ns: int) -> None:
        """All layers of a pass have been computed, or queued on a GPU."""
        if self._spans:
            self._passes.append((self._spans, predicted_s, start_ns, end_ns))
        self._spans = []

    def take(self) -> Iterator[MeasuredPass]:
        """Yield the passes that have been measured since the last call."""
        while self._passes and self._has_passed(self._passes[0][0][-1][1]):
            spans, predicted_s, start_ns, end_ns = self._passes.popleft()
            measured_s = sum(map(self._seconds, spans))
            yield MeasuredPass(predicted_s, measured_s, start_ns, end_ns)

    def _mark(self) -> Any:  # noqa: ANN401 - seconds, or an event of torch
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _has_passed(self, mark: Any) -> bool:  # noqa: ANN401
        return not self._on_gpu or bool(mark.query())

    def _seconds(self, span: tuple[Any, Any]) -> float:
        begin, end = span
        return float(begin.elapsed_time(end)) / 1e3 if self._on_gpu else end - begin


class PassLimits:
    """How large a pass may be: ``blocks`` of ``block_tokens`` in HBM, tokens computed, context."""

    def __init__(
        self, block_tokens: int, blocks: int, budget_tokens: int, context_tokens: int
    ) -> None:
        self.block_tokens = block_tokens
        most_tokens = min(blocks * block_tokens, context_tokens - 1)
        whole = min(PASS_TOKENS, budget_tokens, most_tokens // 2) // block_tokens
        self.bsz = whole * block_tokens
        self._most_cached = (most_tokens - self.bsz) // block_tokens * block_tokens

    def cached(self) -> Iterator[int]:
        """Yield the numbers of cached tokens to time: 0, then doubling up to the limit."""
        if self.bsz < 1 or self._most_cached < self.block_tokens:
            return
        yield 0
        cached = min(self.bsz, self._most_cached)
        while True:
            yield cached
            if cached == self._most_cached:
                return
            cached = min(2 * cached, self._most_cached)

    def size(self, cached: int) -> tuple[int, int]:
        """Return the cached and the computed tokens of a pass; ``cached`` may be ``SHORT_PASS``."""
        return (0, self.block_tokens) if cached == SHORT_PASS else (cached, self.bsz)


class SharedKeys(Protocol):
    """The part of torch's ``Store`` that the ranks of a group use."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all keys are set; raises ``RuntimeError`` after ``timeout``."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key that is not set if ``expected`` is empty; return its value."""


class LockStep:
    """The timed passes of a data-parallel group: its ranks compute each one at the same time.

    All ranks must compute the same passes, as each waits in the others' collectives.  The first
    rank decides which pass is next.  Decisions and results are keys of a store that the ranks
    share, so that each wait for another rank has a limit.
    """

    def __init__(
        self, keys: SharedKeys, rank: int, size: int, wait_s: float = GROUP_WAIT_S
    ) -> None:
        self._keys = keys
        self._rank = rank
        self._size = size
        self._limit = timedelta(seconds=wait_s)
        self._passes = 0

    @property
    def leads(self) -> bool:
        """Whether this rank decides which pass is next."""
        return self._rank == 0

    def begin(self, wanted: bool, blocks: int) -> int | None:
        """Return the least number of KV blocks of any rank, or None if no passes are timed now.

        Passes are timed if all ranks take part, and at least one of them ``wanted`` it.  A rank
        that is late finds the decision that the others have made without it.
        """
        self._keys.set(self._key("ready", self._rank), f"{wanted:d} {blocks}")
        decision = "none late"
        if self.leads:
            if self._are_set([self._key("ready", rank) for rank in range(self._size)]):
                decision = self._decision()
        elif self._are_set([self._key("begin")]):
            decision = ""
        # The first decision counts: a rank that has stopped waiting must not be waited for.
        made = self._keys.compare_set(self._key("begin"), "", decision) if decision else b""
        words = (made or self._keys.get(self._key("begin"))).decode().split()
        if words[0] == "blocks":
            return int(words[1])
        if words[1] == "late":
            log.warning(
                "a rank of the data-parallel group was not ready within %g s, so its passes are "
                "not timed: costs of earlier starts or assumed ones are used; restart the group, "
                "or set profile to a file of `dualpath profile`",
                self._limit.total_seconds(),
            )
        return None

    def _decision(self) -> str:
        found = [
            self._keys.get(self._key("ready", rank)).decode().split() for rank in range(self._size)
        ]
        if not any(wanted == "1" for wanted, _ in found):
            return "none wanted"
        return f"blocks {min(int(blocks) for _, blocks in found)}"

    def next_pass(self, cached: int = NO_MORE_PASSES) -> int:
        """Return the cached tokens of the next pass on all ranks; the first rank gives them.

        They may be ``SHORT_PASS``; ``NO_MORE_PASSES`` ends the passes.  Raises ``ConfigError`` if
        the first rank is missing.
        """
        self._passes += 1
        key = self._key("pass", self._passes)
        if self.leads:
            self._keys.set(key, str(cached))
            return cached
        if not self._are_set([key]):
            raise self._missing("the first rank has not begun another timed pass")
        return int(self._keys.get(key))

    def computed(self, failure: str = "") -> None:
        """Wait until all ranks have computed the pass.

        Raises ``_PassFailedError`` if it failed at any rank, ``ConfigError`` if a rank is missing:
        its collectives would meet those of other steps.
        """
        self._keys.set(self._key("result", self._passes, self._rank), failure or "computed")
        keys = [self._key("result", self._passes, rank) for rank in range(self._size)]
        if not self._are_set(keys):
            raise self._missing("a rank has not ended a timed pass")
        results = [self._keys.get(key).decode() for key in keys]
        failed = [result for result in results if result != "computed"]
        if failed:
            raise _PassFailedError(failed[0])

    def _are_set(self, keys: list[str]) -> bool:
        try:
            self._keys.wait(keys, self._limit)
        except RuntimeError:
            return False
        return True

    def _missing(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} of its data-parallel group within {self._limit.total_seconds():g} s; see the "
            "logs of the other ranks, or set {profile} to off or to a file of `dualpath profile`"
        )

    @staticmethod
    def _key(*words: object) -> str:
        return "/".join(["dualpath-profile", *map(str, words)])


class PassTimer:
    """Times passes on all ranks of an engine and of its data-parallel group, if it has one.

    The first rank of each engine has a timer; the engine's others call ``repeat_passes``.
    """

    def __init__(
        self,
        runner: PassRunner,
        stopwatch: AttentionStopwatch,
        limits: PassLimits,
        group: RankGroup = ONE_RANK,
        lock_step: LockStep | None = None,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._stopwatch = stopwatch
        self._group = group
        self._lock_step = lock_step

    def time(self, cached: int) -> TimedPass:
        """Time one pass; raises ``_PassFailedError`` if it cannot be computed at some rank."""
        if self._lock_step is None:
            return self._time(cached)
        if self._lock_step.leads:
            self._lock_step.next_pass(cached)
        try:
            timed = self._time(cached)
        except _PassFailedError as error:
            self._lock_step.computed(str(error))
            raise
        self._lock_step.computed()
        return timed

    def _time(self, cached: int) -> TimedPass:
        self._group.broadcast(cached)
        return _time(self._runner, self._stopwatch, self.limits, cached)

    def run(self) -> list[TimedPass]:
        """Return the timed passes, as ``time_passes`` or, if another rank leads, as it decides."""
        step = self._lock_step
        if step is None:
            return time_passes(self)
        if not step.leads:
            return self._follow(step)
        try:
            return time_passes(self)
        finally:
            step.next_pass(NO_MORE_PASSES)

    def _follow(self, lock_step: LockStep) -> list[TimedPass]:
        best: dict[int, TimedPass] = {}
        is_first = True
        while (cached := lock_step.next_pass()) != NO_MORE_PASSES:
            try:
                timed = self.time(cached)
            except _PassFailedError as error:
                log.warning("%s; no more passes are timed", error)
                continue
            if not is_first and (cached not in best or timed.pass_s < best[cached].pass_s):
                best[cached] = timed
            is_first = False
        return list(best.values())


def time_passes(timer: PassTimer) -> list[TimedPass]:
    """Return passes of one size after increasing numbers of cached tokens, the best of two runs.

    The last is of one block, if that size is larger.  A pass in which kernels were compiled is
    repeated, and its time is not part of the budget.

    The number of passes depends on their time, so the timer announces each to all other ranks.

    Returns fewer than two passes if no more fit or none can be computed.  Raises ``ConfigError`` if
    vLLM cannot continue after a failed pass.
    """
    timed: list[TimedPass] = []
    if not timer.limits.bsz:
        return timed
    try:
        timer.time(0)  # The first pass is slower than any other.
        measured_s = 0.0
        for cached in timer.limits.cached():
            timed.append(_best_run(timer, cached))
            # Each run of the next pass takes up to twice as long.
            measured_s += _REPEATS * timed[-1].pass_s
            if len(timed) > 1 and measured_s + 2 * _REPEATS * timed[-1].pass_s > BUDGET_S:
                break
        if timer.limits.bsz > timer.limits.block_tokens:
            timed.append(_best_run(timer, SHORT_PASS))
    except _PassFailedError as error:
        log.warning("%s; no more passes are timed", error)
    return timed


def _best_run(timer: PassTimer, cached: int) -> TimedPass:
    runs: list[TimedPass] = []
    while len(runs) < _REPEATS or (len(runs) < _MOST_REPEATS and _compiled(runs)):
        runs.append(timer.time(cached))
    return min(runs, key=lambda run: run.pass_s)


def _compiled(runs: Sequence[TimedPass]) -> bool:
    """Whether a run but the last seems to have compiled kernels, so that the next may be faster."""
    return runs[-2].pass_s > _COMPILED_FACTOR * runs[-1].pass_s


def repeat_passes(runner: PassRunner, limits: PassLimits, group: RankGroup) -> None:
    """Compute the passes that the first rank times, until it broadcasts the end."""
    stopwatch = AttentionStopwatch(lambda: None)
    while (cached := group.broadcast(NO_MORE_PASSES)) != NO_MORE_PASSES:
        with contextlib.suppress(_PassFailedError):  # It also fails at the first rank.
            _time(runner, stopwatch, limits, cached)


class _PassFailedError(Exception):
    """A pass failed, and vLLM has removed its request."""


def _time(
    runner: PassRunner, stopwatch: AttentionStopwatch, limits: PassLimits, cached: int
) -> TimedPass:
    """Compute one pass, then remove its request from vLLM."""
    cached, bsz = limits.size(cached)
    step = step_of(cached, bsz, limits.block_tokens)
    end = SchedulerOutput.make_empty()
    end.finished_req_ids = {_REQUEST}
    end.kv_connector_metadata = StepMetadata()
    before_s, began_s = stopwatch.seconds, time.perf_counter()
    failure: Exception | None = None
    try:
        runner.execute_model(step)
        runner.sample_tokens(None)
    except Exception as error:
        failure = error  # Some kernels cannot compute after cached tokens and raise any error.
    pass_s = time.perf_counter() - began_s
    try:
        runner.execute_model(end)
        stopwatch.synchronize()
    except Exception as error:
        # A worker in an unknown state, or without its device, must not serve.
        raise ConfigError(
            f"vLLM cannot continue after a timed pass of {bsz} tokens after {cached} "
            f"cached ones ({failure or error}); set {{profile}} to off or to a file of "
            "`dualpath profile`"
        ) from error
    if failure is not None:
        raise _PassFailedError(
            f"vLLM cannot compute {bsz} tokens after {cached} cached ones ({failure})"
        ) from failure
    return TimedPass(cached, bsz, pass_s, stopwatch.seconds - before_s)


def step_of(cached: int, bsz: int, block_tokens: int) -> SchedulerOutput:
    """Return a step of one request: ``bsz`` tokens after ``cached`` cached tokens."""
    tokens = cached + bsz
    prompt = [1 + token % 97 for token in range(tokens)]
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=_REQUEST,
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            pooling_params=None,
            # Block 0 is vLLM's null block.
            block_ids=(list(range(1, 1 + tokens // block_tokens)),),
            num_computed_tokens=cached,
            lora_request=None,
            prefill_token_ids=prompt,
        )
    ]
    step.num_scheduled_tokens = {_REQUEST: bsz}
    step.total_num_scheduled_tokens = bsz
    step.num_common_prefix_blocks = [0]
    step.kv_connector_metadata = StepMetadata()
    return step


log = logging.getLogger(__name__)


class FoundCosts(msgspec.Struct, frozen=True):
    """``costs`` and their origin; cached costs were measured ``age_s`` seconds ago."""

    costs: PassCosts
    origin: RateOrigin
    age_s: float | None = None

    @property
    def rate(self) -> Rate:
        """Prompt tokens per second."""
        return Rate(self.costs.prefill_tokens_per_s, self.origin, self.age_s)


def needs_costs(settings: EngineSettings) -> bool:
    """Whether an engine needs its costs: a PE in a mode with compute quota and load balancing."""
    wanted = settings.profile != PROFILE_OFF
    return wanted and settings.role is Role.PREFILL and settings.mode.compute_quota


def attention_geometry(config: "VllmConfig") -> AttentionGeometry:
    """Return attention's FLOP as a function of tokens, by the kind of each layer.

    Layers with a window, and sparse ones, see at most the window or what the indexer selects; the
    indexer and all other layers see every token.  Layers whose state has a fixed size have no cost
    that grows with the context.  Where layers have several windows the largest counts for all.
    """
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    heads = model.get_num_attention_heads(parallel)
    first, end = model.get_layers_start_end_indices(parallel)
    layers = end - first
    if model.use_mla:
        # The absorbed form: QK over the latent and the rotary part, PV over the latent.
        latent = AttentionGeometry.from_heads(
            layers, heads, text.kv_lora_rank + text.qk_rope_head_dim, text.kv_lora_rank
        )
        if (selected := getattr(text, "index_topk", None)) is None:
            return latent
        indexed = 2.0 * layers * text.index_n_heads * text.index_head_dim
        return AttentionGeometry(latent.pair_flops, 0.0, selected, indexed)
    windows = _layer_windows(text, first, end, model.get_sliding_window())
    size = model.get_head_size()
    pair_flops = AttentionGeometry.from_heads(1, heads, size, size).pair_flops
    whole = pair_flops * sum(window == 0 for window in windows)
    if not any(windows):
        return AttentionGeometry(whole)
    seen = pair_flops * sum(window is not None and window > 0 for window in windows)
    return AttentionGeometry(seen, 0.0, max(window or 0 for window in windows), whole)


def _layer_windows(
    text: Any,  # noqa: ANN401 - transformers' configuration of any family
    first: int,
    end: int,
    sliding_window: int | None,
) -> list[int | None]:
    """Return the window of layers ``first`` to ``end`` - 1 in tokens.

    0: the layer sees all tokens; None: it has a state and no KV of tokens.
    """
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return [sliding_window or 0] * (end - first)
    windows = {
        "sliding_attention": sliding_window or 0,
        "chunked_attention": getattr(text, "attention_chunk_size", None) or 0,
        "linear_attention": None,
    }
    whole = {kind: 0 for kind in kinds if "attention" in kind}
    return [{**whole, **windows}.get(kind) for kind in kinds[first:end]]


def find_costs(
    settings: EngineSettings,
    config: "VllmConfig",
    namespace: StoreNamespace,
    time_passes: Callable[[bool], Sequence[TimedPass] | None],
    now_s: float,
) -> FoundCosts | None:
    """Return an engine's costs and their origin; None if passes cannot be timed.

    ``time_passes`` gets whether this engine needs measured passes.  It returns None if none were
    timed, and may time some that only other ranks of a data-parallel group need.

    ``now_s`` is Unix time.  Raises ``ConfigError`` if the file is not one of ``dualpath profile``,
    or if vLLM fails.
    """
    geometry = attention_geometry(config)
    if settings.profile != PROFILE_AUTO:
        costs = read_file(settings.profile, geometry)
        time_passes(False)
        return FoundCosts(costs, RateOrigin.FILE)
    cache = CostsCache(cache_directory(), _of(settings, config, namespace))
    found = cache.load(now_s)
    enough = found is not None and found.suffices
    passes = time_passes(not enough)
    if passes is None or enough:
        return None if found is None else _from_cache(found, now_s, cache)
    limit = config.model_config.max_model_len
    try:
        costs = from_passes(passes, geometry, fitted_attention(passes, geometry), limit)
        best = cache.store(costs, now_s)
        if best.measured_s != now_s:
            return _from_cache(best, now_s, cache)
    except ConfigError as unfit:
        if found is not None:
            return _from_cache(found, now_s, cache)
        try:
            costs = from_passes(passes, geometry, rough_attention(passes, geometry), limit)
        except ConfigError as error:
            log.warning("the speed of this engine cannot be measured: %s", error)
            return None
        log.warning("pass costs are estimates, measured again at the next start: %s", unfit)
    log.info("pass costs measured over %d passes, %s: %s", len(passes), cache.file, costs)
    return FoundCosts(costs, RateOrigin.MEASURED)


def _from_cache(found: CachedCosts, now_s: float, cache: CostsCache) -> FoundCosts:
    age_s = max(now_s - found.measured_s, 0.0)  # a clock may have been ahead
    log.info(
        "pass costs were measured %.1f h ago, the fastest of %d starts, %s: %s",
        age_s / 3600, found.starts, cache.file, found.costs,
    )  # fmt: skip
    return FoundCosts(found.costs, RateOrigin.REMEMBERED, age_s)


def _of(
    settings: EngineSettings, config: "VllmConfig", namespace: StoreNamespace
) -> dict[str, str]:
    """Return everything that the time of a pass depends on, by name."""
    return {
        "namespace": msgspec.json.encode(namespace).decode(),
        "attention": msgspec.json.encode(attention_geometry(config)).decode(),
        "device": _device(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "software": f"vLLM {vllm.__version__}, torch {torch.__version__}",
        "compilation": f"{config.compilation_config.mode}, "
        f"{config.compilation_config.cudagraph_mode}",
        "mode": settings.mode.value,
        "layer_buffers": str(settings.layer_buffers),
        "ranks": str(config.parallel_config.tensor_parallel_size),
        **_place_in_group(config),
        "max_model_len": str(config.model_config.max_model_len),
        "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
    }


def _place_in_group(config: "VllmConfig") -> dict[str, str]:
    """Return the rank in a data-parallel group: its ranks may start on one machine at once."""
    size = config.parallel_config.data_parallel_size
    if size == 1:
        return {}
    return {"data-parallel rank": f"{config.parallel_config.data_parallel_rank} of {size}"}


def _device() -> str:
    """Return the device's name, for CPUs their model because vLLM only returns "cpu"."""
    return cpu_model() if current_platform.is_cpu() else str(current_platform.get_device_name())
