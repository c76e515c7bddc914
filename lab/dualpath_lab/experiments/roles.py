"""A load that shifts from prompts to answers, with fixed roles and with automatic role changes.

Both are measured on emulated engines and simulated.
"""

import asyncio
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dualpath.core.cluster import Role
from dualpath.core.errors import DeadlineError, DualPathError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.core.request import Round, Trajectory
from dualpath.launch.executor import LocalExecutor
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.report.model import NOTHING, Panel, Series, Table
from dualpath.router.api_keys import client_headers
from dualpath.router.scheduler.role_calls import call_roles
from dualpath.router.settings import RouterSettings
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath.workload.replay.result import ReplayResult
from dualpath_lab.emulated.commands import emulated_commands
from dualpath_lab.emulated.settings import EmulatedOptions, Verify
from dualpath_lab.experiments.engine_nodes import simulated_setup
from dualpath_lab.experiments.machine_load import BUSY_LIMIT, BusyMeter
from dualpath_lab.experiments.settings import EmulatedNodes, RoleShiftSettings, with_prefill_rate
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.catalog.costs import prompt_tokens_per_s
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    Run,
    Stage,
    one_stage,
)
from dualpath_sim.simulator.derived import limits
from dualpath_sim.simulator.result import NS_PER_S
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup

# -------------------------------------------------------------------------------------- role shift
# A load that shifts from prompts to answers, and its simulation.
#
# Agents, engines and the policy's settings are the same in the simulator and in the lab.

#: Links that are no bottleneck.
_LINK_BYTES_PER_S = 10e9
#: Buffer of each engine.
BUFFER_BYTES = 128 << 20


class Change(NamedTuple):
    """A node's role change; seconds since the run began, None if the run ended before."""

    to_role: Role
    reason: str
    decided_s: float
    drained_s: float | None = None
    joined_s: float | None = None


class RoleRun(NamedTuple):
    """One run: job completion time, and the role changes in order."""

    jct_s: float
    changes: tuple[Change, ...] = ()


def shifting_agents(settings: RoleShiftSettings) -> list[TokenSession]:
    """Return the agents; equal settings give equal ones."""
    rng = np.random.default_rng([settings.seed, 15])

    def drawn(mean: float) -> int:
        # The mean of the logarithm is lower by half the variance, so that the mean is ``mean``.
        sigma = settings.spread
        return max(1, round(float(rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma))))

    phases = list(zip(settings.append_tokens, settings.generate_tokens, strict=True))
    return [
        TokenSession(
            Trajectory(
                f"agent-{agent}",
                tuple(
                    Round(drawn(append), drawn(generate))
                    for append, generate in phases
                    for _ in range(settings.turns)
                ),
            )
        )
        for agent in range(settings.agents)
    ]


def emulated_nodes(settings: RoleShiftSettings) -> EmulatedNodes:
    """Return the engines, all with the same settings."""
    block_bytes = settings.kv_bytes_per_token * settings.block_tokens
    return EmulatedNodes(
        model=settings.model,
        gpu=settings.gpu,
        layers=settings.layers,
        block_tokens=settings.block_tokens,
        layer_block_bytes=block_bytes // settings.layers,
        speedup=settings.speedup,
        buffer_bytes=BUFFER_BYTES,
        hbm_bytes=settings.hbm_bytes,
    )


def cluster_setup(settings: RoleShiftSettings, policy: RebalanceSettings | None) -> Setup:
    """Return the cluster for the simulator; without a policy roles are fixed."""
    links = LabSettings(
        nodes=settings.nodes,
        snic_bytes_per_s=_LINK_BYTES_PER_S,
        cnic_bytes_per_s=_LINK_BYTES_PER_S,
    )
    setup = simulated_setup(emulated_nodes(settings), links, Mode.DUALPATH)
    cluster = msgspec.structs.replace(setup.cluster, rebalancing=policy)
    return msgspec.structs.replace(setup, cluster=cluster)


def prefill_tokens_per_s(settings: RoleShiftSettings) -> float:
    """Return a PE's rate of prompt tokens, hits included, in the first phase.

    A PE's default rate is that of the paper's mean turn, of which 1 % is computed: too high here.
    """
    setup = cluster_setup(settings, None)
    turns = settings.turns
    first = [session.trajectory.rounds[:turns] for session in shifting_agents(settings)]
    append = sum(r.append_tokens for rounds in first for r in rounds) / len(first) / turns
    context = sum(
        (turns - 1 - index) * (r.append_tokens + r.generated_tokens)
        for rounds in first
        for index, r in enumerate(rounds)
    )
    return prompt_tokens_per_s(
        setup.model.prefill, setup.cluster.compute_quota_s, context / len(first) / turns, append
    )


