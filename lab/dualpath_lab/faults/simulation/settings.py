"""Settings of a simulated cluster: its size, its memories, the limits of router and storage."""

from random import Random

import msgspec

from dualpath.core.blocks import BlockGeometry, slices_of
from dualpath.core.cluster import Role
from dualpath.core.modes import Handover, Mode
from dualpath.engine.settings import EngineSettings
from dualpath.policy.events import RECOMPUTE_LIMIT_S
from dualpath.router.settings import RouterSettings
from dualpath.storage.block_file import HEADER_BYTES
from dualpath.storage.node_dram import page_rounded
from dualpath_lab.emulated.settings import EmulatedSettings, Verify, part_geometry
from dualpath_lab.faults.simulation.cluster_resources import ProcView
from dualpath_lab.faults.simulation.connections import FRONT_END_ADDRESSES
from dualpath_lab.faults.simulation.disk import NODE_DRAM_ROOT
from dualpath_lab.faults.simulation.leadership import LeaderElection
from dualpath_lab.faults.simulation.world import World
from dualpath_sim.simulator.settings import DecodeCosts, ModelCosts, PrefillCosts

LAYERS = 3
BLOCK_TOKENS = 4
COSTS = ModelCosts(
    name="small",
    layers=LAYERS,
    kv_bytes_per_token=LAYERS * 8.0,
    prefill=PrefillCosts(batch_s=1e-2, attention_token_s=2e-4, pair_s=1e-6),
    decode=DecodeCosts(step_s=1e-2),
    prefill_tokens_per_s=1e4,
)
#: Slower than ``call_silence_s`` in every pass and step: calls are silent although engines work.
SLOW_COSTS = msgspec.structs.replace(
    COSTS,
    prefill=PrefillCosts(batch_s=0.6, attention_token_s=2e-4, pair_s=1e-6),
    decode=DecodeCosts(step_s=0.6),
    prefill_tokens_per_s=25.0,
)
#: With it both nodes together read fewer tokens per second than a PE with ``COSTS`` computes.
_RECOMPUTING_ALPHA = 6000
#: By KV heads: equal layers, layers of two parts, and different layers, one of them a window layer.
_LAYER_PARTS = {
    1: ("8*3", "16+8*3", "24,8+8@6,8"),
    2: ("16*3", "32+16*3", "48,16+16@6,16"),
}
GEOMETRIES = {
    heads: tuple(part_geometry(parts, BLOCK_TOKENS) for parts in layers)
    for heads, layers in _LAYER_PARTS.items()
}
VOCABULARY = 1000
#: A seed draws one of these numbers of faults.
FAULT_COUNTS = (0, 1, 1, 1, 2, 3, 4, 6)
#: Blocks used within this time are not evicted: less than a request may take.
PROTECT_S = 0.5


