"""The vLLM connector: a façade over ``SchedulerSide`` and ``WorkerSide``.

Use it with

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "DualPathConnector",
        "kv_role": "kv_both", "kv_connector_extra_config": {"role": "prefill",
        "router": "tcp://10.0.0.1:5700", "storage": "/mnt/kv"}}'

The keys of ``kv_connector_extra_config`` are those of ``dualpath.engine.settings``; the other
arguments an engine needs are ``engine_arguments``'.
"""

import os
from typing import TYPE_CHECKING, Any

import msgspec
import torch
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
from dualpath.vllm.adapter_identity import adapter_problems
from dualpath.vllm.cache_checks import KV_LAYOUT, cache_problems
from dualpath.vllm.cache_layers import (
    cache_groups,
    cache_layers,
    geometry_of,
    hooked_layers,
)
from dualpath.vllm.data_parallel import engine_id_of_rank, group_problems
from dualpath.vllm.draft_context import most_prompt_tokens
from dualpath.vllm.drain_signal import pass_drain_signal_on
from dualpath.vllm.engine_arguments import (
    HASH_ALGORITHM,
    PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    engine_arguments,
    join_vllm_logging,
)
from dualpath.vllm.engine_settings import engine_settings, engine_values
from dualpath.vllm.late_blocks import LateBlocksMetadata
from dualpath.vllm.metadata import StepMetadata, WorkerFacts
from dualpath.vllm.pass_costs import PassCosts
from dualpath.vllm.scheduler_side import SchedulerSide
from dualpath.vllm.sparse_attention import announce_sparse_layers
from dualpath.vllm.tensor_parallel import place_of, slices_of
from dualpath.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


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
        #: What passes cost, once the worker has said it; for the compute quota.
        self.costs: PassCosts | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        group = kv_cache_config.kv_cache_groups[0]
        # Blocks are the whole model's; this rank's pages are a slice of them.
        slices = slices_of(vllm_config, kv_cache_config)
        groups = cache_groups(kv_cache_config, vllm_config.model_config.max_model_len)
        if role == KVConnectorRole.SCHEDULER:
            # A guess where layers are not alike: vLLM tells its scheduler of one of them.
            geometry = BlockGeometry.uniform(
                layers=len(group.layer_names),
                block_tokens=group.kv_cache_spec.block_size,
                layer_block_bytes=group.kv_cache_spec.page_size_bytes * slices,
            )
            most = most_prompt_tokens(vllm_config)
            self._scheduler = SchedulerSide(self.settings, geometry, groups, most)
            parallel = vllm_config.parallel_config
            if parallel.world_size * parallel.data_parallel_size > 1:
                pass_drain_signal_on()  # Workers are processes of their own.
        else:
            announce_sparse_layers(vllm_config)
            layers = cache_layers(kv_cache_config, hooked_layers(vllm_config))
            geometry = geometry_of(layers, group.kv_cache_spec.block_size, slices)
            blocks = kv_cache_config.num_blocks
            place = place_of(vllm_config, kv_cache_config)
            self._worker = WorkerSide(
                self.settings, vllm_config, geometry, blocks, layers, groups, *place
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Preemption needs no special care: buffers outlive a preempted prefill."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A PE needs its per-layer hooks to run between graph pieces."""
        return engine_values(extra_config, os.environ).get("role") == Role.PREFILL.value

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str:
        """What vLLM gives where a backend has it; ``cache_checks`` looks at what it gave."""
        return KV_LAYOUT

    # ------------------------------------------------------------------ scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """See ``SchedulerSide.bind_block_pool``."""
        self._scheduling.bind_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See ``SchedulerSide.matched_tokens``."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """See ``SchedulerSide.blocks_allocated``."""
        self._scheduling.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See ``SchedulerSide.build``."""
        return self._scheduling.build(scheduler_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: what may still be written is held on its own.

        See ``late_blocks``.
        """
        self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        self._scheduling.finished(request)
        return False, None

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See ``SchedulerSide.note_late_blocks``."""
        late = connector_output.kv_connector_worker_meta
        if isinstance(late, LateBlocksMetadata):
            self._scheduling.note_late_blocks(late)

    def has_pending_push_work(self) -> bool:
        """See ``SchedulerSide.needs_a_step``: vLLM's one hook that asks whether to go on."""
        return self._scheduling.needs_a_step

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn from this engine's worker what its blocks are, and what passes cost."""
        for said in metadata.values():
            if isinstance(said, WorkerFacts):
                self._scheduling.learn_geometry(said.geometry)
                self.costs = self.costs or said.costs

    # ------------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See ``WorkerSide.register``."""
        self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """What the scheduler's connector is to know."""
        return WorkerFacts(self.worker_side.geometry, self.worker_side.costs)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start this step's transfers.

        Here and not in ``start_load_kv``: vLLM calls that one after the forward pass unless a
        request with a synchronous hit entered in this very step.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self.worker_side.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ANN401
        """Transfers are under way since ``bind_connector_metadata``."""

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
        """Requests whose H2D is over; failed ones are failed by vLLM and retried by the router."""
        over, failed = self.worker_side.take_copied()
        return KVConnectorTransferResults(finished_recving=over, failed_recving=failed)

    def build_connector_worker_meta(self) -> LateBlocksMetadata | None:
        """See ``WorkerSide.take_late_blocks``."""
        return self.worker_side.take_late_blocks()

    def shutdown(self) -> None:
        """Leave the cluster."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on the worker's connector"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        """What the worker's connector does; the scheduler's has none."""
        assert self._worker is not None, "called on the scheduler's connector"
        return self._worker


def settings_of(config: "VllmConfig") -> EngineSettings:
    """Return this engine's settings; raises ``ConfigError`` for unknown or impossible ones."""
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
    problems += adapter_problems(config, settings)
    problems += _parallel_problems(config.parallel_config)
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        problems.append(
            f"hash algorithm {algorithm}; add --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        problems.append(
            f"PYTHONHASHSEED is {seed}, from which vLLM derives block keys that no other engine "
            "and no router shares; unset it"
        )
    if settings.role is Role.PREFILL:
        problems += _prefill_problems(config, settings)
    if problems:
        raise ConfigError(
            f"engine {settings.engine_id} cannot join a DualPath cluster: "
            + "; ".join(problems)
            + f". All that a {settings.role} engine needs: "
            + " ".join(argument.typed for argument in engine_arguments(settings))
            + f"; the vLLM plugin {PLUGIN!r} adds what is left out, if dualpath is installed and "
            "VLLM_PLUGINS allows it"
        )


def _model_problems(config: "VllmConfig") -> list[str]:
    """Name what makes a block's KV depend on more than the tokens that its key stands for."""
    model = config.model_config
    found = {
        "a diffusion model, whose KV changes with what follows": model.is_diffusion,
        "an encoder and a decoder, whose KV depends on the encoder's input": (
            model.is_encoder_decoder
        ),
        "weight_transfer_config, so that weights change under stored KV; leave it out": (
            config.weight_transfer_config is not None
        ),
    }
    return [problem for problem, there in found.items() if there]


def _parallel_problems(parallel: "ParallelConfig") -> list[str]:
    problems = []
    if parallel.pipeline_parallel_size != 1:
        problems.append(
            f"pipeline parallel size {parallel.pipeline_parallel_size}, which spreads a model's "
            "layers over ranks; leave --pipeline-parallel-size out, or use --tensor-parallel-size"
        )
    if parallel.nnodes_within_dp > 1:
        problems.append(
            f"{parallel.nnodes_within_dp} nodes for one engine, whose ranks share memory; leave "
            "--nnodes out"
        )
    contexts = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if contexts != (1, 1):
        problems.append(
            f"context parallel sizes {contexts}, which spread a block's tokens over ranks; leave "
            "--prefill-context-parallel-size and --decode-context-parallel-size out"
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
            f"kv_load_failure_policy is {policy!r}, so that what the PE refuses would be computed "
            "without its KV; leave it out of --kv-transfer-config"
        )
    aliased = settings.layer_buffers > 0
    if aliased and config.parallel_config.worker_cls != WORKER_CLASS:
        problems.append(
            f"layer_buffers is {settings.layer_buffers}; add --worker-cls {WORKER_CLASS} or "
            "set layer_buffers to 0"
        )
    if aliased and not settings.mode.layerwise:
        problems.append(
            f"mode {settings.mode} keeps all layers in HBM; set layer_buffers to 0, not "
            f"{settings.layer_buffers}"
        )
    return problems


def _budget_problems(config: "VllmConfig") -> list[str]:
    """A pass that may not hold one block would never take a part of a longer prompt."""
    scheduler, block_tokens = config.scheduler_config, config.cache_config.block_size
    budgets = {
        "max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "max-num-scheduled-tokens": scheduler.max_num_scheduled_tokens or block_tokens,
        "long-prefill-token-threshold": scheduler.long_prefill_token_threshold or block_tokens,
    }
    return [
        f"{name} is {tokens}, chunks of a prompt end with a block of {block_tokens} tokens; give "
        f"--{name} at least {block_tokens}"
        for name, tokens in budgets.items()
        if tokens < block_tokens
    ]


def _class_name(value: object) -> str:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)