def simulated(settings: RoleShiftSettings, policy: RebalanceSettings | None) -> RoleRun:
    """Run the agents on the simulated cluster."""
    table = agents_from_sessions(
        shifting_agents(settings), WorkloadSettings(block_tokens=settings.block_tokens)
    )
    result = simulate(cluster_setup(settings, policy), table)
    changes = tuple(
        Change(
            *(move.to_role, move.reason, move.decided_ns / NS_PER_S),
            _move_time_s(move.drained_ns),
            _move_time_s(move.joined_ns),
        )
        for move in result.moves
    )
    return RoleRun(float(result.turns.finished_ns.max()) / NS_PER_S, changes)


def _move_time_s(time_ns: int) -> float | None:
    return None if time_ns < 0 else time_ns / NS_PER_S


# ------------------------------------------------------------------------------------ role cluster
# Runs of emulated engines on one machine while roles change, and the times of the changes.

#: Modules that the fork server imports for all processes.
_PRELOAD = (
    "dualpath_lab.cli.emulate",
    "dualpath_lab.emulated.process",
    "dualpath_lab.emulated.router_server",
)
_POLL_S = 0.05
#: Time-out of a role switch without load.
_SWITCH_WITHIN_S = 120.0


class LiveRun(msgspec.Struct, frozen=True):
    """A run on emulated engines; ``busy`` is the busy share of the machine, by any process.

    ``simulated`` is the same load in the simulator, where role switches take ``switch_s``.
    """

    played: RoleRun
    busy: float
    switch_s: float | None = None
    simulated: RoleRun | None = None


class RoleChangeLog:
    """Times of role changes, from successive answers of ``GET /dualpath/v1/roles``."""

    def __init__(self) -> None:
        self._decided_s: float | None = None
        self._before = 0
        self.changes: list[Change] = []

    def update(self, report: Mapping[str, Any], now_s: float) -> None:
        """Record switches that have begun or ended; ``now_s`` is the time since the run began."""
        if self._decided_s is not None and report["past"][self._before :]:
            self._over(report["past"][self._before], self._decided_s)
            self._decided_s = None
        if self._decided_s is None and (switch := report["switch"]) is not None:
            self._decided_s, self._before = now_s, len(report["past"])
            self.changes.append(Change(Role(switch["to_role"]), switch["reason"], now_s))

    def _over(self, switch: Mapping[str, Any], decided_s: float) -> None:
        if switch["state"] != "joined":
            raise EngineLostError(f"{', '.join(switch['engines'])}: {switch['note']}; see its log")
        self.changes[-1] = self.changes[-1]._replace(
            drained_s=decided_s + switch["drained_after_s"], joined_s=decided_s + switch["took_s"]
        )


def run_live(settings: RoleShiftSettings, policy: RebalanceSettings | None) -> LiveRun:
    """Run the agents on emulated engines; without a policy roles are fixed.

    With a policy, an engine first changes its role and back, to measure the duration of a switch.
    Raises ``EngineLostError`` if a turn fails or an engine is lost.
    """
    with tempfile.TemporaryDirectory(prefix="dualpath-roles-") as folder:
        cluster_settings = _cluster_settings(settings, Path(folder))
        commands = emulated_commands(
            _options(settings), _router(settings, policy), touch_memory=True
        )
        executor = LocalExecutor(cluster_settings, _PRELOAD)
        with LocalCluster(cluster_settings, executor=executor, commands=commands) as cluster:
            switch_s = None if policy is None else _measure_switch(cluster)
            return _played(cluster, settings, switch_s)


