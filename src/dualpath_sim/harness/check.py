"""Compares the key results of a rerun with recorded ones."""

import math

from dualpath.report.model import Table, cell
from dualpath_sim.harness.experiment import KeyResult, Page, RawData, tolerance_text

#: Relative difference of numbers that must be equal, as stored numbers are rounded.
_ROUNDING = 1e-8

SAME, DIFFERS, SKIPPED, MISSING = "same", "DIFFERS", "not compared", "MISSING"


def compare(expected: Page, rerun: Page) -> Table:
    """Return each key result of ``expected`` with that of the rerun and the verdict.

    A result with a tolerance must not differ by more; one with a limit alone must meet the limit if
    the recorded one did.  Times on another processor are not compared.
    """
    same_processor = _processor(expected) is not None and _processor(expected) == _processor(rerun)
    again = {result.what: result for result in rerun.results}
    rows = []
    for result in expected.results:
        found = again.get(result.what)
        measured = None if found is None else found.measured
        difference = _difference(result.measured, measured)
        rows.append(
            (
                result.what,
                cell(result.measured, "{:.4g}"),
                cell(measured, "{:.4g}"),
                cell(difference, "{:+.1%}"),
                _allowed(result),
                MISSING if found is None else _verdict(result, found, difference, same_processor),
            )
        )
    columns = ("what", "expected", "measured", "difference", "allowed", "verdict")
    return Table("Compared with the recorded results", columns, tuple(rows), align="lrrrll")


def agrees(compared: Table) -> bool:
    """Return whether no result differs or is missing."""
    return all(row[-1] not in (DIFFERS, MISSING) for row in compared.rows)


def _processor(page: Page) -> str | None:
    raw = page.data
    return raw.machine.cores if isinstance(raw, RawData) and raw.machine is not None else None


def _difference(expected: float | None, measured: float | None) -> float | None:
    """Return the relative difference; None if one of both was not measured."""
    if expected is None or measured is None:
        return None
    if expected == measured:
        return 0.0
    return measured / expected - 1 if expected else math.inf


def _verdict(
    expected: KeyResult, found: KeyResult, difference: float | None, same_processor: bool
) -> str:
    if expected.tolerance is None:
        return DIFFERS if expected.met and not found.met else SAME
    if not expected.any_machine and not same_processor:
        return SKIPPED
    if difference is None:
        return SAME if expected.measured == found.measured else DIFFERS
    return SAME if abs(difference) <= max(expected.tolerance, _ROUNDING) else DIFFERS


def _allowed(expected: KeyResult) -> str:
    if expected.tolerance is None:
        return f"{'≥' if expected.at_least else '≤'} {expected.limit or 0:.4g}"
    where = "" if expected.any_machine else ", same processor"
    return tolerance_text(expected.tolerance) + where
