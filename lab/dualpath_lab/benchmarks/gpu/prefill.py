"""Layerwise prefill with KV streamed from pinned DRAM, compared with loading before computing.

One prompt: ``cached`` tokens with KV in DRAM as Full Blocks, ``append`` tokens to compute.

* *alone*: all KV is in HBM and nothing is sent: the lower bound of the time.
* *load, then compute*: all layers are loaded, then computed, then sent (mode Basic).
* *streamed*: HBM holds a few layers; while one is computed others are loaded and sent.

Copies are queued by the engine's ``DeviceCopier`` in the order of ``engine.layer_stream``, but all
on the device: a send is a copy into this machine's DRAM instead of a transfer to a decode engine,
so the host never waits.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import msgspec
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from dualpath.core.errors import ConfigError
from dualpath.engine.passes.device import Device, DeviceCopier, DeviceEvent
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath_lab.benchmarks.gpu.geometry import StackGeometry
from dualpath_lab.benchmarks.gpu.machine import seconds_of, spread

# ------------------------------------------------------------------------------------------- stack
# A stack of attention layers with random weights and torch's kernels, without an engine.
#
# All layers share one set of weights.  At the measured sizes a layer's weights are many times
# larger than the L2 cache, so sharing saves memory and does not change times.
#
# KV of a layer is contiguous in order of blocks, so that attention reads it in place; engines use
# paged kernels instead.  Latent attention computes keys and values of all tokens from the latent,
# as engines do in prefill; values are padded to the keys' width, which flash attention requires.

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


DRAM = "dram"

#: Maximum difference between streamed and unstreamed results, relative to the largest value.
TOLERANCE = 1e-2


class PrefillCase(msgspec.Struct, frozen=True):
    """Tokens are multiples of the block size; ``layers`` of the geometry's layers are measured."""

    geometry: StackGeometry
    layers: int
    cached: int
    append: int
    feed_forward: bool
    dtype: str
    seed: int


class Prefill:
    """One case with its memory; each of the timed methods is a whole forward pass."""

    def __init__(self, case: PrefillCase, device: Device, torch_device: torch.device) -> None:
        g, dtype = case.geometry, getattr(torch, case.dtype)
        for tokens in (case.cached, case.append):
            if tokens % g.block_tokens:
                raise ConfigError(f"{tokens} tokens: use multiples of {g.block_tokens}")
        self._case = case
        self._device = device
        self._stack = Stack(g, torch_device, dtype, case.seed, feed_forward=case.feed_forward)
        self.block_bytes = g.block_bytes(dtype.itemsize)
        self._hit_blocks = case.cached // g.block_tokens
        self._blocks = (case.cached + case.append) // g.block_tokens
        generator = torch.Generator(torch_device).manual_seed(case.seed + 1)
        self._prompt = torch.randn(
            case.append, g.hidden, generator=generator, device=torch_device, dtype=dtype
        )
        self.dram = self._make_dram(dtype)
        self._hbm = [
            torch.zeros(self._blocks * self.block_bytes, dtype=torch.uint8, device=torch_device)
            for _ in range(case.layers)
        ]
        self._kv = [region.view(dtype).view(-1, g.kv_values) for region in self._hbm]
        self._register(torch_device)

    def _make_dram(self, dtype: torch.dtype) -> RegisteredMemory:
        """Full Blocks of random hit KV, as storage would have delivered them."""
        memory = allocate_registered(self._blocks * self._case.layers * self.block_bytes)
        self._device.pin(memory.address, memory.size_bytes, memory)
        values = torch.from_numpy(memory.array).view(dtype)
        hits = self._hit_blocks * self._case.layers * self.block_bytes // dtype.itemsize
        generator = torch.Generator().manual_seed(self._case.seed + 2)
        values[:hits].normal_(generator=generator)
        return memory

    def _register(self, torch_device: torch.device) -> None:
        copier = self._copier
        copier.register(
            RegionInfo(
                DRAM,
                self.dram.address,
                self.block_bytes,
                self.block_bytes,
                self._blocks * self._case.layers,
            )
        )
        memory = "VRAM" if torch_device.type == "cuda" else "DRAM"
        for index, region in enumerate(self._hbm):
            copier.register(
                RegionInfo(
                    f"hbm.{index}",
                    region.data_ptr(),
                    self.block_bytes,
                    self.block_bytes,
                    self._blocks,
                    memory=memory,
                )
            )

    @property
    def loaded_bytes(self) -> int:
        """Bytes of hit KV per pass."""
        return self._hit_blocks * self._case.layers * self.block_bytes

    @property
    def _copier(self) -> DeviceCopier:
        assert self._device.copier is not None
        return self._device.copier

    # ------------------------------------------------------------------ timed methods

    def alone(self) -> torch.Tensor:
        """Compute with all KV in HBM; ``load_then_compute`` must have run before."""
        hidden = self._prompt
        for layer in range(self._case.layers):
            hidden = self._compute(layer, layer, hidden)
        return hidden

    def load_then_compute(self) -> torch.Tensor:
        """Load all layers, compute, send all new KV."""
        layers = range(self._case.layers)
        start = self._device.record()
        loads = [self._load(layer, layer, start) for layer in layers]
        for event in loads:
            self._device.wait(event)
        hidden = self.alone()
        computed = self._device.record()
        for event in [self._send(layer, layer, computed) for layer in layers]:
            self._device.wait(event)
        return hidden

    def streamed(self, buffers: int) -> torch.Tensor:
        """Load, compute and send layer by layer in ``buffers`` regions of HBM."""
        layers = self._case.layers
        start = self._device.record()
        loads = [self._load(layer, layer, start) for layer in range(min(buffers, layers))]
        sends: list[DeviceEvent] = []
        hidden = self._prompt
        for layer in range(layers):
            if layer >= buffers:  # new KV overwrites what this send reads
                self._device.wait(sends[layer - buffers])
            hidden = self._compute(layer, layer % buffers, hidden, loads[layer])
            sends.append(self._send(layer, layer % buffers, self._device.record()))
            if layer + buffers < layers:
                loads.append(self._load(layer + buffers, layer % buffers, sends[layer]))
        for event in sends[-buffers:]:
            self._device.wait(event)
        return hidden

    # ------------------------------------------------------------------ steps

    def _compute(
        self, layer: int, region: int, hidden: torch.Tensor, loaded: DeviceEvent | None = None
    ) -> torch.Tensor:
        kv = self._kv[region]
        kv[self._case.cached :] = self._stack.new_kv(hidden)
        if loaded is not None:
            self._device.wait(loaded)
        return self._stack.layer(hidden, kv)

    def _load(self, layer: int, region: int, after: DeviceEvent) -> DeviceEvent:
        hits = range(self._hit_blocks)
        slots = self._slots(hits, layer)
        return self._copier.copy(DRAM, slots, f"hbm.{region}", hits, after).event

    def _send(self, layer: int, region: int, after: DeviceEvent) -> DeviceEvent:
        new = range(self._hit_blocks, self._blocks)
        slots = self._slots(new, layer)
        return self._copier.copy(f"hbm.{region}", new, DRAM, slots, after).event

    def _slots(self, blocks: Sequence[int], layer: int) -> list[int]:
        """Return the pieces of one layer; the layers of a slot are adjacent (§A.5)."""
        return [block * self._case.layers + layer for block in blocks]


