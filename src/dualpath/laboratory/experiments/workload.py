"""What agents do in a lab: windows of long trajectories, scaled so that two cores can move them.

An agent of a lab is met in the middle of its trajectory: the KV of what it did before is stored
before the run begins, and its next turns are replayed.  So a short run has the context lengths and
hit rates of the whole trace, which the first turns of every trajectory have not.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.core.request import Round, Trajectory
from dualpath.laboratory.experiments.settings import WindowSettings
from dualpath.laboratory.workload.columns.generator import DATASETS, GeneratorSettings
from dualpath.laboratory.workload.columns.generator import generate as generate_rounds
from dualpath.laboratory.workload.conversation.token_session import TokenSession
from dualpath.laboratory.workload.formats import read_trace


class Window(msgspec.Struct, frozen=True):
    """What one agent replays: the first ``history_tokens`` of its first prompt are stored."""

    history_tokens: int
    trajectory: Trajectory


def windows(settings: WindowSettings) -> list[Window]:
    """Return one window per agent.

    Where in its trajectory an agent is met is drawn evenly; equal settings give equal windows.
    Raises ``ConfigError`` if no trajectory is long enough.
    """
    long_enough = [t for t in _trajectories(settings) if len(t.rounds) > settings.turns]
    if not long_enough:
        raise ConfigError(
            f"no trajectory of {settings.trace!r} has more than {settings.turns} turns; take fewer"
        )
    rng = np.random.default_rng([settings.seed, 7])
    found: list[Window] = []
    for index in range(settings.agents):
        trajectory = long_enough[index % len(long_enough)]
        start = int(rng.integers(1, len(trajectory.rounds) - settings.turns + 1))
        found.append(_window(trajectory, index, start, settings))
    return found


def write_rounds(found: Sequence[Window], path: Path) -> None:
    """Write what agents replay in the form of §A.3, for ``dualpath replay``."""
    _write(path, {w.trajectory.session_id: _pairs(w.trajectory) for w in found})


def write_histories(found: Sequence[Window], path: Path) -> None:
    """Write a trace that stores every agent's history: one prompt, which its first one begins with.

    A session's tokens are drawn one after the other, so the shorter prompt is a prefix.
    """
    _write(path, {w.trajectory.session_id: [(w.history_tokens, 1)] for w in found})


def _pairs(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [(r.append_tokens, r.generated_tokens) for r in trajectory.rounds]


def _write(path: Path, rounds: Mapping[str, list[tuple[int, int]]]) -> None:
    lines = [
        msgspec.json.encode({"session_id": name, "rounds": pairs}) for name, pairs in rounds.items()
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")


def _trajectories(settings: WindowSettings) -> list[Trajectory]:
    if settings.trace not in DATASETS:
        sessions = read_trace(settings.trace)
        lengths = [s.trajectory for s in sessions if isinstance(s, TokenSession)]
        if not lengths:
            raise ConfigError(
                f"{settings.trace!r} holds no rounds of token counts; give such a file, or one of "
                f"{', '.join(DATASETS)}"
            )
        return lengths
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
        Trajectory(f"{settings.trace}-{index}", tuple(Round(*pair) for pair in pairs[start:end]))
        for index, (start, end) in enumerate(pairwise(bounds))
    ]


def _window(trajectory: Trajectory, agent: int, start: int, settings: WindowSettings) -> Window:
    before = trajectory.rounds[:start]
    history = _scaled(sum(r.append_tokens + r.generated_tokens for r in before), settings.scale)
    append = settings.scale * settings.scale_append
    generate = settings.scale * settings.scale_generate
    rounds = [
        Round(_scaled(r.append_tokens, append), _scaled(r.generated_tokens, generate))
        for r in trajectory.rounds[start : start + settings.turns]
    ]
    first = Round(history + rounds[0].append_tokens, rounds[0].generated_tokens)
    return Window(history, Trajectory(f"agent-{agent}", (first, *rounds[1:])))


def _scaled(tokens: int, scale: float) -> int:
    return max(round(tokens * scale), 1)
