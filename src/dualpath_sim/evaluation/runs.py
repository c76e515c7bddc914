"""Runs on demand, each made once: figures ask for a specification and get its reduced numbers."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError, DualPathError
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.evaluation.settings import (
    AS_WRITTEN,
    Calibration,
    Curves,
    EvaluationSettings,
    RunSpec,
)
from dualpath_sim.simulator.result import (
    NS_PER_S,
    Batches,
    IntArray,
    LinkUse,
    RoleMove,
    SimulationResult,
)
from dualpath_sim.simulator.settings import Setup

FloatArray = NDArray[np.float64]
Curve = tuple[float, ...]


class Balance(msgspec.Struct, frozen=True):
    """Largest over average load, 1 is perfect, at each time since the task began."""

    time_s: FloatArray
    ratio: FloatArray

    def mean(self, until_s: float) -> float | None:
        """Return the mean ratio before ``until_s``; None if nothing was measured by then."""
        chosen = self.ratio[self.time_s < until_s]
        return float(chosen.mean()) if chosen.size else None

    def binned(self, bins: int, until_s: float) -> tuple[Curve, tuple[float | None, ...]]:
        """Return the middle of each of ``bins`` equal times up to ``until_s`` and its mean."""
        chosen = self.time_s < until_s
        index = np.minimum((self.time_s[chosen] / until_s * bins).astype(np.int64), bins - 1)
        counts = np.bincount(index, minlength=bins)
        sums = np.bincount(index, weights=self.ratio[chosen], minlength=bins)
        middle = (np.arange(bins) + 0.5) * until_s / bins
        means = (float(s / n) if n else None for s, n in zip(sums, counts, strict=True))
        return _curve(middle), tuple(means)


def snic_balance(links: LinkUse, window_s: float) -> Balance:
    """Return max/avg of the bytes, reads and writes, of all storage NICs per window.

    Windows without traffic are left out.  Raises ``ConfigError`` if ``window_s`` is no multiple
    of the window that the run was recorded in.
    """
    recorded_s = links.window_ns / NS_PER_S
    factor = round(window_s / recorded_s)
    if factor < 1 or abs(factor * recorded_s - window_s) > 1e-9 * window_s:
        raise ConfigError(
            f"a window of {window_s:g} s is no multiple of the recorded {recorded_s:g} s; "
            "give a multiple of it"
        )
    traffic = links.snic_read_bytes + links.snic_write_bytes
    whole = traffic.shape[0] // factor * factor
    windows = traffic[:whole].reshape(-1, factor, traffic.shape[1]).sum(axis=1)
    time_s = np.arange(windows.shape[0]) * window_s
    used = windows.sum(axis=1) > 0
    return Balance(time_s[used], windows[used].max(axis=1) / windows[used].mean(axis=1))


def attention_balance(batches: Batches) -> Balance:
    """Return max/avg attention time over the engines of a unit, per forward pass."""
    used = batches.attention_mean_s > 0
    ratio = batches.attention_max_s[used] / batches.attention_mean_s[used]
    return Balance(batches.start_ns[used] / NS_PER_S, ratio)


def tail_begins_s(result: SimulationResult, share: float) -> float:
    """Return when the agents not yet done become less than ``share`` of all."""
    last_rounds = result.agents.first_round[1:] - 1
    ends_ns = np.sort(result.turns.finished_ns[last_rounds])
    index = min(int(np.ceil(ends_ns.size * (1 - share))), ends_ns.size - 1)
    return float(ends_ns[index]) / NS_PER_S


class Timeline(msgspec.Struct, frozen=True):
    """Means over equal bins, ``time_s`` being their middles.

    ``prompt_tokens_per_s`` counts whole prompts, hits included, at their first token;
    ``generated_tokens_per_s`` spreads generation evenly over each round.  The counts of rounds are
    taken at the end of a bin.
    """

    time_s: Curve
    prompt_tokens_per_s: Curve
    computed_tokens_per_s: Curve
    generated_tokens_per_s: Curve
    ttft_s: Curve
    queued: Curve
    reading: Curve
    prefilling: Curve
    decoding: Curve


def timeline(result: SimulationResult, bins: int) -> Timeline:
    """Return the timeline of a run in which all rounds have finished."""
    turns, agents = result.turns, result.agents
    width_ns = max(-(-int(turns.finished_ns.max() + 1) // bins), 1)
    first = _bins(turns.first_token_ns, width_ns)
    done = _bins(turns.finished_ns, width_ns)
    width_s = width_ns / NS_PER_S
    prompt = np.bincount(first, weights=agents.prompt_tokens, minlength=bins)
    hits = np.bincount(first, weights=agents.hit_tokens, minlength=bins)
    count = np.bincount(first, minlength=bins)
    ttft = np.bincount(first, weights=result.ttft_s(), minlength=bins)
    lasts_ns = np.maximum(turns.finished_ns - turns.first_token_ns, 1)
    rate = agents.generated_tokens * (NS_PER_S / lasts_ns)
    rising = np.bincount(first, weights=rate, minlength=bins)
    falling = np.bincount(done, weights=rate, minlength=bins)
    generated = np.maximum(np.cumsum(rising - falling), 0.0)
    counts = {
        name: _curve(_between(_bins(start, width_ns), _bins(end, width_ns), bins))
        for name, start, end in (
            ("queued", turns.submitted_ns, turns.granted_ns),
            ("reading", turns.granted_ns, turns.loaded_ns),
            ("prefilling", turns.loaded_ns, turns.first_token_ns),
            ("decoding", turns.first_token_ns, turns.finished_ns),
        )
    }
    return Timeline(
        time_s=_curve((np.arange(bins) + 0.5) * width_s),
        prompt_tokens_per_s=_curve(prompt / width_s),
        computed_tokens_per_s=_curve((prompt - hits) / width_s),
        generated_tokens_per_s=_curve(generated),
        ttft_s=_curve(np.divide(ttft, count, out=np.zeros(bins), where=count > 0)),
        **counts,
    )


def _curve(values: NDArray[Any]) -> Curve:
    return tuple(float(value) for value in values)


def _bins(times_ns: IntArray, width_ns: int) -> IntArray:
    return times_ns // width_ns


def _between(start: IntArray, end: IntArray, bins: int) -> IntArray:
    entered = np.cumsum(np.bincount(start, minlength=bins)[:bins])
    left = np.cumsum(np.bincount(end, minlength=bins)[:bins])
    return entered - left


TIMELINE_BINS = 240
BALANCE_BINS = 120
#: The beginning of a task, in which Fig. 14 measures the balance of attention.
FIRST_SHARE = 0.05
#: Windows that the SNIC balance is also taken over, in units of the chosen one.
WINDOW_FACTORS = (1, 5, 10, 30)


class BalanceOverTime(msgspec.Struct, frozen=True, kw_only=True):
    """Balance until the tail of a task: times in seconds, and the means there.

    ``attention_first`` is the mean balance of attention in the first 5 % of the task,
    ``attention_mean`` that before the tail, over all ``passes``.
    """

    snic: tuple[Curve, tuple[float | None, ...]]
    attention: tuple[Curve, tuple[float | None, ...]]
    attention_first: float | None
    attention_mean: float | None
    passes: int


class OfflineRun(msgspec.Struct, frozen=True, kw_only=True, tag="offline", omit_defaults=True):
    """One finished task; seconds.

    ``snic_by_window`` gives the mean balance of the storage NICs before the tail, for several
    widths of window.
    """

    jct_s: float
    agent_jct_s: float
    tail_begins_s: float
    rounds: int
    hit_share: float
    snic_by_window: tuple[tuple[float, float | None], ...]
    dram_tier_hit_share: float = 0.0
    moves: tuple[RoleMove, ...] = ()
    balance: BalanceOverTime | None = None
    timeline: Timeline | None = None


def offline_run(
    result: SimulationResult, settings: EvaluationSettings, curves: Curves = "none"
) -> OfflineRun:
    """Reduce a run in which every round has finished."""
    hits = int(result.agents.hit_tokens.sum(dtype="int64"))
    prompts = int(result.agents.prompt_tokens.sum(dtype="int64"))
    tail_s = tail_begins_s(result, settings.tail_share)
    windows_s = [factor * settings.window_s for factor in WINDOW_FACTORS]
    return OfflineRun(
        jct_s=result.jct_s,
        agent_jct_s=float(result.agent_jct_s().mean()),
        tail_begins_s=tail_s,
        rounds=result.agents.rounds,
        hit_share=hits / prompts,
        snic_by_window=tuple(
            (window_s, snic_balance(result.links, window_s).mean(tail_s)) for window_s in windows_s
        ),
        dram_tier_hit_share=result.dram_tier_hit_tokens / hits if hits else 0.0,
        moves=tuple(result.moves),
        balance=_balance(result, settings, tail_s) if curves == "balance" else None,
        timeline=timeline(result, TIMELINE_BINS) if curves == "timeline" else None,
    )


def _balance(
    result: SimulationResult, settings: EvaluationSettings, tail_s: float
) -> BalanceOverTime:
    snic = snic_balance(result.links, settings.window_s)
    attention = attention_balance(result.batches)
    return BalanceOverTime(
        snic=snic.binned(BALANCE_BINS, tail_s),
        attention=attention.binned(BALANCE_BINS, tail_s),
        attention_first=attention.mean(FIRST_SHARE * result.jct_s),
        attention_mean=attention.mean(tail_s),
        passes=attention.time_s.size,
    )


TTFT_LIMIT_S = 4.0
TPOT_LIMIT_S = 0.05
WINDOW_S = 150.0
LOOKBACK_S = 1800.0
VARIATION = 0.05


class EndRule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule of §7.4 that ends an experiment with Poisson arrivals; the defaults are the paper's.

    A run ends when the mean TTFT over the last ``window_s`` exceeds ``ttft_limit_s``, or differs by
    less than ``variation``, a share, from what it was ``lookback_s`` before.
    """

    ttft_limit_s: float = TTFT_LIMIT_S
    window_s: float = WINDOW_S
    lookback_s: float = LOOKBACK_S
    variation: float = VARIATION


