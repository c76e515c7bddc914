"""A model's geometry, and the KV-cache and computation that follow from it (paper §3, Table 1).

Bytes and FLOP follow from dimensions; only ``prefill_efficiency`` is fitted.
The cache-compute ratio of Table 1 is, for a prompt of ``append`` new tokens behind ``context``
stored ones,

    context · K / (append · (2N + Σ over layers of pair FLOP · keys seen))

with K the KV bytes per token and N the active parameters without the embedding.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError
from dualpath_sim.catalog.gpu import Share

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Size = Annotated[float, msgspec.Meta(gt=0, le=1 << 20)]

#: Gate, up and down projection of a feed-forward layer.
FEED_FORWARD_MATRICES = 3


class Stored(NamedTuple):
    """What one layer stores of a token: its parts in bytes.

    Only the last ``window_tokens`` of a prefix are needed of it, 0 for all of them.  Beside it a
    sequence has ``state_bytes``, which are not stored.  ``kind`` names it in tables.
    """

    kind: str
    part_bytes: tuple[float, ...]
    window_tokens: int = 0
    state_bytes: float = 0.0


Kernel = Literal["grouped", "latent", "sparse", "indexer"]


class Scan(NamedTuple):
    """What a query does with each token that it sees, in one layer.

    It sees the last ``window_tokens``, or that many which an indexer has ``selected``; 0 for all.
    """

    kernel: Kernel
    flop: float
    read_bytes: float
    window_tokens: int = 0
    selected: bool = False

    def seen_tokens(self, context_tokens: int) -> int:
        """Return how many of ``context_tokens`` are seen."""
        return min(context_tokens, self.window_tokens) if self.window_tokens else context_tokens


class GroupedQueryAttention(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="grouped-query",
):
    """``layers`` layers in which ``heads`` query heads share ``kv_heads`` keys and values.

    A query sees the last ``window_tokens`` keys, 0 for all of them; layers with a window store
    only these.  ``kv_value_bytes`` per stored number.  With an ``output_gate`` the output of
    each query head is multiplied by a projection of the input.
    """

    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    kv_value_bytes: Size
    window_tokens: CountOrZero = 0
    output_gate: bool = False

    @property
    def kv_bytes_per_token(self) -> float:
        """Key and value of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_value_bytes

    @property
    def stored(self) -> tuple[Stored, ...]:
        """What one layer stores: vLLM has key and value of a token side by side."""
        kind = "window" if self.window_tokens else "full"
        return (Stored(kind, (self.kv_bytes_per_token,), self.window_tokens),)

    @property
    def pair_flop(self) -> int:
        """QK and PV of one query with one key in one layer."""
        return 4 * self.heads * self.head_dim

    @property
    def scans(self) -> tuple[Scan, ...]:
        """What a query reads and computes in one layer."""
        return (Scan("grouped", self.pair_flop, self.kv_bytes_per_token, self.window_tokens),)

    def parameters(self, hidden_size: int) -> int:
        """Projections of one layer: Q, K, V, output and, with a gate, the gate."""
        gate = self.heads if self.output_gate else 0
        return hidden_size * self.head_dim * (2 * (self.heads + self.kv_heads) + gate)

    def slices(self, gpus: int) -> int:
        """Return into how many slices ``gpus`` GPUs of an engine cut KV: whole heads."""
        return min(gpus, self.kv_heads)

    def indexer_parameters(self, hidden_size: int) -> int:
        """Return 0: there is no indexer."""
        return 0

    def rank_parameters(self, hidden_size: int, gpus: int) -> float:
        """Return what of ``parameters`` one of an engine's GPUs holds."""
        gate = self.heads / gpus if self.output_gate else 0
        held = self.heads / gpus + self.kv_heads / self.slices(gpus)
        return hidden_size * self.head_dim * (2 * held + gate)


