"""A load that shifts from prompts to answers, with roles that follow it and roles that stay.

Both are measured on emulated engines and simulated.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.laboratory.experiments.machine_load import BUSY_LIMIT
from dualpath.laboratory.experiments.report import ExperimentReport, Target
from dualpath.laboratory.experiments.role_cluster import LivePlayed, play_live
from dualpath.laboratory.experiments.role_settings import RoleShiftSettings, with_prefill_rate
from dualpath.laboratory.experiments.role_shift import Played, prefill_tokens_per_s, simulated
from dualpath.report.model import NOTHING, Panel, Series, Table

#: How far off the simulator may be: of the JCT, of which times of changes are parts as well.
ERROR = 0.1
_DISCUSSION = """\
Roles are decided by the same object on both sides (`policy/role_policy.py`), with the same
settings. Nothing was fitted. The simulator is given the emulated engines' times, the agents, and
what a switch takes, which is measured before the run: an engine changes its role and back while
nothing is asked. It knows nothing of HTTP, of the second until a supervisor reads the wish, and of
late wake-ups."""


class _Pair(NamedTuple):
    """A run on engines and what the simulator says of it."""

    name: str
    live: Sequence[LivePlayed]
    simulated: Played

    @property
    def measured(self) -> Played:
        """The run of the median JCT, the faster one of two."""
        ordered = sorted((run.played for run in self.live), key=lambda played: played.jct_s)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def error(self) -> float:
        """How far off the simulated JCT is."""
        return self.simulated.jct_s / self.measured.jct_s - 1


def measure_roles(
    settings: RoleShiftSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Play the agents with roles that stay and with roles that move, and simulate both.

    Raises ``ConfigError`` for settings that cannot be, ``EngineLostError`` if a turn fails.
    """
    policy = with_prefill_rate(settings.rebalancing, prefill_tokens_per_s(settings))
    fixed: list[LivePlayed] = []
    moving: list[LivePlayed] = []
    for number in range(settings.repeat):
        for runs, asked in ((fixed, None), (moving, policy)):
            runs.append(play_live(settings, asked))
            progress(
                f"{number + 1}/{settings.repeat} {'fixed' if asked is None else 'moving'} roles: "
                f"{runs[-1].played.jct_s:.1f} s, machine {runs[-1].busy:.0%} busy"
            )
    switch_s = statistics.median(run.switch_s for run in moving if run.switch_s is not None)
    told = msgspec.structs.replace(policy, switch_s=switch_s)
    pairs = (
        _Pair("fixed roles", fixed, simulated(settings, None)),
        _Pair("moving roles", moving, simulated(settings, told)),
    )
    return _report(settings, command, pairs, switch_s)


def _report(
    settings: RoleShiftSettings, command: str, pairs: tuple[_Pair, _Pair], switch_s: float
) -> ExperimentReport:
    runs = [run for pair in pairs for run in pair.live]
    busiest = max(run.busy for run in runs)
    return ExperimentReport(
        name=settings.name,
        title="Roles that follow a load",
        command=command,
        settings=(*_setting_lines(settings, switch_s), _busy_line(busiest)),
        tables=(_times(pairs), _changes(pairs[1])),
        panels=(_panel(settings, pairs[1]),),
        targets=tuple(_targets(pairs)),
        discussion=_DISCUSSION,
        data={"runs": {p.name: {"live": p.live, "simulated": p.simulated} for p in pairs}},
        too_busy=busiest > BUSY_LIMIT,
    )