PAPERS_RULE = EndRule()
#: The rule is evaluated this often.
STEP_S = 1.0
#: Shadows of Fig. 10: the lowest and highest mean over pieces of the last window.
PIECE_S = 10.0

Rule = Literal["TTFT above limit", "steady", "horizon"]


class Ending(msgspec.Struct, frozen=True):
    """When and by which rule an experiment ended."""

    at_s: float
    rule: Rule


class Measured(msgspec.Struct, frozen=True):
    """Mean over the last window, and the fluctuation in it; None without any round."""

    mean: float | None
    low: float | None
    high: float | None


class OnlineRun(msgspec.Struct, frozen=True, kw_only=True, tag="online"):
    """One online experiment; seconds.

    ``ttft_parts`` are the means, over the rounds of the last window, of scheduling, allocating,
    reading and prefill (Fig. 12).  ``agent_jct`` is the mean completion time of the agents that
    arrived before the end, followed to their own (Fig. 11); ``agents_unfinished`` of them were
    not done at the horizon and are left out.
    """

    ending: Ending
    ttft: Measured
    ttst: Measured
    tpot: Measured
    ttft_parts: tuple[float, ...]
    agent_jct: float | None
    agents_unfinished: int
    total_tokens_mean: float
    kv_bytes_per_token: float

    @property
    def meets_slo(self) -> bool:
        """TTFT ≤ 4 s and TPOT ≤ 50 ms, measured at the end."""
        return (
            self.ending.rule != "TTFT above limit"
            and self.ttft.mean is not None
            and self.ttft.mean <= TTFT_LIMIT_S
            and (self.tpot.mean or 0.0) <= TPOT_LIMIT_S
        )

    def working_set_bytes(self, agents_per_s: float) -> float | None:
        """λ · mean JCT · mean total length / 2, in bytes of KV (§8.2)."""
        if self.agent_jct is None:
            return None
        tokens = agents_per_s * self.agent_jct * self.total_tokens_mean / 2
        return tokens * self.kv_bytes_per_token


