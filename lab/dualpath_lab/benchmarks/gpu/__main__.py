"""``python -m dualpath_lab.benchmarks.gpu {prefill,copies}``; see README.md in this folder."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dualpath.report import markdown
from dualpath.report.model import NOTHING, Table
from dualpath_lab.benchmarks.gpu.copies import CopyCase, measure_copies
from dualpath_lab.benchmarks.gpu.geometry import HOPPER_SIZED, TINY
from dualpath_lab.benchmarks.gpu.machine import environment, open_machine
from dualpath_lab.benchmarks.gpu.prefill import PrefillCase, fit_layer_times, measure_prefill

# ------------------------------------------------------------------------------------------ report
# Tables of the measurements.

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


#: Bytes of a Layer Block: 42 KB of the paper's DS 660B (§A.5), MLA and GQA above in BF16.
PIECE_BYTES = (16384, 41984, 73728, 262144)


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Measure, print tables, write JSON; return the written document."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    document: dict[str, object] = {
        "measures_a_gpu": device.type == "cuda",
        "settings": settings,
        "environment": environment(device),
    }
    if device.type != "cuda":
        print("On a CPU: this only shows that the script works; its times are meaningless.\n")
    measure = _prefill if options.what == "prefill" else _copies
    document |= measure(options, device)
    document["environment_after"] = environment(device)
    print("\n" + "\n".join(f"{k}: {v}" for k, v in environment(device).items()))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return document


def _prefill(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    results = []
    geometries = TINY if options.tiny else HOPPER_SIZED
    for geometry in (g for g in geometries if options.model in (None, g.name)):
        for feed_forward in sorted({False, options.feed_forward}):
            for cached in options.cached or ([0, 8, 24] if options.tiny else [4096, 16384, 32768]):
                for append in options.append or ([4, 12] if options.tiny else [256, 1024, 4096]):
                    case = PrefillCase(
                        geometry=geometry,
                        layers=min(options.layers or geometry.layers, geometry.layers),
                        cached=cached,
                        append=append,
                        feed_forward=feed_forward,
                        dtype="float32" if device.type == "cpu" else "bfloat16",
                        seed=options.seed,
                    )
                    machine = open_machine(device)
                    try:
                        results.append(
                            measure_prefill(
                                case, options.buffers, machine, device, options.warm_up,
                                options.repeats,
                            )
                        )  # fmt: skip
                    finally:
                        machine.close()
    fits = fit_layer_times(results)
    for table in (prefill_table(results), fit_table(fits)):
        print(markdown.table(table) + "\n")
    return {"prefill": results, "layer_time_estimate": fits}


def _copies(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    results = []
    for piece_bytes in [64] if options.tiny else PIECE_BYTES:
        for pieces in [1, 7] if options.tiny else [16, 64, 256, 1024]:
            for direction in ("h2d", "d2h"):
                case = CopyCase(
                    direction=direction,
                    pieces=pieces,
                    piece_bytes=piece_bytes,
                    full_block_layers=3 if options.tiny else 16,
                    seed=options.seed,
                )
                machine = open_machine(device)
                try:
                    results.append(
                        measure_copies(case, machine, device, options.warm_up, options.repeats)
                    )
                finally:
                    machine.close()
    print(markdown.table(copies_table(results)))
    return {"copies": results}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dualpath_lab.benchmarks.gpu", description=__doc__
    )
    parser.add_argument("what", choices=["prefill", "copies"])
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, …; cpu only to test the script"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test the script")
    names = [geometry.name for geometry in (*HOPPER_SIZED, *TINY)]
    parser.add_argument("--model", choices=names, help="one geometry; default all")
    parser.add_argument("--cached", type=int, nargs="+", help="hit tokens, multiples of a block")
    parser.add_argument("--append", type=int, nargs="+", help="tokens to compute, likewise")
    parser.add_argument("--buffers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", type=int, help="number of layers; default: all of the model")
    parser.add_argument("--feed-forward", action="store_true", help="also with feed-forward layers")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write JSON there")
    return parser


if __name__ == "__main__":
    main()
