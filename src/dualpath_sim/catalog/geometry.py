"""A model's geometry, and the KV-cache and computation that follow from it (paper §3, Table 1).

Bytes and FLOP follow from dimensions; only ``prefill_efficiency`` is fitted.
The cache-compute ratio of Table 1 is, for a prompt of ``append`` new tokens behind ``context``
stored ones,

    context · K / (append · (2N + Σ over layers of pair FLOP · keys seen))

with K the KV bytes per token and N the active parameters without the embedding.
"""

from typing import Annotated

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError
from dualpath_sim.catalog.gpu import Share

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Size = Annotated[float, msgspec.Meta(gt=0, le=1 << 20)]

#: Gate, up and down projection of a feed-forward layer.
FEED_FORWARD_MATRICES = 3


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
    only these.  ``kv_value_bytes`` per stored number.
    """

    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    kv_value_bytes: Size
    window_tokens: CountOrZero = 0

    @property
    def kv_bytes_per_token(self) -> float:
        """Key and value of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_value_bytes

    @property
    def part_bytes_per_token(self) -> tuple[float, ...]:
        """The parts of one layer: vLLM stores key and value of a token side by side."""
        return (self.kv_bytes_per_token,)

    @property
    def attended_bytes(self) -> float:
        """What attention reads of one token that a query sees, in one layer."""
        return self.kv_bytes_per_token

    @property
    def stored_tokens(self) -> int:
        """How many of the last tokens have stored KV, 0 for all."""
        return self.window_tokens

    @property
    def pair_flop(self) -> int:
        """QK and PV of one query with one key in one layer."""
        return 4 * self.heads * self.head_dim

    def seen_tokens(self, context_tokens: int) -> int:
        """Keys a query attends to behind ``context_tokens`` of them."""
        return min(context_tokens, self.window_tokens) if self.window_tokens else context_tokens

    def parameters(self, hidden_size: int) -> int:
        """Projections of one layer: Q, K, V and output."""
        return 2 * hidden_size * self.head_dim * (self.heads + self.kv_heads)

    def slices(self, gpus: int) -> int:
        """Return into how many slices ``gpus`` GPUs of an engine cut KV: whole heads."""
        return min(gpus, self.kv_heads)

    def rank_parameters(self, hidden_size: int, gpus: int) -> float:
        """Return what of ``parameters`` one of an engine's GPUs holds."""
        held = self.heads / gpus + self.kv_heads / self.slices(gpus)
        return 2 * hidden_size * self.head_dim * held