def ending(
    first_token_s: FloatArray,
    ttft_s: FloatArray,
    horizon_s: float,
    rule: EndRule = PAPERS_RULE,
) -> Ending:
    """Return when ``rule`` ends an experiment; it is applied to the first tokens so far.

    It is evaluated every second from the first full window on.  Windows without a first token
    decide nothing.
    """
    order = np.argsort(first_token_s, kind="stable")
    times = first_token_s[order]
    sums = np.concatenate([[0.0], np.cumsum(ttft_s[order])])
    steps = int((horizon_s - rule.window_s) / STEP_S) + 1
    ends_s = rule.window_s + STEP_S * np.arange(max(steps, 0))
    last = np.searchsorted(times, ends_s, side="right")
    first = np.searchsorted(times, ends_s - rule.window_s, side="right")
    counts = last - first
    means = np.full(ends_s.size, np.nan)
    np.divide(sums[last] - sums[first], counts, out=means, where=counts > 0)
    back = max(int(rule.lookback_s / STEP_S), 1)
    steady = np.zeros(ends_s.size, dtype=bool)
    steady[back:] = np.abs(means[back:] - means[:-back]) < rule.variation * means[:-back]
    above = means > rule.ttft_limit_s
    reached = np.flatnonzero(above | steady)
    if not reached.size:
        return Ending(horizon_s, "horizon")
    index = int(reached[0])
    return Ending(float(ends_s[index]), "TTFT above limit" if above[index] else "steady")


