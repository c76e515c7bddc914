"""What job completion times are judged by: what the links allow, or Oracle."""

from collections.abc import Iterator

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.job import JUDGED, Job
from dualpath.laboratory.experiments.report import Target
from dualpath.report.style import MODE_STYLES

#: Of the ideal ratio (P + D) / P with emulated and with real engines, and of Oracle's time.
IDEAL_SHARE, REAL_IDEAL_SHARE, ORACLE_RATIO, SNIC_USE = 0.97, 0.9, 1.02, 0.95
#: Reading takes so many times as long as computing, or so much less, to be judged by a target.
_IO_BOUND, _IO_SUFFICES = 2.0, 0.9


def targets(job: Job, ideal_share: float) -> Iterator[Target]:
    """Yield what each mode of DualPath is measured by, ``ideal_share`` of (P + D) / P or Oracle.

    Nothing where it cannot be told how much of the time is reading, or where it is neither most
    of it nor little.
    """
    share = job.reading_share
    if share is None:
        return
    for mode in JUDGED:
        if mode in job.runs and share >= _IO_BOUND:
            yield from _of_links(job, mode, ideal_share)
        if mode in job.runs and share <= _IO_SUFFICES:
            yield _of_oracle(job, mode, share)


def _of_links(job: Job, mode: Mode, ideal_share: float) -> Iterator[Target]:
    basic, jct_s, typical = job.jct_s(Mode.BASIC), job.jct_s(mode), job.typical(mode)
    if basic is None or jct_s is None or typical is None:
        return
    shape, title = job.lab.nodes, MODE_STYLES[mode].title
    ideal = ideal_share * job.ideal_ratio
    note = f"ideal {job.ideal_ratio:g}"
    yield Target(f"{shape}: Basic / {title}, I/O-bound", basic / jct_s, ideal, True, note)
    use = min(typical.snic_use(job.lab.snic_bytes_per_s))
    what = f"{shape}: use of the least used SNIC, {title}"
    yield Target(what, use, SNIC_USE, True, "middle half of the run")


def _of_oracle(job: Job, mode: Mode, share: float) -> Target:
    oracle, jct_s = job.jct_s(Mode.ORACLE), job.jct_s(mode)
    assert oracle is not None
    assert jct_s is not None
    what = f"{job.lab.nodes}: {MODE_STYLES[mode].title} / Oracle, SNICs suffice"
    note = f"reading needs {share:.0%} of Oracle's time"
    return Target(what, jct_s / oracle, ORACLE_RATIO, False, note)
