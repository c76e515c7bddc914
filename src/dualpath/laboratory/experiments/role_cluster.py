"""Runs of emulated engines on one machine whose roles change, and the times of the changes."""

import asyncio
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import DeadlineError, DualPathError, EngineLostError
from dualpath.core.modes import Mode
from dualpath.laboratory.emulated.commands import emulated_commands
from dualpath.laboratory.emulated.settings import EmulatedOptions, Verify
from dualpath.laboratory.experiments.machine_load import BusyMeter
from dualpath.laboratory.experiments.role_settings import RoleShiftSettings
from dualpath.laboratory.experiments.role_shift import (
    BUFFER_BYTES,
    Change,
    RoleRun,
    cluster_setup,
    shifting_agents,
)
from dualpath.laboratory.workload.replay.client import replay
from dualpath.laboratory.workload.replay.options import ReplayOptions
from dualpath.laboratory.workload.replay.result import ReplayResult
from dualpath.model.sim.derived import limits
from dualpath.ops.launch.local_cluster import LocalCluster
from dualpath.ops.launch.local_executor import LocalExecutor
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.router.api_keys import client_headers
from dualpath.router.control.roles_client import call_roles
from dualpath.router.settings import RouterSettings

#: Modules that the fork server imports for all processes.
_PRELOAD = (
    "dualpath.cli.emulate",
    "dualpath.laboratory.emulated.process",
    "dualpath.laboratory.emulated.front_door_process",
)
_POLL_S = 0.05
#: Time-out of a role switch without load.
_SWITCH_WITHIN_S = 120.0


class LiveRun(msgspec.Struct, frozen=True):
    """A run on emulated engines; ``busy`` is the busy share of the machine, by any process."""

    played: RoleRun
    busy: float
    switch_s: float | None = None


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
        transport="memory",
    )
