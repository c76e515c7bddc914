"""The cluster of a seed.

Options that only some seeds have are drawn from random sources of their own, so that the runs of
other seeds do not depend on them.
"""

from random import Random

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.chaos.simulation.cluster_settings import (
    GEOMETRIES,
    ONE_RANK,
    ClusterSettings,
    TensorParallel,
)
from dualpath.laboratory.chaos.simulation.turns import LeaderElection
from dualpath.laboratory.chaos.simulation.world import World
from dualpath.router.settings import RouterSettings

_MODES = (Mode.DUALPATH, Mode.DUALPATH, Mode.DUALPATH, Mode.SPLIT, Mode.BASIC, Mode.ROUND_ROBIN)
#: Combinations for clusters with engines of several ranks.
_TENSOR_PARALLEL = tuple(
    TensorParallel(prefill, decode, heads)
    for prefill, decode in ((2, 1), (1, 2), (2, 2))
    for heads in (1, 2)
)

#: A role switch whose engine is not back within this time counts the engine as lost.
_SWITCH_S = 30.0


def drawn_settings(world: World, faults: int, deadline_s: float) -> ClusterSettings:
    """Draw a cluster in which requests survive this number of ``faults`` within their deadline."""
    chance = world.chance
    router = RouterSettings(
        engine_timeout_s=2.0,
        suspect_timeout_s=1.0,
        lookup_timeout_s=1.0,
        read_deadline_s=3.0,
        read_margin_s=2.0,
        release_wait_s=1.0,
        engine_wait_s=20.0,
        request_deadline_s=deadline_s,
        max_attempts=3 if faults <= 1 else 1 + 2 * faults,
        # In every seventh cluster buffers cache nothing: all hits are read.
        dram_tier=world.seed % 7 != 5,
    )
    tensor_parallel, front_ends = _tensor_parallel(world.seed), _front_ends(world.seed)
    geometries = GEOMETRIES[tensor_parallel.kv_heads]
    settings = ClusterSettings(
        mode=chance.choice(_MODES),
        prefill=chance.choice((1, 2)),
        decode=chance.choice((1, 2)),
        buffer_blocks=chance.choice((32, 48, 96)),
        hbm_blocks=chance.choice((40, 64)),
        layer_buffers=chance.choice((0, 1, 2)),
        router=msgspec.structs.replace(router, front_ends_port=0) if front_ends else router,
        hosts=chance.choice((1, 1, 2)),
        geometry=geometries[world.seed % len(geometries)],
        prefill_ranks=chance.choice((1, 1, 2)),
        decode_ranks=chance.choice((1, 1, 2)),
        standby=_standby(world.seed),
        tensor_parallel=tensor_parallel,
        quota_blocks=_quota_blocks(world.seed),
        links=world.seed % 5 != 0,
        front_ends=front_ends,
        node_dram_blocks=_node_dram_blocks(world.seed),
    )
    if settings.node_dram_blocks or world.seed % 5 == 4:
        settings = _with_pauses(settings)
    return _with_roles_that_change(settings, world.seed) if world.seed % 7 == 3 else settings


def _front_ends(seed: int) -> int:
    """Every fourth cluster has front ends, half of these with a standby router."""
    return Random(f"front ends of {seed}").choice((1, 2, 2, 3)) if seed % 8 in (1, 3) else 0


def _standby(seed: int) -> LeaderElection:
    """Every fourth cluster has a standby router, half of these elected by a lease."""
    if seed % 4 != 1:
        return LeaderElection.ONE
    kinds = (
        LeaderElection.LOCK,
        LeaderElection.LOCK,
        LeaderElection.ETCD,
        LeaderElection.KUBERNETES,
    )
    return Random(f"turn of {seed}").choice(kinds)


def _tensor_parallel(seed: int) -> TensorParallel:
    """Every fourth cluster has engines of several ranks."""
    return Random(f"ranks of {seed}").choice(_TENSOR_PARALLEL) if seed % 4 == 2 else ONE_RANK


def _quota_blocks(seed: int) -> int:
    """Every third cluster has a storage quota; 0 is none."""
    return Random(f"quota of {seed}").choice((8, 16, 32)) if seed % 3 == 0 else 0


def _node_dram_blocks(seed: int) -> int:
    """In every fifth cluster engines of a machine share DRAM; 0 is none."""
    return Random(f"shared DRAM of {seed}").choice((6, 12, 24)) if seed % 5 == 2 else 0


def _with_pauses(settings: ClusterSettings) -> ClusterSettings:
    """Agents pause for tools while others need the buffers, which hold about one context."""
    return msgspec.structs.replace(
        settings, buffer_blocks=24, agents=(5, 6), turns=(3,), pauses_s=(0.1, 0.5, 1.5)
    )


def _with_roles_that_change(settings: ClusterSettings, seed: int) -> ClusterSettings:
    """Engines change their role in every seventh cluster."""
    chance = Random(f"roles of {seed}")
    prefill, decode = chance.choice(((2, 1), (1, 2)))
    router = msgspec.structs.replace(settings.router, role_switch_timeout_s=_SWITCH_S)
    switches = chance.choice((1, 2, 3))
    return msgspec.structs.replace(
        settings, prefill=prefill, decode=decode, router=router, role_switches=switches
    )
