"""The result of a replay: one versioned schema, in Python and as JSON."""

import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.node.machine import ClientMachine
from dualpath.report.files import as_json, write_file

#: The version is increased when the meaning of a field changes.
SCHEMA = "dualpath.replay/1"


class ToolDelays(enum.StrEnum):
    """Whether agents wait for recorded tool times; without them hit rates and load are higher."""

    NONE = "none"
    RECORDED = "recorded"


class SentHints(enum.StrEnum):
    """Hints that agents send about their sessions (``core.session_hints``)."""

    NONE = "none"
    NAMES = "names"
    """The session's name with each turn, and its end."""
    PAUSES = "pauses"
    """Also the recorded run time of a tool when it starts."""


class Isolation(enum.StrEnum):
    """The scope in which requests hit each other's blocks, set by ``cache_salt``.

    ``SESSION`` is the paper's rule (§A.4): hits only within a trajectory, none from earlier runs.
    """

    SESSION = "session"
    RUN = "run"
    NONE = "none"


class ReplaySetting(msgspec.Struct, frozen=True):
    """The settings of a run, for judging and repeating it.

    ``mode``, ``mode_note`` and ``snic_bytes_per_s`` are reported by the server, None if it does not
    report them; ``snic_bytes_per_s`` None also means that storage was not throttled.
    """

    label: str
    endpoint: str
    trace: str
    trace_format: str
    broken_lines: int
    mode: str | None
    mode_note: str | None
    model: str
    block_tokens: int
    snic_bytes_per_s: float | None
    agents: int
    agents_per_s: float | None
    seed: int
    tool_delays: ToolDelays
    isolation: Isolation
    session_hints: SentHints
    max_context_tokens: int | None
    max_turns: int | None
    scale_append: float
    scale_generate: float
    token_low: int
    token_high: int


class TurnRecord(msgspec.Struct, frozen=True):
    """One request, measured at the client; times in seconds, ``start_s`` since the run's start.

    ``ttft_s``: from just before the request is sent to the first generated token's arrival.
    ``ttst_s``: from the first token's arrival to the second's; None with fewer than 2 tokens.
    ``tpot_s``: mean gap between tokens after the second, (last - second) / (tokens - 2); None
    with fewer than 3 tokens, so that TTFT, TTST and TPOT share no gap.
    ``latency_s``: from just before the request is sent to the last token's arrival.
    Tokens that arrive in one chunk arrive at one time.  All four are None for a failed turn.

    ``ideal_hit_tokens`` is the longest prefix, in Full Blocks, that the session had sent or
    received before; ``hit_tokens`` is reported by the server (``cached_tokens``), else None.
    ``generated_digest``: 16 hex digits of a hash of the generated ids, to compare runs.
    """

    session_id: str
    conversation_id: str
    turn: int
    start_s: float
    delay_s: float
    prompt_tokens: int
    context_tokens: int
    ideal_hit_tokens: int
    generated_tokens: int
    hit_tokens: int | None = None
    ttft_s: float | None = None
    ttst_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None
    generated_digest: str | None = None
    error: str | None = None


class SessionRecord(msgspec.Struct, frozen=True):
    """One agent; ``start_s`` and ``end_s`` since the run's start, sub-agents included."""

    session_id: str
    start_s: float
    end_s: float
    turns: int
    truncated: bool
    failed: bool


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles (linear interpolation) of ``count`` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class TraceMeans(msgspec.Struct, frozen=True):
    """Mean token counts of a turn, as in Table 2."""

    append_tokens: float
    generated_tokens: float
    context_tokens: float
    prompt_tokens: float


class TraceShape(msgspec.Struct, frozen=True):
    """Means of the replayed turns, of two kinds that differ much.

    ``per_turn`` averages over all turns; ``per_trajectory`` averages the trajectories' own means,
    as in Table 2.
    """

    turns_per_trajectory: float
    total_tokens_per_trajectory: float
    per_turn: TraceMeans
    per_trajectory: TraceMeans


class Summary(msgspec.Struct, frozen=True):
    """The metrics of §7.2: JCT of the whole task, and latencies over all successful turns.

    Hit rates are hit tokens divided by prompt tokens; the actual ones are None if the server does
    not report them.
    """

    jct_s: float
    sessions: int
    sessions_failed: int
    sessions_truncated: int
    sessions_without_turn: int
    turns: int
    turns_failed: int
    prompt_tokens: int
    generated_tokens: int
    ideal_hit_tokens: int
    ideal_hit_rate: float | None
    hit_tokens: int | None
    hit_rate: float | None
    ttft_s: Distribution | None
    ttst_s: Distribution | None
    tpot_s: Distribution | None
    latency_s: Distribution | None
    session_jct_s: Distribution | None


class ServerCounters(msgspec.Struct, frozen=True):
    """Increases of the server's counters during the run; ``other`` has those not listed here."""

    hit_tokens: int | None = None
    recomputed_tokens: int | None = None
    path_bytes: dict[str, int] = {}
    snic_read_bytes: dict[str, int] = {}
    other: dict[str, Any] = {}