class Indexer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The lightning indexer of DeepSeek sparse attention: it scores all keys, ``top_tokens`` stay.

    ``key_bytes`` are stored per token and layer for its key, in a part beside the latent's.  The
    paper's figures leave them out; an engine stores and moves them, which is ``counted``.  Layers
    with a ``shared`` indexer take the choice of an earlier layer: they have no keys and score none.
    """

    heads: Count
    head_dim: Count
    top_tokens: Count
    key_bytes: Count
    counted: bool = False
    shared: bool = False

    @property
    def stored_bytes(self) -> tuple[int, ...]:
        """The part that an engine stores of a token, none if keys are shared or not counted."""
        return (self.key_bytes,) if self.counted and not self.shared else ()

    @property
    def pair_flop(self) -> int:
        """Score of one query with one key in one layer."""
        return 0 if self.shared else 2 * self.heads * self.head_dim

    def parameters(self, hidden_size: int, query_input: int) -> int:
        """Projections of one layer: queries, key and head weights."""
        if self.shared:
            return 0
        queries = query_input * self.heads * self.head_dim
        return queries + hidden_size * (self.head_dim + self.heads)


class LatentAttention(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="latent",
):
    """Multi-head latent attention, one compressed key-value per token, weights absorbed.

    ``query_rank`` 0: queries are not compressed.  A stored token takes ``kv_rank`` values of
    ``latent_value_bytes``, ``latent_scale_bytes`` of quantisation scales and ``rope_dim`` values
    of ``rope_value_bytes``.  With an ``indexer`` a query sees its ``top_tokens`` best keys.
    """

    layers: Count
    heads: Count
    query_rank: CountOrZero
    kv_rank: Count
    nope_dim: Count
    rope_dim: Count
    value_dim: Count
    latent_value_bytes: Size
    latent_scale_bytes: CountOrZero
    rope_value_bytes: Size
    indexer: Indexer | None = None
    output_gate: bool = False

    @property
    def kv_heads(self) -> int:
        """Heads that are divided among an engine's GPUs; the latent has none of its own."""
        return self.heads

    @property
    def kv_bytes_per_token(self) -> float:
        """All parts of one token in one layer."""
        return sum(self.part_bytes_per_token)

    @property
    def part_bytes_per_token(self) -> tuple[float, ...]:
        """Latent, scales and rotary key in one part; the indexer's key, if counted, in another."""
        latent = (
            self.kv_rank * self.latent_value_bytes
            + self.latent_scale_bytes
            + self.rope_dim * self.rope_value_bytes
        )
        return (latent, *(self.indexer.stored_bytes if self.indexer else ()))

    @property
    def stored(self) -> tuple[Stored, ...]:
        """What one layer stores: every token, since the indexer chooses from all."""
        kind = "latent"
        if self.indexer is not None:
            kind += ", shared indexer" if self.indexer.shared else " + indexer"
        return (Stored(kind, self.part_bytes_per_token),)

    @property
    def pair_flop(self) -> int:
        """Absorbed form: QK over latent and rotary part, PV over the latent, in one layer."""
        return 2 * self.heads * (2 * self.kv_rank + self.rope_dim)

    @property
    def scans(self) -> tuple[Scan, ...]:
        """What a query reads and computes in one layer."""
        latent_bytes = self.part_bytes_per_token[0]
        if self.indexer is None:
            return (Scan("latent", self.pair_flop, latent_bytes),)
        top = self.indexer.top_tokens
        chosen = Scan("sparse", self.pair_flop, latent_bytes, top, selected=True)
        if self.indexer.shared:
            return (chosen,)
        return (chosen, Scan("indexer", self.indexer.pair_flop, self.indexer.key_bytes))

    def parameters(self, hidden_size: int) -> int:
        """Projections of one layer: Q (down and up), KV down and up, output, gate; no indexer."""
        query_dim = self.heads * (self.nope_dim + self.rope_dim)
        if self.query_rank:
            query = self.query_rank * (hidden_size + query_dim)
        else:
            query = hidden_size * query_dim
        down = hidden_size * (self.kv_rank + self.rope_dim)
        up = self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        outputs = 2 if self.output_gate else 1
        return query + down + up + outputs * self.heads * self.value_dim * hidden_size

    def slices(self, gpus: int) -> int:
        """Return 1: every one of an engine's ``gpus`` needs the whole latent."""
        return 1

    def rank_parameters(self, hidden_size: int, gpus: int) -> float:
        """Return what of ``parameters`` one of an engine's GPUs holds: all down-projections."""
        down = hidden_size * (self.kv_rank + self.rope_dim + self.query_rank)
        return down + (self.parameters(hidden_size) - down) / gpus

    def indexer_parameters(self, hidden_size: int) -> int:
        """Projections of one layer's indexer."""
        if self.indexer is None:
            return 0
        return self.indexer.parameters(hidden_size, self.query_rank or hidden_size)


