"""The report of several runs: columns are runs (modes), rows are the metrics of §7.

print_report(compare([basic, dualpath, oracle]))
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report.model import Notes, Panel, Plots, Report, Series, SideBySide, Table
from dualpath.report.style import MODE_STYLES
from dualpath.workload.replay.result import Distribution, ReplayResult, TurnRecord

# ---------------------------------------------------------------------------------------- headline
# The headline of a comparison of modes: speed-up over Basic, its ceiling, and the share gained.
#
# The share of Basic's waiting for loads that a mode removes, (Basic − mode) / (Basic − Oracle), is
# determined by the data paths and depends little on the machine.  The speed-up, and its ceiling,
# Oracle's, are lower on machines that compute slowly.

#: The headline is about the first of these modes that was run.
_SUBJECTS = (Mode.DUALPATH, Mode.SPLIT, Mode.ROUND_ROBIN, Mode.LAYERWISE)


def headline(results: Sequence[ReplayResult]) -> tuple[str, ...]:
    """Return lines on the speed-up over Basic, its ceiling and the share.

    They are empty without Basic and Oracle; if one of them is missing, the lines name it and the
    figures that are missing for that reason.
    """
    by_mode = {run.setting.mode: run for run in reversed(results) if not run.failed}
    subject = next((mode for mode in _SUBJECTS if mode in by_mode), None)
    if subject is None or not {Mode.BASIC, Mode.ORACLE} & by_mode.keys():
        return ()
    name, run = MODE_STYLES[subject].title, by_mode[subject]
    jct_s = run.summary.jct_s
    count = run.summary.sessions
    agents = f"{count} agent{'' if count == 1 else 's'} finished in {jct_s:.1f} s"
    if Mode.BASIC not in by_mode:
        slower = jct_s / by_mode[Mode.ORACLE].summary.jct_s
        return (
            f"{name}: {agents}, {slower:.2f} times as long as Oracle, which loads nothing. "
            "Basic is missing: no speed-up.",
        )
    basic_s = by_mode[Mode.BASIC].summary.jct_s
    first = f"{name} is {basic_s / jct_s:.2f} times as fast as Basic: {agents}, not {basic_s:.1f} s"
    if Mode.ORACLE not in by_mode:
        return (f"{first}. Oracle is missing: no ceiling, no share.",)
    return (f"{first}.", *_ceiling(name, basic_s, jct_s, by_mode[Mode.ORACLE].summary.jct_s))


def _ceiling(name: str, basic_s: float, jct_s: float, oracle_s: float) -> tuple[str, ...]:
    ceiling = (
        f"The ceiling is {basic_s / oracle_s:.2f} times: Oracle, which loads nothing, took "
        f"{oracle_s:.1f} s."
    )
    if basic_s <= oracle_s:
        return (f"{ceiling} Basic did not wait for loads, so no speed-up was possible.",)
    share = (basic_s - jct_s) / (basic_s - oracle_s)
    return (
        ceiling,
        f"{name} removes {share:.0%} of Basic's waiting for loads: "
        f"(Basic - {name}) / (Basic - Oracle), which depends little on the machine.",
    )


# -------------------------------------------------------------------------------------------- rows
# The table of a comparison of replays: one row per metric, one column per run (§7).

MEGA = 1e6

#: Names of agents in a warning.
_NAMES_SHOWN = 10
_Rows = SideBySide[ReplayResult]


def figures_table(results: Sequence[ReplayResult]) -> Table:
    """Return the table of all metrics that are known for at least one run."""
    rows = SideBySide(labels(results), results)
    basic, oracle = _of_mode(results, Mode.BASIC), _of_mode(results, Mode.ORACLE)
    _add_times(rows, basic, oracle)
    _add_latencies(rows, basic, oracle)
    _add_hits(rows)
    _add_bytes(rows, results)
    _add_turns(rows, results)
    return rows.table()


def labels(results: Sequence[ReplayResult]) -> list[str]:
    """Return one distinct column title per run."""
    titles: list[str] = []
    for result in results:
        title = result.setting.label
        same = sum(1 for earlier in titles if earlier.split(" #")[0] == title)
        titles.append(f"{title} #{same + 1}" if same else title)
    return titles


def _add_times(rows: _Rows, basic: ReplayResult | None, oracle: ReplayResult | None) -> None:
    rows.add("time", "JCT, s", _jct, "{:.2f}")
    rows.add("time", "speed-up over Basic", lambda r: _ratio(_jct(basic), _jct(r)), "{:.2f}x")
    rows.add("time", "JCT relative to Oracle", lambda r: _ratio(_jct(r), _jct(oracle)), "{:.2f}x")
    rows.add("time", "mean JCT of an agent, s", lambda r: _mean(r.summary.session_jct_s), "{:.2f}")


def _add_latencies(rows: _Rows, basic: ReplayResult | None, oracle: ReplayResult | None) -> None:
    _add_latency(rows, "TTFT", lambda r: r.summary.ttft_s)
    for title, base in (("Basic", basic), ("Oracle", oracle)):
        relative = partial(_relative_ttft, base)
        rows.add("TTFT", f"TTFT mean relative to {title}", relative, "{:.2f}x")
    _add_latency(rows, "TTST", lambda r: r.summary.ttst_s)
    _add_latency(rows, "TPOT", lambda r: r.summary.tpot_s)


def _add_latency(rows: _Rows, name: str, of: Callable[[ReplayResult], Distribution | None]) -> None:
    def milliseconds(statistic: str, run: ReplayResult) -> float | None:
        values = of(run)
        return None if values is None else getattr(values, statistic) * 1000

    for statistic in ("mean", "p50", "p90", "p99"):
        rows.add(name, f"{name} {statistic}, ms", partial(milliseconds, statistic), "{:,.1f}")


def _add_hits(rows: _Rows) -> None:
    rows.add("hits", "hit tokens", lambda r: r.summary.hit_tokens, "{:,}")
    rows.add("hits", "ideal hit tokens", lambda r: r.summary.ideal_hit_tokens, "{:,}")
    rows.add("hits", "hit rate", lambda r: r.summary.hit_rate, "{:.1%}")
    rows.add("hits", "ideal hit rate", lambda r: r.summary.ideal_hit_rate, "{:.1%}")
    rows.add(
        "hits",
        "hit tokens recomputed",
        lambda r: r.server.recomputed_tokens if r.server else None,
        "{:,}",
    )


def _add_bytes(rows: _Rows, results: Sequence[ReplayResult]) -> None:
    def megabytes(field: str, key: str, run: ReplayResult) -> float | None:
        values = counted_bytes(run, field)
        return values[key] / MEGA if key in values else None

    for field, section, name in (
        ("path_bytes", "paths", "{}, MB"),
        ("snic_read_bytes", "snics", "SNIC {} read, MB"),
    ):
        for key in byte_keys(results, field):
            of = partial(megabytes, field, key)
            rows.add(section, name.format(byte_label(key)), of, "{:,.1f}")


def counted_bytes(result: ReplayResult, field: str) -> dict[str, int]:
    """Return the server's byte counts by path or SNIC; empty if it has none."""
    return getattr(result.server, field, None) or {}


