"""The report of several runs: columns are runs (modes), rows are the metrics of §7.

print_report(compare([basic, dualpath, oracle]))
"""

from collections.abc import Sequence

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.laboratory.workload.replay.headline import headline
from dualpath.laboratory.workload.replay.panels import panels
from dualpath.laboratory.workload.replay.result import ReplayResult
from dualpath.laboratory.workload.replay.rows import MEGA, figures_table, labels
from dualpath.report.model import Notes, Plots, Report

#: Settings that must be equal for runs to be comparable.
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


def compare(
    results: Sequence[ReplayResult],
    title: str = "dualpath replay",
    further_notes: Sequence[str] = (),
) -> Report:
    """Return the report of one or more runs: headline, first plot, table, notes, other plots.

    The notes state throttle, trace, seed, settings and machine.  The warnings state why runs are
    not comparable or not valid. Raises ``ConfigError`` without any run.
    """
    if not results:
        raise ConfigError("there are no runs to report; give at least one result")
    first, *others = panels(results)
    return Report(
        name="replay",
        title=title,
        headline=headline(results),
        blocks=(
            Plots(title, (first,)),
            figures_table(results),
            Notes((*further_notes, *_notes(results))),
            Plots(title, tuple(others)),
        ),
        warnings=_warnings(results),
    )


def _notes(results: Sequence[ReplayResult]) -> tuple[str, ...]:
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
    if any(r.server is not None and r.server.path_bytes for r in results):
        notes.append(
            "A prompt computed in several chunks loads its earlier KV again for each: h2d, and in "
            "modes with two paths DE to PE, count those bytes every time; storage is read once."
        )
    notes += [
        f"{label}: {r.setting.mode_note}"
        for label, r in zip(labels(results), results, strict=True)
        if r.setting.mode_note
    ]
    return tuple(notes)


def _throttle_note(results: Sequence[ReplayResult]) -> str:
    reading = [result for result in results if result.setting.mode != Mode.ORACLE] or results
    rates = {result.setting.snic_bytes_per_s for result in reading}
    if rates == {None}:
        return "Storage: the server reports no throttle."
    texts = [
        "not throttled" if rate is None else f"throttled to {rate / MEGA:.3g} MB/s per node"
        for rate in sorted(rates, key=lambda rate: rate or 0)
    ]
    return f"Storage (SNIC) bandwidth is {' or '.join(texts)}."


def _warnings(results: Sequence[ReplayResult]) -> tuple[str, ...]:
    warnings: list[str] = []
    # Oracle reads nothing, so the throttle of its storage is irrelevant.
    reading = [result for result in results if result.setting.mode != Mode.ORACLE]
    for names, runs in ((_MUST_AGREE, results), (("snic_bytes_per_s",), reading)):
        for name in names:
            values = [str(getattr(run.setting, name)) for run in runs]
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
    return tuple(warnings)
