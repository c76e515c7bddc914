"""The connector inside a vLLM worker: hosts the traffic manager and drives it layer by layer.

An engine of several ranks has one worker per rank.  The first hosts the traffic manager, the others
host a ``Follower``.
"""

import functools
import gc
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from vllm.distributed.parallel_state import get_tp_group

from dualpath.core.blocks import BlockGeometry, PartSlice, StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.rates import Rates
from dualpath.core.weights import WeightsVersion
from dualpath.engine.buffer.engine_memory import EngineMemory
from dualpath.engine.control.membership import Membership, ServedModel
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.engine.passes.forward_pass import ForwardPass
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.hbm_layout import NO_BLOCK, HbmLayout
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.ranks.follower import FollowedPass, Follower, open_follower
from dualpath.engine.ranks.rank import RankPlace
from dualpath.engine.settings import EngineSettings
from dualpath.vllm.cache_layers import (
    CacheGroups,
    CacheLayer,
    hbm_layout,
    max_drafted_prompt_tokens,
    read_before_hook,
)
from dualpath.vllm.cuda_device import open_device
from dualpath.vllm.drain_on_sigterm import ApiServer, on_drain_signal
from dualpath.vllm.kernel_patches import enable_amx_tiles, patch_cpu_lora_kernels
from dualpath.vllm.kv_events import ConnectorEvents, connector_events
from dualpath.vllm.metadata import (
    BlockExchange,
    DecodeWork,
    HeldBlocks,
    HeldBlocksMetadata,
    StepMetadata,
)
from dualpath.vllm.model_identity import adapters_of, kv_layout, model_fingerprint
from dualpath.vllm.parallel_ranks import (
    agree_on_group,
    lock_step_of,
    with_load_exchange,
    with_own_nic,
)
from dualpath.vllm.pass_costs import PassCosts, TimedPass
from dualpath.vllm.profiling import (
    NO_MORE_PASSES,
    AttentionClock,
    AttentionStopwatch,
    PassLimits,
    PassRunner,
    PassTimer,
    find_costs,
    needs_costs,
    repeat_passes,
)
from dualpath.vllm.receiving_area import ReceivingArea, receiving_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)

#: How often an engine outside the cluster looks whether its server lives.
_WATCH_S = 0.5
#: Reason why a PE refuses a request.
NO_TRANSFER = "it has no valid transfer; send it through the router"


