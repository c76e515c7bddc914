"""Online serving: the highest arrival rate within the latency objectives (Fig. 10 to 12)."""

from collections.abc import Callable, Mapping, Sequence
from math import inf, sqrt
from typing import NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath_sim.evaluation.runs import OnlineRun, Runs, agents_until
from dualpath_sim.evaluation.settings import EvaluationSettings, RunSpec, System


class Bracket(NamedTuple):
    """Bounds of a capacity: it is at least ``met`` and below ``missed``.

    ``met`` is 0 while no rate has met the SLO, ``missed`` None while none has missed it.
    """

    met: float = 0.0
    missed: float | None = None


Middle = Callable[[float, float], float | None]
"""From a rate that met the SLO and one that missed it to one in between, None if they are close."""


def within(precision: float) -> Middle:
    """Return the rule that ends when ``missed`` is at most ``1 + precision`` times ``met``.

    It bisects their ratio, so that small capacities are found as exactly as large ones.
    """

    def middle(met: float, missed: float) -> float | None:
        return sqrt(met * missed) if missed > met * (1 + precision) else None

    return middle


class RateSearch:
    """Finds the highest rate that meets an SLO, where higher rates are harder.

    From ``first_rate`` it doubles until a rate misses the SLO, or halves until one meets it, within
    ``least_rate`` and ``most_rate``; then it bisects the bracket until ``middle`` returns None.
    With ``known`` the search begins with that bracket, and its ends are not tried.

    A run may err.  So each end of the last bracket is tried until ``agreeing_runs`` of its runs
    agree, and the majority counts; if that reverses an end, the search continues from there.  With
    two agreeing runs a single wrong answer never changes the result: it makes its rate an end of
    the bracket, and every later answer leaves the bracket's end there until that rate is tried
    again.  ``most_runs`` bounds all runs.
    """

    def __init__(
        self,
        first_rate: float,
        middle: Middle,
        *,
        least_rate: float = 0.0,
        most_rate: float = inf,
        known: Bracket | None = None,
        agreeing_runs: int = 1,
        most_runs: int = 1000,
    ) -> None:
        self._first_rate = first_rate
        self._middle = middle
        self._least_rate = least_rate
        self._most_rate = most_rate
        self._known = known
        self._agreeing_runs = agreeing_runs
        self._most_runs = most_runs
        self._answers: dict[float, list[bool]] = {}

    @property
    def answers(self) -> Mapping[float, Sequence[bool]]:
        """Whether the SLO was met, by rate and run; rates are in the order of their first run."""
        return self._answers

    @property
    def runs(self) -> int:
        """The number of runs so far."""
        return sum(map(len, self._answers.values()))

    @property
    def bracket(self) -> Bracket:
        """The bracket so far; a rate with a tie of its runs is neither met nor missed."""
        known = self._known or Bracket()
        verdicts = {rate: _verdict(answers) for rate, answers in self._answers.items()}
        met = [rate for rate, verdict in verdicts.items() if verdict is True]
        missed = [rate for rate, verdict in verdicts.items() if verdict is False]
        return Bracket(max(met, default=known.met), min(missed, default=known.missed))

    @property
    def overturned(self) -> tuple[float, ...]:
        """The rates at which the majority of runs contradicts the first one."""
        return tuple(
            rate
            for rate, answers in self._answers.items()
            if _verdict(answers) is not None and _verdict(answers) != answers[0]
        )

    @property
    def cut_short(self) -> bool:
        """Whether ``most_runs`` ended the search early."""
        return self.runs >= self._most_runs and self._wanted() is not None

    def next_rate(self) -> float | None:
        """Return the rate to try now, None when the search is over."""
        return self._wanted() if self.runs < self._most_runs else None

    def answer(self, rate: float, met: bool) -> None:
        """Record whether a run at ``next_rate`` met the SLO."""
        self._answers.setdefault(rate, []).append(met)

    def run(self, meets_slo: Callable[[float], bool]) -> Bracket:
        """Search to the end and return the bracket."""
        while (rate := self.next_rate()) is not None:
            self.answer(rate, meets_slo(rate))
        return self.bracket

    def _wanted(self) -> float | None:
        for divided, answers in self._answers.items():
            if _verdict(answers) is None:
                return divided
        narrower = self._narrower()
        return self._unconfirmed() if narrower is None else narrower

    def _narrower(self) -> float | None:
        """Return a rate that narrows the bracket, None if it is narrow enough or no rate can."""
        met, missed = self.bracket
        if missed is None:
            higher = min(2 * met or self._first_rate, self._most_rate)
            return higher if higher > met else None
        if met == 0 and self._known is None:
            lower = max(missed / 2, self._least_rate)
            return lower if lower < missed else None
        return self._middle(met, missed)

    def _unconfirmed(self) -> float | None:
        """Return an end of the bracket on which too few of its runs agree."""
        for end in self.bracket:
            answers = self._answers.get(end, ()) if end is not None else ()
            agreeing = max(answers.count(True), answers.count(False))
            if answers and agreeing < self._agreeing_runs:
                return end
        return None


