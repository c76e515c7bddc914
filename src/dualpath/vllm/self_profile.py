"""Times a few forward passes of a prefill engine at start, before the engine joins (§A.4).

Each pass is one request in a handmade ``SchedulerOutput``, as in vLLM's own warm-up: tokens to
compute after tokens that are marked as cached, whose KV need not be valid for timing.  The
connector's hooks before and after each layer's attention measure the share of attention.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from dualpath.core.errors import ConfigError
from dualpath.engine.ranks import ONE_RANK, RankGroup
from dualpath.vllm.metadata import StepMetadata
from dualpath.vllm.pass_costs import TimedPass

log = logging.getLogger(__name__)

#: Tokens computed in a pass, if the limits allow as many.
PASS_TOKENS = 512
#: Seconds of measured passes after which no other pass is started.
BUDGET_S = 3.0
_REPEATS = 2
#: Value that the first rank broadcasts in place of a number of cached tokens to end profiling.
NO_MORE_PASSES = -1
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


def time_passes(
    runner: PassRunner,
    stopwatch: AttentionStopwatch,
    limits: PassLimits,
    group: RankGroup = ONE_RANK,
) -> list[TimedPass]:
    """Return passes of one size after increasing numbers of cached tokens, the best of two runs.

    The number of passes depends on their time, so each is broadcast to the engine's other ranks.

    Returns fewer than two passes if no more fit or none can be computed.  Raises ``ConfigError`` if
    vLLM cannot continue after a failed pass.
    """
    timed: list[TimedPass] = []
    if not limits.bsz:
        return timed
    try:
        group.broadcast(0)
        _time(runner, stopwatch, limits, 0)  # The first pass is slower than any other.
        began_s = time.perf_counter()
        for cached in limits.cached():
            runs = []
            for _ in range(_REPEATS):
                group.broadcast(cached)
                runs.append(_time(runner, stopwatch, limits, cached))
            timed.append(min(runs, key=lambda run: run.pass_s))
            # Each run of the next pass takes up to twice as long.
            next_s = 2 * _REPEATS * timed[-1].pass_s
            if len(timed) > 1 and time.perf_counter() - began_s + next_s > BUDGET_S:
                break
    except _PassFailedError as error:
        log.warning("%s; no more passes are timed", error)
    return timed


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
    step, end = step_of(limits, cached), SchedulerOutput.make_empty()
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
            f"vLLM cannot continue after a timed pass of {limits.bsz} tokens after {cached} "
            f"cached ones ({failure or error}); set {{profile}} to off or to a file of "
            "`dualpath profile`"
        ) from error
    if failure is not None:
        raise _PassFailedError(
            f"vLLM cannot compute {limits.bsz} tokens after {cached} cached ones ({failure})"
        ) from failure
    return TimedPass(cached, limits.bsz, pass_s, stopwatch.seconds - before_s)


def step_of(limits: PassLimits, cached: int) -> SchedulerOutput:
    """Return a step of one request: ``limits.bsz`` tokens after ``cached`` cached tokens."""
    tokens = cached + limits.bsz
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
            block_ids=(list(range(1, 1 + tokens // limits.block_tokens)),),
            num_computed_tokens=cached,
            lora_request=None,
            prefill_token_ids=prompt,
        )
    ]
    step.num_scheduled_tokens = {_REQUEST: limits.bsz}
    step.total_num_scheduled_tokens = limits.bsz
    step.num_common_prefix_blocks = [0]
    step.kv_connector_metadata = StepMetadata()
    return step
