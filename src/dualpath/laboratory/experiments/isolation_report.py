"""The report of the isolation experiment: tables, plots, targets."""

import math
import os
import platform
from collections.abc import Sequence
from statistics import median

import msgspec

from dualpath.laboratory.experiments.isolation_bulk import BulkChecked
from dualpath.laboratory.experiments.isolation_settings import Case, IsolationSettings, Leg
from dualpath.laboratory.experiments.report import ExperimentReport, Target
from dualpath.laboratory.lab.cluster import LinkReport
from dualpath.report.model import NOTHING, Panel, Series, Table

NAME = "isolation"
#: Limit of p99 with bulk and QoS over p99 alone, for the largest messages.
P99_TARGET = 1.05

_DISCUSSION = """\
A round ends when every peer has sent its message back; it begins at its scheduled time or at the
end of the previous one, whichever is later, so that durations without QoS are those of a
slowed-down model and not of a growing queue. Each number is the median over the repetitions of one
run's percentile over the rounds of all nodes; ratios are taken within a repetition.

"No QoS" is the same bulk on TCP ports of the inference lane, in the same lab. HTB has strict
priorities: KV gets the bandwidth that the inference lane does not use, and at least 1 %. InfiniBand
would share by weights, packet by packet, in hardware; that is not measured here. The rest of the
p99 of short messages is caused by the CPUs, which copy the bulk: segments of KV of 16 KiB instead
of 64 did not reduce it. Therefore the exchange has real-time priority if allowed, as a collective
on hardware needs no CPU.

On the loopback leg, which stands for CNIC-assisted H2D copies, a node exchanges with itself."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One size in one case: durations of the rounds of all nodes in s, rate of the bulk, load.

    ``late`` rounds ended after the next was due.  ``busy`` is the busy share of the machine, 0 to
    1; ``rejected`` earlier attempts were too busy.  ``first``: the exchange had real-time priority.
    """

    leg: Leg
    case: Case
    repetition: int
    message_bytes: int
    round_s: tuple[float, ...]
    late: int
    wrong_messages: int
    bulk_bytes_per_s: float
    busy: float
    rejected: int
    first: bool = False

    @property
    def text(self) -> str:
        """The run as one line of text."""
        return (
            f"{self.leg.value}, {size_name(self.message_bytes)}, {self.case.value}: "
            f"p50 {percentile(self.round_s, 50) * 1e3:.2f} ms, "
            f"p99 {percentile(self.round_s, 99) * 1e3:.2f} ms, "
            f"bulk {self.bulk_bytes_per_s / 1e6:.0f} MB/s, machine {self.busy:.0%} busy"
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def size_name(size_bytes: int) -> str:
    """Return a size with its unit."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


class Runs:
    """Runs on a machine that was not too busy, by leg, size and case."""

    def __init__(self, runs: Sequence[Run], most_busy: float) -> None:
        self.valid = [run for run in runs if run.busy <= most_busy]
        self.dropped = len(runs) - len(self.valid)

    def of(self, leg: Leg, message_bytes: int, case: Case) -> list[Run]:
        """Return the repetitions."""
        wanted = (leg, message_bytes, case)
        return [run for run in self.valid if (run.leg, run.message_bytes, run.case) == wanted]

    def round_s(self, leg: Leg, message_bytes: int, case: Case, percent: float) -> float | None:
        """Return the median of a percentile, None without runs."""
        found = [percentile(run.round_s, percent) for run in self.of(leg, message_bytes, case)]
        return median(found) if found else None

    def slowdown(self, leg: Leg, message_bytes: int, case: Case, percent: float) -> float | None:
        """Return the median ratio to "alone" of the same repetition, None without any."""
        alone = {run.repetition: run for run in self.of(leg, message_bytes, Case.ALONE)}
        found = [
            percentile(run.round_s, percent) / percentile(alone[run.repetition].round_s, percent)
            for run in self.of(leg, message_bytes, case)
            if run.repetition in alone
        ]
        return median(found) if found else None


def isolation_report(
    settings: IsolationSettings,
    runs: Sequence[Run],
    checks: Sequence[BulkChecked],
    links: Sequence[LinkReport],
) -> ExperimentReport:
    """Return the report of all runs; ``checks`` are of the bulk, ``links`` of the lab."""
    counted = Runs(runs, settings.most_busy)
    return ExperimentReport(
        name=NAME,
        title="Isolation: an all-to-all with KV bulk",
        command=f"dualpath lab bench {NAME}",
        settings=_setting_lines(settings, runs, counted, checks, links),
        tables=tuple(_table(settings, counted, leg) for leg in settings.legs),
        panels=tuple(
            _panel(counted, leg, size) for leg in settings.legs for size in settings.message_bytes
        ),
        targets=_targets(settings, counted, runs, checks),
        discussion=_DISCUSSION,
        data={
            "settings": msgspec.to_builtins(settings),
            "runs": [_run_data(run) for run in runs],
            "bulk_checks": msgspec.to_builtins(list(checks)),
        },
    )


def _setting_lines(
    settings: IsolationSettings,
    runs: Sequence[Run],
    counted: Runs,
    checks: Sequence[BulkChecked],
    links: Sequence[LinkReport],
) -> tuple[str, ...]:
    busy = [run.busy for run in runs]
    return (
        f"Lab of {settings.nodes}, "
        + "; ".join(
            f"{link.link} {link.bytes_per_s * 8 / 1e9:g} Gbit/s ({link.how})"
            for link in links
            if link.link != "SNIC"
        )
        + ". A lab: network namespaces on one machine, not a fabric.",
        f"Exchange: one message to each peer and back, TCP {settings.congestion_control}; messages "
        f"use {settings.load:.0%} of a link's rate in each direction. {settings.repeat} "
        f"repetitions of at least {settings.rounds} rounds of each of {settings.count} nodes, "
        "cases interleaved. Its processes have "
        + ("real-time" if all(run.first for run in runs) else "normal")
        + " priority.",
        f"Bulk: NIXL WRITE over UCX tcp, {settings.blocks} Layer Blocks of "
        f"{settings.block_bytes} bytes per transfer, {settings.in_flight} transfers in flight "
        "between two agents; CNIC: from every DE to every PE; loopback: every node to itself.",
        f"Machine: {os.cpu_count()} cores, Linux {platform.release()}, "
        f"{min(busy):.0%} to {max(busy):.0%} busy; {sum(run.rejected for run in runs)} runs were "
        f"repeated and {counted.dropped} left out because it was above "
        f"{settings.most_busy:.0%}.",
        f"{sum(len(run.round_s) for run in runs)} rounds; {sum(c.blocks for c in checks)} blocks "
        "in HBM were compared with their sources after the bulk.",
    )


def _table(settings: IsolationSettings, runs: Runs, leg: Leg) -> Table:
    columns = (
        *("case and message", "rounds", "p50, ms", "p99, ms", "p50 / alone", "p99 / alone"),
        *("bulk, MB/s", "of its links", "rounds late", "machine busy"),
    )
    return Table(
        f"{leg.value}: round trip of the inference class",
        columns,
        tuple(
            _row(settings, runs, leg, size, case)
            for size in settings.message_bytes
            for case in Case
        ),
    )


def _row(
    settings: IsolationSettings, runs: Runs, leg: Leg, size: int, case: Case
) -> tuple[str, ...]:
    name = f"{case.value}, {size_name(size)}"
    found = runs.of(leg, size, case)
    if not found:
        return (name, *([NOTHING] * 9))
    rounds = sum(len(run.round_s) for run in found)
    bulk = median(run.bulk_bytes_per_s for run in found)
    percentiles = [runs.round_s(leg, size, case, percent) for percent in (50, 99)]
    slowdowns = [runs.slowdown(leg, size, case, percent) for percent in (50, 99)]
    return (
        name,
        str(rounds),
        *(NOTHING if one is None else f"{one * 1e3:.2f}" for one in percentiles),
        *(NOTHING if one is None else f"{one:.3f}" for one in slowdowns),
        NOTHING if case is Case.ALONE else f"{bulk / 1e6:.0f}",
        NOTHING if case is Case.ALONE else f"{bulk / settings.bulk_limit_bytes_per_s(leg):.0%}",
        f"{sum(run.late for run in found) / rounds:.0%}",
        f"{median(run.busy for run in found):.0%}",
    )


def _panel(runs: Runs, leg: Leg, size: int) -> Panel:
    def milliseconds(case: Case, percent: float) -> float | None:
        found_s = runs.round_s(leg, size, case, percent)
        return None if found_s is None else found_s * 1e3

    return Panel(
        f"{leg.value}, {size_name(size)}",
        "grouped",
        "",
        "round, ms",
        tuple(
            Series(
                f"p{percent}",
                tuple(case.value for case in Case),
                tuple(milliseconds(case, percent) for case in Case),
            )
            for percent in (50, 99)
        ),
    )


def _targets(
    settings: IsolationSettings, counted: Runs, runs: Sequence[Run], checks: Sequence[BulkChecked]
) -> tuple[Target, ...]:
    size = max(settings.message_bytes)
    wrong = sum(run.wrong_messages for run in runs) + sum(check.wrong for check in checks)
    return (
        *(_p99_target(counted, leg, size) for leg in settings.legs),
        Target("wrong messages and KV blocks", wrong, 0, at_least=False),
    )


def _p99_target(counted: Runs, leg: Leg, size: int) -> Target:
    found = counted.slowdown(leg, size, Case.QOS, 99)
    return Target(
        f"{leg.value}: p99 with bulk and QoS / alone, {size_name(size)}",
        math.inf if found is None else found,
        P99_TARGET,
        at_least=False,
        note="no valid run: the machine was too busy" if found is None else "",
    )


def _run_data(run: Run) -> dict[str, object]:
    """Return a run without the durations of its thousands of rounds."""
    data = {name: getattr(run, name) for name in run.__struct_fields__ if name != "round_s"}
    data["rounds"] = len(run.round_s)
    for percent in (50, 90, 99, 100):
        data[f"p{percent}_s"] = percentile(run.round_s, percent)
    return data