def _played(cluster: LocalCluster, settings: RoleShiftSettings, switch_s: float | None) -> LiveRun:
    """Replay on another thread: this one starts processes, which end with their starting thread."""
    found: list[ReplayResult | DualPathError] = []

    def run() -> None:
        options = ReplayOptions(seed=settings.seed, run_id="roles")
        try:
            found.append(asyncio.run(replay(shifting_agents(settings), cluster.endpoint, options)))
        except DualPathError as error:
            found.append(error)

    busy, timeline, client = BusyMeter(), RoleChangeLog(), threading.Thread(target=run)
    began_s = time.monotonic()
    client.start()
    while client.is_alive():
        cluster.supervise()
        timeline.update(_roles(cluster), time.monotonic() - began_s)
        client.join(_POLL_S)
    result = found[0]
    if isinstance(result, DualPathError):
        raise result
    if result.failed:
        errors = [turn.error for turn in result.turns if turn.error]
        raise EngineLostError(f"{len(errors)} turns failed, the first with: {errors[:1]}")
    return LiveRun(RoleRun(result.summary.jct_s, tuple(timeline.changes)), busy.busy(), switch_s)


def _measure_switch(cluster: LocalCluster) -> float:
    """Change an engine's role and back; return the duration of a switch without load."""
    prefill = cluster.settings.prefill
    there, back = (Role.DECODE, Role.PREFILL) if prefill > 1 else (Role.PREFILL, Role.DECODE)
    switch = _roles(cluster, {"role": there.value})
    _await_switch(cluster)
    _roles(cluster, {"role": back.value, "engine_id": switch["engines"][0]})
    report = _await_switch(cluster)
    return float(report["cost_s"])


def _await_switch(cluster: LocalCluster) -> dict[str, Any]:
    deadline_s = time.monotonic() + _SWITCH_WITHIN_S
    while (report := _roles(cluster))["switch"] is not None:
        if time.monotonic() > deadline_s:
            raise DeadlineError(
                f"a role switch takes longer than {_SWITCH_WITHIN_S:g} s; see the engines' logs"
            )
        cluster.supervise()
        time.sleep(_POLL_S)
    if (last := report["past"][-1])["state"] != "joined":
        raise EngineLostError(f"{', '.join(last['engines'])}: {last['note']}; see its log")
    return report


def _roles(cluster: LocalCluster, requested: object = None) -> dict[str, Any]:
    return call_roles(cluster.cluster_url, client_headers(()), requested)


def _cluster_settings(settings: RoleShiftSettings, folder: Path) -> LocalClusterSettings:
    return LocalClusterSettings(
        transport="memory",
        model=settings.model,
        storage=str(folder / "kv"),
        log_dir=str(folder / "logs"),
        nodes=settings.nodes,
        mode=Mode.DUALPATH,
        port=0,
        block_tokens=settings.block_tokens,
        buffer_bytes=BUFFER_BYTES,
    )


def _router(settings: RoleShiftSettings, policy: RebalanceSettings | None) -> RouterSettings:
    derived = limits(cluster_setup(settings, None))
    return RouterSettings(
        alpha_tokens=derived.alpha_tokens,
        beta_tokens=derived.beta_tokens,
        dram_tier=False,
        rebalance=policy is not None,
        rebalance_options=_options_of(policy) if policy is not None else {},
    )


def _options_of(policy: RebalanceSettings) -> dict[str, float]:
    return {name: value for name, value in msgspec.structs.asdict(policy).items() if value}


def _options(settings: RoleShiftSettings) -> EmulatedOptions:
    return EmulatedOptions(
        gpu=settings.gpu,
        layers=settings.layers,
        kv_bytes_per_token=settings.kv_bytes_per_token,
        block_tokens=settings.block_tokens,
        kv_heads=1,
        speedup=settings.speedup,
        hbm_bytes=settings.hbm_bytes,
        verify=Verify.SAMPLED,
    )


#: Allowed error of the simulator, relative to the JCT, also for times of changes.
ERROR = 0.1
_DISCUSSION = """\
Roles are decided by the same object on both sides (`policy/rebalance.py`), with the same
settings. Nothing was fitted. The simulator is given the emulated engines' times, the agents, and
what a switch takes, which is measured before the run: an engine changes its role and back while
nothing is asked. It knows nothing of HTTP, of the second until a supervisor reads the wish, and of
late wake-ups."""


#: Tolerances of reruns: the JCT on the same processor, the share that is saved on any machine.
_JCT_TOLERANCE, _SAVED_TOLERANCE = 0.1, 0.15
FIXED, MOVING = "fixed roles", "moving roles"


