"""Several runs side by side: columns are runs (modes), rows are the figures of §7.

comparison = compare([basic, dualpath, oracle])
print_comparison(comparison, Console())
"""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.replay.result import ReplayResult
from dualpath.laboratory.workload.rows import MEGA, Row, all_rows, labels

#: Settings that have to be equal for two columns to be comparable.
_MUST_AGREE = (
    "trace",
    "model",
    "block_tokens",
    "agents",
    "agents_per_s",
    "seed",
    "tool_delays",
    "isolation",
    "max_context_tokens",
    "max_turns",
    "scale_append",
    "scale_generate",
)


class Comparison(msgspec.Struct, frozen=True):
    """A table with what has to be said beside it.

    ``notes`` state throttle, trace, seed, setting and machine; ``warnings`` what forbids a
    comparison or spoils a run.
    """

    columns: list[str]
    rows: list[Row]
    notes: list[str]
    warnings: list[str]


def compare(results: Sequence[ReplayResult]) -> Comparison:
    """Return the table of one or more runs; raise ``ConfigError`` without any."""
    if not results:
        raise ConfigError("there is no run to report; give at least one result")
    return Comparison(labels(results), all_rows(results), _notes(results), _warnings(results))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print table, notes and warnings for a terminal."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for column in comparison.columns:
        table.add_column(column, justify="right", no_wrap=True)
    section = None
    for row in comparison.rows:
        if section not in (None, row.section):
            table.add_section()
        section = row.section
        table.add_row(row.name, *row.cells)
    console.print(table)
    for note in comparison.notes:
        console.print(Text(note))
    for warning in comparison.warnings:
        console.print(Text(f"warning: {warning}", style="bold"))


def _notes(results: Sequence[ReplayResult]) -> list[str]:
    setting = results[0].setting
    load = (
        f"{setting.agents} agents at once"
        if setting.agents_per_s is None
        else f"{setting.agents} agents arriving at {setting.agents_per_s:g} per second (Poisson)"
    )
    limits = [
        f"at most {setting.max_turns} turns" if setting.max_turns else "",
        f"context up to {setting.max_context_tokens} tokens" if setting.max_context_tokens else "",
        f"append x{setting.scale_append:g}" if setting.scale_append != 1 else "",
        f"generation x{setting.scale_generate:g}" if setting.scale_generate != 1 else "",
    ]
    machine = results[0].machine
    notes = [
        _throttle_note(results),
        f"Trace {setting.trace or 'given in Python'} ({setting.trace_format or 'unnamed format'}); "
        + "; ".join([load, *filter(None, limits)])
        + f"; recorded tool delays: {setting.tool_delays}; hits shared within: "
        f"{setting.isolation}; seed {setting.seed}.",
        f"Model {setting.model}, blocks of {setting.block_tokens} tokens. Client machine: "
        f"{machine.cpu_count} CPUs ({machine.cpu_model}), {machine.memory_bytes / 2**30:.0f} GiB, "
        f"{machine.platform}, Python {machine.python}.",
    ]
    shape = results[0].trace
    if shape is not None:
        turn, trajectory = shape.per_turn, shape.per_trajectory
        notes.append(
            f"Replayed: {shape.turns_per_trajectory:.1f} turns and "
            f"{shape.total_tokens_per_trajectory:.0f} tokens per trajectory; mean append / "
            f"generated / context {turn.append_tokens:.0f} / {turn.generated_tokens:.0f} / "
            f"{turn.context_tokens:.0f} over turns, {trajectory.append_tokens:.0f} / "
            f"{trajectory.generated_tokens:.0f} / {trajectory.context_tokens:.0f} over "
            "trajectories' means."
        )
    notes += [
        f"{label}: {r.setting.mode_note}"
        for label, r in zip(labels(results), results, strict=True)
        if r.setting.mode_note
    ]
    return notes


def _throttle_note(results: Sequence[ReplayResult]) -> str:
    rates = {result.setting.snic_bytes_per_s for result in results}
    if rates == {None}:
        return "Storage: no throttle stated by the server."
    texts = [
        "not throttled" if rate is None else f"throttled to {rate / MEGA:g} MB/s per node"
        for rate in sorted(rates, key=lambda rate: rate or 0)
    ]
    return f"Storage (SNIC) bandwidth is {' or '.join(texts)}."


def _warnings(results: Sequence[ReplayResult]) -> list[str]:
    warnings: list[str] = []
    for name in (*_MUST_AGREE, "snic_bytes_per_s"):
        values = [str(getattr(result.setting, name)) for result in results]
        if len(set(values)) > 1:
            warnings.append(f"the runs differ in {name}: {', '.join(values)}")
    if len({result.machine for result in results}) > 1:
        warnings.append("the runs were made on different machines")
    for label, result in zip(labels(results), results, strict=True):
        summary = result.summary
        if summary.turns_failed:
            error = next(turn.error for turn in result.turns if turn.error)
            warnings.append(f"{label}: {summary.turns_failed} turns failed, the first: {error}")
        if summary.sessions_without_turn:
            warnings.append(
                f"{label}: {summary.sessions_without_turn} agents sent nothing, their first "
                f"prompt exceeds {result.setting.max_context_tokens} tokens"
            )
        if result.setting.broken_lines:
            warnings.append(f"{label}: {result.setting.broken_lines} broken trace lines left out")
    return warnings
