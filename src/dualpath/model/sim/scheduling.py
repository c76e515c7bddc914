"""How both cores set up the scheduler of a simulated cluster."""

from dualpath.model.sim.derived import Limits
from dualpath.model.sim.layout import ClusterLayout, node_of
from dualpath.model.sim.settings import Setup
from dualpath.policy.events import EngineSpec, SchedulerSettings


def scheduler_settings(setup: Setup, limits: Limits) -> SchedulerSettings:
    """Return the scheduler's settings."""
    cluster = setup.cluster
    return SchedulerSettings(
        mode=setup.mode,
        alpha_tokens=limits.alpha_tokens,
        beta_tokens=limits.beta_tokens,
        block_tokens=cluster.block_tokens,
        threshold_factor=cluster.threshold_factor,
        generated_reserve_tokens=cluster.generated_reserve_tokens,
        recompute_limit_s=cluster.recompute_limit_s,
        computed_weight=setup.model.computed_weight,
    )


def engine_specs(setup: Setup, limits: Limits, layout: ClusterLayout) -> list[EngineSpec]:
    """Return all engines, PEs first, in order of number; an engine's id is its number."""
    cluster = setup.cluster
    return [
        EngineSpec(
            engine_id=str(engine),
            role=group.role,
            node=str(node_of(cluster, engine)),
            group=group.name,
            order=engine,
            hbm_tokens=limits.decode_hbm_tokens,
            snic_tokens_per_s=limits.read_tokens_per_s,
        )
        for group in layout.groups
        for engine in group.engines
    ]
