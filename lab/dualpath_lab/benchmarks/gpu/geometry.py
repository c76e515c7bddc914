"""Attention stacks to measure: the shapes of released models, and tiny ones for tests on a CPU."""

import msgspec

from dualpath.policy.batching import AttentionGeometry


class StackGeometry(msgspec.Struct, frozen=True):
    """The layers of one model, all equal.

    ``latent`` selects multi-head latent attention: KV of a token is ``kv_values`` = latent and
    rotary values, from which keys and values of all heads are computed.  Otherwise a token has
    ``kv_heads`` keys and values.  ``intermediate`` is the width of a gated feed-forward layer with
    the model's cost per token (for experts: that of the active ones together).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    intermediate: int
    latent: bool = False
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    block_tokens: int = 64

    @property
    def kv_values(self) -> int:
        """Values of KV per token and layer."""
        if self.latent:
            return self.kv_rank + self.rope_dim
        return self.kv_heads * (self.key_dim + self.value_dim)

    def block_bytes(self, value_bytes: int) -> int:
        """Bytes of a Layer Block."""
        return self.block_tokens * self.kv_values * value_bytes

    def attention(self, layers: int) -> AttentionGeometry:
        """Return the cost of this many layers, as counted by the compute quota (§6.2)."""
        return AttentionGeometry.from_heads(layers, self.heads, self.key_dim, self.value_dim)


#: DeepSeek-V3: multi-head latent attention, 8 + 1 active experts of width 2048.
DEEPSEEK = StackGeometry(
    name="deepseek-v3-mla",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=1,
    key_dim=192,
    value_dim=128,
    intermediate=9 * 2048,
    latent=True,
    query_rank=1536,
    kv_rank=512,
    rope_dim=64,
)

#: Qwen2.5-32B: grouped-query attention, dense.
QWEN = StackGeometry(
    name="qwen2.5-32b-gqa",
    layers=64,
    hidden=5120,
    heads=40,
    kv_heads=8,
    key_dim=128,
    value_dim=128,
    intermediate=27648,
)

TINY_MLA = StackGeometry(
    name="tiny-mla",
    layers=5,
    hidden=32,
    heads=4,
    kv_heads=1,
    key_dim=12,
    value_dim=8,
    intermediate=48,
    latent=True,
    query_rank=16,
    kv_rank=16,
    rope_dim=4,
    block_tokens=4,
)

TINY_GQA = StackGeometry(
    name="tiny-gqa",
    layers=5,
    hidden=32,
    heads=4,
    kv_heads=2,
    key_dim=8,
    value_dim=8,
    intermediate=48,
    block_tokens=4,
)

HOPPER_SIZED = (DEEPSEEK, QWEN)
TINY = (TINY_MLA, TINY_GQA)