def measure_prefill(
    case: PrefillCase,
    buffers: Sequence[int],
    device: Device,
    torch_device: torch.device,
    warm_up: int,
    repeats: int,
) -> dict[str, object]:
    """Check that all methods compute and send the same, then time them.

    Raises ``ConfigError`` if a streamed result differs.
    """
    prefill = Prefill(case, device, torch_device)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "load, then compute": prefill.load_then_compute,
        "alone": prefill.alone,
    }
    for count in buffers:
        ways[f"streamed, {count} buffers"] = lambda count=count: prefill.streamed(count)  # type: ignore[misc]
    difference = _largest_difference(prefill, buffers, torch_device)
    if difference > TOLERANCE:
        raise ConfigError(
            f"{case.geometry.name}: a streamed result differs by {difference:.2g} of the largest "
            f"value, more than {TOLERANCE}; KV was wrong, so the times are invalid"
        )
    # Streaming has overwritten regions with other layers.
    prefill.load_then_compute()
    alone = seconds_of(prefill.alone, torch_device, warm_up, repeats)
    times = {"alone": spread(alone)}
    for way, run in ways.items():
        if way != "alone":
            times[way] = spread(seconds_of(run, torch_device, warm_up, repeats))
    return {
        "model": case.geometry.name,
        "layers": case.layers,
        "cached_tokens": case.cached,
        "append_tokens": case.append,
        "feed_forward": case.feed_forward,
        "loaded_bytes": prefill.loaded_bytes,
        "layer_block_bytes": prefill.block_bytes,
        "attention_flops": case.geometry.attention(case.layers).flops(case.cached, case.append),
        "largest_difference": difference,
        "times": times,
    }


def _largest_difference(
    prefill: Prefill, buffers: Sequence[int], torch_device: torch.device
) -> float:
    """Return the difference of streamed hidden states and sent KV from the unstreamed ones."""

    def results(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = run().float().cpu()
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
        dtype = getattr(torch, prefill._case.dtype)
        return hidden, torch.from_numpy(prefill.dram.array.copy()).view(dtype).float()

    expected = results(prefill.load_then_compute)
    worst = 0.0
    for count in buffers:
        new_kv = prefill.dram.array[prefill.loaded_bytes :]
        new_kv[:] = 0
        found = results(lambda count=count: prefill.streamed(count))  # type: ignore[misc]
        for is_there, should_be in zip(found, expected, strict=True):
            off = (is_there - should_be).abs().max() / should_be.abs().max()
            worst = max(worst, float(off))
    return worst