def measured(at_s: FloatArray, values: FloatArray, end_s: float) -> Measured:
    """Return the mean of ``values`` in the last window of time, and their fluctuation."""
    chosen = (at_s > end_s - WINDOW_S) & (at_s <= end_s) & ~np.isnan(values)
    if not chosen.any():
        return Measured(None, None, None)
    pieces = ((end_s - at_s[chosen]) // PIECE_S).astype(np.int64)
    counts = np.bincount(pieces)
    sums = np.bincount(pieces, weights=values[chosen])
    means = sums[counts > 0] / counts[counts > 0]
    return Measured(float(values[chosen].mean()), float(means.min()), float(means.max()))


def online_run(result: SimulationResult, horizon_s: float) -> OnlineRun:
    """Reduce a run with Poisson arrivals."""
    turns = result.turns
    first_s = _seconds(turns.first_token_ns)
    answered = ~np.isnan(first_s)
    ttft_s = result.ttft_s()
    end = ending(first_s[answered], ttft_s[answered], horizon_s)
    agent_jct, unfinished = _agent_jct(result, end.at_s)
    first, last = result.agents.first_round[:-1], result.agents.first_round[1:] - 1
    started = turns.submitted_ns[first] >= 0
    final = last[started] if started.any() else last
    total = result.agents.prompt_tokens[final].astype(np.int64)
    total = total + result.agents.generated_tokens[final]
    return OnlineRun(
        ending=end,
        ttft=measured(first_s, ttft_s, end.at_s),
        ttst=measured(_seconds(turns.second_token_ns), result.ttst_s(), end.at_s),
        tpot=measured(_seconds(turns.finished_ns), result.tpot_s(), end.at_s),
        ttft_parts=_parts(result, end.at_s),
        agent_jct=agent_jct,
        agents_unfinished=unfinished,
        total_tokens_mean=float(total.mean()),
        kv_bytes_per_token=result.setup.model.kv_bytes_per_token,
    )


def _parts(result: SimulationResult, end_s: float) -> tuple[float, ...]:
    turns = result.turns
    first_s = _seconds(turns.first_token_ns)
    chosen = (first_s > end_s - WINDOW_S) & (first_s <= end_s)
    if not chosen.any():
        return ()
    marks = (
        turns.submitted_ns,
        turns.assigned_ns,
        turns.granted_ns,
        turns.loaded_ns,
        turns.first_token_ns,
    )
    return tuple(float((b[chosen] - a[chosen]).mean() / NS_PER_S) for a, b in pairwise(marks))


def _agent_jct(result: SimulationResult, end_s: float) -> tuple[float | None, int]:
    arrived = result.turns.submitted_ns[result.agents.first_round[:-1]]
    chosen = (arrived >= 0) & (arrived <= end_s * NS_PER_S)
    times = result.agent_jct_s()[chosen]
    done = times[~np.isnan(times)]
    return (float(done.mean()) if done.size else None), int(times.size - done.size)


def _seconds(times_ns: NDArray[np.int64]) -> FloatArray:
    return np.where(times_ns >= 0, times_ns / NS_PER_S, np.nan)


#: Agent tables in the cache: the modes of one comparison follow each other and share one.
_CACHED_TABLES = 2


class Inputs(Protocol):
    """Where clusters, models and workloads come from."""

    def setup(self, spec: RunSpec) -> Setup:
        """Return cluster, model costs and mode of a run."""

    def agents(self, spec: RunSpec, seed: int) -> AgentTable:
        """Return the run's agents, arrivals included."""


class Simulate(Protocol):
    """``sim.run.simulate`` with a core chosen."""

    def __call__(
        self, setup: Setup, agents: AgentTable, *, until_s: float | None, window_s: float
    ) -> SimulationResult:
        """Run the agents."""


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """Numbers of a figure that needs no simulated run, by name."""

    numbers: dict[str, float]


class Impossible(msgspec.Struct, frozen=True, tag="impossible"):
    """A run that the cluster cannot make, and why."""

    reason: str


Result = OfflineRun | OnlineRun | Computed | Impossible


class NotRecordedError(Exception):
    """A figure asks for a run that its raw data lacks; ``make`` makes the run."""

    def __init__(self, cell: str, make: Callable[[], Result]) -> None:
        super().__init__(cell)
        self.cell = cell
        self.make = make


class Runs:
    """The runs that a figure asks for: reduced to numbers, each made once, by cell."""

    def __init__(
        self,
        settings: EvaluationSettings,
        inputs: Inputs,
        simulate: Simulate,
        calibration: Calibration = AS_WRITTEN,
    ) -> None:
        """Make no run yet."""
        self.settings = settings
        self.calibration = calibration
        self.results: dict[str, Result] = {}
        self._inputs = inputs
        self._simulate = simulate
        self._tables: dict[tuple[object, ...], AgentTable] = {}

    def setup(self, spec: RunSpec) -> Setup:
        """Return the setup of a run without making it."""
        return self._inputs.setup(spec)

    def offline(self, spec: RunSpec) -> OfflineRun:
        """Return the numbers of a run in which all agents start at once.

        Raises ``ConfigError`` if the cluster cannot make it.
        """
        found = self._result(spec.title, lambda: self._offline(spec))
        if isinstance(found, Impossible):
            raise ConfigError(found.reason)
        assert isinstance(found, OfflineRun)
        return found

    def online(self, spec: RunSpec) -> OnlineRun:
        """Return the numbers of a run in which agents arrive until ``spec.until_s``."""
        until_s = spec.until_s
        if spec.agents_per_s is None or until_s is None:
            raise ConfigError(f"{spec.title}: an online run needs a rate and an end; give both")
        found = self._result(spec.title, lambda: online_run(self._simulated(spec), until_s))
        assert isinstance(found, OnlineRun)
        return found

    def computed(self, cell: str, compute: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return numbers that need no simulated run; ``cell`` names them."""
        found = self._result(cell, lambda: Computed(dict(compute())))
        assert isinstance(found, Computed)
        return found.numbers

    def agents(self, spec: RunSpec) -> AgentTable:
        """Return the agents of a run, the same for every mode and cluster."""
        key = (
            spec.workload,
            spec.agents,
            spec.append_scale,
            spec.generation_scale,
            spec.agents_per_s,
            spec.generator,
            spec.unseen_generation,
        )
        if key not in self._tables:
            while len(self._tables) >= _CACHED_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = self._inputs.agents(spec, self.settings.seed)
        return self._tables[key]

    def _result(self, cell: str, make: Callable[[], Result]) -> Result:
        cell += self.calibration.cell_suffix
        if cell not in self.results:
            self.results[cell] = self._missing(cell, make)
        return self.results[cell]

    def _missing(self, cell: str, make: Callable[[], Result]) -> Result:
        """Return the result of a run that ``results`` lacks."""
        return make()

    def _offline(self, spec: RunSpec) -> OfflineRun | Impossible:
        try:
            result = self._simulated(spec)
        except DualPathError as error:
            return Impossible(str(error))
        return offline_run(result, self.settings, spec.curves)

    def _simulated(self, spec: RunSpec) -> SimulationResult:
        result = self._simulate(
            self._inputs.setup(spec),
            self.agents(spec),
            until_s=spec.until_s,
            window_s=self.settings.window_s,
        )
        if spec.until_s is None and result.stopped:
            raise ConfigError(f"{spec.title}: the run ended with rounds unfinished; raise its end")
        return result


class RecordedRuns(Runs):
    """Recorded runs: a missing one raises ``NotRecordedError``."""

    def _missing(self, cell: str, make: Callable[[], Result]) -> Result:
        raise NotRecordedError(cell, make)


def agents_until(agents_per_s: float, until_s: float) -> int:
    """Return a number of Poisson arrivals that practically surely lasts for ``until_s``."""
    mean = agents_per_s * until_s
    return math.ceil(mean + 6 * math.sqrt(mean)) + 1