class CompressedAttention(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="compressed",
):
    """DeepSeek-V4's attention: one entry for ``ratio`` tokens, beside a window of single tokens.

    An entry, the same for key and value of all ``heads``, takes ``entry_bytes``.  A query sees the
    last ``window_tokens`` tokens and all entries, or those that an ``indexer`` selects:
    ``top_tokens`` entries, with keys of ``key_bytes`` per entry.  With ``ratio`` 0 there is only
    the window.  The output is projected in ``output_groups`` groups of rank ``output_rank``.
    """

    layers: Count
    heads: Count
    head_dim: Count
    query_rank: Count
    output_groups: Count
    output_rank: Count
    window_tokens: Count
    entry_bytes: Count
    ratio: CountOrZero = 0
    indexer: Indexer | None = None

    @property
    def kv_heads(self) -> int:
        """Heads that are divided among an engine's GPUs; entries have none of their own."""
        return self.heads

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The single tokens of the window and, with a ratio, the parts of the entries."""
        window = Stored("window", (self.entry_bytes,), self.window_tokens)
        if not self.ratio:
            return (window,)
        kind = f"compressed {self.ratio}:1" + (" + indexer" if self.indexer else "")
        keys = self.indexer.stored_bytes if self.indexer else ()
        entry = (self.entry_bytes / self.ratio, *(one / self.ratio for one in keys))
        return Stored(kind, entry, state_bytes=self._compressor_bytes), window

    @property
    def kv_bytes_per_token(self) -> float:
        """All that one layer stores of a token, the window's part included."""
        return sum(sum(one.part_bytes) for one in self.stored)

    @property
    def _overlap(self) -> int:
        """How many entries a token is part of: two where an indexer selects."""
        return 2 if self.indexer else 1

    @property
    def _compressor_bytes(self) -> int:
        """State of the compressors of one layer and sequence: values and weights in FP32."""
        indexer_dim = self.indexer.head_dim if self.indexer else 0
        width = 2 * self._overlap * (self.head_dim + indexer_dim) * 4
        return self._overlap * self.ratio * width

    @property
    def pair_flop(self) -> int:
        """QK and PV of one query with one entry in one layer."""
        return 4 * self.heads * self.head_dim

    @property
    def scans(self) -> tuple[Scan, ...]:
        """What a query reads and computes in one layer, per token."""
        window = Scan("sparse", self.pair_flop, self.entry_bytes, self.window_tokens)
        if not self.ratio:
            return (window,)
        flop, read_bytes = self.pair_flop / self.ratio, self.entry_bytes / self.ratio
        if self.indexer is None:
            return window, Scan("sparse", flop, read_bytes)
        chosen = self.indexer.top_tokens * self.ratio
        keys = Scan(
            "indexer", self.indexer.pair_flop / self.ratio, self.indexer.key_bytes / self.ratio
        )
        return window, Scan("sparse", flop, read_bytes, chosen, selected=True), keys

    def parameters(self, hidden_size: int) -> int:
        """Projections of one layer: Q (down and up), KV, compressor, grouped output."""
        width = self.heads * self.head_dim
        query = self.query_rank * (hidden_size + width)
        compressor = 2 * hidden_size * self._overlap * self.head_dim if self.ratio else 0
        output = self.output_rank * (width + self.output_groups * hidden_size)
        return query + hidden_size * self.head_dim + compressor + output

    def slices(self, gpus: int) -> int:
        """Return 1: every one of an engine's ``gpus`` needs the whole entries."""
        return 1

    def rank_parameters(self, hidden_size: int, gpus: int) -> float:
        """Return what of ``parameters`` one of an engine's GPUs holds: KV and compressor whole."""
        overlap = 2 * self._overlap if self.ratio else 0
        whole = hidden_size * (self.head_dim * (1 + overlap) + self.query_rank)
        return whole + (self.parameters(hidden_size) - whole) / gpus

    def indexer_parameters(self, hidden_size: int) -> int:
        """Projections of one layer's indexer, its compressor included."""
        if self.indexer is None:
            return 0
        compressor = 2 * hidden_size * self._overlap * self.indexer.head_dim
        return self.indexer.parameters(hidden_size, self.query_rank) + compressor


