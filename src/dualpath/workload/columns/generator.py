"""Generates trajectories with the means of Table 2 (§7.2).

In Table 2, Turns × (Append + Gen) exceeds Total by a factor of 1.58 to 1.70, which is impossible
for means over all turns.  So every column is read as a mean over trajectories, where Append, Gen
and Context are a trajectory's own mean over its turns.  Long trajectories then have short turns:
with turns n and total T independent, E[n]·E[T/n] = Turns × (Append + Gen) determines the spread of
n.  The distribution of n, the *tail*, is not in the table; it must be chosen and reported.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.workload.columns.agent_table import AgentTable, IntArray
from dualpath.workload.columns.conversations import RoundColumns, offsets
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_rounds

FloatArray = NDArray[np.float64]
Tail = Literal["gamma", "lognormal", "uniform"]


class Dataset(msgspec.Struct, frozen=True):
    """One row of Table 2: means over trajectories, in tokens except ``turns``."""

    name: str
    max_tokens: int
    turns: float
    append_tokens: float
    generated_tokens: float
    total_tokens: float
    context_tokens: float


#: The rows of Table 2, by MaxLen.
DATASETS = {
    "32K": Dataset("32K", 32 << 10, 60, 608, 148, 28639, 17183),
    "48K": Dataset("48K", 48 << 10, 106, 474, 172, 42607, 25120),
    "64K": Dataset("64K", 64 << 10, 157, 429, 176, 55958, 32721),
}


class GeneratorSettings(Settings, frozen=True, kw_only=True):
    """Parameters that Table 2 does not determine.

    ``tail`` is the distribution of turns.  Each ``*_sigma`` is the standard deviation of the
    logarithm: of a trajectory's total before it is cut at MaxLen, of its first prompt, and of
    appended and generated tokens between turns.  ``first_prompt_share`` is the share of the first
    prompt in the mean total; None derives it from Context, about 17 to 20 %.  The sigmas between
    turns are those of real traces: within a session the logarithms of appended and generated
    tokens have standard deviations of 1.41 and 1.17 in mini_swe_gemini3, 1.87 and 0.88 in
    kv_cache_tester.
    """

    trajectories: Annotated[int, Setting("number of trajectories", ge=10, le=1_000_000)] = 500
    tail: Annotated[Tail, Setting("distribution of turns")] = "gamma"
    total_sigma: Annotated[
        float, Setting("log standard deviation of total tokens before the cut", ge=0, le=3)
    ] = 0.4
    first_prompt_share: Annotated[
        float | None, Setting("share of the first prompt in the mean total", ge=0.001, le=0.5)
    ] = None
    first_prompt_sigma: Annotated[
        float, Setting("log standard deviation of first prompts", ge=0, le=3)
    ] = 0.25
    append_sigma: Annotated[
        float, Setting("log standard deviation of appended tokens between turns", ge=0, le=3)
    ] = 1.4
    generated_sigma: Annotated[
        float, Setting("log standard deviation of generated tokens between turns", ge=0, le=3)
    ] = 1.1


class _Budgets(msgspec.Struct):
    """Of each trajectory: turns, total tokens, generated tokens, tokens of the first prompt."""

    turns: IntArray
    total: FloatArray
    generated: FloatArray
    first_prompt: FloatArray


def generate(
    dataset: Dataset, seed: int, settings: GeneratorSettings | None = None
) -> RoundColumns:
    """Return ``settings.trajectories`` trajectories with the means of ``dataset``.

    No trajectory exceeds ``dataset.max_tokens``.  Equal arguments return equal arrays.
    Raises ``ConfigError`` for settings out of range, or means that no trajectories can have.
    """
    settings = settings or GeneratorSettings()
    WorkloadSettings(seed=seed)  # Refuses an invalid seed.
    rng = np.random.default_rng([seed, 3])
    count = settings.trajectories
    total = _totals(dataset, settings, _strata(rng, count))
    turns = _turns(dataset, settings.tail, _strata(rng, count), total)
    share = dataset.generated_tokens / (dataset.append_tokens + dataset.generated_tokens)
    spread = _lognormal(rng, settings.first_prompt_sigma, count)
    first_round = offsets(turns)
    rounds = int(first_round[-1])
    noise = (
        _lognormal(rng, settings.append_sigma, rounds),
        _lognormal(rng, settings.generated_sigma, rounds),
    )

    def with_share(first_share: float) -> RoundColumns:
        prompt = np.minimum(first_share * dataset.total_tokens * spread, total * (1 - share) * 0.8)
        return _rounds(_Budgets(turns, total, share * total, prompt), first_round, *noise)

    if settings.first_prompt_share is not None:
        return with_share(settings.first_prompt_share)
    found = _bisected(lambda x: _mean_context(with_share(x)), dataset.context_tokens, 0.001, 0.7)
    return with_share(found)


def generate_agents(
    dataset: Dataset,
    agents: int,
    seed: int,
    generator: GeneratorSettings | None = None,
    workload: WorkloadSettings | None = None,
) -> AgentTable:
    """Return ``agents`` agents of ``dataset``; agents beyond the generated ones are as in §A.3.

    ``workload`` sets scales and cuts.  Its ``agents`` and ``seed`` are replaced, and its
    ``max_context_tokens`` defaults to the dataset's MaxLen.
    """
    workload = workload or WorkloadSettings()
    limit = workload.max_context_tokens
    workload = msgspec.structs.replace(
        workload,
        agents=agents,
        seed=seed,
        max_context_tokens=dataset.max_tokens if limit is None else limit,
    )
    return agents_from_rounds(generate(dataset, seed, generator), workload)


def _totals(dataset: Dataset, settings: GeneratorSettings, quantiles: FloatArray) -> FloatArray:
    """Return lognormal totals, cut at MaxLen, with mean Total."""
    shape = np.exp(settings.total_sigma * _normal(quantiles))

    def mean(median: float) -> float:
        return float(np.minimum(median * shape, dataset.max_tokens).mean())

    median = _bisected(mean, dataset.total_tokens, 1.0, 1e3 * dataset.max_tokens)
    return np.minimum(median * shape, dataset.max_tokens)


def _turns(dataset: Dataset, tail: Tail, quantiles: FloatArray, total: FloatArray) -> IntArray:
    """Return turns with mean Turns such that the mean of total / turns is Append + Gen."""

    def turns(spread: float) -> IntArray:
        shape = _SHAPES[tail](spread, quantiles)
        # A turn appends and generates at least one token; rounding changes the mean by < 0.1 %.
        drawn = np.rint(shape * (dataset.turns / shape.mean()))
        whole: IntArray = np.clip(drawn, 2, total // 4).astype(np.int64)
        return whole

    wanted = dataset.append_tokens + dataset.generated_tokens
    found = turns(_bisected(lambda x: float((total / turns(x)).mean()), wanted, 0.01, 0.99))
    return _settled(found, total, wanted)


def _settled(turns: IntArray, total: FloatArray, wanted: float) -> IntArray:
    """Change single trajectories by one turn until the mean of total / turns is ``wanted``.

    With whole turns the mean is a step function, with steps of a few percent if the shortest
    trajectory has few turns.
    """
    turns = turns.copy()
    for _ in range(20):
        missing = wanted * turns.size - float((total / turns).sum())
        if abs(missing) < 1e-4 * wanted * turns.size:
            break
        moved = turns - 1 if missing > 0 else turns + 1
        change = total / np.maximum(moved, 1) - total / turns
        change[moved < 2] = np.inf
        best = int(np.abs(change - missing).argmin())
        turns[best] = moved[best]
    return turns


def _gamma(spread: float, quantiles: FloatArray) -> FloatArray:
    """Return quantiles of a gamma distribution; E[n]·E[1/n] grows with ``spread`` = 1 / shape."""
    shape = 1 / spread
    logs = np.linspace(np.log(shape) - 40 * np.sqrt(spread) - 8, np.log(shape) + 4, 20001)
    density = np.exp(shape * logs - np.exp(logs) - (shape * np.log(shape) - shape))
    cumulated = np.cumsum(density)
    return np.exp(np.interp(quantiles, cumulated / cumulated[-1], logs))


def _lognormal_shape(spread: float, quantiles: FloatArray) -> FloatArray:
    """Return quantiles of a lognormal distribution of σ = 2 · ``spread``."""
    return np.exp(2 * spread * _normal(quantiles))


def _uniform(spread: float, quantiles: FloatArray) -> FloatArray:
    """Return quantiles of a uniform distribution from 1 - ``spread`` to 1 + ``spread``."""
    return 1 + spread * (2 * quantiles - 1)


_SHAPES: dict[Tail, Callable[[float, FloatArray], FloatArray]] = {
    "gamma": _gamma,
    "lognormal": _lognormal_shape,
    "uniform": _uniform,
}


def _rounds(
    budgets: _Budgets, first_round: IntArray, append_noise: FloatArray, generated_noise: FloatArray
) -> RoundColumns:
    """Distribute every trajectory's tokens over its rounds, at least one appended and generated."""
    first = first_round[:-1]
    append_weight = append_noise.copy()
    append_weight[first] = 0
    spare = budgets.total - budgets.generated - budgets.first_prompt - (budgets.turns - 1)
    append = 1 + _divided(append_weight, np.maximum(spare, 0), first_round)
    append[first] = np.maximum(np.rint(budgets.first_prompt), 1).astype(np.int64)
    spare = budgets.generated - budgets.turns
    generated = 1 + _divided(generated_noise, np.maximum(spare, 0), first_round)
    return RoundColumns(first_round, append, generated, np.zeros(append.size, np.float32))


