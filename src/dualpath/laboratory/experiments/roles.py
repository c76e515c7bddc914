"""A load that shifts from prompts to answers, with fixed roles and with automatic role changes.

Both are measured on emulated engines and simulated.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.laboratory.experiments.machine_load import BUSY_LIMIT
from dualpath.laboratory.experiments.report import ExperimentReport, Target
from dualpath.laboratory.experiments.role_cluster import LiveRun, run_live
from dualpath.laboratory.experiments.role_settings import RoleShiftSettings, with_prefill_rate
from dualpath.laboratory.experiments.role_shift import RoleRun, prefill_tokens_per_s, simulated
from dualpath.report.model import NOTHING, Panel, Series, Table

#: Allowed error of the simulator, relative to the JCT, also for times of changes.
ERROR = 0.1
_DISCUSSION = """\
Roles are decided by the same code on both sides (`policy/role_policy.py`), with the same
settings. No parameter was fitted. The inputs of the simulator are the emulated engines' times,
the agents, and the duration of a role switch, which is measured before the run: an idle engine
changes its role and back. The simulator does not include HTTP, the second until a supervisor
reads the requested role, or late wake-ups."""


class _Pair(NamedTuple):
    """Runs on engines and the simulated run."""

    name: str
    live: Sequence[LiveRun]
    simulated: RoleRun

    @property
    def measured(self) -> RoleRun:
        """The run with the median JCT, the faster one of two."""
        ordered = sorted((run.played for run in self.live), key=lambda played: played.jct_s)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def error(self) -> float:
        """Relative error of the simulated JCT."""
        return self.simulated.jct_s / self.measured.jct_s - 1


def measure_roles(
    settings: RoleShiftSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Run the agents with fixed roles and with changing roles, and simulate both.

    Raises ``ConfigError`` for invalid settings, ``EngineLostError`` if a turn fails.
    """
    policy = with_prefill_rate(settings.rebalancing, prefill_tokens_per_s(settings))
    fixed: list[LiveRun] = []
    moving: list[LiveRun] = []
    for number in range(settings.repeat):
        for runs, rebalancing in ((fixed, None), (moving, policy)):
            runs.append(run_live(settings, rebalancing))
            progress(
                f"{number + 1}/{settings.repeat} "
                f"{'fixed' if rebalancing is None else 'changing'} roles: "
                f"{runs[-1].played.jct_s:.1f} s, machine {runs[-1].busy:.0%} busy"
            )
    switch_s = statistics.median(run.switch_s for run in moving if run.switch_s is not None)
    measured_policy = msgspec.structs.replace(policy, switch_s=switch_s)
    pairs = (
        _Pair("fixed roles", fixed, simulated(settings, None)),
        _Pair("moving roles", moving, simulated(settings, measured_policy)),
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
        f"KV at a decode node, {settings.kv_bytes_per_token} bytes each. Storage and links are "
        "no bottleneck.",
        f"Agents: {settings.agents}, all at once. {settings.turns} turns each append "
        f"{append[0]:g} tokens and generate {generate[0]:g} in the mean, then {settings.turns} "
        f"turns append {append[1]:g} and generate {generate[1]:g}; standard deviation of the "
        f"logarithm {settings.spread:g}. Seed {settings.seed}.",
        f"Policy: evaluated every {policy.interval_s:g} s, horizon {policy.horizon_s:g} s, margin "
        f"{policy.margin:g}, rest {policy.rest_s:g} s, "
        f"{prefill_tokens_per_s(settings):,.0f} prompt tokens/s for a prefill node (its rate in "
        "the first phase).",
        f"Each {settings.repeat} times, interleaved; medians. A switch without load took "
        f"{switch_s:.2f} s.",
    )


def _busy_line(busiest: float) -> str:
    warning = " TOO BUSY: engines may have been delayed." if busiest > BUSY_LIMIT else ""
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
        Target(f"{pair.name}: error of the simulated JCT", abs(pair.error), ERROR, False)
        for pair in pairs
    ]
    measured, predicted = moving.measured.changes, moving.simulated.changes
    found.append(
        Target("difference in numbers of changes", abs(len(measured) - len(predicted)), 0, False)
    )
    off_s = [abs(a.decided_s - b.decided_s) for a, b in zip(measured, predicted, strict=False)]
    worst = max(off_s, default=0.0) / moving.measured.jct_s
    found.append(
        Target("error of the time of a decision, relative to the JCT", worst, ERROR, False)
    )
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


def _nodes_over_time(name: str, prefill: int, played: RoleRun) -> Series:
    """Return the number of serving prefill nodes from the beginning to the end of the run."""
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
