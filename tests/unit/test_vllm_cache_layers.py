"""DeepSeek-V3.2's latent KV and indexer keys: vLLM's own specs, as two parts of every layer."""

from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm_caches import (
    attending,
    cache_of,
    full_attention,
    loaded_config,
    sliding_window,
    two_parts,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.vllm.cache_layers import (
    cache_layers,
    cache_problems,
    geometry_of,
    hbm_layout,
    hooked_layers,
)
from dualpath.vllm.layerwise_worker import place_in_regions, unaliased_bytes
from dualpath.vllm.worker_side import WorkerSide

LAYERS = 4
MAIN, INDEX = 64 * 656, 64 * 132
MEMORY = 64 << 20


def vllm_config(layout="LBHNC"):
    """The configuration fields that vLLM's grouping of KV cache specs reads."""
    from vllm.config import CacheConfig, VllmConfig

    config = VllmConfig(cache_config=CacheConfig(block_size=64))
    config.cache_config.kv_cache_layout = layout
    return config


@pytest.fixture(scope="module")
def cache():
    """The KV cache groups that vLLM builds from the specs."""
    config = vllm_config()
    groups = kv_cache_utils.get_kv_cache_groups(config, two_parts(LAYERS))
    found = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, MEMORY)
    found.kv_cache_layout = "LBHNC"
    return found


def without_windows(names):
    return dict.fromkeys(names, 0)


def is_attention(names):
    return without_windows(name for name in names if name.endswith(".attn"))


def layers_of(cache):
    names = [name for group in cache.kv_cache_groups for name in group.layer_names]
    return cache_layers(cache, is_attention(names))


def test_vllm_puts_both_into_one_group_and_we_into_one_layer(cache):
    (group,) = cache.kv_cache_groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    layers = layers_of(cache)
    assert [layer.part_bytes for layer in layers] == [(MAIN, INDEX)] * LAYERS
    assert [layer.names[0] for layer in layers] == [
        f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)
    ]
    assert all(layer.read_before_hook for layer in layers)
    geometry = geometry_of(layers, 64)
    assert geometry.full_block_bytes == LAYERS * (MAIN + INDEX)
    assert cache_problems(Role.PREFILL, loaded_config({}), cache) == []


def test_layers_without_an_indexer_have_one_part():
    specs = two_parts(LAYERS, without_indexer=(1, 3))
    spec = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
    layers = layers_of(cache_of(list(specs), spec))
    assert [layer.part_bytes for layer in layers] == [(MAIN, INDEX), (MAIN,)] * 2


def views(tensors, blocks, pages):
    """Each layer's byte tensor at its offset, as vLLM's model runners allocate it."""
    memory = torch.zeros(tensors[0].size, dtype=torch.uint8)
    return memory, {
        tensor.layers[0]: torch.as_strided(
            memory,
            (blocks, pages[tensor.layers[0]]),
            (tensor.block_stride, 1),
            tensor.offset,
        )
        for tensor in tensors
    }


@pytest.mark.parametrize("buffers", [1, 2, 3, LAYERS])
def test_each_part_has_layer_buffers_of_its_own(cache, buffers):
    """Tensors fit into the available memory, and blocks of different parts do not overlap."""
    pages = {name: two_parts(LAYERS)[name].page_size_bytes for name in two_parts(LAYERS)}
    config = vllm_config()
    seen = kv_cache_utils.get_kv_cache_config_from_groups(
        config, cache.kv_cache_groups, unaliased_bytes(MEMORY, pages, buffers)
    )
    placed = place_in_regions(seen.kv_cache_tensors, seen.num_blocks, buffers)
    assert MEMORY - buffers * (MAIN + INDEX) < placed[0].size <= MEMORY
    memory, caches = views(placed, seen.num_blocks, pages)
    layers = layers_of(seen)
    geometry = geometry_of(layers, 64)
    parts = [[caches[name] for name in layer.names] for layer in layers]
    layout = hbm_layout(parts, seen.num_blocks, geometry)
    assert len(layout.memories) == 2 * buffers
    spans = sorted(
        (region.base_address, region.base_address + region.stride_bytes * region.pieces)
        for region in layout.memories
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] <= memory.data_ptr() + placed[0].size
    for layer, (main, index) in enumerate(layout.layers):
        assert (main.region.piece_bytes, index.region.piece_bytes) == (MAIN, INDEX)
        assert layout.layers[layer % buffers] == (main, index)


def test_blocks_that_hold_all_layers_side_by_side_are_refused():
    config = vllm_config("BLHNC")
    groups = kv_cache_utils.get_kv_cache_groups(config, two_parts(LAYERS))
    found = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, MEMORY)
    found.kv_cache_layout = "BLHNC"
    (problem,) = cache_problems(Role.DECODE, loaded_config({}), found)
    assert "layout BLHNC" in problem