def _verdict(answers: Sequence[bool]) -> bool | None:
    """Return the majority of the runs at a rate, None for a tie."""
    met, missed = answers.count(True), answers.count(False)
    return None if met == missed else met > missed


#: Finer than the paper's figures show.
RESOLUTION_APS = 0.01


class Sweep(msgspec.Struct, frozen=True):
    """Rates tried in steps, and the capacity; ``capped`` if even the highest rate was met.

    ``grid_capacity`` is the last rate of the steps that met the SLO, as an experiment on a grid
    would report it; both are 0 if the lowest rate already missed it.
    """

    rates: tuple[float, ...]
    capacity: float
    grid_capacity: float
    capped: bool


def sweep(
    meets_slo: Callable[[float], bool],
    step: float,
    limit: float,
    quickly: Callable[[float], bool] | None = None,
) -> Sweep:
    """Raise the rate by ``step`` until the SLO is missed, then bisect to ``RESOLUTION_APS``.

    ``quickly`` answers as ``meets_slo`` does, at less cost, where nothing else is asked of a rate.
    """
    rates: list[float] = []
    met = 0.0
    while True:
        rate = round(step * (len(rates) + 1), 6)
        if rate > limit + 1e-9:
            return Sweep(tuple(rates), met, met, True)
        rates.append(rate)
        if not meets_slo(rate):
            return Sweep(tuple(rates), bisected(quickly or meets_slo, met, rate), met, False)
        met = rate


def bisected(meets_slo: Callable[[float], bool], met: float, missed: float) -> float:
    """Return the highest rate, in steps of ``RESOLUTION_APS``, between one met and one missed."""
    search = RateSearch(met, _on_the_grid, known=Bracket(met, missed))
    return round(_steps(search.run(meets_slo).met) * RESOLUTION_APS, 6)


def _on_the_grid(met: float, missed: float) -> float | None:
    low, high = _steps(met), _steps(missed)
    return (low + high) // 2 * RESOLUTION_APS if high - low > 1 else None


def _steps(rate: float) -> int:
    return round(rate / RESOLUTION_APS)


def ratio(ours: Sequence[float]) -> float | None:
    """Return the second of two capacities over the first; None if the first is 0."""
    return ours[1] / ours[0] if ours[0] else None


WORKLOAD = "64K"
#: Most experiments that end by a rule have ended by then.
FIRST_LOOK_S = 3000.0
#: How every online figure was made, for its page.
METHOD = (
    "Poisson arrivals from an empty system, no tool delays. An experiment ends when the mean TTFT "
    "over a sliding 150 s exceeds 4 s, or is within 5 % of what it was 30 minutes before; numbers "
    "are means over the last 150 s."
)


def online_spec(
    settings: EvaluationSettings,
    system: System,
    mode: Mode,
    agents_per_s: float,
    nodes: tuple[int, int] | None = None,
    horizon_s: float | None = None,
) -> RunSpec:
    """Return an online experiment; agents arrive until ``horizon_s``, by default the settings'."""
    until_s = horizon_s or settings.horizon_s
    return RunSpec(
        system=system,
        mode=mode,
        workload=WORKLOAD,
        agents=agents_until(agents_per_s, until_s),
        nodes=nodes,
        agents_per_s=agents_per_s,
        until_s=until_s,
    )


def online(runs: Runs, system: System, mode: Mode, agents_per_s: float) -> OnlineRun:
    """Return one online experiment on the system's own cluster."""
    return runs.online(online_spec(runs.settings, system, mode, agents_per_s))


def rate_sweep(runs: Runs, system: System, mode: Mode) -> Sweep:
    """Return the rates of a system up to the first that misses the SLO, and its capacity."""
    return sweep(
        lambda rate: online(runs, system, mode, rate).meets_slo,
        runs.settings.aps_step(system),
        runs.settings.aps_limit(system),
        lambda rate: meets_slo(runs, online_spec(runs.settings, system, mode, rate)),
    )


def meets_slo(runs: Runs, spec: RunSpec) -> bool:
    """Return whether an experiment meets the SLO, simulating only as much as this takes.

    A run that is cut early has the same past: most end long before the horizon, which is there for
    agents to be followed to their own end.
    """
    assert spec.until_s is not None
    early = runs.online(msgspec.structs.replace(spec, until_s=min(FIRST_LOOK_S, spec.until_s)))
    return early.meets_slo if early.ending.rule != "horizon" else runs.online(spec).meets_slo
