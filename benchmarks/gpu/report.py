"""Tables of what was measured, in Markdown."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def prefill_table(results: Sequence[Row]) -> str:
    """Return medians in ms, and how much longer than computing alone each way takes."""
    ways = list(results[0]["times"]) if results else []
    head = ["model", "layers", "cached", "append", "feed-forward", "KV in, GB", *ways]
    rows = []
    for result in results:
        alone_s = result["times"]["alone"]["median_s"]
        cells = [f"{result['times'][way]['median_s'] * 1e3:.2f}" for way in ways]
        for index, way in enumerate(ways[1:], start=1):
            cells[index] += f" ({result['times'][way]['median_s'] / alone_s - 1:+.0%})"
        rows.append(
            [
                result["model"],
                str(result["layers"]),
                str(result["cached_tokens"]),
                str(result["append_tokens"]),
                "yes" if result["feed_forward"] else "no",
                f"{result['loaded_bytes'] / 1e9:.3f}",
                *cells,
            ]
        )
    return "Median ms (against alone)\n\n" + _markdown(head, rows)


def fit_table(fits: Sequence[Row]) -> str:
    """Return the fitted estimates of a pass's attention time."""
    rows = [
        [fit["model"], "-", "-", fit["not_fitted"]]
        if "not_fitted" in fit
        else [
            fit["model"],
            f"{fit['overhead_s'] * 1e3:.3f}",
            f"{fit['flops_per_s'] / 1e12:.4g}",
            f"{max(map(abs, fit['errors'])):.1%}",
        ]
        for fit in fits
    ]
    head = ["model", "overhead, ms", "TFLOP/s", "largest error"]
    return "Layer-time estimate: overhead + FLOP / rate\n\n" + _markdown(head, rows)


def copies_table(results: Sequence[Row]) -> str:
    """Return rates, and the CPU's time per piece to queue a copy."""
    head = ["", "pieces", "KB", "way", "median µs", "GB/s", "CPU µs per piece", "bytes"]
    rows = []
    for result in results:
        size_bytes = result["pieces"] * result["piece_bytes"]
        for way, row in result["ways"].items():
            rows.append(
                [
                    result["direction"].upper(),
                    str(result["pieces"]),
                    f"{result['piece_bytes'] / 1e3:.1f}",
                    way,
                    f"{row['median_s'] * 1e6:.1f}",
                    f"{size_bytes / row['median_s'] / 1e9:.2f}",
                    f"{row['post_s'] * 1e6 / result['pieces']:.3f}",
                    "right" if row["right"] else "WRONG",
                ]
            )
    return _markdown(head, rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
