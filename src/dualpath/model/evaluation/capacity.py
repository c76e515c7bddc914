"""Capacity (§7.4): the highest arrival rate at which the SLO is met."""

from collections.abc import Callable, Sequence

import msgspec

from dualpath.model.evaluation.rate_search import Bracket, RateSearch

#: Finer than the paper's figures can tell.
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