class StateAttention(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="state",
):
    """Linear attention (gated delta rule, Kimi delta attention): one state per sequence.

    The state of each of ``heads`` value heads is a matrix ``key_dim`` × ``value_dim``; the last
    ``conv_width`` - 1 inputs of the convolution are stored beside it.  An engine stores a prefix's
    state once per ``checkpoint_tokens`` tokens: a hit moves one state.  ``gate_rank`` of the
    output gate, 0: full; ``decay_rank`` of the projection of decays, 0: one number per head.
    """

    layers: Count
    heads: Count
    key_heads: Count
    key_dim: Count
    value_dim: Count
    conv_width: Count
    state_value_bytes: Size
    conv_value_bytes: Size
    checkpoint_tokens: Count
    gate_rank: CountOrZero = 0
    decay_rank: CountOrZero = 0

    @property
    def kv_heads(self) -> int:
        """Heads that are divided among an engine's GPUs, with their states."""
        return self.heads

    @property
    def _mixed_dim(self) -> int:
        """Width of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def state_bytes(self) -> float:
        """State of one layer and sequence."""
        state = self.heads * self.key_dim * self.value_dim * self.state_value_bytes
        return state + self._mixed_dim * (self.conv_width - 1) * self.conv_value_bytes

    @property
    def stored(self) -> tuple[Stored, ...]:
        """One state in ``checkpoint_tokens`` tokens."""
        return (Stored("state", (self.kv_bytes_per_token,), self.checkpoint_tokens),)

    @property
    def kv_bytes_per_token(self) -> float:
        """What one layer stores of a token, on average."""
        return self.state_bytes / self.checkpoint_tokens

    @property
    def scans(self) -> tuple[Scan, ...]:
        """Nothing: a query sees the state."""
        return ()

    @property
    def token_flop(self) -> int:
        """Decay, delta, update and output of one token in one layer."""
        return 8 * self.heads * self.key_dim * self.value_dim

    def parameters(self, hidden_size: int) -> int:
        """Projections of one layer: Q, K, V, gate, decays and write strengths, output."""
        width = self.heads * self.value_dim
        rank, decay = self.gate_rank, self.decay_rank
        gate = rank * (hidden_size + width) if rank else hidden_size * width
        decays = decay * (hidden_size + self.heads * self.key_dim) if decay else 0
        per_head = hidden_size * self.heads * (1 if decay else 2)
        return hidden_size * (self._mixed_dim + width) + gate + decays + per_head

    def slices(self, gpus: int) -> int:
        """Return into how many slices ``gpus`` GPUs of an engine cut states: whole heads."""
        return min(gpus, self.heads)

    def rank_parameters(self, hidden_size: int, gpus: int) -> float:
        """Return what of ``parameters`` one of an engine's GPUs holds."""
        return self.parameters(hidden_size) / gpus

    def indexer_parameters(self, hidden_size: int) -> int:
        """Return 0: there is no indexer."""
        return 0


class DenseFeedForward(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="dense",
):
    """``layers`` gated feed-forward layers."""

    layers: Count
    intermediate_size: Count

    def parameters(self, hidden_size: int) -> int:
        """Of one layer."""
        return FEED_FORWARD_MATRICES * hidden_size * self.intermediate_size


class ExpertFeedForward(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="kind",
    tag="experts",
):
    """``layers`` mixture-of-experts layers: every token takes ``active_experts`` of ``experts``.

    ``shared_experts`` of the same width work on every token.  Routed experts work on tokens that
    are projected to ``expert_hidden_size``, 0: on those of the model.  The router sends a token to
    at most ``routed_nodes`` nodes (DeepSeek's node-limited routing), 0 for no limit.
    """

    layers: Count
    experts: Count
    active_experts: Count
    intermediate_size: Count
    shared_experts: CountOrZero = 0
    routed_nodes: CountOrZero = 0
    expert_hidden_size: CountOrZero = 0

    def expert_parameters(self, hidden_size: int) -> int:
        """Of one routed expert of one layer."""
        width = self.expert_hidden_size or hidden_size
        return FEED_FORWARD_MATRICES * width * self.intermediate_size

    def shared_parameters(self, hidden_size: int) -> int:
        """Of the shared experts of one layer."""
        return self.shared_experts * FEED_FORWARD_MATRICES * hidden_size * self.intermediate_size

    def router_parameters(self, hidden_size: int) -> int:
        """Of the router and the projections to the experts and back of one layer."""
        return hidden_size * (self.experts + 2 * self.expert_hidden_size)

    def replicated_parameters(self, hidden_size: int) -> int:
        """Router, projections and shared experts of one layer, which every GPU holds."""
        return self.router_parameters(hidden_size) + self.shared_parameters(hidden_size)