class ReplayResult(msgspec.Struct, frozen=True):
    """A run; ``server`` is None for an endpoint without ``/dualpath/v1/status``.

    An ``interrupted`` run has the turns and sessions that had ended.
    """

    setting: ReplaySetting
    machine: ClientMachine
    summary: Summary
    trace: TraceShape | None
    server: ServerCounters | None
    sessions: list[SessionRecord]
    turns: list[TurnRecord]
    schema: str = SCHEMA
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether any turn failed, or no turn was replayed."""
        return self.summary.turns_failed > 0 or self.summary.turns == 0


def write_result(result: ReplayResult, path: str | Path) -> None:
    """Write ``result`` as JSON; raises ``ConfigError`` if the file cannot be written."""
    write_file(path, as_json(result))


def read_result(path: str | Path) -> ReplayResult:
    """Read a result written by ``write_result``; raises ``ConfigError`` for other files."""
    try:
        raw = Path(path).read_bytes()
        schema = msgspec.json.decode(raw, type=_SchemaOnly).schema
        if schema == SCHEMA:
            return msgspec.json.decode(raw, type=ReplayResult)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path}: is not a replay result ({error}); give the --json file of a replay"
        ) from None
    raise ConfigError(
        f"{path}: schema is {schema!r}, but this version reads {SCHEMA!r}; repeat the run"
    )


class _SchemaOnly(msgspec.Struct):
    schema: str = ""


# ----------------------------------------------------------------------------------------- metrics
# Computes the metrics of §7 from turns: JCT, TTFT, TTST, TPOT, hits, and means of the trace.


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Return mean and percentiles of the values except None; None without values."""
    known = np.asarray([value for value in values if value is not None], dtype=float)
    if not len(known):
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return Distribution(
        count=len(known),
        mean=float(known.mean()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=float(known.max()),
    )


def summarise(
    turns: Sequence[TurnRecord], sessions: Sequence[SessionRecord], jct_s: float
) -> Summary:
    """Return the metrics of one run; ``jct_s`` is from the run's start to its last answer."""
    good = [turn for turn in turns if turn.error is None]
    prompt_tokens = sum(turn.prompt_tokens for turn in good)
    ideal = sum(turn.ideal_hit_tokens for turn in good)
    reported = [turn for turn in good if turn.hit_tokens is not None]
    hits = sum(turn.hit_tokens or 0 for turn in reported)
    reported_prompt_tokens = sum(turn.prompt_tokens for turn in reported)
    return Summary(
        jct_s=jct_s,
        sessions=len(sessions),
        sessions_failed=sum(session.failed for session in sessions),
        sessions_truncated=sum(session.truncated for session in sessions),
        sessions_without_turn=sum(session.turns == 0 for session in sessions),
        turns=len(turns),
        turns_failed=len(turns) - len(good),
        prompt_tokens=prompt_tokens,
        generated_tokens=sum(turn.generated_tokens for turn in good),
        ideal_hit_tokens=ideal,
        ideal_hit_rate=ideal / prompt_tokens if prompt_tokens else None,
        hit_tokens=hits if reported else None,
        hit_rate=hits / reported_prompt_tokens if reported_prompt_tokens else None,
        ttft_s=distribution(turn.ttft_s for turn in good),
        ttst_s=distribution(turn.ttst_s for turn in good),
        tpot_s=distribution(turn.tpot_s for turn in good),
        latency_s=distribution(turn.latency_s for turn in good),
        session_jct_s=distribution(s.end_s - s.start_s for s in sessions if not s.failed),
    )


def trace_shape(turns: Iterable[TurnRecord]) -> TraceShape | None:
    """Return the means of the replayed turns, per turn and per trajectory; None without turns."""
    trajectories: dict[str, list[TurnRecord]] = {}
    for turn in turns:
        if turn.error is None:
            trajectories.setdefault(turn.conversation_id, []).append(turn)
    if not trajectories:
        return None
    own_means = [_means(part) for part in trajectories.values()]
    last = [part[-1] for part in trajectories.values()]
    return TraceShape(
        turns_per_trajectory=fmean(map(len, trajectories.values())),
        total_tokens_per_trajectory=fmean(t.prompt_tokens + t.generated_tokens for t in last),
        per_turn=_means([turn for part in trajectories.values() for turn in part]),
        per_trajectory=TraceMeans(
            append_tokens=fmean(means.append_tokens for means in own_means),
            generated_tokens=fmean(means.generated_tokens for means in own_means),
            context_tokens=fmean(means.context_tokens for means in own_means),
            prompt_tokens=fmean(means.prompt_tokens for means in own_means),
        ),
    )


def _means(turns: Sequence[TurnRecord]) -> TraceMeans:
    return TraceMeans(
        append_tokens=fmean(turn.prompt_tokens - turn.context_tokens for turn in turns),
        generated_tokens=fmean(turn.generated_tokens for turn in turns),
        context_tokens=fmean(turn.context_tokens for turn in turns),
        prompt_tokens=fmean(turn.prompt_tokens for turn in turns),
    )
