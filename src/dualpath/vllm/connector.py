"""The vLLM connector: a façade over ``SchedulerSide`` and ``WorkerSide``.

Use it with

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "DualPathConnector",
        "kv_role": "kv_both", "kv_connector_extra_config": {"role": "prefill",
        "router": "tcp://10.0.0.1:5700", "storage": "/mnt/kv"}}'

The keys of ``kv_connector_extra_config`` are those of ``dualpath.engine.settings``; the other
arguments that an engine needs are listed in ``engine_arguments``.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.settings import EngineSettings
from dualpath.vllm.cache_layers import (
    KV_LAYOUT,
    cache_groups,
    cache_layers,
    cache_problems,
    geometry_of,
    hooked_layers,
    max_drafted_prompt_tokens,
)
from dualpath.vllm.core_requests import answer_for_requests
from dualpath.vllm.drain_on_sigterm import forward_drain_signal
from dualpath.vllm.engine_arguments import (
    HASH_ALGORITHM,
    PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    engine_arguments,
    engine_settings,
    engine_values,
    join_vllm_logging,
)
from dualpath.vllm.kernel_patches import patch_sparse_layers
from dualpath.vllm.metadata import HeldBlocksMetadata, StepMetadata, WorkerFacts
from dualpath.vllm.model_identity import adapter_problems
from dualpath.vllm.parallel_ranks import engine_id_of_rank, group_problems, place_of, slices_of
from dualpath.vllm.pass_costs import PassCosts
from dualpath.vllm.receiving_area import receiving_blocks
from dualpath.vllm.scheduler_side import SchedulerSide
from dualpath.vllm.weight_updates import watch_trainers
from dualpath.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from dualpath.vllm.kv_events import ConnectorEvents


class DualPathConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefill or decode engine of a DualPath cluster."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_logging()
        self.settings = settings_of(vllm_config)
        check_engine_config(vllm_config, self.settings, kv_cache_config)
        #: Costs of forward passes for the compute quota, None until the worker reports them.
        self.costs: PassCosts | None = None
        self._scheduler: SchedulerSide | None = None
        #: Events from the worker that vLLM has not taken yet.
        self._kv_events: list[KVCacheEvent] = []
        self._worker: WorkerSide | None = None
        group = kv_cache_config.kv_cache_groups[0]
        # A block holds KV of the whole model; a page of this rank is a slice of it.
        slices = slices_of(vllm_config, kv_cache_config)
        groups = cache_groups(kv_cache_config, vllm_config.model_config.max_model_len)
        if role == KVConnectorRole.SCHEDULER:
            # An estimate if layers differ: vLLM's scheduler has the spec of only one of them.
            geometry = BlockGeometry.uniform(
                layers=len(group.layer_names),
                block_tokens=group.kv_cache_spec.block_size,
                layer_block_bytes=group.kv_cache_spec.page_size_bytes * slices,
            )
            most = max_drafted_prompt_tokens(vllm_config)
            self._scheduler = SchedulerSide(self.settings, geometry, groups, most)
            answer_for_requests()
            if self.settings.rollouts:
                watch_trainers(self)
            parallel = vllm_config.parallel_config
            if parallel.world_size * parallel.data_parallel_size > 1:
                forward_drain_signal()  # Workers are separate processes.
        else:
            patch_sparse_layers(vllm_config)
            layers = cache_layers(kv_cache_config, hooked_layers(vllm_config))
            geometry = geometry_of(layers, group.kv_cache_spec.block_size, slices)
            blocks = kv_cache_config.num_blocks
            place = place_of(vllm_config, kv_cache_config)
            self._worker = WorkerSide(
                self.settings, vllm_config, geometry, blocks, layers, groups, *place
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: buffers outlive a preempted prefill, so preemption loses no KV."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether this is a PE: its per-layer hooks must run between graph pieces."""
        return engine_values(extra_config, os.environ).get("role") == Role.PREFILL.value

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str:
        """Return the wanted layout; a backend may not have it, so ``cache_checks`` checks."""
        return KV_LAYOUT

    # ------------------------------------------------------------------ scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """See ``SchedulerSide.bind_block_pool``."""
        self.scheduler_side.bind_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See ``SchedulerSide.matched_tokens``."""
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """See ``SchedulerSide.blocks_allocated``."""
        self.scheduler_side.blocks_allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """See ``SchedulerSide.hit_sources``."""
        return self.scheduler_side.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See ``SchedulerSide.build``."""
        return self.scheduler_side.build(scheduler_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once; ``HeldBlocks`` holds blocks that may be written."""
        self.scheduler_side.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished``."""
        self.scheduler_side.finished(request)
        return False, None

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See ``SchedulerSide.update_held_blocks``."""
        changes = connector_output.kv_connector_worker_meta
        if isinstance(changes, HeldBlocksMetadata):
            self.scheduler_side.update_held_blocks(changes)
        if connector_output.kv_cache_events is not None:
            self._kv_events += connector_output.kv_cache_events.get_all_events()

    def take_events(self) -> "Sequence[KVCacheEvent]":
        """Return the events of blocks outside HBM, which vLLM publishes with its own."""
        taken, self._kv_events = self._kv_events, []
        return taken

    def has_pending_push_work(self) -> bool:
        """See ``SchedulerSide.needs_step``; called when vLLM has no request to schedule."""
        return self.scheduler_side.needs_step

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Receive the block geometry and pass costs from this engine's worker."""
        for facts in metadata.values():
            if isinstance(facts, WorkerFacts):
                self.scheduler_side.set_geometry(facts.geometry)
                self.costs = self.costs or facts.costs

    # ------------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See ``WorkerSide.register``."""
        self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """Return the facts that the scheduler's connector needs from the worker."""
        return WorkerFacts(self.worker_side.geometry, self.worker_side.costs)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start this step's transfers.

        This is not done in ``start_load_kv``, because vLLM calls that one after the forward pass
        unless a request with a synchronous hit was added in the same step.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self.worker_side.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing: ``bind_connector_metadata`` has started the transfers."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See ``WorkerSide.wait_loaded``."""
        self.worker_side.wait_loaded(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - vLLM's signature
        **kwargs: Any,  # noqa: ANN401 - vLLM's signature
    ) -> None:
        """See ``WorkerSide.computed``."""
        self.worker_side.computed(layer_name)

    def wait_for_save(self) -> None:
        """See ``WorkerSide.end_step``."""
        self.worker_side.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return finished and failed H2D copies; vLLM fails the latter and the router retries."""
        over, failed = self.worker_side.take_copied()
        return KVConnectorTransferResults(finished_recving=over, failed_recving=failed)

    def get_kv_connector_kv_cache_events(self) -> "ConnectorEvents | None":
        """See ``WorkerSide.take_kv_events``."""
        return self.worker_side.take_kv_events()

    def build_connector_worker_meta(self) -> HeldBlocksMetadata | None:
        """See ``WorkerSide.take_held_blocks``."""
        return self.worker_side.take_held_blocks()

    def shutdown(self) -> None:
        """Leave the cluster."""
        if self._worker is not None:
            self._worker.close()

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's half of the connector; the worker's connector has none."""
        assert self._scheduler is not None, "called on the worker's connector"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        """The worker's half of the connector; the scheduler's connector has none."""
        assert self._worker is not None, "called on the scheduler's connector"
        return self._worker


def settings_of(config: "VllmConfig") -> EngineSettings:
    """Return this engine's settings; raises ``ConfigError`` for unknown or invalid ones."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    settings = engine_settings(transfer.kv_connector_extra_config, os.environ)
    name = engine_id_of_rank(settings.engine_id, config.parallel_config)
    return msgspec.structs.replace(settings, engine_id=name)


def check_engine_config(
    config: "VllmConfig", settings: EngineSettings, cache: "KVCacheConfig"
) -> None:
    """Raise ``ConfigError`` for vLLM settings under which KV could be wrong."""
    problems = cache_problems(settings.role, config, cache)
    problems += _model_problems(config)
    problems += _rollout_problems(config, settings)
    problems += adapter_problems(config, settings)
    problems += _parallel_problems(config.parallel_config)
    problems += _receiving_problems(config, settings, cache)
    if settings.two_leg_scheduler and config.parallel_config.data_parallel_size > 1:
        problems.append(
            f"two_leg_scheduler is {settings.two_leg_scheduler} in a data-parallel group: its "
            "server would not know which rank a leg is for; leave it out"
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        problems.append(
            f"hash algorithm {algorithm}; add --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        problems.append(
            f"PYTHONHASHSEED is {seed}: vLLM derives block keys from it that differ from those of "
            "the router and of other engines; unset it"
        )
    if settings.role is Role.PREFILL:
        problems += _prefill_problems(config, settings)
    if problems:
        raise ConfigError(
            f"engine {settings.engine_id} cannot join a DualPath cluster: "
            + "; ".join(problems)
            + f". Arguments that a {settings.role} engine needs: "
            + " ".join(argument.typed for argument in engine_arguments(settings))
            + f"; the vLLM plugin {PLUGIN!r} adds missing ones, if dualpath is installed and "
            "VLLM_PLUGINS allows it"
        )


def _model_problems(config: "VllmConfig") -> list[str]:
    """Describe what makes the KV of a block depend on more than the tokens of its key."""
    model = config.model_config
    found = {
        "a diffusion model: its KV depends on later tokens": model.is_diffusion,
        "an encoder-decoder model: its KV depends on the encoder's input": (
            model.is_encoder_decoder
        ),
    }
    return [problem for problem, there in found.items() if there]


def _rollout_problems(config: "VllmConfig", settings: EngineSettings) -> list[str]:
    """Describe settings by which weights change unnoticed, or cannot change."""
    if not settings.rollouts:
        transfers = config.weight_transfer_config is not None
        return [
            "weight_transfer_config is set: weights would change while KV computed with the former "
            "weights is stored; set rollouts, or leave it out"
        ] * transfers
    if not envs.VLLM_SERVER_DEV_MODE:
        return [
            "rollouts is set, but vLLM serves its routes for trainers only with "
            "VLLM_SERVER_DEV_MODE=1 in the environment; set it"
        ]
    return []


def _receiving_problems(
    config: "VllmConfig", settings: EngineSettings, cache: "KVCacheConfig"
) -> list[str]:
    """Describe a receiving area with which a prompt, or a request, could never be served."""
    area = len(receiving_blocks(settings, cache.num_blocks))
    if not area:
        return []
    share, most = settings.receive_hbm_share, config.model_config.max_model_len
    if len(cache.kv_cache_groups) > 1 or config.parallel_config.world_size > 1:
        return [
            f"receive_hbm_share is {share:g}, but KV is handed over in HBM only between engines of "
            "one rank with one group of KV cache; leave it out"
        ]
    needed = -(-most // cache.kv_cache_groups[0].kv_cache_spec.block_size)
    left = cache.num_blocks - 1 - area
    if min(area, left) < needed:
        return [
            f"receive_hbm_share is {share:g} of {cache.num_blocks} KV blocks: {area} receive "
            f"prompts and {left} are left, max_model_len {most} needs {needed} of each; set "
            "another share, lower --max-model-len, or give the engine more KV memory"
        ]
    return []


def _parallel_problems(parallel: "ParallelConfig") -> list[str]:
    problems = []
    if parallel.pipeline_parallel_size != 1:
        problems.append(
            f"pipeline parallel size is {parallel.pipeline_parallel_size}: layers would be spread "
            "over ranks; leave --pipeline-parallel-size out, or use --tensor-parallel-size"
        )
    if parallel.nnodes_within_dp > 1:
        problems.append(
            f"{parallel.nnodes_within_dp} nodes for one engine: its ranks share memory and must be "
            "on one node; leave --nnodes out"
        )
    contexts = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if contexts != (1, 1):
        problems.append(
            f"context parallel sizes are {contexts}: the tokens of a block would be spread over "
            "ranks; leave --prefill-context-parallel-size and --decode-context-parallel-size out"
        )
    return problems + group_problems(parallel)


def _prefill_problems(config: "VllmConfig", settings: EngineSettings) -> list[str]:
    problems = []
    if config.cache_config.enable_prefix_caching:
        problems.append("prefix caching is on at the PE; add --no-enable-prefix-caching")
    if _class_name(config.scheduler_config.scheduler_cls) != SCHEDULER_CLASS:
        problems.append(
            "chunks of a prompt must end at block boundaries; add "
            f"--scheduler-cls {SCHEDULER_CLASS}"
        )
    problems += _budget_problems(config)
    if config.scheduler_config.async_scheduling:
        problems.append("asynchronous scheduling is on at the PE; add --no-async-scheduling")
    assert config.kv_transfer_config is not None
    if (policy := config.kv_transfer_config.kv_load_failure_policy) != "fail":
        problems.append(
            f"kv_load_failure_policy is {policy!r}: requests that the PE refuses would be computed "
            "without their KV; leave it out of --kv-transfer-config"
        )
    aliased = settings.layer_buffers > 0
    if aliased and config.parallel_config.worker_cls != WORKER_CLASS:
        problems.append(
            f"layer_buffers is {settings.layer_buffers}; add --worker-cls {WORKER_CLASS} or "
            "set layer_buffers to 0"
        )
    if aliased and not settings.mode.layerwise:
        problems.append(
            f"mode {settings.mode} holds all layers in HBM, but layer_buffers is "
            f"{settings.layer_buffers}; set layer_buffers to 0"
        )
    return problems


def _budget_problems(config: "VllmConfig") -> list[str]:
    """Describe token budgets below one block, with which a long prompt would never be scheduled."""
    scheduler, block_tokens = config.scheduler_config, config.cache_config.block_size
    budgets = {
        "max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "max-num-scheduled-tokens": scheduler.max_num_scheduled_tokens or block_tokens,
        "long-prefill-token-threshold": scheduler.long_prefill_token_threshold or block_tokens,
    }
    return [
        f"{name} is {tokens}, but chunks of a prompt end at blocks of {block_tokens} tokens; set "
        f"--{name} to at least {block_tokens}"
        for name, tokens in budgets.items()
        if tokens < block_tokens
    ]


def _class_name(value: object) -> str:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)
