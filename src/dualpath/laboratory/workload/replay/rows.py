"""The table of a comparison of replays: one row per metric, one column per run (§7)."""

from collections.abc import Callable, Sequence
from functools import partial

from dualpath.core.modes import Mode
from dualpath.laboratory.workload.replay.result import Distribution, ReplayResult
from dualpath.report.model import SideBySide, Table

MEGA = 1e6

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