class TensorParallel(msgspec.Struct, frozen=True):
    """Ranks of each engine of a role; ``kv_heads`` are divided among them."""

    prefill: int = 1
    decode: int = 1
    kv_heads: int = 1

    def ranks(self, role: Role) -> int:
        """Number of ranks of an engine of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def __str__(self) -> str:
        return f"{self.prefill} and {self.decode} ranks for {self.kv_heads} KV heads"


#: Engines of one rank.
ONE_RANK = TensorParallel()


class ClusterSettings(msgspec.Struct, frozen=True):
    """Size of the cluster, of its memories in blocks, and the router's limits.

    ``prefill`` and ``decode`` count data-parallel groups, of ``prefill_ranks`` and ``decode_ranks``
    engines each; a group of one rank is a plain engine.  ``standby`` is how the leading router is
    elected, if there are two.  ``quota_blocks`` above 0 limits the storage, and every engine may
    become its janitor.  ``links``: whether its file system supports hard links.  ``front_ends`` are
    separate processes; the router serves clients as well.  With two ``units`` they also know a
    second scheduler, which has an engine of each role.  ``role_switches`` counts requests for
    another role; some of these also change the size of a group.  The engines of each machine share
    ``node_dram_blocks`` if it is above 0.  Each run draws its number of agents from ``agents``,
    the number of turns of each from ``turns`` and every pause between two turns from ``pauses_s``.
    ``salts`` are the agents' cache salts, in turn; with several of them every two agents send the
    same prompts.  ``tenant_quota_blocks`` above 0 limits the stored blocks of each salt.
    ``proxies`` are those of others, which send the legs of requests to engines.  ``proc`` is what
    ``/proc`` shows on the first machine, where the router is.  A trainer changes the weights of all
    engines ``weight_updates`` times.
    """

    mode: Mode
    prefill: int
    decode: int
    buffer_blocks: int
    hbm_blocks: int
    layer_buffers: int
    router: RouterSettings
    hosts: int
    geometry: BlockGeometry
    costs: ModelCosts = COSTS
    prefill_ranks: int = 1
    decode_ranks: int = 1
    standby: LeaderElection = LeaderElection.ONE
    tensor_parallel: TensorParallel = ONE_RANK
    quota_blocks: int = 0
    links: bool = True
    front_ends: int = 0
    units: int = 1
    role_switches: int = 0
    node_dram_blocks: int = 0
    proc: ProcView = ProcView.COMPLETE
    agents: tuple[int, ...] = (2, 3, 4)
    turns: tuple[int, ...] = (1, 2, 3)
    pauses_s: tuple[float, ...] = (0.0, 0.0, 0.01, 0.3)
    salts: tuple[str | None, ...] = (None,)
    tenant_quota_blocks: int = 0
    weight_updates: int = 0
    proxies: int = 0

    @property
    def has_quota(self) -> bool:
        """Whether the storage has a quota, and thus a janitor."""
        return self.quota_blocks > 0 or self.tenant_quota_blocks > 0

    @property
    def moves(self) -> bool:
        """Whether KV is moved to decode engines that get second legs."""
        return self.proxies > 0 and self.decode > 1 and self.router.move_kv

    def usual_ranks(self, role: Role) -> int:
        """Engines of a group of a role, unless another number was requested."""
        return self.prefill_ranks if role is Role.PREFILL else self.decode_ranks


def engine_settings(
    cluster: ClusterSettings, role: Role, engine_id: str, api_url: str
) -> EmulatedSettings:
    """Return the settings of one engine."""
    engine = EngineSettings(
        role=role,
        engine_id=engine_id,
        router="tcp://127.0.0.1:5700",
        api_url=api_url,
        storage="memory://simulated",
        mode=cluster.mode,
        # Transfers are simulated: no other process maps a buffer.
        transport="nixl",
        buffer_bytes=cluster.buffer_blocks * cluster.geometry.full_block_bytes,
        staging_blocks=4,
        layer_buffers=cluster.layer_buffers,
        parallel_reads=2,
        drain_timeout_s=30.0,
        storage_quota=cluster.quota_blocks * stored_bytes(cluster.geometry),
        storage_tenant_quota=cluster.tenant_quota_blocks * stored_bytes(cluster.geometry),
        storage_protect_s=PROTECT_S,
        two_leg_scheduler=FRONT_END_ADDRESSES[0] if cluster.proxies else "",
        dram_dir=NODE_DRAM_ROOT if cluster.node_dram_blocks else "",
        dram_bytes=cluster.node_dram_blocks * page_rounded(stored_bytes(cluster.geometry)),
    )
    ranks, heads = cluster.tensor_parallel.ranks(role), cluster.tensor_parallel.kv_heads
    hbm_bytes = cluster.hbm_blocks * cluster.geometry.full_block_bytes
    return EmulatedSettings(
        engine=engine,
        geometry=cluster.geometry,
        costs=cluster.costs,
        tensor_parallel_size=ranks,
        kv_heads=heads,
        hbm_bytes=hbm_bytes // slices_of(ranks, heads),
        batch_cap_tokens=16,
        max_model_len=160,
        verify=Verify.FULL,
        vocab_size=VOCABULARY,
    )


def stored_bytes(geometry: BlockGeometry) -> int:
    """Return the size of a stored block."""
    return HEADER_BYTES + geometry.full_block_bytes


# ----------------------------------------------------------------------------------- drawn cluster
# The cluster of a seed.
#
# Options that only some seeds have are drawn from separate random sources, so that the runs of
# other seeds do not depend on these options.

_MODES = (Mode.DUALPATH, Mode.DUALPATH, Mode.DUALPATH, Mode.SPLIT, Mode.BASIC, Mode.ROUND_ROBIN)
#: Combinations for clusters with engines of several ranks.
_TENSOR_PARALLEL = tuple(
    TensorParallel(prefill, decode, heads)
    for prefill, decode in ((2, 1), (1, 2), (2, 2))
    for heads in (1, 2)
)

_LARGE_BUFFER_BLOCKS = 192

#: An engine counts as lost if it is not back within this time during a role switch.
_SWITCH_S = 30.0


def recomputes(seed: int) -> bool:
    """Whether hits are recomputed where that takes less time, in modes that do."""
    return seed // 3 % 4 == 1


def drawn_settings(world: World, faults: int, deadline_s: float) -> ClusterSettings:
    """Draw a cluster in which requests survive this number of ``faults`` within their deadline."""
    chance = world.chance
    router = RouterSettings(
        engine_timeout_s=2.0,
        suspect_timeout_s=1.0,
        call_silence_s=0.5,
        inquiry_timeout_s=1.0,
        core_timeout_s=2.0,
        lookup_timeout_s=1.0,
        read_deadline_s=3.0,
        read_margin_s=2.0,
        release_wait_s=1.0,
        engine_wait_s=20.0,
        request_deadline_s=deadline_s,
        max_attempts=3 if faults <= 1 else 1 + 2 * faults,
        # In every seventh cluster buffers cache nothing: all hits are read from storage.
        dram_tier=world.seed % 7 != 5,
        append_at_decode_tokens=_append_tokens(world.seed),
        handover=handover_of_seed(world.seed),
        # Elsewhere no engine knows how fast storage is, so that no hit is recomputed.
        alpha_tokens=_RECOMPUTING_ALPHA if recomputes(world.seed) else None,
        recompute_limit_s=RECOMPUTE_LIMIT_S if recomputes(world.seed) else None,
        third_engine_reads=thirds_of_seed(world.seed),
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
        units=units_of_seed(world.seed),
        node_dram_blocks=_node_dram_blocks(world.seed),
        proc=_proc(world.seed),
    )
    if faults <= 1 and world.seed % 5 == 1:
        settings = msgspec.structs.replace(settings, costs=SLOW_COSTS)
    if settings.node_dram_blocks or world.seed % 5 == 4:
        settings = _with_pauses(settings)
    if settings.proc is not ProcView.COMPLETE:  # Slots of dead writers may never be free again.
        settings = msgspec.structs.replace(settings, buffer_blocks=_LARGE_BUFFER_BLOCKS)
        if router.handover is not Handover.BUFFER:
            settings = msgspec.structs.replace(settings, hbm_blocks=_LARGE_BUFFER_BLOCKS)
    if world.seed % 5 == 3:
        settings = _with_tenants(settings, world.seed)
    if router.third_engine_reads:
        settings = _with_thirds(settings, world.seed)
    if has_trainer(world.seed):
        return _with_trainer(settings, world.seed)
    if has_proxies(world.seed):
        return _with_proxies(settings, world.seed)
    return _with_roles_that_change(settings, world.seed) if world.seed % 7 == 3 else settings


def _front_ends(seed: int) -> int:
    """Return the number of front ends: every fourth cluster has some, half with a standby."""
    return Random(f"front ends of {seed}").choice((1, 2, 2, 3)) if seed % 8 in (1, 3) else 0


def faults_of(seed: int) -> int:
    """Return the number of faults of a run, which is the first number that its seed draws."""
    return Random(seed).choice(FAULT_COUNTS)


def units_of_seed(seed: int) -> int:
    """Return the number of units: half of the clusters with front ends have two.

    Not where roles change: requests for another role name engines of the first unit.
    """
    return Random(f"units of {seed}").choice((1, 2)) if _front_ends(seed) and seed % 7 != 3 else 1


def _standby(seed: int) -> LeaderElection:
    """Return the leader election: every fourth cluster has a standby, two thirds by a lease."""
    if seed % 4 != 1:
        return LeaderElection.ONE
    kinds = (LeaderElection.LOCK, LeaderElection.ETCD, LeaderElection.KUBERNETES)
    return Random(f"turn of {seed}").choice(kinds)


def _tensor_parallel(seed: int) -> TensorParallel:
    """Return the ranks of engines: in every fourth cluster engines have several."""
    return Random(f"ranks of {seed}").choice(_TENSOR_PARALLEL) if seed % 4 == 2 else ONE_RANK


def _quota_blocks(seed: int) -> int:
    """Return the storage quota, which every third cluster has; 0 for none."""
    return Random(f"quota of {seed}").choice((8, 16, 32)) if seed % 3 == 0 else 0


def _node_dram_blocks(seed: int) -> int:
    """Return the DRAM that engines of a machine share in every fifth cluster; 0 for none."""
    return Random(f"shared DRAM of {seed}").choice((6, 12, 24)) if seed % 5 == 2 else 0


def _proc(seed: int) -> ProcView:
    """In every third cluster ``/proc`` hides processes or shows those of another namespace."""
    other = (ProcView.HIDDEN, ProcView.FOREIGN)
    return Random(f"/proc of {seed}").choice(other) if seed % 3 == 1 else ProcView.COMPLETE


def _append_tokens(seed: int) -> int:
    """Return up to how many tokens DEs append themselves, as in two of three clusters; 0: none."""
    return Random(f"appends of {seed}").choice((0, 12, 48))


def handover_of_seed(seed: int) -> Handover:
    """Return where DEs receive KV: in half of the clusters without ranks, HBM may be used."""
    if _tensor_parallel(seed) is not ONE_RANK:
        return Handover.BUFFER
    kinds = (Handover.BUFFER, Handover.BUFFER, Handover.HBM, Handover.AUTO)
    return Random(f"handover of {seed}").choice(kinds)


def _least_buffer_blocks(settings: ClusterSettings) -> int:
    """Return the least buffer of a cluster: slots of dead writers may never be free again."""
    return _LARGE_BUFFER_BLOCKS if settings.proc is not ProcView.COMPLETE else 0


def thirds_of_seed(seed: int) -> int:
    """Return how many third DEs may serve a hit: 0 but in the last quarter of a hundred seeds.

    Everything else that depends on a seed occurs there as well.
    """
    return Random(f"third engines of {seed}").choice((1, 2)) if seed % 100 >= 75 else 0


def _with_thirds(settings: ClusterSettings, seed: int) -> ClusterSettings:
    """Let there be further DEs, each a node of its own, more reads, and few slots to spare."""
    chance = Random(f"modes of third engines of {seed}")
    caches = settings.router.dram_tier and chance.random() < 1 / 2
    return msgspec.structs.replace(
        settings,
        router=msgspec.structs.replace(settings.router, dram_tier=caches),
        mode=chance.choice((Mode.SPLIT, Mode.SPLIT, Mode.DUALPATH)),
        decode=max(chance.choice((2, 3)), 1 + settings.router.third_engine_reads),
        decode_ranks=1,
        buffer_blocks=max(chance.choice((24, 24, 32, 64)), _least_buffer_blocks(settings)),
        agents=(5, 6),
        turns=(3,),
    )


def _with_pauses(settings: ClusterSettings) -> ClusterSettings:
    """Let agents pause for tools while others need the buffers, which hold about one context."""
    return msgspec.structs.replace(
        settings, buffer_blocks=24, agents=(5, 6), turns=(3,), pauses_s=(0.1, 0.5, 1.5)
    )


#: Salts of agents where tenants have no quotas; the first two differ, as do the next two.
_SALTS = (("red", "blue"), (None, "red"), ("red", None, "blue", "red"))
#: Salts where they have: the first tenant has most agents and exceeds its quota.
_QUOTA_SALTS = ("red", "blue", "red", "red", "red", "red")


def _with_tenants(settings: ClusterSettings, seed: int) -> ClusterSettings:
    """Let agents be of several tenants; without a quota of all blocks, tenants have quotas."""
    chance = Random(f"tenants of {seed}")
    settings = msgspec.structs.replace(settings, agents=(4, 6), turns=(2, 3))
    if settings.quota_blocks or chance.random() < 1 / 4:
        return msgspec.structs.replace(settings, salts=chance.choice(_SALTS))
    return msgspec.structs.replace(
        settings,
        salts=_QUOTA_SALTS,
        tenant_quota_blocks=chance.choice((16, 24, 32)),
        turns=(3,),
        pauses_s=(0.0, 0.1, 0.5),
    )


#: Clusters with a trainer, by their seed modulo 13.
_TRAINED = (6, 10, 11)


def has_trainer(seed: int) -> bool:
    """Whether weights change in a cluster: none with ranks, changes of roles, quotas or tenants."""
    plain = seed % 7 != 3 and seed % 4 != 2 and seed % 3 != 0 and seed % 5 != 3
    return seed % 13 in _TRAINED and plain


def _with_trainer(settings: ClusterSettings, seed: int) -> ClusterSettings:
    """Let a trainer change weights, as in a twelfth of clusters; no engine is in a group there."""
    updates = Random(f"trainer of {seed}").choice((1, 2, 3))
    router = msgspec.structs.replace(
        settings.router, max_attempts=settings.router.max_attempts + 4 * updates
    )
    return msgspec.structs.replace(
        settings,
        router=router,
        prefill_ranks=1,
        decode_ranks=1,
        turns=(2, 3),
        pauses_s=(0.0, 0.1, 0.5),
        weight_updates=updates,
    )


#: Clusters with proxies of others, by their seed modulo 11.
_BEHIND_OTHERS = (4, 7, 8)


def has_proxies(seed: int) -> bool:
    """Whether a proxy of others sends legs to engines: none where roles or weights change."""
    return seed % 11 in _BEHIND_OTHERS and seed % 7 != 3 and not has_trainer(seed)


#: Share of clusters with proxies in which KV may be moved between decode engines.
_MOVES_KV = 0.45


def has_moves(seed: int) -> bool:
    """Whether KV is moved to decode engines that get second legs, of which there are several."""
    return (
        has_proxies(seed) and _moves_kv(seed) and _decode_engines(Random(f"proxies of {seed}")) > 1
    )


def _moves_kv(seed: int) -> bool:
    return Random(f"moved KV of {seed}").random() < _MOVES_KV


def _decode_engines(chance: Random) -> int:
    """Return how many decode engines a cluster with proxies has."""
    return chance.choice((1, 2, 2, 3))


def _with_proxies(settings: ClusterSettings, seed: int) -> ClusterSettings:
    """Let proxies of others send legs, as in a fifth of clusters; no engine is in a group there."""
    chance = Random(f"proxies of {seed}")
    router = msgspec.structs.replace(
        settings.router,
        front_ends_port=0,
        first_leg_timeout_s=0.5,
        second_leg_timeout_s=3.0,
        move_kv=_moves_kv(seed),
    )
    return msgspec.structs.replace(
        settings,
        router=router,
        decode=max(_decode_engines(chance), 2 if settings.router.third_engine_reads else 1),
        prefill_ranks=1,
        decode_ranks=1,
        units=1,
        proxies=chance.choice((1, 1, 2)),
    )


def _with_roles_that_change(settings: ClusterSettings, seed: int) -> ClusterSettings:
    """Let engines change their role, as in every seventh cluster."""
    chance = Random(f"roles of {seed}")
    prefill, decode = chance.choice(((2, 1), (1, 2)))
    router = msgspec.structs.replace(settings.router, role_switch_timeout_s=_SWITCH_S)
    switches = chance.choice((1, 2, 3))
    return msgspec.structs.replace(
        settings, prefill=prefill, decode=decode, router=router, role_switches=switches
    )
