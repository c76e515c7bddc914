"""Determines a prefill engine's pass costs: from a file, from the cache, or by timing passes."""

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import vllm
from vllm.platforms import current_platform

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.rates import Rate, RateOrigin
from dualpath.engine.cache_directory import cache_directory
from dualpath.engine.settings import PROFILE_AUTO, PROFILE_OFF, EngineSettings
from dualpath.policy.batching import AttentionGeometry
from dualpath.vllm.costs_cache import STARTS, CachedCosts, CostsCache
from dualpath.vllm.pass_costs import (
    PassCosts,
    TimedPass,
    fitted_attention,
    from_passes,
    read_file,
    rough_attention,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)


class FoundCosts(msgspec.Struct, frozen=True):
    """``costs`` and their origin; cached costs were measured ``age_s`` seconds ago."""

    costs: PassCosts
    origin: RateOrigin
    age_s: float | None = None

    @property
    def rate(self) -> Rate:
        """Prompt tokens per second."""
        return Rate(self.costs.prefill_tokens_per_s, self.origin, self.age_s)


def needs_costs(settings: EngineSettings) -> bool:
    """Whether an engine needs its costs: a PE in a mode with compute quota and load balancing."""
    wanted = settings.profile != PROFILE_OFF
    return wanted and settings.role is Role.PREFILL and settings.mode.compute_quota


def attention_geometry(config: "VllmConfig") -> AttentionGeometry:
    """Return attention's FLOP as a function of tokens, assuming plain multi-head attention."""
    model, parallel = config.model_config, config.parallel_config
    head_size = model.get_head_size()
    return AttentionGeometry.from_heads(
        layers=model.get_num_layers(parallel),
        query_heads=model.get_num_attention_heads(parallel),
        key_dimension=head_size,
        value_dimension=head_size,
    )


def find_costs(
    settings: EngineSettings,
    config: "VllmConfig",
    namespace: StoreNamespace,
    time_passes: Callable[[], Sequence[TimedPass]],
    now_s: float,
) -> FoundCosts | None:
    """Return an engine's costs and their origin; None if passes cannot be timed.

    ``now_s`` is Unix time.  Raises ``ConfigError`` if the file is not one of ``dualpath profile``,
    or if vLLM fails.
    """
    geometry = attention_geometry(config)
    if settings.profile != PROFILE_AUTO:
        return FoundCosts(read_file(settings.profile, geometry), RateOrigin.FILE)
    cache = CostsCache(cache_directory(), _of(settings, config, namespace))
    found = cache.load(now_s)
    if found is not None and found.starts >= STARTS:
        return _from_cache(found, now_s, cache)
    passes = time_passes()
    limit = config.model_config.max_model_len
    try:
        costs = from_passes(passes, geometry, fitted_attention(passes, geometry), limit)
        best = cache.store(costs, now_s)
        if best.measured_s != now_s:
            return _from_cache(best, now_s, cache)
    except ConfigError as unfit:
        if found is not None:
            return _from_cache(found, now_s, cache)
        try:
            costs = from_passes(passes, geometry, rough_attention(passes, geometry), limit)
        except ConfigError as error:
            log.warning("the speed of this engine cannot be measured: %s", error)
            return None
        log.warning("pass costs are estimates, measured again at the next start: %s", unfit)
    log.info("pass costs measured over %d passes, %s: %s", len(passes), cache.file, costs)
    return FoundCosts(costs, RateOrigin.MEASURED)


def _from_cache(found: CachedCosts, now_s: float, cache: CostsCache) -> FoundCosts:
    age_s = now_s - found.measured_s
    log.info(
        "pass costs were measured %.1f h ago, the fastest of %d starts, %s: %s",
        age_s / 3600, found.starts, cache.file, found.costs,
    )  # fmt: skip
    return FoundCosts(found.costs, RateOrigin.REMEMBERED, age_s)


def _of(
    settings: EngineSettings, config: "VllmConfig", namespace: StoreNamespace
) -> dict[str, str]:
    """Return everything that the time of a pass depends on, by name."""
    return {
        "namespace": msgspec.json.encode(namespace).decode(),
        "device": _device(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "software": f"vLLM {vllm.__version__}, torch {torch.__version__}",
        "compilation": f"{config.compilation_config.mode}, "
        f"{config.compilation_config.cudagraph_mode}",
        "mode": settings.mode.value,
        "layer_buffers": str(settings.layer_buffers),
        "ranks": str(config.parallel_config.tensor_parallel_size),
        "max_model_len": str(config.model_config.max_model_len),
        "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
    }


def _device() -> str:
    """Return the device's name, for CPUs from /proc/cpuinfo because vLLM only returns "cpu"."""
    name = str(current_platform.get_device_name())
    if current_platform.is_cpu():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
            return models[0] if models else name
    return name
