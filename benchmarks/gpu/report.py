"""Tables of the measurements."""

from collections.abc import Sequence
from typing import Any

from dualpath.report.model import NOTHING, Table

Row = dict[str, Any]


def prefill_table(results: Sequence[Row]) -> Table:
    """Return medians in ms, and the time of each method relative to computing alone."""
    ways = list(results[0]["times"]) if results else []
    columns = ("model", "layers", "cached", "append", "feed-forward", "KV in, GB", *ways)
    rows = []
    for result in results:
        alone_s = result["times"]["alone"]["median_s"]
        cells = [f"{result['times'][way]['median_s'] * 1e3:.2f}" for way in ways]
        for index, way in enumerate(ways[1:], start=1):
            cells[index] += f" ({result['times'][way]['median_s'] / alone_s - 1:+.0%})"
        rows.append(
            (
                result["model"],
                str(result["layers"]),
                str(result["cached_tokens"]),
                str(result["append_tokens"]),
                "yes" if result["feed_forward"] else "no",
                f"{result['loaded_bytes'] / 1e9:.3f}",
                *cells,
            )
        )
    return Table("Median ms (against alone)", columns, tuple(rows))


def fit_table(fits: Sequence[Row]) -> Table:
    """Return the fitted estimates of a pass's attention time."""
    rows = tuple(
        (fit["model"], NOTHING, NOTHING, fit["not_fitted"])
        if "not_fitted" in fit
        else (
            fit["model"],
            f"{fit['overhead_s'] * 1e3:.3f}",
            f"{fit['flops_per_s'] / 1e12:.4g}",
            f"{max(map(abs, fit['errors'])):.1%}",
        )
        for fit in fits
    )
    columns = ("model", "overhead, ms", "TFLOP/s", "largest error")
    return Table("Layer-time estimate: overhead + FLOP / rate", columns, rows)


def copies_table(results: Sequence[Row]) -> Table:
    """Return rates, and the CPU time per piece to queue a copy."""
    columns = ("", "pieces", "KB", "method", "median µs", "GB/s", "CPU µs per piece", "bytes")
    rows = []
    for result in results:
        size_bytes = result["pieces"] * result["piece_bytes"]
        for way, row in result["ways"].items():
            rows.append(
                (
                    result["direction"].upper(),
                    str(result["pieces"]),
                    f"{result['piece_bytes'] / 1e3:.1f}",
                    way,
                    f"{row['median_s'] * 1e6:.1f}",
                    f"{size_bytes / row['median_s'] / 1e9:.2f}",
                    f"{row['post_s'] * 1e6 / result['pieces']:.3f}",
                    "right" if row["right"] else "WRONG",
                )
            )
    return Table("Copies between DRAM and HBM", columns, tuple(rows))
