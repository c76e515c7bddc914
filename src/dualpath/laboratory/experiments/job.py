"""All runs of one cluster, which replayed the same agents in several modes."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.runs import Measured
from dualpath.laboratory.experiments.workload import Window
from dualpath.laboratory.lab.cluster import LinkReport
from dualpath.laboratory.lab.settings import LabSettings

#: The modes that load by both paths with the scheduler of §6; these have targets.
JUDGED = (Mode.DUALPATH, Mode.SPLIT)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one cluster."""

    lab: LabSettings
    links: tuple[LinkReport, ...]
    agents: Sequence[Window]
    runs: Mapping[Mode, Sequence[Measured]]

    def jct_s(self, mode: Mode) -> float | None:
        """Median over repetitions."""
        return self.median(mode, lambda run: run.jct_s)

    def median(self, mode: Mode, of: Callable[[Measured], float]) -> float | None:
        """Return the median of ``of`` over a mode's runs; None without runs."""
        runs = self.runs.get(mode)
        return statistics.median(of(run) for run in runs) if runs else None

    def typical(self, mode: Mode) -> Measured | None:
        """Return the run of median JCT, the later of two."""
        runs = sorted(self.runs.get(mode, ()), key=lambda run: run.jct_s)
        return runs[len(runs) // 2] if runs else None

    @property
    def ideal_ratio(self) -> float:
        """Ideal speed-up over Basic if only storage limits: all SNICs read instead of P of them."""
        return (self.lab.prefill + self.lab.decode) / self.lab.prefill

    @property
    def reading_share(self) -> float | None:
        """Time that all SNICs together need for the bytes, relative to Oracle's JCT."""
        oracle = self.jct_s(Mode.ORACLE)
        run = next(filter(None, map(self.typical, JUDGED)), None)
        if oracle is None or run is None:
            return None
        nodes = self.lab.prefill + self.lab.decode
        return run.storage_bytes / (nodes * self.lab.snic_bytes_per_s) / oracle