class WorkerSide:
    """State of one engine's worker process; ``register`` starts the data plane."""

    def __init__(
        self,
        settings: EngineSettings,
        config: "VllmConfig",
        geometry: BlockGeometry,
        num_blocks: int,
        layers: Sequence[CacheLayer],
        groups: CacheGroups,
        place: RankPlace,
        kv_slice: PartSlice,
    ) -> None:
        self._given_settings, self._given_place = settings, place
        self._settings = settings
        self._config = config
        self._place = place
        self._slice = kv_slice
        self._cache_layers = layers
        self._groups = groups
        #: Layer numbers by the names with which vLLM calls the connector.
        self._layers = {layer.names[0]: index for index, layer in enumerate(layers)}
        self._read_before_hook = read_before_hook(config, layers)
        self.geometry = geometry
        self._num_blocks = num_blocks
        self._server = ApiServer()
        self._drain_requested = False
        self._membership: Membership | None = None
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        #: The version of the weights, unset for those that vLLM has loaded.
        self._weights: WeightsVersion | msgspec.UnsetType = msgspec.UNSET
        #: Epoch and rates of the membership before, None for the first one.
        self._former: tuple[str, Rates] | None = None
        #: Its DRAM, if that is kept while the engine is outside the cluster.
        self._memory: EngineMemory | None = None
        self._follower: Follower | None = None
        #: Set while the engine is in the cluster.
        self._back = threading.Event()
        #: Costs of forward passes, None until they are measured.
        self.costs: PassCosts | None = None
        self._stopwatch: AttentionStopwatch | None = None
        #: Measures the attention of passes of which the quota has predicted it.
        self._clock: AttentionClock | None = None
        self._predicted_s, self._began_ns = 0.0, 0
        self._pass: ForwardPass | FollowedPass | None = None
        self._generated: list[GeneratedBlock] = []
        self._held = HeldBlocks()
        #: How long the load of a token takes, as last reported to the scheduler.
        self._reported_load_token_s = 0.0
        area = receiving_blocks(settings, num_blocks)
        #: Where prompts arrive in HBM, None if they do not.
        self._area = ReceivingArea(area, geometry.block_tokens, self._held) if area else None
        self._area_tokens = len(area) * geometry.block_tokens
        self._copied: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()

    # ------------------------------------------------------------------ start and stop

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register HBM and buffer, open storage, join the cluster."""
        self._kv_caches = kv_caches
        if self._config.lora_config is not None:
            patch_cpu_lora_kernels()
        self._join()

    def join(self, weights: WeightsVersion | msgspec.UnsetType) -> None:
        """Join the cluster again with these weights; all that was registered is registered anew."""
        self._weights = weights
        self._join()

    def leave(self, reason: str) -> bool:
        """Leave the cluster and free everything but HBM; return whether all transfers are over.

        The engine may compute meanwhile, without KV of the cluster.
        """
        membership, self._membership = self._membership, None
        follower, self._follower = self._follower, None
        settled = True
        if membership is not None:
            self._former = membership.epoch, membership.rates
            settled = membership.leave(reason)
            if self._settings.keep_buffer:
                self._memory = membership.manager.unused_memory
        if follower is not None:
            settled = follower.close()
        del membership, follower
        gc.collect()  # What leads to the buffer refers to itself.
        if self._place.group.rank == 0:
            self._back.clear()
            threading.Thread(target=self._watch_outside, name="outside-watch", daemon=True).start()
        return settled

    def _watch_outside(self) -> None:
        """Watch the server, as the control link does in the cluster, until the engine joins."""
        while not self._back.wait(_WATCH_S):
            if self._drain_requested:
                self._drained()
                return
            self._watch_server()

    def _join(self) -> None:
        self._back.set()
        self._settings, self._place = self._given_settings, self._given_place
        kv_caches = self._kv_caches
        layers = [[kv_caches[name] for name in layer.names] for layer in self._cache_layers]
        hbm = self._in_groups(hbm_layout(layers, self._num_blocks, self.geometry, self._slice))
        hbm = msgspec.structs.replace(
            hbm,
            layer_names=tuple(self._layers),
            capacity_tokens=hbm.capacity_tokens - self._area_tokens,
        )
        here = layers[0][0].device
        enable_amx_tiles(here)
        device = open_device(here, self._settings.device_copies)
        predicts = self._prefills and self._settings.mode.compute_quota
        measures = predicts and self._place.group.rank == 0
        self._clock = AttentionClock(on_gpu=here.type == "cuda") if measures else None
        self._synchronize = torch.cuda.synchronize if layers[0][0].is_cuda else _nothing_queued
        if self._settings.share_loads and self._prefills:
            self._place = with_load_exchange(self._place, get_tp_group(), layers, self._num_blocks)
        group = self._place.group
        parallel = self._config.parallel_config
        self._settings = with_own_nic(self._settings, parallel, group.rank, here)
        if group.rank:
            self._follower = open_follower(
                self._settings, self.geometry, hbm, self._held, self._place, device
            )
            self._follower.watch(self._watch_parent)
            return
        model = self._config.model_config
        served = ServedModel(
            served_model_name=_first(model.served_model_name) or model.model,
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            max_prompt_tokens=max_drafted_prompt_tokens(self._config) if self._prefills else None,
            adapters=adapters_of(self._config, self._settings),
        )
        self._membership = Membership(
            *(self._settings, self._namespace(), served, hbm, device),
            holder=self._area or self._held,
            place=self._place._replace(memory=self._memory),
            former_epoch=None if self._former is None else self._former[0],
            hbm_pool=self._area,
            former_rates=None if self._former is None else self._former[1],
        )
        self._memory = None
        events = self._config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            self._membership.manager.block_events.enabled = True
        on_drain_signal(self._request_drain)
        if self._former is None and needs_costs(self._settings):
            self._membership.measure_reading()
        dp = agree_on_group(self._settings.engine_id, self._config.parallel_config)
        self._membership.join(self._settings.api_url, self._watch_parent, dp)

    @property
    def _prefills(self) -> bool:
        return self._settings.role is Role.PREFILL

    def _in_groups(self, hbm: HbmLayout) -> HbmLayout:
        if len(self._groups.windows) == 1:
            return hbm
        return msgspec.structs.replace(
            hbm,
            group_of_layer=tuple(layer.group for layer in self._cache_layers),
            capacity_tokens=self._groups.tokens_in(self._num_blocks - 1),
        )

    def profile(self, runner: PassRunner) -> None:
        """Determine the costs of passes and report them when the engine joins.

        Raises ``ConfigError`` if the profile file is not one of ``dualpath profile``.
        """
        if not needs_costs(self._settings):
            return
        group = self._place.group
        if group.rank:
            if (blocks := group.broadcast(NO_MORE_PASSES)) != NO_MORE_PASSES:
                repeat_passes(runner, self._pass_limits(blocks), group)
            return
        self._stopwatch = AttentionStopwatch(self._synchronize)
        try:
            found = find_costs(
                self._settings,
                self._config,
                self._namespace(),
                functools.partial(self._time_passes, runner, self._stopwatch),
                time.time(),
            )
        finally:
            self._stopwatch = None
            group.broadcast(NO_MORE_PASSES)
        if found is not None:
            self.costs = found.costs
            costs = found.costs
            self._joined().set_compute_rate(
                found.rate, costs.computed_weight, costs.recompute_weight
            )

    def _time_passes(
        self, runner: PassRunner, stopwatch: AttentionStopwatch, wanted: bool
    ) -> list[TimedPass] | None:
        """Time passes if this engine, or a rank of its data-parallel group, ``wanted`` it."""
        group, blocks = self._place.group, self._num_blocks - 1
        lock_step = lock_step_of(self._config.parallel_config)
        if lock_step is not None:
            agreed = lock_step.begin(wanted, blocks)
            if agreed is None:
                return None
            blocks = agreed
        elif not wanted:
            return None
        limits = self._pass_limits(group.broadcast(blocks))
        return PassTimer(runner, stopwatch, limits, group, lock_step).run()

    def _pass_limits(self, blocks: int) -> PassLimits:
        return PassLimits(
            self.geometry.block_tokens,
            blocks,
            self._config.scheduler_config.max_num_batched_tokens,
            self._config.model_config.max_model_len,
        )

    def close(self) -> None:
        """Leave the cluster and release all resources; idempotent."""
        self._back.set()
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave()
        if self._follower is not None:
            self._follower.close()

    def _namespace(self) -> StoreNamespace:
        return self._loaded_namespace.with_weights(self._weights)

    @functools.cached_property
    def _loaded_namespace(self) -> StoreNamespace:
        """The namespace with the weights of the start.

        It is read once: vLLM changes its configuration where it reloads other files.
        """
        return StoreNamespace(
            model=model_fingerprint(self._config),
            dtype=str(self._config.model_config.dtype).removeprefix("torch."),
            layout=kv_layout(self._config, list(self._layers)),
            geometry=self.geometry,
            mode="kv" if self._settings.mode.moves_bytes else "oracle",
            protection=self._settings.protection,
        )

    def _request_drain(self) -> None:
        self._drain_requested = True  # Set in a signal handler; the link's thread reads it.

    def _drained(self) -> None:
        self._server.interrupt()

    def _watch_parent(self) -> None:
        if self._drain_requested and self._membership is not None:
            self._membership.drain("its server got SIGTERM", self._drained)
        self._watch_server()

    def _watch_server(self) -> None:
        if self._server.has_exited:
            # The API server died without ending its engine: requests cannot reach the engine any
            # more, but while it reports to the router it would still be assigned requests.
            log.error("the API server of engine %s is gone", self._settings.engine_id)
            os.kill(os.getpid(), signal.SIGKILL)

    def _joined(self) -> Membership:
        assert self._membership is not None, "register_kv_caches was not called"
        return self._membership

    # ------------------------------------------------------------------ one engine step

    def begin_step(self, step: StepMetadata) -> None:
        """Start this step's transfers; called before the forward pass."""
        self._generated = step.generated
        if self._membership is not None:
            self._membership.manager.made_step()
        if self._area is not None:
            self._area.give(step.received)
        for vllm_request_id in step.refused:
            self._copied.put((vllm_request_id, NO_TRANSFER))
        if self._membership is None and self._follower is None:
            self._begin_outside(step)
            return
        if self._membership is not None:
            self._tell_router(self._membership, step)
        if step.prefills:
            self._predicted_s = step.predicted_attention_s
            self._began_ns = time.monotonic_ns()
            self._pass = self._begin_pass(step.prefills)
            self._wait_for_early_read(0)
        for work in step.decodes:
            self._begin_decode(work)

    def _begin_outside(self, step: StepMetadata) -> None:
        """Begin a step of an engine that has left; its scheduler accepts no transfers."""
        assert not step.prefills, "a prefill engine that has left computes nothing"
        for work in step.decodes:
            if work.decode_transfer.in_hbm:
                self._held.exchange(BlockExchange(work.vllm_request_id))
            if work.waits:
                self._copied.put((work.vllm_request_id, "the engine has left the cluster"))

    def _tell_router(self, membership: Membership, step: StepMetadata) -> None:
        if step.free_hbm_tokens is not None:
            membership.manager.free_hbm_tokens = step.free_hbm_tokens
        for request_id in step.ended:
            membership.manager.ended(request_id)
        for request_id, reason in step.rejected.items():
            membership.send(membership.manager.sent(request_id, reason))

    def _begin_pass(self, parts: Sequence[PrefillChunk]) -> ForwardPass | FollowedPass:
        if self._follower is not None:
            return self._follower.begin_pass(parts)
        membership = self._joined()
        return ForwardPass(membership.manager, membership.send, parts)

    def _begin_decode(self, work: DecodeWork) -> None:
        if work.decode_transfer.in_hbm:
            self._begin_reserved(work)
            return

        def copied(error: str | None) -> None:
            if work.waits:
                self._copied.put((work.vllm_request_id, error))

        self._mover.fill_hbm(work.decode_transfer, work.hbm_blocks, copied)

    def _begin_reserved(self, work: DecodeWork) -> None:
        """Load a prompt into the blocks that are reserved for it, which then replace vLLM's.

        vLLM has found the first rows in its prefix cache: these keep their blocks.
        """
        manager, transfer = self._joined().manager, work.decode_transfer
        reserved = manager.reserved_hbm.blocks_of(transfer.request_id)
        first = sum(block == NO_BLOCK for block in work.hbm_blocks)
        end = len(work.hbm_blocks)

        def loaded(error: str | None) -> None:
            taken: tuple[int, ...] = ()
            if error is None:
                assert self._area is not None, "its blocks are in the area"
                taken = self._area.take(transfer.request_id, first, end if work.waits else first)
            # Before the load is reported as over: vLLM then uses the request's table.
            self._held.exchange(BlockExchange(work.vllm_request_id, first, taken))
            if work.waits:
                self._copied.put((work.vllm_request_id, error))

        blocks = (NO_BLOCK,) * first + reserved[first:end]
        manager.fill_hbm(transfer, blocks, loaded)

    @property
    def _mover(self) -> TrafficManager | Follower:
        return self._joined().manager if self._follower is None else self._follower

    def wait_loaded(self, layer_name: str) -> None:
        """Block until a layer's stored KV is in HBM."""
        if self._pass is not None:
            self._pass.wait_loaded(self._layers[layer_name])
            if self._clock is not None:
                self._clock.begin()
        if self._stopwatch is not None:
            self._stopwatch.begin()

    def computed(self, layer_name: str) -> None:
        """Record that a layer's new KV is in HBM."""
        if self._stopwatch is not None:
            self._stopwatch.end()
        if self._pass is not None:
            if self._clock is not None:
                self._clock.end()
            self._pass.computed(self._layers[layer_name])
            self._wait_for_early_read(self._layers[layer_name] + 1)

    def _wait_for_early_read(self, layer: int) -> None:
        """Load a layer before it begins, if vLLM calls the connector only after its KV is read.

        The load then overlaps with the attention of the previous layer, but not with its experts.
        """
        if self._read_before_hook and self._pass is not None and layer < len(self._layers):
            self._pass.wait_loaded(layer)

    def end_step(self) -> None:
        """Finish this step's transfers; called after the forward pass."""
        if self._pass is not None:
            self._measure_attention()
            self._pass.finish({})
            self._pass = None
        if self._generated and (self._membership is not None or self._follower is not None):
            self._mover.persist_generated(self._generated)
        self._generated = []
        if self._membership is not None:
            self._membership.manager.made_step()
            self._membership.changed()

    def _measure_attention(self) -> None:
        """Count the passes of which the attention is measured by now."""
        if self._clock is None or self._membership is None:
            return
        now_ns = self._membership.manager.trace.now_ns()
        self._clock.pass_over(self._predicted_s, self._began_ns, now_ns)
        for one in self._clock.take():
            self._membership.manager.attention.passed(*one)

    def take_copied(self) -> tuple[set[str], set[str]]:
        """Return the requests copied since the last call, and the requests that failed."""
        over: set[str] = set()
        failed: set[str] = set()
        while True:
            try:
                request_id, error = self._copied.get_nowait()
            except queue.Empty:
                return over, failed
            over.add(request_id)
            if error is not None:
                log.error("request %s: its KV was not loaded: %s", request_id, error)
                failed.add(request_id)

    def take_kv_events(self) -> ConnectorEvents | None:
        """Return the changes of where blocks are since the last call; None without any."""
        if self._membership is None:
            return None
        taken = self._membership.manager.block_events.take()
        return connector_events(taken, self.geometry.block_tokens)

    def take_held_blocks(self) -> HeldBlocksMetadata | None:
        """Return the HBM blocks held and released since the last call; None without changes.

        Also how long the load of a token takes, if that has changed.
        """
        taken = self._held.take()
        load_token_s = self._membership.manager.load_token_s if self._membership else 0.0
        if load_token_s != self._reported_load_token_s:
            taken = taken or HeldBlocksMetadata([], [])
            taken.load_token_s = self._reported_load_token_s = load_token_s
        return taken


def _nothing_queued() -> None:
    """Do nothing: a CPU computes synchronously."""


def _first(names: str | list[str] | None) -> str | None:
    return names[0] if isinstance(names, list) else names
