"""What the model of online serving may lack: one change at a time, and what it explains (§7.4)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath.model.evaluation.capacity import bisected, ratio
from dualpath.model.evaluation.runs import Runs
from dualpath.model.evaluation.serving import WORKLOAD, meets_slo, online_spec
from dualpath.model.evaluation.settings import DS_660B, EvaluationSettings, RunSpec

TTFT_APS, LOW_APS, HIGH_APS = 0.4, 0.1, 0.45
#: Lowest rate looked at; a system that misses the SLO there has no capacity worth the name.
LEAST_APS = 0.05
#: Long enough for the rule of §7.4 and for agents to end after it; shorter than the figures'.
HORIZON_S = 4000.0
OTHER_LENGTH = "48K"
#: Bytes/s of a storage NIC at which slower prefill leaves the largest speed-up where it is.
SLOW_STORAGE = 28e9
#: Steps of proportion that find a factor to within a percent.
_STEPS = 4
_LARGEST_FACTOR = 4.0


class Candidate(NamedTuple):
    """One change, or several together."""

    title: str
    generator: tuple[tuple[str, Any], ...] = ()
    overrides: tuple[tuple[str, Any], ...] = ()
    prefill_slowdown: float = 1.0
    interleaved: bool | None = None
    unseen_generation: float = 1.0

    def of(self, spec: RunSpec) -> RunSpec:
        """Return ``spec`` with the change."""
        return msgspec.structs.replace(
            spec,
            generator=self.generator,
            overrides=self.overrides,
            prefill_slowdown=self.prefill_slowdown,
            interleaved=self.interleaved,
            unseen_generation=self.unseen_generation,
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate gives; rates per second, times in seconds, all of DualPath but Basic's."""

    title: str
    basic_aps: float
    dualpath_aps: float
    ttft_s: float | None
    low_jct_s: float | None
    high_jct_s: float | None
    offline_s: float
    offline_other_s: float
    speedup: float

    @property
    def ratio(self) -> float | None:
        """Capacity of DualPath over Basic's; None without any."""
        return ratio([self.basic_aps, self.dualpath_aps])


MODEL = Candidate("the model")
WORKLOADS = (
    Candidate("appends vary less (sigma 0.5 for 1.4)", generator=(("append_sigma", 0.5),)),
    Candidate("first prompts 30 % of the total", generator=(("first_prompt_share", 0.3),)),
    Candidate("turns uniform", generator=(("tail", "uniform"),)),
    Candidate("turns lognormal", generator=(("tail", "lognormal"),)),
    Candidate("1.7x generation, not kept in context", unseen_generation=1.7),
)
PATHS = (
    Candidate("groups fetch every 0.5 s", overrides=(("fetch_interval_s", 0.5),)),
    Candidate("0.7 s between client and scheduler", overrides=(("request_overhead_s", 0.7),)),
    Candidate("exchange not hidden (one micro-batch)", interleaved=False),
    Candidate("compute quota 1 s for 0.3 s", overrides=(("compute_quota_s", 1.0),)),
)


def outcomes(runs: Runs) -> list[Outcome]:
    """Return the model's numbers and every candidate's; with ``quick`` settings of a few."""
    if runs.settings.quick:
        return [outcome(runs, candidate) for candidate in (MODEL, PATHS[1])]
    return [outcome(runs, one) for one in (MODEL, *WORKLOADS, *PATHS, *_slower(runs))]


def outcome(runs: Runs, candidate: Candidate) -> Outcome:
    """Run one candidate online and offline."""
    ttft, low, high = (
        runs.online(candidate.of(_online(runs.settings, Mode.DUALPATH, rate)))
        for rate in (TTFT_APS, LOW_APS, HIGH_APS)
    )
    offline_s = offline_jct_s(runs, candidate, Mode.DUALPATH)
    return Outcome(
        title=candidate.title,
        basic_aps=capacity(runs, candidate, Mode.BASIC),
        dualpath_aps=capacity(runs, candidate, Mode.DUALPATH),
        ttft_s=ttft.ttft.mean,
        low_jct_s=low.agent_jct,
        high_jct_s=high.agent_jct,
        offline_s=offline_s,
        offline_other_s=offline_jct_s(runs, candidate, Mode.DUALPATH, OTHER_LENGTH),
        speedup=offline_jct_s(runs, candidate, Mode.BASIC) / offline_s,
    )


def capacity(runs: Runs, candidate: Candidate, mode: Mode) -> float:
    """Return the highest rate that meets the SLO, by bisection alone; 0 below ``LEAST_APS``."""

    def meets(rate: float) -> bool:
        return meets_slo(runs, candidate.of(_online(runs.settings, mode, rate)))

    limit = runs.settings.aps_limit(DS_660B)
    if not meets(LEAST_APS):
        return 0.0
    return limit if meets(limit) else bisected(meets, LEAST_APS, limit)


def offline_jct_s(runs: Runs, candidate: Candidate, mode: Mode, workload: str = WORKLOAD) -> float:
    """Return the JCT of the largest batch on 2P4D."""
    agents = runs.settings.offline_agents[-1]
    spec = RunSpec(system=DS_660B, mode=mode, workload=workload, agents=agents)
    return runs.offline(candidate.of(spec)).jct_s


def _online(settings: EvaluationSettings, mode: Mode, rate: float) -> RunSpec:
    return online_spec(settings, DS_660B, mode, rate, horizon_s=min(HORIZON_S, settings.horizon_s))


def _slower(runs: Runs) -> list[Candidate]:
    """Return machines slowed down until they meet a number of the paper elsewhere."""

    def jct_factor(factor: float) -> float:
        slowed = Candidate("", prefill_slowdown=factor)
        return 3167.0 / offline_jct_s(runs, slowed, Mode.DUALPATH, OTHER_LENGTH)

    def capacity_factor(factor: float) -> float:
        slowed = Candidate("", prefill_slowdown=factor)
        # Near its limit a capacity falls faster than in proportion.
        found: float = (capacity(runs, slowed, Mode.DUALPATH) / HIGH_APS) ** 0.5
        return found

    jct = _found(jct_factor, 1.0)
    online = _found(capacity_factor, jct)
    whole = f"prefill {jct:.2f}x slower, storage NICs 28 GB/s"
    storage = (("snic_bytes_per_s", SLOW_STORAGE), ("snic_write_bytes_per_s", SLOW_STORAGE))
    return [
        Candidate("storage NICs 28 GB/s", overrides=storage),
        Candidate(f"prefill {jct:.2f}x slower (3,167 s is 48K)", prefill_slowdown=jct),
        Candidate(f"prefill {online:.2f}x slower (0.45 APS)", prefill_slowdown=online),
        Candidate(whole, overrides=storage, prefill_slowdown=jct),
        Candidate(
            f"{whole}, 1.7x generation",
            overrides=storage,
            prefill_slowdown=jct,
            unseen_generation=1.7,
        ),
    ]


def _found(change: Callable[[float], float], factor: float) -> float:
    """Return the factor that needs least change, of a few reached in proportion."""
    tried: dict[float, float] = {}
    for _ in range(_STEPS):
        factor = round(min(max(factor, 1.0), _LARGEST_FACTOR), 2)
        tried[factor] = change(factor)
        factor *= tried[factor]
    return min(tried, key=lambda one: abs(tried[one] - 1))