class Indexer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The lightning indexer of DeepSeek sparse attention: it scores all keys, ``top_tokens`` stay.

    ``key_bytes`` are stored per token and layer for its key, in a part beside the latent's.  The
    paper's figures leave them out; an engine stores and moves them, which is ``counted``.
    """

    heads: Count
    head_dim: Count
    top_tokens: Count
    key_bytes: Count
    counted: bool = False


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

    @property
    def window_tokens(self) -> int:
        """Most keys a query attends to, 0 for all."""
        return self.indexer.top_tokens if self.indexer else 0

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
        indexer = self.indexer
        return (latent, indexer.key_bytes) if indexer and indexer.counted else (latent,)

    @property
    def attended_bytes(self) -> float:
        """What attention reads of one token that a query sees, in one layer: the latent's part."""
        return self.part_bytes_per_token[0]

    @property
    def stored_tokens(self) -> int:
        """0: every token has stored KV, since the indexer chooses from all."""
        return 0

    @property
    def pair_flop(self) -> int:
        """Absorbed form: QK over latent and rotary part, PV over the latent, in one layer."""
        return 2 * self.heads * (2 * self.kv_rank + self.rope_dim)

    def seen_tokens(self, context_tokens: int) -> int:
        """Keys a query attends to behind ``context_tokens`` of them."""
        return min(context_tokens, self.window_tokens) if self.window_tokens else context_tokens

    def parameters(self, hidden_size: int) -> int:
        """Projections of one layer: Q (down and up), KV down and up, output; no indexer."""
        query_dim = self.heads * (self.nope_dim + self.rope_dim)
        if self.query_rank:
            query = self.query_rank * (hidden_size + query_dim)
        else:
            query = hidden_size * query_dim
        down = hidden_size * (self.kv_rank + self.rope_dim)
        up = self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        return query + down + up + self.heads * self.value_dim * hidden_size

    def slices(self, gpus: int) -> int:
        """Return 1: every one of an engine's ``gpus`` needs the whole latent."""
        return 1

    def rank_parameters(self, hidden_size: int, gpus: int) -> float:
        """Return what of ``parameters`` one of an engine's GPUs holds: all down-projections."""
        down = hidden_size * (self.kv_rank + self.rope_dim + self.query_rank)
        return down + (self.parameters(hidden_size) - down) / gpus

    def indexer_parameters(self, hidden_size: int) -> int:
        """Projections of one layer's indexer: queries, key and head weights."""
        if self.indexer is None:
            return 0
        query_input = self.query_rank or hidden_size
        queries = query_input * self.indexer.heads * self.indexer.head_dim
        return queries + hidden_size * (self.indexer.head_dim + self.indexer.heads)

    @property
    def indexer_pair_flop(self) -> int:
        """Score of one query with one key in one layer."""
        return 2 * self.indexer.heads * self.indexer.head_dim if self.indexer else 0


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

    ``shared_experts`` of the same size work on every token.  The router sends a token to at most
    ``routed_nodes`` nodes (DeepSeek's node-limited routing), 0 for no limit.
    """

    layers: Count
    experts: Count
    active_experts: Count
    intermediate_size: Count
    shared_experts: CountOrZero = 0
    routed_nodes: CountOrZero = 0

    def expert_parameters(self, hidden_size: int) -> int:
        """Of one expert of one layer."""
        return FEED_FORWARD_MATRICES * hidden_size * self.intermediate_size

    def replicated_parameters(self, hidden_size: int) -> int:
        """Router and shared experts of one layer, which every GPU holds."""
        shared = self.shared_experts * self.expert_parameters(hidden_size)
        return hidden_size * self.experts + shared


Attention = GroupedQueryAttention | LatentAttention
FeedForward = DenseFeedForward | ExpertFeedForward


FLOP_PER_PARAMETER = 2


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
            part.layers * part.kv_bytes_per_token
            for part in self.attention
            if not part.stored_tokens
        )

    @property
    def kv_bytes_per_token_all_layers(self) -> float:
        """KV of one token over all layers: what engines store of every block.

        Layers with a sliding window are stored like others; the paper's ratios leave them out.
        """
        return sum(part.layers * part.kv_bytes_per_token for part in self.attention)

    def block_geometry(self, block_tokens: int) -> BlockGeometry:
        """Return blocks of all layers, part by part, as engines store and move them.

        Layers come run by run, not in the order in which the model has them.
        """
        parts: list[tuple[int, ...]] = []
        windows: list[int] = []
        for run in self.attention:
            sizes = tuple(round(size * block_tokens) for size in run.part_bytes_per_token)
            parts += [sizes] * run.layers
            windows += [run.stored_tokens] * run.layers
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
            part.layers * part.indexer_parameters(self.hidden_size)
            for part in self.attention
            if isinstance(part, LatentAttention)
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
            kv_heads = part.heads if isinstance(part, LatentAttention) else part.kv_heads
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
            shared = part.shared_experts / gpus
            experts = (routed + shared) * part.expert_parameters(self.hidden_size)
            held += part.layers * (experts + self.hidden_size * part.experts)
        return held * self.expert_value_bytes

    # Computation

    def attention_flop(self, context_tokens: int) -> int:
        """QK and PV of one query behind ``context_tokens`` keys, over all layers."""
        return sum(
            part.layers * part.pair_flop * part.seen_tokens(context_tokens)
            for part in self.attention
        )

    def indexer_flop(self, context_tokens: int) -> int:
        """Scores of one query against ``context_tokens`` keys, over all layers."""
        return context_tokens * sum(
            part.layers * part.indexer_pair_flop
            for part in self.attention
            if isinstance(part, LatentAttention)
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
                part.layers * (latent_pair_flop - part.pair_flop) * part.seen_tokens(context_tokens)
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
