"""vLLM's own attention on HBM that is NaN wherever nothing was loaded or computed.

A small stack of layers; its attention is vLLM's: the functions that write new KV, call
the connector and read, in vLLM's order, over the transfers of a prefill engine with few layer
buffers.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.engine_harness import ToyCluster
from tests.poisoned_hbm import poison_hbm, skip_wait
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention.attention import (
    Attention,
    unified_attention_with_output,
    unified_kv_cache_update,
)
from vllm.v1.attention.backends import cpu_attn

from dualpath.core.blocks import BlockGeometry, block_keys
from dualpath.core.runs import BlockRun
from dualpath.core.transfers import PrefillTransfer
from dualpath.engine.passes.forward_pass import ForwardPass
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.vllm.connector import DualPathConnector
from dualpath.vllm.metadata import StepMetadata
from dualpath.vllm.profiling import AttentionClock
from dualpath.vllm.worker_side import WorkerSide

BLOCK, LAYERS = 32, 5
HEADS, KV_HEADS, HEAD = 4, 2, 32
WIDTH = HEADS * HEAD
NAMES = [f"model.layers.{number}.attn" for number in range(LAYERS)]
PART_BYTES = KV_HEADS * BLOCK * 2 * HEAD * 4
TOKENS = 5 * BLOCK - 7
#: Chunk blocks never precede the prompt's blocks: data read there belongs to another request.
HBM_BLOCKS = (40, 7, 23, 4, 61)
WINDOWS = {"all tokens": (), "windows": (40, 0, 64, 0, 40)}


class Model:
    """Weights, and the output for a prompt computed without a cache."""

    def __init__(self, windows: Sequence[int]) -> None:
        made = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) / shape[-1] ** 0.5

        self.windows = windows or (0,) * LAYERS
        self.query = [weight(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.kv = [weight(2 * KV_HEADS * HEAD, WIDTH) for _ in range(LAYERS)]
        self.out = [weight(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.prompt = torch.randn(TOKENS, WIDTH, generator=made)

    def projected(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return query, key and value of some tokens."""
        key, value = (x @ self.kv[layer].T).view(len(x), 2, KV_HEADS, HEAD).unbind(1)
        return (x @ self.query[layer].T).view(len(x), HEADS, HEAD), key, value

    def answer(self) -> torch.Tensor:
        """Return the output of all layers for the prompt, with reference attention."""
        x, ahead = self.prompt, torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]
        for layer, window in enumerate(self.windows):
            query, key, value = self.projected(layer, x)
            key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
            scores = torch.einsum("qhc,khc->hqk", query, key) * HEAD**-0.5
            seen = (ahead >= 0) & (ahead < (window or TOKENS))
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            mixed = torch.einsum("hqk,khc->qhc", weights, value).reshape(TOKENS, WIDTH)
            x = x + mixed @ self.out[layer].T
        return x


class Engine:
    """A prefill engine and a decode engine, and the model on vLLM's attention in the former."""

    def __init__(self, model: Model, buffers: int, worker: Any) -> None:
        self._model, self._worker = model, worker
        seen = model.windows if any(model.windows) else ()
        geometry = BlockGeometry(BLOCK, ((PART_BYTES,),) * LAYERS, tuple(seen))
        self.cluster = ToyCluster(geometry=geometry, layer_buffers=buffers)
        self._isa = cpu_attn._get_attn_isa(torch.float32, BLOCK, HEAD, "auto")
        windows = zip(range(LAYERS), model.windows, strict=True)
        self._layers = {NAMES[layer]: self._layer(layer, window) for layer, window in windows}

    def _layer(self, index: int, window: int) -> Any:
        layer: Any = object.__new__(Attention)
        torch.nn.Module.__init__(layer)
        memory = self.cluster.pe.hbm[index % self.cluster.pe.regions]
        shape = (len(memory), KV_HEADS, BLOCK, 2 * HEAD)
        layer.kv_cache = torch.from_numpy(memory).view(torch.float32).view(shape)
        layer.isa, layer._k_scale_float, layer._v_scale_float = self._isa, 1.0, 1.0
        layer.impl = cpu_attn.CPUAttentionBackendImpl(
            HEADS, HEAD, HEAD**-0.5, KV_HEADS, None, window or None, "auto"
        )
        return layer

    def load(self, name: str, pe_hits: int, de_hits: int) -> PrefillTransfer:
        """Read hits of the prompt at either side."""
        self.keys = block_keys(list(range(TOKENS)), BLOCK)
        return self.cluster.load(name, self.keys, TOKENS, pe_hits, de_hits)

    def store(self, transfer: PrefillTransfer) -> None:
        """Store the KV of a prompt's full blocks in the decode engine's buffer."""
        blocks = [self.cluster.de.slot_bytes(slot) for slot in transfer.de_slots]
        pairs = zip(self.keys, blocks, strict=False)
        self.cluster.storage.write(self.keys, [memoryview(block) for _, block in pairs])

    def compute(self, transfer: PrefillTransfer, chunk: BlockRun) -> torch.Tensor:
        """Run one forward pass; return its output for the chunk's tokens."""
        first, end = chunk.first * BLOCK, min(chunk.end * BLOCK, TOKENS)
        part = PrefillChunk(transfer, chunk, HBM_BLOCKS)
        forward = ForwardPass(self.cluster.pe.manager, lambda message: None, [part])
        self._worker._pass = forward
        table = torch.tensor(HBM_BLOCKS)
        tokens = torch.arange(first, end)
        slots = table[tokens // BLOCK] * BLOCK + tokens % BLOCK
        context = ForwardContext(
            no_compile_layers=self._layers,
            attn_metadata=dict.fromkeys(NAMES, self._metadata(first, end, table, slots)),
            slot_mapping=dict.fromkeys(NAMES, slots),
        )
        with override_forward_context(context):
            x = self._layers_of(self._model.prompt[first:end])
        assert forward.finish({}) == {}
        return x

    def _layers_of(self, x: torch.Tensor) -> torch.Tensor:
        for layer, name in enumerate(NAMES):
            query, key, value = self._model.projected(layer, x)
            unified_kv_cache_update(key, value, name)
            mixed = torch.empty_like(query)
            unified_attention_with_output(query, key, value, mixed, name)
            x = x + mixed.reshape(len(x), WIDTH) @ self._model.out[layer].T
        return x

    def _metadata(self, first: int, end: int, table: torch.Tensor, slots: torch.Tensor) -> Any:
        starts = torch.tensor([0, end - first], dtype=torch.int32)
        lengths = torch.tensor([end], dtype=torch.int32)
        plan = cpu_attn.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD,
            seq_lens=lengths,
            dtype=torch.float32,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=False,
        )
        return cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=end - first,
            max_query_len=end - first,
            query_start_loc=starts,
            max_seq_len=end,
            seq_lens=lengths,
            block_table=table.to(torch.int32)[None],
            slot_mapping=slots,
            scheduler_metadata=plan,
        )


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector that vLLM's functions call; its worker has not begun a pass."""
    connector: Any = object.__new__(DualPathConnector)
    connector._connector_metadata = StepMetadata()
    made: Any = object.__new__(WorkerSide)
    connector._worker = made
    made._layers = {name: index for index, name in enumerate(NAMES)}
    made._read_before_hook, made._stopwatch, made._pass = False, None, None
    made._clock = None
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
    return made


