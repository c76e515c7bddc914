"""The data plane alone: storage to DRAM, Layer Blocks between engines, with rates and CPU time.

No scheduler, no computation: baselines and dualpath's code transfer the same bytes, interleaved.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from dualpath.laboratory.experiments.data_plane_moves import measure_moves
from dualpath.laboratory.experiments.data_plane_posts import measure_posts
from dualpath.laboratory.experiments.data_plane_settings import (
    DataPlaneSettings,
    Leg,
    Mover,
    PostCost,
    Rate,
    Reader,
)
from dualpath.laboratory.experiments.data_plane_storage import measure_reads
from dualpath.laboratory.experiments.machine_load import BusyMeter
from dualpath.laboratory.experiments.report import ExperimentReport, Target
from dualpath.report.model import Panel, Series, Table

_READ_LIMIT, _MOVE_LIMIT = 0.95, 0.90
_CPU_LIMIT_S_PER_GB, _PIECE_LIMIT_US = 0.7, 1.0

Rates = Mapping[str, Sequence[Rate]]
_T = TypeVar("_T")


def measure_data_plane(
    settings: DataPlaneSettings, command: str = "dualpath lab bench data-plane"
) -> ExperimentReport:
    """Run all measurements and return the report; takes a minute or two.

    Raises ``ConfigError`` for a storage without direct I/O, ``StorageError`` for a block that is
    read wrong, ``TransportError`` or ``EngineLostError`` if a transfer fails.
    """
    meter = BusyMeter()
    reads = _in_child(measure_reads, settings)
    moves = measure_moves(settings)
    posts = _in_child(measure_posts, settings)
    return data_plane_report(settings, command, reads, moves, posts, meter.busy())


def _in_child(measure: Callable[[DataPlaneSettings], _T], settings: DataPlaneSettings) -> _T:
    """Run in a new process, in which UCX reads ``settings.tls`` and there is no other agent."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as child:
        return child.submit(measure, settings).result()


def data_plane_report(
    settings: DataPlaneSettings,
    command: str,
    reads: Mapping[Reader, Sequence[Rate]],
    moves: Mapping[tuple[Leg, Mover], Sequence[Rate]],
    posts: Sequence[PostCost],
    busy: float,
) -> ExperimentReport:
    """Return the report of the measurements; ``busy`` is the machine's busy share, 0 to 1."""
    legs = {leg: {m.value: moves[leg, m] for m in Mover} for leg in Leg}
    readers = {reader.value: found for reader, found in reads.items()}
    tables = (
        _rate_table("Storage to registered DRAM", readers, Reader.READ_QUEUE),
        *(_rate_table(leg.value, legs[leg], Mover.TRAFFIC_MANAGER) for leg in Leg),
        _post_table(posts),
    )
    return ExperimentReport(
        name="data-plane",
        title="The data plane alone",
        command=command,
        settings=_setting_lines(settings, busy, Reader.FIO in reads),
        tables=tables,
        panels=(
            _rate_panel("Storage to registered DRAM", readers),
            *(_rate_panel(leg.value, legs[leg]) for leg in Leg),
            _post_panel(posts),
        ),
        targets=_targets(settings, readers, legs, posts),
        discussion=_DISCUSSION,
        data={
            # The path of the storage on this machine is left out.
            "settings": msgspec.to_builtins(settings) | {"storage": Path(settings.storage).name},
            "reads": msgspec.to_builtins(readers),
            "moves": {leg.value: msgspec.to_builtins(found) for leg, found in legs.items()},
            "posts": msgspec.to_builtins(posts),
            "busy": busy,
        },
    )


_DISCUSSION = """
CPU seconds are those of all participating processes, including kernel time. Reads of dualpath
verify every block (XXH3-128); fio and raw NIXL verify nothing. Over TCP the kernel copies every
byte at both ends, and posting a transfer sends its bytes: therefore the cost of a descriptor is
that of checks and handle, without posting.
"""