def test_layers_are_counted_as_the_model_does_whatever_order_vllm_names_them_in():
    names = [f"model.layers.{n}.self_attn.attn" for n in (2, 10, 0, 1)]
    layers = cache_layers(cache_of(names, full_attention(32)), without_windows(names))
    assert [layer.names for layer in layers] == [
        (f"model.layers.{n}.self_attn.attn",) for n in (0, 1, 2, 10)
    ]
    assert not any(layer.read_before_hook for layer in layers)


@pytest.mark.parametrize(("lookahead_tokens", "again_tokens"), [(0, 0), (1, 0), (3, 2)])
def test_both_roles_use_the_windows_of_the_layers(lookahead_tokens, again_tokens):
    """A PE has one group for all layers and does not list draft layers; a DE does."""
    names = [f"model.layers.{n}.self_attn.attn" for n in range(3)]
    layers = {names[0]: attending(100), names[1]: attending(None), names[2]: attending(100)}
    images = attending(100)
    images.use_mm_prefix = True
    config = loaded_config(layers, lookahead_tokens=lookahead_tokens)
    apart = cache_of(names[1:2], full_attention(32), names[::2], sliding_window(32, 100))
    made = [
        geometry_of(cache_layers(cache, hooked_layers(config)), 32)
        for cache in (cache_of(names, full_attention(32)), apart)
    ]
    window = 100 + again_tokens
    assert made[0] == made[1]
    assert made[0].layer_windows == (window, 0, window)
    everywhere = loaded_config({name: images for name in names})
    assert hooked_layers(everywhere) == dict.fromkeys(names, 0)


def test_a_cache_without_connector_calls_is_refused():
    names = ["model.layers.0.attn", "model.layers.1.sparse"]
    with pytest.raises(
        ConfigError, match=r"not call the connector around model\.layers\.1\.sparse"
    ):
        cache_layers(cache_of(names, full_attention(32)), without_windows(names[:1]))
    both = ["model.layers.0.attn", "model.layers.0.indexer"]
    with pytest.raises(ConfigError, match="in several KV cache groups"):
        cache_layers(
            cache_of(both[:1], full_attention(32), both[1:], sliding_window(32, 64)),
            without_windows(both[:1]),
        )


# ------------------------------------------------------------------ when a layer must be there


class Pass:
    """A forward pass that records which layers are waited for."""

    def __init__(self):
        self.calls = []

    def wait_loaded(self, layer):
        self.calls.append(f"loaded {layer}")

    def computed(self, layer):
        self.calls.append(f"computed {layer}")


def computed_by(layers):
    """The waits of a worker while it computes a model with layers that read KV before the call."""
    worker, asked = cast("Any", object.__new__(WorkerSide)), Pass()
    worker._pass, worker._stopwatch, worker._clock = asked, None, None
    worker._layers = {layer.names[0]: n for n, layer in enumerate(layers)}
    worker._read_before_hook = any(layer.read_before_hook for layer in layers)
    worker._wait_for_early_read(0)
    for layer in layers:
        asked.calls.append("read")
        worker.wait_loaded(layer.names[0])
        worker.computed(layer.names[0])
    return asked.calls


def test_a_layer_with_an_indexer_that_reads_first_is_loaded_before_it_begins(cache):
    calls = computed_by(layers_of(cache))
    assert calls[:6] == ["loaded 0", "read", "loaded 0", "computed 0", "loaded 1", "read"]
    reads = [n for n, call in enumerate(calls) if call == "read"]
    assert all(calls[n - 1] == f"loaded {layer}" for layer, n in enumerate(reads))


def test_other_layers_are_awaited_as_late_as_possible():
    names = [f"model.layers.{n}.self_attn.attn" for n in range(2)]
    calls = computed_by(cache_layers(cache_of(names, full_attention(32)), without_windows(names)))
    assert calls == ["read", "loaded 0", "computed 0", "read", "loaded 1", "computed 1"]


def test_the_scheduler_checks_transfers_with_the_geometry_that_the_worker_reports():
    """vLLM reports one of the two caches to its scheduler, as if all layers used it."""
    from tests.unit.test_vllm_hooks import GROUPS, SETTINGS

    from dualpath.core.blocks import BlockGeometry
    from dualpath.vllm.connector import DualPathConnector
    from dualpath.vllm.metadata import WorkerFacts
    from dualpath.vllm.scheduler_side import SchedulerSide

    guess = BlockGeometry.uniform(layers=8, block_tokens=64, layer_block_bytes=MAIN)
    true = BlockGeometry(64, ((MAIN, INDEX),) * LAYERS)
    settings = msgspec.structs.replace(SETTINGS, buffer_bytes=10 * true.full_block_bytes)
    connector = object.__new__(DualPathConnector)
    connector._scheduler, connector.costs = SchedulerSide(settings, guess, GROUPS), None
    assert connector._scheduler._checks._own_slots < 10
    connector.set_xfer_handshake_metadata({0: WorkerFacts(true, None)})
    assert connector._scheduler._checks._own_slots == 10