def byte_keys(results: Sequence[ReplayResult], field: str) -> list[str]:
    """Return the names of all paths (or SNICs) in any run's counts, in order."""
    keys: dict[str, None] = {}
    for result in results:
        keys.update(dict.fromkeys(counted_bytes(result, field)))
    # Prefill before decode, independent of the server's order.
    return sorted(keys, key=lambda key: (not key.startswith("pe"), key))


def byte_label(key: str) -> str:
    """Return a counter's name for readers: ``pe_path`` is "PE path"."""
    words = key.split("_")
    return " ".join(word.upper() if word in ("pe", "de") else word for word in words)


def _add_turns(rows: _Rows, results: Sequence[ReplayResult]) -> None:
    rows.add("turns", "agents", lambda r: r.summary.sessions, "{:,}")
    rows.add("turns", "turns", lambda r: r.summary.turns, "{:,}")
    rows.add("turns", "turns failed", lambda r: r.summary.turns_failed, "{:,}")
    rows.add("turns", "tokens generated", lambda r: r.summary.generated_tokens, "{:,}")
    if len(results) > 1:
        equal = partial(_equal_responses, results[0])
        rows.add("turns", f"responses equal to {labels(results)[0]}", equal)


def _equal_responses(first: ReplayResult, other: ReplayResult) -> str | None:
    """Compare generated token ids turn by turn, except Oracle's, which are invalid."""
    if Mode.ORACLE in (first.setting.mode, other.setting.mode):
        return None
    digests = {(t.conversation_id, t.turn): t.generated_digest for t in first.turns}
    same = sum(
        t.generated_digest is not None
        and digests.get((t.conversation_id, t.turn)) == t.generated_digest
        for t in other.turns
    )
    return f"{same} of {len(first.turns)}"


def _of_mode(results: Sequence[ReplayResult], mode: Mode) -> ReplayResult | None:
    return next((result for result in results if result.setting.mode == mode), None)


def _jct(result: ReplayResult | None) -> float | None:
    return result.summary.jct_s if result is not None else None


def _relative_ttft(base: ReplayResult | None, result: ReplayResult) -> float | None:
    if base is None:
        return None
    return _ratio(_mean(result.summary.ttft_s), _mean(base.summary.ttft_s))


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _mean(values: Distribution | None) -> float | None:
    return values.mean if values is not None else None