def _setting_lines(settings: DataPlaneSettings, busy: float, fio: bool) -> tuple[str, ...]:
    return (
        f"Full Blocks of {settings.layers} Layer Blocks of {settings.layer_block_bytes:,} bytes",
        f"storage: {settings.stored_blocks} cold blocks, {settings.read_batch_blocks} at a time, "
        f"by dualpath {settings.parallel_reads}"
        + ("" if fio else "; without fio, which is not installed"),
        f"transfers: prompts of {settings.blocks} blocks, two layers in flight, "
        f"UCX_TLS={settings.tls}",
        f"medians of {settings.repeat} interleaved rounds, ratios within a round",
        f"{os.cpu_count()} cores, {busy:.0%} busy",
    )


def _rate_table(title: str, found: Rates, ours: str) -> Table:
    rows = []
    for name, rates in found.items():
        speeds = [rate.bytes_per_s / 1e6 for rate in rates]
        cost = median(rate.cpu_s_per_gb for rate in rates)
        rows.append(
            (
                name,
                f"{median(speeds):.0f}",
                f"{min(speeds):.0f} to {max(speeds):.0f}",
                f"{cost:.2f}",
                f"{_ratio(found[ours], rates):.2f}",
            )
        )
    columns = ("method", "MB/s", "range", "CPU s/GB", "dualpath / this")
    return Table(title, columns, tuple(rows))


def _ratio(ours: Sequence[Rate], others: Sequence[Rate]) -> float:
    """Return the median ratio of rates taken in the same round."""
    pairs = zip(ours, others, strict=True)
    return median(own.bytes_per_s / other.bytes_per_s for own, other in pairs)


def _post_table(posts: Sequence[PostCost]) -> Table:
    rows = tuple(
        (
            f"{cost.pieces:,}",
            *(f"{s / cost.pieces * 1e6:.2f}" for s in (cost.check_s, cost.make_s, cost.post_s)),
            f"{cost.descriptor_us:.2f}",
        )
        for cost in posts
    )
    columns = ("pieces", "checks", "handle", "post, bytes included", "checks and handle")
    return Table("One posted transfer, µs per piece", columns, rows)


def _rate_panel(title: str, found: Rates) -> Panel:
    series = tuple(
        Series(name, ("median",), (median(rate.bytes_per_s for rate in rates) / 1e6,))
        for name, rates in found.items()
    )
    return Panel(title, "grouped", "", "MB/s", series)


def _post_panel(posts: Sequence[PostCost]) -> Panel:
    pieces = tuple(f"{cost.pieces:,}" for cost in posts)
    costs = tuple(cost.descriptor_us for cost in posts)
    return Panel(
        "Cost of a descriptor: checks and handle",
        "grouped",
        "pieces of one posted transfer",
        "µs per piece",
        (Series("dualpath", pieces, costs),),
        limit_y=_PIECE_LIMIT_US,
    )


def _targets(
    settings: DataPlaneSettings,
    readers: Rates,
    legs: Mapping[Leg, Rates],
    posts: Sequence[PostCost],
) -> tuple[Target, ...]:
    own_read = readers[Reader.READ_QUEUE]
    targets = [
        Target(
            f"storage reads, relative to {name}",
            _ratio(own_read, rates),
            _READ_LIMIT,
            at_least=True,
        )
        for name, rates in readers.items()
        if name != Reader.READ_QUEUE
    ]
    for leg, found in legs.items():
        own = found[Mover.TRAFFIC_MANAGER]
        share = _ratio(own, found[Mover.NIXL])
        targets.append(
            Target(f"{leg.value}, relative to raw NIXL", share, _MOVE_LIMIT, at_least=True)
        )
        cost = median(rate.cpu_s_per_gb for rate in own)
        what = f"{leg.value}, CPU s/GB of both ends"
        targets.append(Target(what, cost, _CPU_LIMIT_S_PER_GB, at_least=False))
    layer = min(posts, key=lambda cost: abs(cost.pieces - settings.blocks))
    what = f"checks and handle of one of {layer.pieces:,} descriptors, µs"
    return (*targets, Target(what, layer.descriptor_us, _PIECE_LIMIT_US, at_least=False))
