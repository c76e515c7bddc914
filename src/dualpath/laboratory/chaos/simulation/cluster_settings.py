"""Settings of a simulated cluster: its size, its memories, the limits of router and storage."""

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.parts import slices_of
from dualpath.engine.settings import EngineSettings
from dualpath.laboratory.chaos.simulation.disk import NODE_DRAM_ROOT
from dualpath.laboratory.chaos.simulation.turns import LeaderElection
from dualpath.laboratory.emulated.settings import EmulatedSettings, Verify, part_geometry
from dualpath.model.sim.settings import DecodeCosts, ModelCosts, PrefillCosts
from dualpath.router.settings import RouterSettings
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.node_dram import page_rounded

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
#: Blocks used within this time are not evicted: less than a request may take.
PROTECT_S = 0.5


class TensorParallel(msgspec.Struct, frozen=True):
    """Ranks of each engine of a role, among which ``kv_heads`` are divided."""

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
    separate processes; the router serves clients as well.  ``role_switches`` counts requests for
    another role, some of which also change the size of a group.  ``node_dram_blocks`` above 0 are
    shared by the engines of each machine.  A run has one of these numbers of ``agents``, each with
    one of these numbers of ``turns``, and one of ``pauses_s`` between two turns.
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
    prefill_ranks: int = 1
    decode_ranks: int = 1
    standby: LeaderElection = LeaderElection.ONE
    tensor_parallel: TensorParallel = ONE_RANK
    quota_blocks: int = 0
    links: bool = True
    front_ends: int = 0
    role_switches: int = 0
    node_dram_blocks: int = 0
    agents: tuple[int, ...] = (2, 3, 4)
    turns: tuple[int, ...] = (1, 2, 3)
    pauses_s: tuple[float, ...] = (0.0, 0.0, 0.01, 0.3)

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
        buffer_bytes=cluster.buffer_blocks * cluster.geometry.full_block_bytes,
        staging_blocks=4,
        layer_buffers=cluster.layer_buffers,
        parallel_reads=2,
        drain_timeout_s=30.0,
        storage_quota=cluster.quota_blocks * stored_bytes(cluster.geometry),
        storage_protect_s=PROTECT_S,
        dram_dir=NODE_DRAM_ROOT if cluster.node_dram_blocks else "",
        dram_bytes=cluster.node_dram_blocks * page_rounded(stored_bytes(cluster.geometry)),
    )
    ranks, heads = cluster.tensor_parallel.ranks(role), cluster.tensor_parallel.kv_heads
    hbm_bytes = cluster.hbm_blocks * cluster.geometry.full_block_bytes
    return EmulatedSettings(
        engine=engine,
        geometry=cluster.geometry,
        costs=COSTS,
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
