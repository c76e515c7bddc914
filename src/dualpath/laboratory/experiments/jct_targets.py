"""Targets of job completion times: relative to what the links allow, or to Oracle."""

from collections.abc import Iterator

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.job import JUDGED, Job
from dualpath.laboratory.experiments.report import Target
from dualpath.report.style import MODE_STYLES

#: Shares of the ideal ratio (P + D) / P with emulated and with real engines; limit of JCT /
#: Oracle's; share of the SNIC's rate.
IDEAL_SHARE, REAL_IDEAL_SHARE, ORACLE_RATIO, SNIC_USE = 0.97, 0.9, 1.02, 0.95
#: A job is I/O-bound if reading takes this many times Oracle's JCT; I/O suffices below the second.
_IO_BOUND, _IO_SUFFICES = 2.0, 0.9


def targets(job: Job, ideal_share: float) -> Iterator[Target]:
    """Yield the targets of each mode of DualPath: ``ideal_share`` of (P + D) / P, or Oracle's JCT.

    There is none if the share of reading is unknown, or neither high nor low.
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