def _setting_lines(settings: RoleShiftSettings, switch_s: float) -> tuple[str, ...]:
    append, generate = settings.append_tokens, settings.generate_tokens
    policy = settings.rebalancing
    return (
        f"{settings.nodes} emulated engines of one machine: times of {settings.model} on "
        f"{settings.gpu}, {settings.speedup:g} times as fast; {settings.hbm_tokens:,} tokens of "
        f"KV at a decode node, {settings.kv_bytes_per_token} bytes each. Storage and links bind "
        "nobody.",
        f"Agents: {settings.agents}, all at once. {settings.turns} turns each append "
        f"{append[0]:g} tokens and generate {generate[0]:g} in the mean, then {settings.turns} "
        f"turns append {append[1]:g} and generate {generate[1]:g}; deviation of the logarithm "
        f"{settings.spread:g}. Seed {settings.seed}.",
        f"Policy: a look every {policy.interval_s:g} s, horizon {policy.horizon_s:g} s, margin "
        f"{policy.margin:g}, rest {policy.rest_s:g} s, "
        f"{prefill_tokens_per_s(settings):,.0f} prompt tokens/s for a prefill node (what it gets "
        "done of the first phase's turns).",
        f"Each {settings.repeat} times, in turns; medians. A switch without load took "
        f"{switch_s:.2f} s.",
    )


def _busy_line(busiest: float) -> str:
    warning = " TOO BUSY: engines may not have had their time." if busiest > BUSY_LIMIT else ""
    return f"Machine at most {busiest:.0%} busy (limit {BUSY_LIMIT:.0%}).{warning}"


def _times(pairs: Sequence[_Pair]) -> Table:
    rows = tuple(
        (
            pair.name,
            f"{pair.measured.jct_s:.1f}",
            f"{pair.simulated.jct_s:.1f}",
            f"{pair.error:+.1%}",
            str(len(pair.measured.changes)),
            str(len(pair.simulated.changes)),
        )
        for pair in pairs
    )
    columns = ("roles", "measured s", "simulated s", "error", "changes", "simulated changes")
    return Table("Job completion time", columns, rows)


def _changes(moving: _Pair) -> Table:
    rows = []
    measured, predicted = moving.measured.changes, moving.simulated.changes
    for number in range(max(len(measured), len(predicted))):
        pair = [
            changes[number] if number < len(changes) else None for changes in (measured, predicted)
        ]
        named = next(change for change in pair if change is not None)
        decided = [_seconds(None if c is None else c.decided_s) for c in pair]
        joined = [_seconds(None if c is None else c.joined_s) for c in pair]
        rows.append((f"{named.reason}, to {named.to_role.value}", *decided, *joined))
    columns = ("change", "decided s", "simulated s", "serves s", "simulated s")
    return Table("When roles change", columns, tuple(rows))


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def _targets(pairs: tuple[_Pair, _Pair]) -> list[Target]:
    fixed, moving = pairs
    found = [
        Target(f"{pair.name}: simulated JCT off by", abs(pair.error), ERROR, False)
        for pair in pairs
    ]
    measured, predicted = moving.measured.changes, moving.simulated.changes
    found.append(
        Target("changes that one side has more", abs(len(measured) - len(predicted)), 0, False)
    )
    off_s = [abs(a.decided_s - b.decided_s) for a, b in zip(measured, predicted, strict=False)]
    worst = max(off_s, default=0.0) / moving.measured.jct_s
    found.append(Target("a change is decided at another time, of the JCT", worst, ERROR, False))
    gain = 1 - moving.measured.jct_s / fixed.measured.jct_s
    found.append(Target("JCT saved by changing roles", gain, 0.0, True))
    return found


def _panel(settings: RoleShiftSettings, moving: _Pair) -> Panel:
    series = tuple(
        _nodes_over_time(name, settings.prefill, played)
        for name, played in (("measured", moving.measured), ("simulated", moving.simulated))
    )
    title = f"Started as {settings.nodes}"
    return Panel(title, "steps", "seconds", "prefill nodes", series)


def _nodes_over_time(name: str, prefill: int, played: Played) -> Series:
    """Return how many prefill nodes serve, from the run's begin to its end."""
    steps: list[tuple[float, int]] = []
    for change in played.changes:
        if change.to_role is Role.DECODE:
            steps.append((change.decided_s, -1))
        elif change.joined_s is not None:
            steps.append((change.joined_s, 1))
    times, nodes = [0.0], [prefill]
    for time_s, more in sorted(steps):
        times.append(time_s)
        nodes.append(nodes[-1] + more)
    return Series(name, (*times, played.jct_s), (*map(float, nodes), float(nodes[-1])))