def _stages(settings: RoleShiftSettings, progress: Progress) -> list[Stage[str, LiveRun]]:
    policy = with_prefill_rate(settings.rebalancing, prefill_tokens_per_s(settings))

    def run(name: str, number: int) -> LiveRun:
        """Raises ``EngineLostError`` if a turn fails."""
        rebalancing = None if name == FIXED else policy
        live = run_live(settings, rebalancing)
        if rebalancing is not None and live.switch_s is not None:
            rebalancing = msgspec.structs.replace(rebalancing, switch_s=live.switch_s)
        return msgspec.structs.replace(live, simulated=simulated(settings, rebalancing))

    return one_stage({FIXED: FIXED, MOVING: MOVING}, run)


class _Pair(NamedTuple):
    """Runs on engines and the simulated run."""

    name: str
    measured: RoleRun
    simulated: RoleRun

    @property
    def error(self) -> float:
        """Relative error of the simulated JCT."""
        return self.simulated.jct_s / self.measured.jct_s - 1


def draw(raw: RawData[RoleShiftSettings, LiveRun]) -> Page:
    """Draw both loads, measured and simulated."""
    pairs = [_pair(name, raw.of(name)) for name in raw.cells]
    moving = [pair for pair in pairs if pair.name == MOVING]
    busiest = max(run.busy for run in raw.results)
    return Page(
        settings=(*_setting_lines(raw), _busy_line(busiest)),
        tables=(_times(pairs), *(_changes(pair) for pair in moving)),
        panels=tuple(_panel(raw.settings, pair) for pair in moving),
        results=tuple(_results(pairs)),
        discussion=_DISCUSSION,
        too_busy=busiest > BUSY_LIMIT,
    )


def _pair(name: str, live: Sequence[LiveRun]) -> _Pair:
    """Return the run with the median JCT, the faster one of two."""
    ordered = sorted(live, key=lambda run: run.played.jct_s)
    typical = ordered[(len(ordered) - 1) // 2]
    assert typical.simulated is not None
    return _Pair(name, typical.played, typical.simulated)


def _setting_lines(raw: RawData[RoleShiftSettings, LiveRun]) -> tuple[str, ...]:
    settings = raw.settings
    switches_s = [run.switch_s for run in raw.of(MOVING) if run.switch_s is not None]
    switch_s = statistics.median(switches_s) if switches_s else 0.0
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


def _results(pairs: Sequence[_Pair]) -> Iterator[KeyResult]:
    for pair in pairs:
        what = f"{pair.name}: error of the simulated JCT"
        yield KeyResult(what, abs(pair.error), ERROR, at_least=False)
        what = f"{pair.name}: JCT, s"
        yield KeyResult(what, pair.measured.jct_s, tolerance=_JCT_TOLERANCE)
    if len(pairs) < 2:
        return
    fixed, moving = pairs
    measured, predicted = moving.measured.changes, moving.simulated.changes
    difference = abs(len(measured) - len(predicted))
    yield KeyResult("difference in numbers of changes", difference, 0, at_least=False)
    off_s = [abs(a.decided_s - b.decided_s) for a, b in zip(measured, predicted, strict=False)]
    worst = max(off_s, default=0.0) / moving.measured.jct_s
    what = "error of the time of a decision, relative to the JCT"
    yield KeyResult(what, worst, ERROR, at_least=False)
    yield KeyResult(
        "JCT saved by changing roles",
        1 - moving.measured.jct_s / fixed.measured.jct_s,
        0.0,
        tolerance=_SAVED_TOLERANCE,
        any_machine=True,
    )


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


def _published(page: Page, settings: RoleShiftSettings) -> RawData[RoleShiftSettings, LiveRun]:
    """Convert ``{"runs": {roles: {"live": [run, …], "simulated": run}}}``."""
    runs = [
        Run(
            cell=name,
            round=number,
            result=msgspec.convert({**live, "simulated": found["simulated"]}, LiveRun),
        )
        for name, found in page.data["runs"].items()
        for number, live in enumerate(found["live"])
    ]
    return RawData(experiment=ROLES.name, settings=settings, runs=runs)


ROLES = Experiment(
    name="roles",
    title="Roles that follow a load",
    settings=RoleShiftSettings(),
    result=LiveRun,
    stages=_stages,
    draw=draw,
    summary=lambda run: f"{run.played.jct_s:.1f} s, machine {run.busy:.0%} busy",
    # Objectives that only the simulator's policy has, and a measured one.
    fixed=("ttft_slo_s", "tpot_slo_s", "switch_s"),
    published=_published,
)
