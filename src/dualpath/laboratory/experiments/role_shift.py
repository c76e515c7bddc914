"""A load that shifts from prompts to answers, and its simulation.

Agents, engines and the policy's settings are the same in the simulator and in the lab.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.request import Round, Trajectory
from dualpath.laboratory.experiments.emulated_nodes import simulated_setup
from dualpath.laboratory.experiments.role_settings import RoleShiftSettings
from dualpath.laboratory.experiments.settings import EmulatedNodes
from dualpath.laboratory.lab.settings import LabSettings
from dualpath.laboratory.workload.columns.from_sessions import (
    WorkloadSettings,
    agents_from_sessions,
)
from dualpath.laboratory.workload.conversation.token_session import TokenSession
from dualpath.model.catalog.costs import prompt_tokens_per_s
from dualpath.model.sim.result import NS_PER_S
from dualpath.model.sim.run import simulate
from dualpath.model.sim.settings import Setup
from dualpath.policy.rebalance import RebalanceSettings

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