def in_chunks(engine: Engine, transfer: PrefillTransfer, *ends: int) -> torch.Tensor:
    firsts = (transfer.hit_blocks, *ends)
    chunks = [BlockRun(first, end - first) for first, end in zip(firsts, ends, strict=False)]
    return torch.cat([engine.compute(transfer, chunk) for chunk in chunks])


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("windows", WINDOWS)
def test_every_chunk_reads_nothing_but_what_was_loaded_or_computed(
    windows: str, buffers: int, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_hbm(monkeypatch.setattr)
    model = Model(WINDOWS[windows])
    engine, right = Engine(model, buffers, worker), model.answer()
    first = engine.load("first", 0, 0)
    torch.testing.assert_close(in_chunks(engine, first, 2, 4, 5), right, rtol=1e-4, atol=1e-4)
    engine.store(first)
    second = engine.load("second", 1, 2)
    found = in_chunks(engine, second, 4, 5)
    torch.testing.assert_close(found, right[3 * BLOCK :], rtol=1e-4, atol=1e-4)
    engine.cluster.close()


@pytest.mark.parametrize("unwaited", range(LAYERS))
def test_one_missing_wait_changes_the_output_of_the_layers(
    unwaited: int, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_hbm(monkeypatch.setattr)
    skip_wait(unwaited, monkeypatch.setattr)
    engine = Engine(Model(()), 2, worker)
    transfer = engine.load("r", 0, 0)
    assert engine.compute(transfer, BlockRun(0, 2)).isfinite().all()
    assert engine.compute(transfer, BlockRun(2, 2)).isnan().all()
    engine.cluster.close()


def test_the_hooks_of_vllms_attention_measure_its_time(worker: Any) -> None:
    clock = worker._clock = AttentionClock(on_gpu=False)
    engine = Engine(Model(()), 2, worker)
    transfer = engine.load("r", 0, 0)
    for predicted_s, first in ((0.5, 0), (0.7, 2)):
        engine.compute(transfer, BlockRun(first, 2))
        clock.pass_over(predicted_s, first, first + 1)
    both = list(clock.take())
    assert [(one.predicted_s, one.start_ns, one.end_ns) for one in both] == [
        (0.5, 0, 1), (0.7, 2, 3),
    ]  # fmt: skip
    assert all(one.measured_s > 0 for one in both)
    assert list(clock.take()) == []
    engine.cluster.close()


def test_the_time_of_a_pass_on_a_gpu_is_known_when_its_last_event_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[Any] = []

    class GpuEvent:
        """An event that the GPU passes 1 ms after the one before it."""

        passed = False

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(self)

        def query(self) -> bool:
            return self.passed

        def elapsed_time(self, later: Any) -> float:
            return float(recorded.index(later) - recorded.index(self))

    monkeypatch.setattr(torch.cuda, "Event", GpuEvent)
    clock = AttentionClock(on_gpu=True)
    for _ in range(2):
        for _ in NAMES:
            clock.begin()
            clock.end()
        clock.pass_over(0.1, 0, 1)
    assert list(clock.take()) == []
    for event in recorded[: 2 * LAYERS]:
        event.passed = True
    (first,) = clock.take()
    assert first.measured_s == pytest.approx(LAYERS * 1e-3)
