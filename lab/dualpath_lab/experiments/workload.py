"""Workload of a lab: windows of long trajectories, scaled to what two cores can transfer.

An agent of a lab starts in the middle of its trajectory: the KV of its earlier turns, its history,
is stored before the run, and its next turns are replayed.  So a short run has the context lengths
and hit rates of the whole trace, unlike the first turns of every trajectory.  With ``History.NONE``
the windows are the first turns, and with ``whole`` they are whole trajectories.

Only token counts are taken from traces, of any format.  Turns only append: context that turns of
the trace drop (compactions, edits) is replayed.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise, starmap
from pathlib import Path

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.core.request import Round, Trajectory
from dualpath.node.output_files import write_whole
from dualpath.workload.columns.generator import DATASETS, GeneratorSettings
from dualpath.workload.columns.generator import generate as generate_rounds
from dualpath.workload.columns.sessions_to_columns import as_lengths
from dualpath.workload.conversation.sessions import AgentSettings, Session
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import read_trace
from dualpath.workload.formats.lines import SkippedLines
from dualpath_lab.experiments.settings import History, WindowSettings

log = logging.getLogger(__name__)


class Window(msgspec.Struct, frozen=True):
    """The turns of one agent; the first ``history_tokens`` ≥ 0 of its first prompt are stored."""

    history_tokens: int
    trajectory: Trajectory


def windows(settings: WindowSettings) -> list[Window]:
    """Return one window per agent.

    The start within a trajectory is drawn uniformly; equal settings give equal windows.
    Raises ``ConfigError`` if no trajectory is long enough.
    """
    if settings.whole:
        return _whole_trajectories(settings)
    fitting = (s for s in _sessions(settings) if s.turns > settings.turns)
    long_enough = list(islice(fitting, settings.agents))
    if not long_enough:
        raise ConfigError(
            f"no trajectory of {settings.trace!r} has more than {settings.turns} turns; take fewer"
        )
    rng = np.random.default_rng([settings.seed, 7])
    found: list[Window] = []
    for index in range(settings.agents):
        session = long_enough[index % len(long_enough)]
        start = int(rng.integers(1, session.turns - settings.turns + 1))
        begin = 0 if settings.history is History.NONE else start
        found.append(_window(session, index, begin, settings))
    return found


def _whole_trajectories(settings: WindowSettings) -> list[Window]:
    sessions = list(islice((s for s in _sessions(settings) if s.turns), settings.agents))
    if not sessions:
        raise ConfigError(f"{settings.trace!r} has no trajectory with a turn; give another trace")
    return [
        _window(sessions[index % len(sessions)], index, 0, settings)
        for index in range(settings.agents)
    ]


def working_set_tokens(found: Sequence[Window]) -> int:
    """Return the context tokens of all agents after their last turn."""
    return sum(window.trajectory.total_tokens for window in found)


def write_rounds(found: Sequence[Window], path: Path) -> None:
    """Write the agents' turns in the format of §A.3, with tool times, for ``dualpath replay``."""
    _write(path, {w.trajectory.session_id: _rounds(w.trajectory) for w in found})


def write_histories(found: Sequence[Window], path: Path) -> None:
    """Write a trace that stores all histories: per agent one prompt, a prefix of its first prompt.

    A session's tokens are drawn one after the other, so the shorter prompt is a prefix.  Agents
    without a history are left out.
    """
    with_one = [w for w in found if w.history_tokens]
    _write(path, {w.trajectory.session_id: [(w.history_tokens, 1)] for w in with_one})


def _rounds(trajectory: Trajectory) -> list[object]:
    rounds: list[object] = []
    context = 0
    for r in trajectory.rounds:
        rounds.append(
            {
                "prompt": context + r.append_tokens,
                "append": r.append_tokens,
                "context": context,
                "gen": r.generated_tokens,
                "think_s": r.delay_s,
            }
            if r.delay_s
            else (r.append_tokens, r.generated_tokens)
        )
        context += r.append_tokens + r.generated_tokens
    return rounds


def _write(path: Path, rounds: Mapping[str, Sequence[object]]) -> None:
    lines = [
        msgspec.json.encode({"session_id": name, "rounds": listed})
        for name, listed in rounds.items()
    ]
    write_whole(path, b"\n".join(lines) + b"\n")


def _sessions(settings: WindowSettings) -> Iterable[TokenSession]:
    if settings.trace not in DATASETS:
        return as_lengths(_read(settings))
    spread = GeneratorSettings(trajectories=max(settings.agents, 10))
    if settings.even:
        spread = msgspec.structs.replace(
            spread, total_sigma=0.0, first_prompt_sigma=0.0, append_sigma=0.0, generated_sigma=0.0
        )
    columns = generate_rounds(DATASETS[settings.trace], settings.seed, spread)
    pairs = list(
        zip(columns.append_tokens.tolist(), columns.generated_tokens.tolist(), strict=True)
    )
    bounds = columns.first_round.tolist()
    return [
        TokenSession(
            Trajectory(f"{settings.trace}-{index}", tuple(starmap(Round, pairs[start:end])))
        )
        for index, (start, end) in enumerate(pairwise(bounds))
    ]


def _read(settings: WindowSettings) -> Sequence[Session]:
    skipped = SkippedLines()
    on_broken = skipped if settings.skip_broken else None
    sessions = read_trace(settings.trace, on_broken=on_broken)
    for line in skipped.report():
        log.warning("%s", line)
    return sessions


def _window(session: TokenSession, agent: int, start: int, settings: WindowSettings) -> Window:
    met = list(session.planned(AgentSettings(max_turns=start + 1)))[start]
    history = _scaled(met.context_tokens, settings.scale) if met.context_tokens else 0
    append = settings.scale * settings.scale_append
    generate = settings.scale * settings.scale_generate
    end = None if settings.whole else start + settings.turns
    rounds = [
        Round(
            _scaled(r.append_tokens, append),
            _scaled(r.generated_tokens, generate),
            min(r.delay_s, settings.longest_pause_s),
        )
        for r in session.trajectory.rounds[start:end]
    ]
    # No tool runs before the first turn of the window.
    first = Round(history + rounds[0].append_tokens, rounds[0].generated_tokens)
    return Window(history, Trajectory(f"agent-{agent}", (first, *rounds[1:])))


def _scaled(tokens: int, scale: float) -> int:
    return max(round(tokens * scale), 1)
