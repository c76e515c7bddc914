"""Predicted and measured attention time of a prefill engine's forward passes.

The compute quota admits requests by a prediction of their attention time (§6.2).  The relative
error of each pass, |predicted - measured| / measured, is counted in buckets, so that the router has
its mean and its percentiles.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping

from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.engine.trace import TraceRecorder

#: Names of totals in an engine's reports.
PREDICTED_S, MEASURED_S = "attention_predicted_seconds", "attention_measured_seconds"
_ERRORS, _BUCKET = "attention_error_sum", "attention_error_le_"
#: Upper bounds of the buckets of relative errors.
ERROR_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, math.inf)
#: The track of passes in a trace.
ATTENTION_TRACK = "attention"


class AttentionErrors:
    """The errors in an engine's totals: ``counts`` by bucket, and their ``sum``."""

    def __init__(self, totals: Mapping[str, float]) -> None:
        self.counts = [totals.get(f"{_BUCKET}{bound:g}", 0.0) for bound in ERROR_BOUNDS]
        self.sum = totals.get(_ERRORS, 0.0)

    @property
    def passes(self) -> int:
        """The number of measured passes."""
        return int(sum(self.counts))

    @property
    def mean(self) -> float | None:
        """The mean relative error, None without passes."""
        return self.sum / self.passes if self.passes else None

    def quantile(self, share: float) -> float | None:
        """Return a quantile as Prometheus does, by interpolation within its bucket.

        In the last bucket it is the bound below; None without passes.
        """
        if not self.passes:
            return None
        rank, below, low = share * self.passes, 0.0, 0.0
        for count, bound in zip(self.counts, ERROR_BOUNDS, strict=True):
            if below + count >= rank and count:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / count
            below, low = below + count, bound
        raise AssertionError("the buckets have all passes")


class AttentionTimes:
    """Counts the passes of one engine; thread-safe."""

    def __init__(self, trace: TraceRecorder, threads: Threads = OS_THREADS) -> None:
        self._trace = trace
        self._lock = threads.lock()
        self._totals: dict[str, float] = {}

    def passed(self, predicted_s: float, measured_s: float, start_ns: int, end_ns: int) -> None:
        """Count a pass of which the attention took ``measured_s`` > 0.

        ``start_ns`` and ``end_ns`` are those of the whole pass, on the trace's clock.
        """
        if measured_s <= 0:
            return
        error = abs(predicted_s - measured_s) / measured_s
        bound = ERROR_BOUNDS[bisect_left(ERROR_BOUNDS, error)]
        found = {
            PREDICTED_S: predicted_s,
            MEASURED_S: measured_s,
            _ERRORS: error,
            f"{_BUCKET}{bound:g}": 1.0,
        }
        with self._lock:
            for name, amount in found.items():
                self._totals[name] = self._totals.get(name, 0.0) + amount
        times = {"predicted_s": predicted_s, "measured_s": measured_s}
        self._trace.record("pass", ATTENTION_TRACK, start_ns, end_ns, **times)

    def totals(self) -> dict[str, float]:
        """Return the totals for reports; empty before the first pass."""
        with self._lock:
            return dict(self._totals)
