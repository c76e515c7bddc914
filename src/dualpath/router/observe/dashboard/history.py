"""A bounded history of the whole cluster: one sample a second, the latest ten minutes."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

SAMPLES_KEPT = 600
#: TTFTs of this long are pooled into the figures of ``recent_ttft``, of at most so many requests.
RECENT_S = 60.0
_RECENT_REQUESTS = 4096


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """What happened in the ``interval_s`` before ``time_s`` (the router's clock).

    Tokens and bytes are those of the interval.  ``ttft_p50_s`` and ``ttft_p90_s`` are over
    the requests whose first token was streamed in it, None without any.  ``waiting`` and
    ``running`` requests are counted at its end.
    """

    time_s: float
    interval_s: float
    pe_read_bytes: float
    de_read_bytes: float
    prompt_tokens: int
    hit_tokens: int
    generated_tokens: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    waiting: int
    running: int


class History:
    """The latest samples, numbered from 1, and the TTFTs of the last minute."""

    def __init__(self, kept: int = SAMPLES_KEPT) -> None:
        self.last_seq = 0
        self._samples: deque[Sample] = deque(maxlen=kept)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=_RECENT_REQUESTS)

    def add(self, sample: Sample, ttfts_s: Iterable[float]) -> None:
        """Append a sample and the TTFTs (seconds) that were observed in its interval."""
        self.last_seq += 1
        self._samples.append(sample)
        self._ttfts.extend((sample.time_s, ttft_s) for ttft_s in ttfts_s)
        while self._ttfts and self._ttfts[0][0] <= sample.time_s - RECENT_S:
            self._ttfts.popleft()

    def since(self, seq: int) -> dict[str, Any]:
        """Return columns and the samples after number ``seq``; all of them for a number to come.

        The latter is what a page asks that has watched a router before this one.
        """
        wanted = self.last_seq - seq if 0 <= seq <= self.last_seq else len(self._samples)
        samples = list(self._samples)
        return {
            "kept": self._samples.maxlen,
            "columns": Sample.__struct_fields__,
            "rows": samples[len(samples) - min(wanted, len(samples)) :],
        }

    def recent_ttft(self) -> dict[str, Any]:
        """Return median and 90th percentile of the TTFTs of the last ``RECENT_S``."""
        p50_s, p90_s = median_and_p90([ttft_s for _, ttft_s in self._ttfts])
        return {
            "span_s": RECENT_S,
            "requests": len(self._ttfts),
            "ttft_p50_s": p50_s,
            "ttft_p90_s": p90_s,
        }


def median_and_p90(values: list[float]) -> tuple[float | None, float | None]:
    """Return both (linear interpolation), None without values."""
    if not values:
        return None, None
    p50, p90 = np.quantile(values, (0.5, 0.9))
    return float(p50), float(p90)