# ------------------------------------------------------------------------------------------ panels
# The plots of a comparison: completion times, latency distributions, turns and bytes.


def panels(results: Sequence[ReplayResult]) -> tuple[Panel, ...]:
    """Return the plots of the runs; those without data are left out."""
    names = labels(results)
    jct = tuple(
        Series(name, ("all agents",), (result.summary.jct_s,))
        for name, result in zip(names, results, strict=True)
    )
    drawn = (
        Panel("Job completion time", "grouped", "", "JCT, s", jct),
        _distribution("Time to first token (TTFT)", "TTFT, ms", results, lambda t: t.ttft_s),
        _distribution("Time per output token (TPOT)", "TPOT, ms", results, lambda t: t.tpot_s),
        _turns(results),
        _bytes("Bytes moved, by path", results, "path_bytes"),
        _bytes("Bytes read per storage NIC", results, "snic_read_bytes"),
        _parts_of_turns(results),
    )
    return tuple(panel for panel in drawn if panel.series)


def _distribution(
    title: str,
    label: str,
    results: Sequence[ReplayResult],
    of: Callable[[TurnRecord], float | None],
) -> Panel:
    """Return the cumulative distribution of a latency of turns, one line per run."""

    def curve(result: ReplayResult) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        known_ms = np.sort([v * 1000 for turn in result.turns if (v := of(turn)) is not None])
        return known_ms, np.arange(1, len(known_ms) + 1) / max(len(known_ms), 1)

    return Panel(title, "steps", label, "share of turns", _curves(results, curve))


def _turns(results: Sequence[ReplayResult]) -> Panel:
    """Return the number of answered turns over time, one line per run."""

    def curve(result: ReplayResult) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        ends_s = [t.start_s + t.latency_s for t in result.turns if t.latency_s is not None]
        time_s = np.concatenate([[0.0], np.sort(ends_s)]) if ends_s else np.zeros(0)
        return time_s, np.arange(len(time_s), dtype=np.float64)

    title = "Turns finished over time"
    return Panel(title, "steps", "time since start, s", "turns answered", _curves(results, curve))


def _parts_of_turns(results: Sequence[ReplayResult]) -> Panel:
    """Return the mean time of a turn, split at the first and second token: one bar per run."""
    answered = [[t for t in run.turns if t.latency_s and t.ttft_s] for run in results]
    names = tuple(labels(results))
    cuts: tuple[tuple[str, Callable[[TurnRecord], float]], ...] = (
        ("until the first token", lambda t: t.ttft_s or 0.0),
        ("until the second", lambda t: t.ttst_s or 0.0),
        ("further tokens", lambda t: (t.latency_s or 0.0) - (t.ttft_s or 0.0) - (t.ttst_s or 0.0)),
    )
    series = tuple(
        Series(name, names, tuple(sum(map(of, turns)) / max(len(turns), 1) for turns in answered))
        for name, of in cuts
    )
    known = series if any(answered) else ()
    return Panel("Where the time of a turn goes", "stacked", "", "mean of turns, s", known)


def _curves(
    results: Sequence[ReplayResult],
    curve: Callable[[ReplayResult], tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> tuple[Series, ...]:
    """Return the curve of every run that has one."""
    series = []
    for name, result in zip(labels(results), results, strict=True):
        x, y = curve(result)
        if len(x):
            series.append(Series(name, tuple(x.tolist()), tuple(y.tolist())))
    return tuple(series)


def _bytes(title: str, results: Sequence[ReplayResult], field: str) -> Panel:
    """Return one bar per run that stacks the bytes of each path or SNIC."""
    counted = [counted_bytes(result, field) for result in results]
    keys = byte_keys(results, field) if any(sum(values.values()) for values in counted) else []
    names = tuple(labels(results))
    series = tuple(
        Series(byte_label(key), names, tuple(values.get(key, 0) / MEGA for values in counted))
        for key in keys
    )
    return Panel(title, "stacked", "", "MB", series)


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
            silent = [one.session_id for one in result.sessions if not one.turns]
            more = f" and {len(silent) - _NAMES_SHOWN} more" if len(silent) > _NAMES_SHOWN else ""
            warnings.append(
                f"{label}: {summary.sessions_without_turn} agents sent nothing, their first "
                f"prompt exceeds {result.setting.max_context_tokens} tokens: "
                f"{', '.join(silent[:_NAMES_SHOWN])}{more}"
            )
        if result.interrupted:
            warnings.append(f"{label}: interrupted; only turns that had ended are counted")
        if result.setting.broken_lines:
            warnings.append(f"{label}: {result.setting.broken_lines} broken trace lines left out")
    return tuple(warnings)
