"""How evenly load lies: storage NICs over windows (Fig. 13), attention over engines (Fig. 14)."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.model.sim.result import NS_PER_S, Batches, LinkUse, SimulationResult

FloatArray = NDArray[np.float64]


class Balance(msgspec.Struct, frozen=True):
    """Largest over average load, 1 is perfect, at each time since the task began."""

    time_s: FloatArray
    ratio: FloatArray

    def mean(self, until_s: float) -> float | None:
        """Return the mean ratio before ``until_s``; None if nothing was measured by then."""
        chosen = self.ratio[self.time_s < until_s]
        return float(chosen.mean()) if chosen.size else None

    def binned(self, bins: int, until_s: float) -> tuple[list[float], list[float | None]]:
        """Return the middle of each of ``bins`` equal times up to ``until_s`` and its mean."""
        chosen = self.time_s < until_s
        index = np.minimum((self.time_s[chosen] / until_s * bins).astype(np.int64), bins - 1)
        counts = np.bincount(index, minlength=bins)
        sums = np.bincount(index, weights=self.ratio[chosen], minlength=bins)
        middle = (np.arange(bins) + 0.5) * until_s / bins
        means = [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)]
        return middle.tolist(), means


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
