"""The simulated machine: nodes, links, memories and how engines are grouped (§2.3, §4.2, §A.4)."""

import math
from typing import Literal

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.policy.rebalance import RebalanceSettings

#: Rates and times beyond these are typing errors, not machines.
LARGEST_RATE = 1e15
LONGEST_S = 1e6


class ClusterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cluster, as a TOML file names it; the defaults are the paper's testbed (§7.2, §A.4).

    *Shape.*  ``prefill_nodes`` P and ``decode_nodes`` D of ``gpus_per_node`` g engines.  A group
    (§6.1) is made of whole nodes: ``*_nodes_per_group`` of them, 0 for all nodes of the role, the
    last group may be smaller.  ``lockstep`` says that the engines of a group synchronise in every
    layer (expert parallelism with DP attention); without it every engine steps for itself.

    *Links.*  Bytes/s of a node's storage NIC in either direction, of one engine's compute NIC in
    either direction, and of a node's DRAM (half duplex).  ``snic_sharing`` is how concurrent
    reads share an SNIC: one after the other, or all at once in equal parts.
    ``read_latency_s`` passes before the first byte of a read arrives.

    *Memories.*  ``prefill_buffer_bytes`` and ``decode_buffer_bytes`` of DRAM per node (§4.1);
    ``baseline_buffer_bytes`` instead of both for Basic and Layerwise, whose DRAM the paper does not
    limit (§A.4 names DualPath's alone), None for the same.
    ``prefill_hbm_bytes`` and ``decode_hbm_bytes`` of HBM for KV per engine; ``layer_buffers``
    layers of KV a layerwise PE holds.  ``dram_tier_bytes`` per node of a cluster-wide DRAM cache
    between storage and buffers, least recently used sessions leave; 0 for none.

    *Policy.*  α and β as times (§A.4), the compute quota, ``batch_cap_tokens`` per engine and
    forward pass where there is no quota, the fetch interval of the groups (§6.1), tokens a DE
    reserves for generation at most.  ``beta_tokens`` overrides β.
    ``request_overhead_s`` passes between a client's request and its arrival at the scheduler,
    ``decode_admission_s`` between a prompt's KV being in the DE's HBM and its first decode step.
    With ``rebalancing`` nodes change their role while the cluster serves; what one node of a role
    gets done per second follows from the model's costs unless given.
    """

    prefill_nodes: int
    decode_nodes: int
    gpus_per_node: int = 8
    prefill_nodes_per_group: int = 2
    decode_nodes_per_group: int = 4
    lockstep: bool = True

    snic_bytes_per_s: float = 50e9
    snic_write_bytes_per_s: float = 50e9
    snic_sharing: Literal["fifo", "equal"] = "fifo"
    read_latency_s: float = 0.0
    cnic_bytes_per_s: float = 50e9
    dram_bytes_per_s: float = 500e9

    prefill_buffer_bytes: float = 80e9
    decode_buffer_bytes: float = 80e9
    baseline_buffer_bytes: float | None = None
    prefill_hbm_bytes: float = 24e9
    decode_hbm_bytes: float = 40e9
    layer_buffers: int = 2
    dram_tier_bytes: float = 0.0

    alpha_s: float = 3.0
    beta_s: float = 5.0
    beta_tokens: int | None = None
    compute_quota_s: float = 0.3
    batch_cap_tokens: int = 1024
    fetch_interval_s: float = 0.05
    generated_reserve_tokens: int = 256
    threshold_factor: float = 1.05
    block_tokens: int = 64
    request_overhead_s: float = 0.0
    decode_admission_s: float = 0.0
    rebalancing: RebalanceSettings | None = None

    @property
    def nodes(self) -> int:
        """All nodes; the prefill nodes come first."""
        return self.prefill_nodes + self.decode_nodes

    @property
    def prefill_engines(self) -> int:
        """PEs, one per GPU; they come first in every numbering of engines."""
        return self.prefill_nodes * self.gpus_per_node

    @property
    def decode_engines(self) -> int:
        """DEs, one per GPU."""
        return self.decode_nodes * self.gpus_per_node

    @property
    def engines(self) -> int:
        """All engines."""
        return self.nodes * self.gpus_per_node

    def check(self) -> None:
        """Raise ``ConfigError`` for the first value out of range."""
        for name in ("prefill_nodes", "decode_nodes", "gpus_per_node", "layer_buffers"):
            self._require(name, 1, 100_000)
        for name in ("batch_cap_tokens", "block_tokens"):
            self._require(name, 1, 1 << 30)
        for name in ("prefill_nodes_per_group", "decode_nodes_per_group"):
            self._require(name, 0, 100_000)
        self._require("generated_reserve_tokens", 0, 1 << 30)
        for name in self.__struct_fields__:
            if name.endswith("_bytes_per_s"):
                self._require(name, 1.0, LARGEST_RATE)
            elif name.endswith("_bytes") and getattr(self, name) is not None:
                self._require(name, 0.0, LARGEST_RATE)
            elif name.endswith("_s"):
                self._require(name, 0.0, LONGEST_S)
        self._require("compute_quota_s", 1e-6, LONGEST_S)
        self._require("fetch_interval_s", 1e-6, LONGEST_S)
        self._require("threshold_factor", 1.0, 100.0)
        if self.beta_tokens is not None:
            self._require("beta_tokens", 1, 1 << 50)
        if self.rebalancing is not None:
            self.rebalancing.check()

    def _require(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or not least <= value <= most:
            raise ConfigError(
                f"{name} is {value}, must be between {least:g} and {most:g}; "
                "correct it in the cluster file"
            )


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


class ModelCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the simulator knows of a model on a GPU: KV size and times.

    ``kv_bytes_per_token`` over all ``layers``.  ``prefill_tokens_per_s`` is what one PE gets done
    in prompt tokens, hits included; β is ``beta_s`` of it (§A.4).
    ``context_limit_tokens`` bounds prompt plus generation, None for no bound.
    """

    name: str
    layers: int
    kv_bytes_per_token: float
    prefill: PrefillCosts
    decode: DecodeCosts
    prefill_tokens_per_s: float
    context_limit_tokens: int | None = None


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run needs besides its agents."""

    cluster: ClusterSettings
    model: ModelCosts
    mode: Mode