def _divided(weights: FloatArray, budgets: FloatArray, first_round: IntArray) -> IntArray:
    """Return whole tokens per round in proportion to weights; sums are budgets rounded down."""
    counts = np.diff(first_round)
    before = np.concatenate([np.zeros(1), np.cumsum(weights)])
    sums = before[first_round[1:]] - before[first_round[:-1]]
    rate = np.repeat(np.floor(budgets) / sums, counts)
    start = np.repeat(before[first_round[:-1]], counts)
    # Rounding running totals loses no token; the small term makes the last total reach its budget.
    upper = np.floor((before[1:] - start) * rate + 1e-6)
    lower = np.floor((before[:-1] - start) * rate + 1e-6)
    tokens: IntArray = (upper - lower).astype(np.int64)
    return tokens


def _mean_context(columns: RoundColumns) -> float:
    """Return the mean over trajectories of their mean context."""
    first = columns.first_round
    counts = np.diff(first)
    before = offsets(columns.append_tokens + columns.generated_tokens)[:-1]
    own = np.add.reduceat(before, first[:-1]) / counts - before[first[:-1]]
    return float(own.mean())


def _bisected(measure: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return x where the increasing ``measure(x)`` is ``wanted``, within 1e-6 of the range."""
    if not measure(low) <= wanted <= measure(high):
        raise ConfigError(
            f"no trajectories can have a mean of {wanted:g}: with these settings it can be "
            f"{measure(low):g} to {measure(high):g}; correct the dataset, its tail or its sigmas"
        )
    span = high - low
    while high - low > 1e-6 * span:
        middle = (low + high) / 2
        low, high = (middle, high) if measure(middle) < wanted else (low, middle)
    return (low + high) / 2


def _strata(rng: np.random.Generator, count: int) -> FloatArray:
    """Return one random quantile from each of ``count`` equal strata, in random order."""
    return (rng.permutation(count) + rng.random(count)) / count


def _normal(quantiles: FloatArray) -> FloatArray:
    inverse = NormalDist().inv_cdf
    return np.asarray([inverse(q) for q in quantiles.tolist()])


def _lognormal(rng: np.random.Generator, sigma: float, count: int) -> FloatArray:
    return np.exp(sigma * rng.standard_normal(count))
