"""A prefill engine times a few of its own forward passes at start, before it joins (§A.4).

Each is one request of a scheduler's output made by hand, as in vLLM's own warm-up: tokens to
compute behind tokens that count as cached, so that KV need not be right to take its time.  The
connector's hooks stand around the attention of every layer and tell its share.
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

#: Tokens computed in a pass, if that many may be.
PASS_TOKENS = 512
#: No further pass is begun after these seconds of measured ones.
BUDGET_S = 3.0
_REPEATS = 2
#: What the first rank says instead of a number of cached tokens.
NO_MORE_PASSES = -1
_REQUEST = "dualpath-profile"


class PassRunner(Protocol):
    """What a vLLM worker does in a step."""

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
        """A layer's attention comes next."""
        self.synchronize()
        self._began_s = time.perf_counter()

    def end(self) -> None:
        """A layer's attention has been queued."""
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
        """Yield what passes are behind: nothing, then ever twice as much."""
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
    """Return passes of one size behind ever more cached tokens, the best of two runs each.

    How many there are depends on their time, so the other ranks of the engine are told of each.

    Fewer than two where no more fit, or none can be computed.  Raises ``ConfigError`` where vLLM
    cannot go on after that.
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
            # The next one takes up to twice as long, and so does each of its runs.
            next_s = 2 * _REPEATS * timed[-1].pass_s
            if len(timed) > 1 and time.perf_counter() - began_s + next_s > BUDGET_S:
                break
    except _PassFailedError as error:
        log.warning("%s; passes are timed no further", error)
    return timed


def repeat_passes(runner: PassRunner, limits: PassLimits, group: RankGroup) -> None:
    """Compute what the first rank times, until it says that there is no more."""
    stopwatch = AttentionStopwatch(lambda: None)
    while (cached := group.broadcast(NO_MORE_PASSES)) != NO_MORE_PASSES:
        with contextlib.suppress(_PassFailedError):  # It fails at the first rank as well.
            _time(runner, stopwatch, limits, cached)


class _PassFailedError(Exception):
    """A pass failed and left nothing behind."""


def _time(
    runner: PassRunner, stopwatch: AttentionStopwatch, limits: PassLimits, cached: int
) -> TimedPass:
    """Compute one pass and forget its request."""
    step, end = step_of(limits, cached), SchedulerOutput.make_empty()
    end.finished_req_ids = {_REQUEST}
    end.kv_connector_metadata = StepMetadata()
    before_s, began_s = stopwatch.seconds, time.perf_counter()
    failure: Exception | None = None
    try:
        runner.execute_model(step)
        runner.sample_tokens(None)
    except Exception as error:
        failure = error  # Some kernels cannot compute behind cached tokens, and say so in any way.
    pass_s = time.perf_counter() - began_s
    try:
        runner.execute_model(end)
        stopwatch.synchronize()
    except Exception as error:
        # A worker that has lost its way, or a device, must not serve.
        raise ConfigError(
            f"vLLM cannot go on after {limits.bsz} tokens behind {cached} were timed "
            f"({failure or error}); set {{profile}} to off or to a file of `dualpath profile`"
        ) from error
    if failure is not None:
        raise _PassFailedError(
            f"vLLM cannot compute {limits.bsz} tokens behind {cached} ({failure})"
        ) from failure
    return TimedPass(cached, limits.bsz, pass_s, stopwatch.seconds - before_s)


def step_of(limits: PassLimits, cached: int) -> SchedulerOutput:
    """Return a step of one request: ``limits.bsz`` tokens behind ``cached``."""
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