Attention = GroupedQueryAttention | LatentAttention | CompressedAttention | StateAttention
FeedForward = DenseFeedForward | ExpertFeedForward


FLOP_PER_PARAMETER = 2


class KvKind(NamedTuple):
    """What ``layers`` layers of one kind store, all together.

    ``token_bytes`` per token.  Where only ``window_tokens`` of a prefix are needed, those take
    ``sequence_bytes``, the state of compressors included.
    """

    kind: str
    layers: int
    token_bytes: float
    window_tokens: int
    sequence_bytes: float


class ModelGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The dimensions of a model.

    Layers come in runs of equal kind; the runs of ``attention`` and those of ``feed_forward``
    each add up to all layers, in no particular order.  ``*_value_bytes`` per weight: of attention
    and dense layers, of routed and shared experts, of embedding and output head.
    ``context_limit_tokens`` bounds prompt plus generation, None for no bound.  ``draft_layers`` of
    multi-token prediction come with the checkpoint and count in nothing else.  In prefill this
    model's kernels reach ``prefill_efficiency`` of the GPU's rates.
    """

    name: str
    title: str
    hidden_size: Count
    vocabulary: Count
    attention: Annotated[tuple[Attention, ...], msgspec.Meta(min_length=1)]
    feed_forward: Annotated[tuple[FeedForward, ...], msgspec.Meta(min_length=1)]
    weight_value_bytes: Size
    expert_value_bytes: Size = 1.0
    head_value_bytes: Size = 2.0
    tied_embedding: bool = False
    context_limit_tokens: Count | None = None
    draft_layers: CountOrZero = 0
    prefill_efficiency: Share = 1.0

    def check(self) -> None:
        """Raise ``ConfigError`` where the parts contradict each other."""
        below = sum(part.layers for part in self.feed_forward)
        if self.layers != below:
            raise ConfigError(
                f"attention has {self.layers} layers and feed_forward {below}; "
                "both must describe every layer, correct the numbers of layers"
            )
        for part in self.expert_layers:
            if part.active_experts > part.experts:
                raise ConfigError(
                    f"active_experts is {part.active_experts}, above the {part.experts} experts; "
                    "lower it"
                )
        for attention in self.attention:
            if isinstance(attention, GroupedQueryAttention) and (
                attention.heads % attention.kv_heads
            ):
                raise ConfigError(
                    f"heads is {attention.heads}, must be a multiple of kv_heads "
                    f"{attention.kv_heads}; correct one of them"
                )
        if not self.kv_bytes_per_token:
            raise ConfigError(
                "no layer stores every token's KV (windows or states in all layers), which "
                "dualpath serves in no engine (docs/reference/served-models.md); choose a model "
                "with layers of full attention"
            )

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(part.layers for part in self.attention)

    @property
    def expert_layers(self) -> tuple[ExpertFeedForward, ...]:
        """The runs of mixture-of-experts layers."""
        return tuple(part for part in self.feed_forward if isinstance(part, ExpertFeedForward))

    # KV-cache

    @property
    def kv_bytes_per_token(self) -> float:
        """KV of one token over the layers that store every token, which grows with the context."""
        return sum(
            part.layers * sum(stored.part_bytes)
            for part in self.attention
            for stored in part.stored
            if not stored.window_tokens
        )

    @property
    def kv_bytes_per_token_all_layers(self) -> float:
        """KV of one token over all layers: what engines store of every block.

        Layers with a sliding window are stored like others, states once per some tokens; the
        paper's ratios leave both out.
        """
        return sum(part.layers * part.kv_bytes_per_token for part in self.attention)

    def kv_by_kind(self) -> "Iterator[KvKind]":
        """Yield what the runs of layers store, in their order."""
        for part in self.attention:
            for stored in part.stored:
                token_bytes = part.layers * sum(stored.part_bytes)
                sequence_bytes = (
                    token_bytes * stored.window_tokens + part.layers * stored.state_bytes
                )
                yield KvKind(
                    stored.kind, part.layers, token_bytes, stored.window_tokens, sequence_bytes
                )

    def block_geometry(self, block_tokens: int) -> BlockGeometry:
        """Return blocks of all layers, part by part, as engines store and move them.

        Layers come run by run, not in the order in which the model has them.  A layer of the model
        that stores tokens in two ways (``CompressedAttention``) counts as two.
        """
        parts: list[tuple[int, ...]] = []
        windows: list[int] = []
        for run in self.attention:
            for stored in run.stored:
                sizes = tuple(max(round(size * block_tokens), 1) for size in stored.part_bytes)
                parts += [sizes] * run.layers
                windows += [stored.window_tokens] * run.layers
        return BlockGeometry(block_tokens, tuple(parts), tuple(windows) if any(windows) else ())

    # Parameters

    @property
    def attention_parameters(self) -> int:
        """Projections of attention over all layers, without indexers."""
        return sum(part.layers * part.parameters(self.hidden_size) for part in self.attention)

    @property
    def indexer_parameters(self) -> int:
        """Projections of the sparse indexers over all layers."""
        return sum(
            part.layers * part.indexer_parameters(self.hidden_size) for part in self.attention
        )

    @property
    def dense_parameters(self) -> int:
        """Dense feed-forward layers."""
        return sum(
            part.layers * part.parameters(self.hidden_size)
            for part in self.feed_forward
            if isinstance(part, DenseFeedForward)
        )

    @property
    def replicated_expert_parameters(self) -> int:
        """Routers and shared experts over all layers."""
        return sum(
            part.layers * part.replicated_parameters(self.hidden_size)
            for part in self.expert_layers
        )

    @property
    def routed_parameters(self) -> int:
        """All routed experts of all layers."""
        return sum(
            part.layers * part.experts * part.expert_parameters(self.hidden_size)
            for part in self.expert_layers
        )

    @property
    def active_expert_parameters(self) -> int:
        """What one token meets in the mixture-of-experts layers: router, shared, active."""
        return self.replicated_expert_parameters + sum(
            part.layers * part.active_experts * part.expert_parameters(self.hidden_size)
            for part in self.expert_layers
        )

    @property
    def head_parameters(self) -> int:
        """The output head; the embedding has as many and costs no FLOP."""
        return self.hidden_size * self.vocabulary

    @property
    def active_parameters(self) -> int:
        """N: body and output head of one token, without embedding and indexers."""
        return (
            self.attention_parameters
            + self.dense_parameters
            + self.active_expert_parameters
            + self.head_parameters
        )

    @property
    def total_parameters(self) -> int:
        """Everything, embedding and indexers included."""
        return (
            self.attention_parameters
            + self.indexer_parameters
            + self.dense_parameters
            + self.replicated_expert_parameters
            + self.routed_parameters
            + self.head_parameters * (1 if self.tied_embedding else 2)
        )

    # Tensor parallelism

    def check_gpus_per_engine(self, gpus: int) -> None:
        """Raise ``ConfigError`` for a number of GPUs that heads cannot be divided among."""
        for part in self.attention:
            kv_heads = part.kv_heads
            if part.heads % gpus or (kv_heads % gpus and gpus % kv_heads):
                raise ConfigError(
                    f"an engine of {gpus} GPUs cannot divide the {part.heads} heads and {kv_heads} "
                    f"KV heads of {self.title}; choose another tensor parallel size"
                )

    def replicas(self, gpus: int) -> float:
        """Return how many of an engine's GPUs hold the same KV, on average over its bytes."""
        held = sum(
            part.layers * part.kv_bytes_per_token * gpus / part.slices(gpus)
            for part in self.attention
        )
        return held / self.kv_bytes_per_token_all_layers

    # Weights in memory

    @property
    def weight_bytes(self) -> float:
        """Weights of the whole model."""
        return self.weight_bytes_per_gpu(1)

    def weight_bytes_per_gpu(self, expert_width: int, gpus: int = 1) -> float:
        """Weights one GPU holds when the routed experts are spread over ``expert_width`` ≥ 1 GPUs.

        Everything else is held by each engine (DP attention, §7.2), divided among its ``gpus`` as
        vLLM does: latent attention's down-projections, indexers and routers are on each.
        """
        embeddings = self.head_parameters * (1 if self.tied_embedding else 2)
        return (
            self._dense_weight_bytes(gpus)
            + self._expert_bytes_per_gpu(expert_width, gpus)
            + embeddings * self.head_value_bytes / gpus
        )

    def step_weight_bytes(self, expert_width: int, gpus: int = 1) -> float:
        """Weights one GPU reads in a decode step that touches every expert it holds.

        The embedding is a table look-up and is left out.
        """
        head = self.head_parameters * self.head_value_bytes / gpus
        return (
            self._dense_weight_bytes(gpus) + self._expert_bytes_per_gpu(expert_width, gpus) + head
        )

    def rank_attention_parameters(self, gpus: int) -> float:
        """Projections of attention and indexers on one of an engine's ``gpus``."""
        projections = sum(
            part.layers * part.rank_parameters(self.hidden_size, gpus) for part in self.attention
        )
        return projections + self.indexer_parameters

    def _dense_weight_bytes(self, gpus: int) -> float:
        parameters = self.rank_attention_parameters(gpus) + self.dense_parameters / gpus
        return parameters * self.weight_value_bytes

    def _expert_bytes_per_gpu(self, expert_width: int, gpus: int) -> float:
        held = 0.0
        for part in self.expert_layers:
            # Beyond one expert per GPU experts are replicated.
            routed = max(1.0, part.experts / expert_width)
            experts = routed * part.expert_parameters(self.hidden_size)
            shared = part.shared_parameters(self.hidden_size) / gpus
            held += part.layers * (experts + shared + part.router_parameters(self.hidden_size))
        return held * self.expert_value_bytes

    # Computation

    def attention_flop(self, context_tokens: int) -> float:
        """QK and PV of one query behind ``context_tokens`` keys, and states, over all layers."""
        states = sum(
            part.layers * part.token_flop
            for part in self.attention
            if isinstance(part, StateAttention)
        )
        return states + self._scan_flop(context_tokens, indexers=False)

    def indexer_flop(self, context_tokens: int) -> float:
        """Scores of one query against ``context_tokens`` keys, over all layers."""
        return self._scan_flop(context_tokens, indexers=True)

    def _scan_flop(self, context_tokens: int, *, indexers: bool) -> float:
        return sum(
            part.layers * scan.flop * scan.seen_tokens(context_tokens)
            for part in self.attention
            for scan in part.scans
            if (scan.kernel == "indexer") is indexers
        )

    def cache_compute_ratio(
        self, context_tokens: int, append_tokens: int, *, latent_pair_flop: int | None = None
    ) -> float:
        """GB of KV to load per PFLOP to compute (Table 1).

        ``latent_pair_flop`` replaces the FLOP per pair and layer that geometry gives for latent
        attention.  The indexer's projections are no part of N, as in the paper's figures.
        """
        attention = self.attention_flop(context_tokens)
        if latent_pair_flop is not None:
            attention += sum(
                part.layers
                * (latent_pair_flop - part.pair_flop)
                * part.scans[0].seen_tokens(context_tokens)
                for part in self.attention
                if isinstance(part, LatentAttention)
            )
        token_flop = FLOP_PER_PARAMETER * self.active_parameters
        flop = append_tokens * (token_flop + attention + self.indexer_flop(context_tokens))
        return context_tokens * self.kv_bytes_per_token / flop * 1e6

    # Expert parallelism

    @property
    def dispatch_bytes(self) -> float:
        """One token's activation on its way to an expert: FP8 with a 4-byte scale per 128."""
        return self.hidden_size * (1 + 4 / 128) if self.expert_layers else 0.0

    @property
    def combine_bytes(self) -> float:
        """One expert's BF16 result on its way back to the token."""
        return self.hidden_size * 2.0 if self.expert_layers else 0.0
