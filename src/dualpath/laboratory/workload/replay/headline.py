"""The headline of a comparison of modes: speed-up over Basic, its ceiling, and the share gained.

The share of Basic's waiting for loads that a mode removes, (Basic − mode) / (Basic − Oracle), is
determined by the data paths and depends little on the machine.  The speed-up, and its ceiling,
Oracle's, are lower on machines that compute slowly.
"""

from collections.abc import Sequence

from dualpath.core.modes import Mode
from dualpath.laboratory.workload.replay.result import ReplayResult
from dualpath.report.style import MODE_STYLES

#: The headline is about the first of these modes that was run.
_SUBJECTS = (Mode.DUALPATH, Mode.SPLIT, Mode.ROUND_ROBIN, Mode.LAYERWISE)


def headline(results: Sequence[ReplayResult]) -> tuple[str, ...]:
    """Return lines on the speed-up over Basic, its ceiling and the share.

    They are empty without Basic and Oracle; if one of them is missing, the lines name it and the
    figures that are missing for that reason.
    """
    by_mode = {run.setting.mode: run for run in reversed(results) if not run.failed}
    subject = next((mode for mode in _SUBJECTS if mode in by_mode), None)
    if subject is None or not {Mode.BASIC, Mode.ORACLE} & by_mode.keys():
        return ()
    name, run = MODE_STYLES[subject].title, by_mode[subject]
    jct_s = run.summary.jct_s
    count = run.summary.sessions
    agents = f"{count} agent{'' if count == 1 else 's'} finished in {jct_s:.1f} s"
    if Mode.BASIC not in by_mode:
        slower = jct_s / by_mode[Mode.ORACLE].summary.jct_s
        return (
            f"{name}: {agents}, {slower:.2f} times as long as Oracle, which loads nothing. "
            "Basic is missing: no speed-up.",
        )
    basic_s = by_mode[Mode.BASIC].summary.jct_s
    first = f"{name} is {basic_s / jct_s:.2f} times as fast as Basic: {agents}, not {basic_s:.1f} s"
    if Mode.ORACLE not in by_mode:
        return (f"{first}. Oracle is missing: no ceiling, no share.",)
    return (f"{first}.", *_ceiling(name, basic_s, jct_s, by_mode[Mode.ORACLE].summary.jct_s))


def _ceiling(name: str, basic_s: float, jct_s: float, oracle_s: float) -> tuple[str, ...]:
    ceiling = (
        f"The ceiling is {basic_s / oracle_s:.2f} times: Oracle, which loads nothing, took "
        f"{oracle_s:.1f} s."
    )
    if basic_s <= oracle_s:
        return (f"{ceiling} Basic did not wait for loads, so no speed-up was possible.",)
    share = (basic_s - jct_s) / (basic_s - oracle_s)
    return (
        ceiling,
        f"{name} removes {share:.0%} of Basic's waiting for loads: "
        f"(Basic - {name}) / (Basic - Oracle), which depends little on the machine.",
    )
