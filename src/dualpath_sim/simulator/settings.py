"""The simulated machine: nodes, links, memories and how engines are grouped (§2.3, §4.2, §A.4)."""

from typing import Annotated, Literal

import msgspec

from dualpath.core.cluster import MAX_NODES, Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Handover, Mode
from dualpath.core.rates import ComputedWeight
from dualpath.core.settings import Setting, Settings
from dualpath.plan.movements import Replicas
from dualpath.policy.events import TYPICAL_COMPUTED_WEIGHT
from dualpath.policy.rebalance import RebalanceSettings

#: Rates and times beyond these are typing errors, not machines.
LARGEST = 1e15
LONGEST_S = 1e6
LARGEST_GROUP = MAX_NODES * 100_000


class ClusterSettings(Settings, frozen=True, kw_only=True):
    """One cluster, as a TOML file names it; the defaults are the paper's testbed (§7.2, §A.4).

    *Shape.*  An engine has one GPU, or as many as its role's tensor parallel size, all of one node.
    A group (§6.1) is made of whole nodes, or of its role's data parallel size of engines where that
    is given: a part of a node or whole nodes.  The last group may be smaller.

    *Links.*  Bytes/s in either direction; DRAM is half duplex.

    *Memories.*  ``baseline_buffer_bytes`` replaces both buffers for Basic and Layerwise, which the
    paper does not limit in DRAM (§A.4 names DualPath's alone).  With ``dram_tier_bytes`` the unused
    part of buffers caches blocks that they have read or written, and evicts the tails of the least
    recently used agents' contexts first; buffers are larger by so many bytes, which may be 0.

    *Policy.*  α and β as times (§A.4).  With ``rebalancing`` nodes change their role while the
    cluster serves; the work that a node of a role does per second follows from the model's costs
    unless given.
    """

    prefill_nodes: Annotated[int, Setting("P (§4.2)", ge=1, le=MAX_NODES, flag=False)]
    decode_nodes: Annotated[int, Setting("D (§4.2)", ge=1, le=MAX_NODES, flag=False)]
    gpus_per_node: Annotated[
        int, Setting("GPUs of a node, each with one compute NIC", ge=1, le=100_000)
    ] = 8
    prefill_nodes_per_group: Annotated[
        int, Setting("nodes of a prefill group, 0 for all", ge=0, le=MAX_NODES)
    ] = 2
    decode_nodes_per_group: Annotated[
        int, Setting("nodes of a decode group, 0 for all", ge=0, le=MAX_NODES)
    ] = 4
    prefill_tp: Annotated[
        int, Setting("GPUs of a PE: its tensor parallel size", ge=1, le=100_000)
    ] = 1
    decode_tp: Annotated[
        int, Setting("GPUs of a DE: its tensor parallel size", ge=1, le=100_000)
    ] = 1
    prefill_dp: Annotated[
        int,
        Setting("PEs of a data-parallel group, 0 for those of its nodes", ge=0, le=LARGEST_GROUP),
    ] = 0
    decode_dp: Annotated[
        int,
        Setting("DEs of a data-parallel group, 0 for those of its nodes", ge=0, le=LARGEST_GROUP),
    ] = 0
    lockstep: Annotated[
        bool, Setting("engines of a group synchronise in every layer (expert parallelism)")
    ] = True

    snic_bytes_per_s: Annotated[float, Setting("a node's storage NIC", ge=1, le=LARGEST)] = 50e9
    snic_write_bytes_per_s: Annotated[float, Setting("the same for writes", ge=1, le=LARGEST)] = (
        50e9
    )
    snic_sharing: Annotated[
        Literal["fifo", "equal"],
        Setting("concurrent reads share it one after the other, or in equal parts"),
    ] = "fifo"
    read_latency_s: Annotated[
        float, Setting("until the first byte of a read arrives", ge=0, le=LONGEST_S)
    ] = 0.0
    cnic_bytes_per_s: Annotated[float, Setting("one GPU's compute NIC", ge=1, le=LARGEST)] = 50e9
    dram_bytes_per_s: Annotated[float, Setting("a node's DRAM", ge=1, le=LARGEST)] = 500e9

    prefill_buffer_bytes: Annotated[
        float, Setting("DRAM of a prefill node for KV (§4.1)", ge=0, le=LARGEST)
    ] = 80e9
    decode_buffer_bytes: Annotated[
        float, Setting("DRAM of a decode node for KV (§4.1)", ge=0, le=LARGEST)
    ] = 80e9
    baseline_buffer_bytes: Annotated[
        float | None, Setting("of Basic and Layerwise; none: as the others", ge=0, le=LARGEST)
    ] = None
    prefill_hbm_bytes: Annotated[
        float, Setting("HBM of a PE for KV, per GPU", ge=0, le=LARGEST)
    ] = 24e9
    decode_hbm_bytes: Annotated[float, Setting("HBM of a DE for KV, per GPU", ge=0, le=LARGEST)] = (
        40e9
    )
    layer_buffers: Annotated[
        int, Setting("layers of KV that a layerwise PE holds", ge=1, le=100_000)
    ] = 2
    overlap_passes: Annotated[
        bool, Setting("a forward pass that follows another loads its first layers within that one")
    ] = False
    share_loads: Annotated[
        bool, Setting("GPUs of a PE that hold the same KV load a part each and gather the rest")
    ] = False
    dram_tier_bytes: Annotated[
        float | None,
        Setting(
            "DRAM of a node beyond its buffer, the unused part of which caches KV; none: no cache",
            ge=0,
            le=LARGEST,
        ),
    ] = None

    alpha_s: Annotated[float, Setting("alpha as reading time", ge=0, le=LONGEST_S)] = 3.0
    beta_s: Annotated[float, Setting("beta as computing time", ge=0, le=LONGEST_S)] = 5.0
    beta_tokens: Annotated[int | None, Setting("beta in tokens, instead", ge=1, le=1 << 50)] = None
    compute_quota_s: Annotated[
        float, Setting("attention time of a forward batch (§6.2)", ge=1e-6, le=LONGEST_S)
    ] = 0.3
    batch_cap_tokens: Annotated[
        int, Setting("of an engine's forward pass without quota", ge=1, le=1 << 30)
    ] = 1024
    fetch_interval_s: Annotated[float, Setting("of the groups (§6.1)", ge=1e-6, le=LONGEST_S)] = (
        0.05
    )
    generated_reserve_tokens: Annotated[
        int, Setting("that a DE reserves for generation, at most", ge=0, le=1 << 30)
    ] = 256
    threshold_factor: Annotated[float, Setting("factor of Z in decode phase 2", ge=1, le=100)] = (
        1.05
    )
    block_tokens: Annotated[int, Setting("size of a Full Block", ge=1, le=1 << 30)] = 64
    request_overhead_s: Annotated[
        float, Setting("from a client's request to the scheduler", ge=0, le=LONGEST_S)
    ] = 0.0
    decode_admission_s: Annotated[
        float, Setting("from a prompt's KV in HBM to its first decode step", ge=0, le=LONGEST_S)
    ] = 0.0
    recompute_limit_s: Annotated[
        float,
        Setting(
            "recompute a hit if loading it takes longer than recomputing, up to this many "
            "seconds; 0: load all hits",
            ge=0,
            le=LONGEST_S,
        ),
    ] = 0.0
    append_at_decode_tokens: Annotated[
        int,
        Setting(
            "a DE that has a request's hit computes up to this many tokens behind it, without a "
            "PE; 0: a PE computes them",
            ge=0,
            le=1 << 30,
        ),
    ] = 0
    handover: Annotated[
        Handover,
        Setting(
            "where a DE receives KV: in its DRAM buffer, in HBM that it allocates at the "
            "assignment, or in HBM where it is free, else in the buffer"
        ),
    ] = Handover.BUFFER
    third_engine_reads: Annotated[
        int,
        Setting(
            "so many decode engines that are not a request's may serve a part of its hit, from "
            "their DRAM or through their storage NIC; 0: none",
            ge=0,
            le=1 << 10,
        ),
    ] = 0
    rebalancing: RebalanceSettings | None = None

    def check(self) -> None:
        """Raise ``ConfigError`` for engines or groups that do not fit the nodes."""
        super().check()
        g = self.gpus_per_node
        for role in Role:
            gpus, engines = self.gpus_per_engine(role), self.group_engines(role)
            if g % gpus:
                raise ConfigError(
                    f"{{{role}_tp}} is {gpus}; it must divide {{gpus_per_node}}, "
                    f"{g}, as an engine's GPUs are of one node; change one of them"
                )
            if gpus * engines % g and g % (gpus * engines):
                raise ConfigError(
                    f"{{{role}_dp}} is {engines} engines of {gpus} GPUs; a group "
                    f"must be whole nodes of {g} GPUs or an even part of one; change it"
                )
        if self.rebalancing and not self._alike:
            raise ConfigError(
                "with a table rebalancing nodes change their role; both roles must have the same "
                "{prefill_tp} and no {prefill_dp}; leave one out"
            )

        if self.rebalancing and self.third_engine_reads:
            raise ConfigError(
                f"{{third_engine_reads}} is {self.third_engine_reads}, and nodes change their "
                "role by {rebalancing}, which may not end while a node serves others' requests; "
                "leave one out"
            )

    @property
    def beyond_the_paper(self) -> list[str]:
        """The settings in use that only the reference core plays (``sim.run``)."""
        used = {
            "snic_sharing": self.snic_sharing != "fifo",
            "dram_tier_bytes": self.dram_tier_bytes is not None,
            "recompute_limit_s": self.recompute_limit_s > 0,
            "append_at_decode_tokens": self.append_at_decode_tokens > 0,
            "handover": self.handover is not Handover.BUFFER,
            "third_engine_reads": self.third_engine_reads > 0,
            "rebalancing": self.rebalancing is not None,
        }
        return [name for name, is_used in used.items() if is_used]

    @property
    def _alike(self) -> bool:
        """Whether nodes of both roles have equal engines; their groups may differ."""
        same = self.prefill_tp == self.decode_tp
        return same and not (self.prefill_dp or self.decode_dp)

    @property
    def nodes(self) -> int:
        """All nodes; the prefill nodes come first."""
        return self.prefill_nodes + self.decode_nodes

    def nodes_of(self, role: Role) -> int:
        """Return the number of nodes of a role."""
        return self.prefill_nodes if role is Role.PREFILL else self.decode_nodes

    def gpus_per_engine(self, role: Role) -> int:
        """Return the GPUs of an engine of a role, each a rank with its own compute NIC."""
        if role is Role.PREFILL:
            return self.prefill_tp
        return self.decode_tp

    def node_engines(self, role: Role) -> int:
        """Return the engines of a node of a role."""
        return self.gpus_per_node // self.gpus_per_engine(role)

    def group_engines(self, role: Role) -> int:
        """Return the engines of a group of a role; its last group may be smaller."""
        if role is Role.PREFILL:
            engines, nodes = self.prefill_dp, self.prefill_nodes_per_group
        else:
            engines, nodes = self.decode_dp, self.decode_nodes_per_group
        every = self.nodes_of(role) * self.node_engines(role)
        return min(engines or nodes * self.node_engines(role) or every, every)

    @property
    def prefill_engines(self) -> int:
        """PEs; they come first in every numbering of engines."""
        return self.prefill_nodes * self.node_engines(Role.PREFILL)

    @property
    def decode_engines(self) -> int:
        """DEs."""
        return self.decode_nodes * self.node_engines(Role.DECODE)

    @property
    def engines(self) -> int:
        """All engines."""
        return self.prefill_engines + self.decode_engines


class PrefillCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds one PE needs, as coefficients; a lock-step group waits for its slowest engine.

    Attention of a batch takes ``attention_batch_s`` plus, for every chunk of ``bsz`` tokens
    behind ``cached`` ones, ``attention_token_s`` per token, ``pair_s`` per (query, key) pair of
    which a query sees ``window_tokens`` at most (0: all), and ``index_pair_s`` per pair whatever
    the window.  It is what the compute quota bounds (§6.2).

    The rest takes ``batch_s`` per batch, and per token of the unit's mean engine
    ``feed_forward_token_s`` and ``exchange_token_s`` (all-to-all of expert parallelism).  With
    ``interleaved`` two micro-batches hide exchange behind computation and the longer of both
    counts; otherwise they add up.
    """

    batch_s: float = 0.0
    attention_batch_s: float = 0.0
    attention_token_s: float = 0.0
    pair_s: float = 0.0
    index_pair_s: float = 0.0
    window_tokens: int = 0
    feed_forward_token_s: float = 0.0
    exchange_token_s: float = 0.0
    interleaved: bool = False


class DecodeCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of one decode step of a unit, by requests and context of its mean engine.

    ``step_s`` + ``request_s`` · requests + ``pair_s`` · Σ min(context, ``window_tokens``) +
    ``index_pair_s`` · Σ context, sums over the requests of the mean engine.  A request's context
    is taken at half of its generation.
    """

    step_s: float = 0.0
    request_s: float = 0.0
    pair_s: float = 0.0
    index_pair_s: float = 0.0
    window_tokens: int = 0


class WindowLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV of one token over all layers that attend to the last ``window_tokens`` ≥ 1 only."""

    window_tokens: int
    kv_bytes_per_token: float


class ModelCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model on a GPU: KV size and times.

    ``kv_bytes_per_token`` over all ``layers``; ``window_layers`` names those of them that move of
    hits only what they see.  ``prefill_tokens_per_s`` is what one PE gets done in prompt tokens,
    hits included; β is ``beta_s`` of it (§A.4).  ``computed_weight`` ≥ 1 of them pass for each that
    is computed.  ``context_limit_tokens`` bounds prompt plus generation, None for no bound.  Of an
    engine's GPUs ``prefill_replicas`` or ``decode_replicas`` hold the same KV
    (``plan.movements.Replicas``); the times are those of an engine with all its GPUs.
    """

    name: str
    layers: int
    kv_bytes_per_token: float
    prefill: PrefillCosts
    decode: DecodeCosts
    prefill_tokens_per_s: float
    context_limit_tokens: int | None = None
    prefill_replicas: float = 1.0
    decode_replicas: float = 1.0
    window_layers: tuple[WindowLayers, ...] = ()
    computed_weight: ComputedWeight = TYPICAL_COMPUTED_WEIGHT


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run needs besides its agents."""

    cluster: ClusterSettings
    model: ModelCosts
    mode: Mode

    @property
    def replicas(self) -> Replicas:
        """How many GPUs of an engine hold the same KV, and whether each loads all of it."""
        model = self.model
        return Replicas(model.prefill_replicas, model.decode_replicas, self.cluster.share_loads)
