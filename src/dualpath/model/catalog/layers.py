"""The kinds of layers a model is made of: bytes of KV, parameters and FLOP of each.

Everything is per layer unless it says otherwise; a multiplication and an addition count as two
FLOP.  Vectors (norms, biases) are left out, below 0.1 ‰ of any model.
"""

from typing import Annotated

import msgspec

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

    A query sees the last ``window_tokens`` keys, 0 for all of them; layers with a window keep no
    more than it.  ``kv_value_bytes`` per stored number.
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
        """The parts of one layer: vLLM keeps key and value of a token side by side."""
        return (self.kv_bytes_per_token,)

    @property
    def attended_bytes(self) -> float:
        """What attention reads of one token that a query sees, in one layer."""
        return self.kv_bytes_per_token

    @property
    def kept_tokens(self) -> int:
        """How many of the last tokens keep their KV, 0 for all."""
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
    def kept_tokens(self) -> int:
        """0: whatever the indexer chooses from, every token keeps its KV."""
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
