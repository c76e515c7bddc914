"""The experiments on a GPU; see README.md in this folder.

This module imports no torch, so that a page can be drawn where there is none.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.policy.batching import fit
from dualpath.report.model import NOTHING, Table
from dualpath_lab.benchmarks.gpu.geometry import HOPPER_SIZED, TINY, StackGeometry
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    Stage,
    one_stage,
    tolerance_of,
)

if TYPE_CHECKING:
    import torch

#: Bytes of a Layer Block: 42 KB of the paper's DS 660B (§A.5), MLA and GQA above in BF16.
PIECE_BYTES = (16384, 41984, 73728, 262144)
#: Tolerance of reruns: shares on any GPU, times on the same processor.
_TOLERANCE = 0.05

Row = dict[str, Any]
"""The result of a run: numbers of one case, and the machine at that time."""

Device = Annotated[str, Setting("cuda, cuda:1, …; cpu only to test the program")]
Tiny = Annotated[bool, Setting("tiny sizes, to test the program")]
WarmUp = Annotated[int, Setting("runs of each method before the measurement", ge=0)]
Repeats = Annotated[int, Setting("timed runs of each method", ge=1)]
Seed = Annotated[int, Setting("of contents and places", ge=0)]


class PrefillSettings(Settings, frozen=True, kw_only=True):
    """Sizes of the prompts; empty ones have defaults."""

    device: Device = "cuda"
    tiny: Tiny = False
    model: Annotated[
        Literal["", "deepseek-v3-mla", "qwen2.5-32b-gqa", "tiny-mla", "tiny-gqa"],
        Setting("one geometry; default all"),
    ] = ""
    cached: Annotated[tuple[int, ...], Setting("hit tokens, multiples of a block", ge=0)] = ()
    append: Annotated[tuple[int, ...], Setting("tokens to compute, likewise", ge=1)] = ()
    buffers: Annotated[tuple[int, ...], Setting("layers of KV in HBM", ge=1)] = (1, 2, 3)
    layers: Annotated[int, Setting("number of layers; 0: all of the model", ge=0)] = 0
    feed_forward: Annotated[bool, Setting("also with feed-forward layers")] = False
    warm_up: WarmUp = 3
    repeats: Repeats = 11
    seed: Seed = 0


class CopiesSettings(Settings, frozen=True, kw_only=True):
    """Sizes of the copies."""

    device: Device = "cuda"
    tiny: Tiny = False
    warm_up: WarmUp = 3
    repeats: Repeats = 11
    seed: Seed = 0


# ------------------------------------------------------------------------------------------- runs


def _opened(name: str) -> "torch.device":
    import torch

    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _prefill_stages(settings: PrefillSettings, progress: Progress) -> list[Stage[Row, Row]]:
    geometries = TINY if settings.tiny else HOPPER_SIZED
    cached = settings.cached or ((0, 8, 24) if settings.tiny else (4096, 16384, 32768))
    append = settings.append or ((4, 12) if settings.tiny else (256, 1024, 4096))
    cells = {
        f"{geometry.name}, {hits} + {new}{', feed-forward' if forward else ''}": {
            "geometry": geometry, "cached": hits, "append": new, "feed_forward": forward
        }
        for geometry in geometries
        if settings.model in ("", geometry.name)
        for forward in sorted({False, settings.feed_forward})
        for hits in cached
        for new in append
    }  # fmt: skip
    return one_stage(cells, lambda case, number: _run_prefill(settings, case))


def _run_prefill(settings: PrefillSettings, chosen: Row) -> Row:
    """Raises ``ConfigError`` if a streamed result differs."""
    from dualpath_lab.benchmarks.gpu.machine import environment, open_machine
    from dualpath_lab.benchmarks.gpu.prefill import PrefillCase, measure_prefill

    device, geometry = _opened(settings.device), chosen["geometry"]
    assert isinstance(geometry, StackGeometry)
    case = PrefillCase(
        layers=min(settings.layers or geometry.layers, geometry.layers),
        dtype="float32" if device.type == "cpu" else "bfloat16",
        seed=settings.seed,
        **chosen,
    )
    machine = open_machine(device)
    try:
        found = measure_prefill(
            *(case, settings.buffers, machine, device, settings.warm_up, settings.repeats)
        )
    finally:
        machine.close()
    return {**found, "environment": environment(device)}


def _copies_stages(settings: CopiesSettings, progress: Progress) -> list[Stage[Row, Row]]:
    cells = {
        f"{direction.upper()}, {pieces} of {piece_bytes} bytes": {
            "direction": direction, "pieces": pieces, "piece_bytes": piece_bytes
        }
        for piece_bytes in ((64,) if settings.tiny else PIECE_BYTES)
        for pieces in ((1, 7) if settings.tiny else (16, 64, 256, 1024))
        for direction in ("h2d", "d2h")
    }  # fmt: skip
    return one_stage(cells, lambda case, number: _run_copies(settings, case))


def _run_copies(settings: CopiesSettings, chosen: Row) -> Row:
    from dualpath_lab.benchmarks.gpu.copies import CopyCase, measure_copies
    from dualpath_lab.benchmarks.gpu.machine import environment, open_machine

    device = _opened(settings.device)
    layers = 3 if settings.tiny else 16
    case = CopyCase(full_block_layers=layers, seed=settings.seed, **chosen)
    machine = open_machine(device)
    try:
        found = measure_copies(case, machine, device, settings.warm_up, settings.repeats)
    finally:
        machine.close()
    return {**found, "environment": environment(device)}


# ------------------------------------------------------------------------------------------- pages


def draw_prefill(raw: RawData[PrefillSettings, Row]) -> Page:
    """Draw the times of all methods, and the fitted estimates."""
    return Page(
        settings=_setting_lines(raw.results, raw.settings.device),
        tables=(prefill_table(raw.results), fit_table(fit_layer_times(raw.results))),
        results=tuple(_prefill_results(raw)),
    )


def draw_copies(raw: RawData[CopiesSettings, Row]) -> Page:
    """Draw the rates of all methods."""
    results = [
        KeyResult(
            f"{run.cell}, {way}: median µs", row["median_s"] * 1e6,
            tolerance=tolerance_of(_TOLERANCE, raw.settings.repeats),
        )
        for run in raw.runs
        for way, row in run.result["ways"].items()
    ]  # fmt: skip
    return Page(
        settings=_setting_lines(raw.results, raw.settings.device),
        tables=(copies_table(raw.results),),
        results=tuple(results),
    )


def _setting_lines(results: Sequence[Row], device: str) -> tuple[str, ...]:
    facts = ", ".join(f"{name} {value}" for name, value in results[-1]["environment"].items())
    if device.startswith("cuda"):
        return (f"{facts}.",)
    return ("On a CPU: this only shows that the program works; its times are meaningless.", facts)


def _prefill_results(raw: RawData[PrefillSettings, Row]) -> Iterator[KeyResult]:
    tolerance = tolerance_of(_TOLERANCE, raw.settings.repeats)
    for run in raw.runs:
        times = run.result["times"]
        alone_s = times["alone"]["median_s"]
        yield KeyResult(f"{run.cell}: alone, ms", alone_s * 1e3, tolerance=tolerance)
        for way, spread in times.items():
            if way != "alone":
                ratio = spread["median_s"] / alone_s
                what = f"{run.cell}: {way} / alone"
                yield KeyResult(what, ratio, tolerance=tolerance, any_machine=True)


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


def fit_layer_times(results: Sequence[Row]) -> list[Row]:
    """Fit the estimate of §6.2 to the times *alone*, per model and without feed-forward layers.

    ``errors`` are relative, per case in its order.
    """
    fits: list[Row] = []
    attention = [result for result in results if not result["feed_forward"]]
    for model in dict.fromkeys(str(result["model"]) for result in attention):
        samples = [
            (float(r["attention_flops"]), float(r["times"]["alone"]["median_s"]))
            for r in attention
            if r["model"] == model
        ]
        try:
            estimate = fit(samples)
        except ConfigError as error:
            fits.append({"model": model, "not_fitted": str(error)})
            continue
        errors = [estimate.seconds(flops) / seconds - 1 for flops, seconds in samples]
        fits.append({"model": model, **msgspec.structs.asdict(estimate), "errors": errors})
    return fits


GPU_PREFILL = Experiment(
    name="gpu-prefill",
    title="Layerwise prefill with KV streamed from pinned DRAM",
    settings=PrefillSettings(),
    result=Row,
    stages=_prefill_stages,
    draw=draw_prefill,
    packages=("dualpath", "torch"),
)
GPU_COPIES = Experiment(
    name="gpu-copies",
    title="Many small copies between pinned DRAM and HBM",
    settings=CopiesSettings(),
    result=Row,
    stages=_copies_stages,
    draw=draw_copies,
    packages=("dualpath", "torch"),
)
