"""vLLM's sparse attention calls no connector; the patch calls it before a layer's KV is read."""

import inspect
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.engine_harness import GEOMETRY, ToyCluster, prompt_keys
from tests.vllm_caches import cache_of, loaded_config, two_parts
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.models.deepseek_v32.attention import DeepseekV32Attention
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from dualpath.core.errors import ConfigError
from dualpath.core.runs import BlockRun
from dualpath.engine.passes.forward_pass import ForwardPass
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.vllm.cache_layers import cache_layers, hooked_layers, read_before_hook
from dualpath.vllm.connector import DualPathConnector
from dualpath.vllm.kernel_patches import (
    READER,
    calls_connector,
    calls_connector_first,
    patch_sparse_layers,
    reads_at_one_place,
)
from dualpath.vllm.metadata import StepMetadata
from dualpath.vllm.worker_side import WorkerSide

LAYERS = GEOMETRY.layers
NAMES = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
TOKENS = 3 * GEOMETRY.block_tokens


def toy_kind() -> type:
    """vLLM's class with our kernels; each test gets an unpatched class."""

    class Toy(DeepseekV32Attention):
        def _sparse_indexer_and_attn(
            self, positions, q_c, q_nope, q_pe, index_q_fp8, index_k,
            index_weights_out, kv_c, k_pe, ql_nope, mqa_q, output,
        ) -> None:  # fmt: skip
            output.append(self.layer_name)

    return Toy


def model(kind: type) -> dict[str, Any]:
    layers = {}
    for name in NAMES:
        layer: Any = object.__new__(kind)
        torch.nn.Module.__init__(layer)
        layer.layer_name, layer.kv_cache = name, torch.zeros(1)
        layers[name] = layer
    return layers


def run(layers: dict[str, Any], read: Any) -> None:
    """Compute all layers in a forward pass of vLLM, as their own ``forward`` calls the function."""
    context = ForwardContext(
        no_compile_layers=layers, attn_metadata=dict.fromkeys(layers, object()), slot_mapping={}
    )
    with override_forward_context(context):
        for layer in layers.values():
            getattr(layer, READER)(*[None] * 11, read)


class Reads(list[str]):
    """The layers with KV that was read; ``at`` is called for each at that moment."""

    def __init__(self, at: Any) -> None:
        super().__init__()
        self._at = at

    def append(self, name: str) -> None:
        super().append(name)
        self._at(NAMES.index(name))


@pytest.fixture
def connector(monkeypatch):
    """A connector of a worker that has not begun a pass."""
    made: Any = object.__new__(DualPathConnector)
    made._connector_metadata = StepMetadata()
    made._worker = worker = object.__new__(WorkerSide)
    worker._layers = {name: index for index, name in enumerate(NAMES)}
    worker._read_before_hook, worker._stopwatch, worker._pass = False, None, None
    worker._clock = None
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
    return made


def layers_of(kind: type) -> tuple[Any, Any]:
    specs = two_parts(LAYERS)
    spec = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
    config = loaded_config(model(kind))
    return config, cache_of(list(specs), spec)


def one_pass(connector, layers, at=lambda cluster, layer, keys: None, buffers=2):
    """Load two blocks and compute a third; return the order of reads, and the failures."""
    cluster = ToyCluster(layer_buffers=buffers)
    keys = prompt_keys(TOKENS)
    cluster.store(keys[:2])
    transfer = cluster.load("r", keys, TOKENS, 2, 0)
    part = PrefillChunk(transfer, BlockRun(2, 1), (0, 1, 2))
    forward = ForwardPass(cluster.pe.manager, lambda message: None, [part])
    connector.worker_side._pass = forward
    read = Reads(lambda layer: at(cluster, layer, keys))
    run(layers, read)
    failures = forward.finish({})
    cluster.close()
    return list(read), failures


def test_vllms_own_class_has_the_supported_form():
    assert not calls_connector(toy_kind())
    assert reads_at_one_place(DeepseekV32Attention)
    assert calls_connector(MLAAttention)
    assert not calls_connector_first(MLAAttention)


def test_every_layer_has_its_stored_kv_when_it_reads_and_later_ones_still_load(connector):
    from tests.engine_harness import kv_bytes

    def at(cluster, layer, keys):
        region = cluster.pe.hbm[layer % cluster.pe.regions]
        for block in range(2):
            expected = kv_bytes(keys[block], layer, GEOMETRY.bytes_of(layer))
            assert region[block][: GEOMETRY.bytes_of(layer)].tobytes() == expected

    layers = model(toy_kind())
    patch_sparse_layers(loaded_config(layers))
    patch_sparse_layers(loaded_config(layers))
    read, failures = one_pass(connector, layers, at)
    assert (read, failures) == (NAMES, {})


def test_a_layer_that_does_not_call_the_connector_fails_the_pass(connector):
    _, failures = one_pass(connector, model(toy_kind()))
    assert "layer 0 is computed without" in failures["r"]


def test_a_patched_layer_is_not_loaded_before_it_begins():
    config, cache = layers_of(toy_kind())
    with pytest.raises(ConfigError, match="does not call the connector around"):
        cache_layers(cache, hooked_layers(config))
    patch_sparse_layers(config)
    layers = cache_layers(cache, hooked_layers(config))
    assert [layer.names[0] for layer in layers] == NAMES
    assert not read_before_hook(config, layers)
    others, cache = layers_of(MLAAttention)
    assert read_before_hook(others, cache_layers(cache, hooked_layers(others)))


def test_a_function_with_another_signature_is_left_alone_and_the_model_refused():
    kind = toy_kind()
    setattr(kind, READER, lambda self, positions, everything_else, output: None)
    config, _ = layers_of(kind)
    with pytest.raises(ConfigError, match=f"{NAMES[0]} is a .*Toy.*does not call the connector"):
        patch_sparse_layers(config)
    assert "announced" not in vars(kind)


def test_amds_class_is_refused_by_its_name():
    """It also inherits the known function, and never calls it."""
    from vllm.models.deepseek_v32.amd.rocm import DeepseekV32MLAAttention

    config, _ = layers_of(DeepseekV32MLAAttention)
    with pytest.raises(ConfigError, match=r"amd\.rocm\.DeepseekV32MLAAttention.* on NVIDIA GPUs"):
        patch_sparse_layers(config)
    assert "announced" not in vars(DeepseekV32MLAAttention)


def test_graphs_are_broken_around_the_patched_function(monkeypatch):
    """Otherwise a captured graph would contain only the waits at its capture."""
    from dualpath.vllm import kernel_patches

    broken = []

    def noted(function):
        broken.append(function)
        return function

    monkeypatch.setattr(kernel_patches, "eager_break_during_capture", noted)
    kind = toy_kind()
    original = getattr(kind, READER)
    patch_sparse_layers(loaded_config(model(kind)))
    (outermost,) = broken
    assert getattr(kind, READER) is outermost
    assert inspect.unwrap(outermost) is original
