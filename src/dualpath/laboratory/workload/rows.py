"""The figures of a comparison, formatted: one row per figure, one cell per run."""

from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.workload.replay.result import Distribution, ReplayResult

#: Stands for a figure that is not known or makes no sense for a run.
NOTHING = "-"
MEGA = 1e6


class Row(msgspec.Struct, frozen=True):
    """One figure of every run, formatted; ``section`` groups rows."""

    section: str
    name: str
    cells: list[str]


def all_rows(results: Sequence[ReplayResult]) -> list[Row]:
    """Return the rows that have a figure for at least one run."""
    rows = [
        *_time_rows(results),
        *_latency_rows(results),
        *_hit_rows(results),
        *_byte_rows(results),
        *_turn_rows(results),
    ]
    return [row for row in rows if any(cell != NOTHING for cell in row.cells)]


def labels(results: Sequence[ReplayResult]) -> list[str]:
    """Return one distinct column title per run."""
    titles: list[str] = []
    for result in results:
        title = result.setting.label
        same = sum(1 for earlier in titles if earlier.split(" #")[0] == title)
        titles.append(f"{title} #{same + 1}" if same else title)
    return titles


def _row(
    section: str,
    name: str,
    results: Sequence[ReplayResult],
    value: Callable[[ReplayResult], str | None],
) -> Row:
    cells = [value(result) for result in results]
    return Row(section, name, [NOTHING if cell is None else cell for cell in cells])


def _time_rows(results: Sequence[ReplayResult]) -> list[Row]:
    basic = _of_mode(results, Mode.BASIC)
    oracle = _of_mode(results, Mode.ORACLE)
    return [
        _row("time", "JCT, s", results, lambda r: f"{r.summary.jct_s:.2f}"),
        _row(
            "time",
            "speed-up over Basic",
            results,
            lambda r: _ratio(_jct(basic), _jct(r), "{:.2f}x"),
        ),
        _row(
            "time",
            "JCT relative to Oracle",
            results,
            lambda r: _ratio(_jct(r), _jct(oracle), "{:.2f}x"),
        ),
        _row("time", "mean JCT of an agent, s", results, lambda r: _mean(r.summary.session_jct_s)),
    ]


def _latency_rows(results: Sequence[ReplayResult]) -> list[Row]:
    basic = _of_mode(results, Mode.BASIC)
    oracle = _of_mode(results, Mode.ORACLE)
    rows: list[Row] = []
    for field, name in (("ttft_s", "TTFT"), ("ttst_s", "TTST"), ("tpot_s", "TPOT")):
        for statistic in ("mean", "p50", "p90", "p99"):
            rows.append(
                _row(
                    name,
                    f"{name} {statistic}, ms",
                    results,
                    lambda r, f=field, s=statistic: _ms(getattr(r.summary, f), s),  # type: ignore[misc]
                )
            )
        if field == "ttft_s":
            rows += [
                _row(
                    name,
                    "TTFT mean relative to Basic",
                    results,
                    lambda r: _ratio(_ttft(r), _ttft(basic), "{:.2f}x"),
                ),
                _row(
                    name,
                    "TTFT mean relative to Oracle",
                    results,
                    lambda r: _ratio(_ttft(r), _ttft(oracle), "{:.2f}x"),
                ),
            ]
    return rows


def _hit_rows(results: Sequence[ReplayResult]) -> list[Row]:
    return [
        _row("hits", "hit tokens", results, lambda r: _count(r.summary.hit_tokens)),
        _row("hits", "ideal hit tokens", results, lambda r: _count(r.summary.ideal_hit_tokens)),
        _row("hits", "hit rate", results, lambda r: _percent(r.summary.hit_rate)),
        _row("hits", "ideal hit rate", results, lambda r: _percent(r.summary.ideal_hit_rate)),
        _row(
            "hits",
            "hit tokens recomputed",
            results,
            lambda r: _count(r.server.recomputed_tokens) if r.server else None,
        ),
    ]


def _byte_rows(results: Sequence[ReplayResult]) -> list[Row]:
    rows: list[Row] = []
    for field, section, name in (
        ("path_bytes", "paths", "{}, MB"),
        ("snic_read_bytes", "snics", "SNIC {} read, MB"),
    ):
        for key in byte_keys(results, field):
            rows.append(
                _row(
                    section,
                    name.format(byte_label(key)),
                    results,
                    lambda r, f=field, k=key: _megabytes(r, f, k),  # type: ignore[misc]
                )
            )
    return rows


def byte_keys(results: Sequence[ReplayResult], field: str) -> list[str]:
    """Return the names of all paths (or SNICs) that any run counted, in order."""
    keys: dict[str, None] = {}
    for result in results:
        keys.update(dict.fromkeys(getattr(result.server, field, None) or {}))
    # Prefill before decode, whatever order the server counts in.
    return sorted(keys, key=lambda key: (not key.startswith("pe"), key))


def byte_label(key: str) -> str:
    """Return a counter's name as it is read: ``pe_path`` is the PE path."""
    words = key.split("_")
    return " ".join(word.upper() if word in ("pe", "de") else word for word in words)


def _turn_rows(results: Sequence[ReplayResult]) -> list[Row]:
    first = results[0]
    rows = [
        _row("turns", "agents", results, lambda r: _count(r.summary.sessions)),
        _row("turns", "turns", results, lambda r: _count(r.summary.turns)),
        _row("turns", "turns failed", results, lambda r: _count(r.summary.turns_failed)),
        _row("turns", "tokens generated", results, lambda r: _count(r.summary.generated_tokens)),
    ]
    if len(results) > 1:
        title = f"responses equal to {labels(results)[0]}"
        rows.append(_row("turns", title, results, lambda r: _equal_responses(first, r)))
    return rows


def _equal_responses(first: ReplayResult, other: ReplayResult) -> str | None:
    """Compare generated token ids turn by turn; Oracle's are meaningless and not compared."""
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


def _ttft(result: ReplayResult | None) -> float | None:
    return result.summary.ttft_s.mean if result is not None and result.summary.ttft_s else None


def _ratio(value: float | None, base: float | None, form: str) -> str | None:
    return form.format(value / base) if value is not None and base else None


def _mean(values: Distribution | None) -> str | None:
    return f"{values.mean:.2f}" if values is not None else None


def _ms(values: Distribution | None, statistic: str) -> str | None:
    return f"{getattr(values, statistic) * 1000:.1f}" if values is not None else None


def _count(value: int | None) -> str | None:
    return f"{value:,}" if value is not None else None


def _percent(value: float | None) -> str | None:
    return f"{value:.1%}" if value is not None else None


def _megabytes(result: ReplayResult, field: str, key: str) -> str | None:
    values: dict[str, int] = getattr(result.server, field, None) or {}
    return f"{values[key] / MEGA:,.1f}" if key in values else None
