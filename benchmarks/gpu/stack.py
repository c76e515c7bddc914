"""A stack of attention layers with random weights and torch's kernels, without an engine.

All layers share one set of weights.  At the measured sizes a layer's weights are many times larger
than the L2 cache, so sharing saves memory and does not change times.

KV of a layer is contiguous in order of blocks, so that attention reads it in place; engines use
paged kernels instead.  Latent attention computes keys and values of all tokens from the latent, as
engines do in prefill; values are padded to the keys' width, which flash attention requires.
"""

import math
from contextlib import nullcontext

import torch
from benchmarks.gpu.geometry import StackGeometry
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class Stack:
    """``layer`` computes one layer of ``append`` tokens after those in its KV memory."""

    def __init__(
        self,
        geometry: StackGeometry,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        *,
        feed_forward: bool,
    ) -> None:
        self.geometry = geometry
        self._feed_forward = feed_forward
        generator = torch.Generator(device).manual_seed(seed)

        def weight(outputs: int, inputs: int) -> torch.Tensor:
            values = torch.randn(outputs, inputs, generator=generator, device=device, dtype=dtype)
            return values / math.sqrt(inputs)

        g = geometry
        query_values = g.heads * g.key_dim
        self._into_kv = weight(g.kv_values, g.hidden)
        self._output = weight(g.hidden, g.heads * g.value_dim)
        if g.latent:
            self._query_down = weight(g.query_rank, g.hidden)
            self._query = weight(query_values, g.query_rank)
            self._nope_dim = g.key_dim - g.rope_dim
            self._out_of_latent = weight(g.heads * (self._nope_dim + g.value_dim), g.kv_rank)
        else:
            self._query = weight(query_values, g.hidden)
        if feed_forward:
            self._gate_up = weight(2 * g.intermediate, g.hidden)
            self._down = weight(g.hidden, g.intermediate)

    def new_kv(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the KV of these tokens, [tokens, kv_values]."""
        return functional.linear(_norm(hidden), self._into_kv)

    def layer(self, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states; ``kv`` [tokens, kv_values] ends with these tokens'."""
        attended = self._attend(_norm(hidden), kv)
        hidden = hidden + functional.linear(attended, self._output)
        if not self._feed_forward:
            return hidden
        gate, up = functional.linear(_norm(hidden), self._gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, self._down)

    def _attend(self, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        g = self.geometry
        append, tokens = hidden.shape[0], kv.shape[0]
        queries = functional.linear(hidden, self._query_down) if g.latent else hidden
        query = functional.linear(queries, self._query).view(append, g.heads, g.key_dim)
        key, value = self._expand(kv) if g.latent else self._split(kv)
        heads_first = [part.transpose(0, 1).unsqueeze(0) for part in (query, key, value)]
        # On a GPU an error is better than a kernel that writes all scores to HBM.
        kernels = sdpa_kernel(_KERNELS) if hidden.is_cuda else nullcontext()
        with kernels:
            attended = functional.scaled_dot_product_attention(
                heads_first[0],
                heads_first[1],
                heads_first[2],
                attn_mask=causal_lower_right(append, tokens),
                enable_gqa=key.shape[1] != g.heads,
            )
        return attended[0, :, :, : g.value_dim].transpose(0, 1).reshape(append, -1)

    def _split(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = self.geometry
        both = kv.view(kv.shape[0], 2, g.kv_heads, g.key_dim)
        return both[:, 0], both[:, 1]

    def _expand(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = self.geometry
        tokens = kv.shape[0]
        latent, rope = kv.split([g.kv_rank, g.rope_dim], dim=-1)
        heads = functional.linear(latent, self._out_of_latent).view(tokens, g.heads, -1)
        nope, value = heads.split([self._nope_dim, g.value_dim], dim=-1)
        key = torch.cat((nope, rope.unsqueeze(1).expand(tokens, g.heads, g.rope_dim)), dim=-1)
        return key, functional.pad(value, (0, g.key_dim - g.value_dim))


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:])
