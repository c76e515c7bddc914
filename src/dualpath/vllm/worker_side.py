"""The connector inside a vLLM worker: hosts the traffic manager and feeds it layer by layer."""

import logging
import os
import queue
import signal
import socket
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.control import PROTOCOL_VERSION, Hello, PrefillDone, PrefillTransfer
from dualpath.core.errors import TransportError
from dualpath.engine.layer_stream import LayerSettings, LayerStream
from dualpath.engine.link import ControlLink
from dualpath.engine.settings import EngineSettings
from dualpath.engine.step_transfers import PrefillChunk
from dualpath.engine.traffic_manager import TrafficManager
from dualpath.storage.factory import open_storage
from dualpath.transport.cluster_secret import load_secret
from dualpath.transport.contract import Transport
from dualpath.vllm.cuda_device import open_device
from dualpath.vllm.kv_regions import hbm_layout
from dualpath.vllm.metadata import DecodeWork, PrefillWork, StepMetadata
from dualpath.vllm.model_identity import kv_layout, model_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)


class WorkerSide:
    """State of one engine's worker process; ``register`` brings the data plane up."""

    def __init__(
        self,
        settings: EngineSettings,
        config: "VllmConfig",
        geometry: BlockGeometry,
        num_blocks: int,
        layer_names: list[str],
    ) -> None:
        self._settings = settings
        self._config = config
        self._layers = {name: index for index, name in enumerate(layer_names)}
        self.geometry = geometry
        self._num_blocks = num_blocks
        self._parent = os.getppid()
        self._epoch = uuid.uuid4().hex[:12]
        self._manager: TrafficManager | None = None
        self._link: ControlLink | None = None
        self._stream: LayerStream | None = None
        self._chunks: list[PrefillChunk] = []
        self._generated: list[tuple[int, bytes]] = []
        self._copied: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()

    # ------------------------------------------------------------------ start and stop

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register HBM and buffer once, open storage, join the cluster."""
        layers = [kv_caches[name] for name in self._layers]
        hbm = hbm_layout(layers, self._num_blocks, self.geometry)
        device = open_device(layers[0].device, self._settings.device_copies)
        storage = open_storage(
            self._settings.storage,
            self._namespace(),
            mode=self._settings.mode,
            read_bytes_per_s=self._settings.snic_bytes_per_s or None,
        )
        manager = TrafficManager(
            self._settings, self.geometry, storage, self._open_transport(), hbm, self._send, device
        )
        self._manager = manager
        self._link = ControlLink(
            self._settings.router,
            self._hello,
            manager.report,
            manager.handle,
            self._tick,
            load_secret(self._settings.cluster_secret_file),
        )
        self._link.start()
        log.info(
            "dualpath %s engine %s: %d layers of %d-token blocks, buffer of %d tokens, HBM of %d",
            self._settings.role,
            self._settings.engine_id,
            self.geometry.layers,
            self.geometry.block_tokens,
            manager.buffer_tokens,
            manager.hbm_tokens,
        )

    def close(self) -> None:
        """Leave the cluster and give everything back; idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.close("engine shuts down")
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _open_transport(self) -> Transport:
        from dualpath.transport.nixl import NixlTransport

        return NixlTransport(
            f"{self._settings.engine_id}-{self._epoch}",
            tls=self._settings.ucx_tls or None,
            progress_delay_us=self._settings.progress_delay_us,
            engine_config=self._settings.nixl_engine_config,
        )

    def _namespace(self) -> StoreNamespace:
        backend = self._config.attention_config.backend
        return StoreNamespace(
            model=model_fingerprint(self._config.model_config),
            dtype=str(self._config.model_config.dtype).removeprefix("torch."),
            layout=kv_layout(self._config, str(backend)),
            geometry=self.geometry,
            mode="kv" if self._settings.mode.moves_bytes else "oracle",
        )

    def _hello(self) -> Hello | None:
        """Register once this engine's HTTP server accepts connections."""
        url = urlsplit(self._settings.api_url)
        try:
            socket.create_connection((url.hostname, url.port), timeout=1.0).close()
        except OSError:
            return None
        manager = self._running()
        model = self._config.model_config
        return Hello(
            version=PROTOCOL_VERSION,
            address=manager.address(self._epoch),
            namespace=self._namespace(),
            api_url=self._settings.api_url,
            node=self._settings.node_name,
            group=self._settings.group_name,
            mode=self._settings.mode.value,
            hbm_tokens=manager.hbm_tokens,
            buffer_tokens=manager.buffer_tokens,
            snic_bytes_per_s=self._settings.snic_bytes_per_s or None,
            limits={
                "max_model_len": model.max_model_len,
                "vocab_size": model.get_vocab_size(),
                "served_model_name": _first(model.served_model_name) or model.model,
                "pid": os.getpid(),
            },
        )

    def _tick(self, now_ns: int) -> None:
        if os.getppid() != self._parent:
            # The API server died without ending its engine: nobody can send requests any more,
            # and an engine that keeps reporting would keep getting them assigned.
            log.error("the API server of engine %s is gone", self._settings.engine_id)
            os.kill(os.getpid(), signal.SIGKILL)
        self._running().tick(now_ns)

    def _send(self, message: Any) -> None:  # noqa: ANN401 - any control message
        if self._link is not None:
            self._link.send(message)

    def _running(self) -> TrafficManager:
        assert self._manager is not None, "register_kv_caches was not called"
        return self._manager

    # ------------------------------------------------------------------ one engine step

    def begin_step(self, step: StepMetadata) -> None:
        """Start this step's transfers; called before the forward pass."""
        manager = self._running()
        if step.free_hbm_tokens is not None:
            manager.set_free_hbm_tokens(step.free_hbm_tokens)
        self._generated = step.generated
        self._chunks = []
        for request_id, reason in step.rejected.items():
            self._reject(request_id, reason)
        if self._settings.role is Role.PREFILL and step.prefills:
            self._begin_prefill(manager, step.prefills)
        for work in step.decodes:
            self._begin_decode_transfer(manager, work)

    def _begin_prefill(self, manager: TrafficManager, prefills: list[PrefillWork]) -> None:
        for work in prefills:
            try:
                chunk = manager.prefill_chunk(work.prefill_transfer, work.chunk, work.hbm_blocks)
            except TransportError as error:
                self._reject(work.prefill_transfer.request_id, str(error))
                continue
            self._chunks.append(chunk)
        if self._settings.mode.moves_bytes:
            layers = LayerSettings(
                buffers=self._settings.layer_buffers or self.geometry.layers,
                overlap=self._settings.mode.layerwise,
            )
            self._stream = manager.begin_prefill(self._chunks, layers)

    def _reject(self, request_id: str, reason: str) -> None:
        """Nothing moves for a request of this step: the router has to try again."""
        self._send(PrefillDone(request_id=request_id, failure=reason))

    def _begin_decode_transfer(self, manager: TrafficManager, work: DecodeWork) -> None:
        def copied(error: str | None) -> None:
            self._copied.put((work.vllm_request_id, error))

        manager.fill_hbm(work.decode_transfer, work.hbm_blocks, copied)

    def wait_loaded(self, layer_name: str) -> None:
        """Block until a layer's stored KV is in HBM."""
        if self._stream is not None:
            self._stream.wait_loaded(self._layers[layer_name])

    def computed(self, layer_name: str) -> None:
        """A layer's new KV is in HBM."""
        if self._stream is not None:
            self._stream.computed(self._layers[layer_name])

    def end_step(self) -> None:
        """Finish this step's transfers; called after the forward pass."""
        manager = self._running()
        failures = {}
        if self._stream is not None:
            failures = manager.end_prefill(self._stream)
            self._stream = None
        for chunk in self._chunks:
            self._report_sent(chunk.prefill_transfer, chunk.chunk.end, failures)
        if self._generated:
            manager.persist_generated(self._generated)
            self._generated = []
        if self._link is not None:
            self._link.changed()

    def _report_sent(
        self, prefill_transfer: PrefillTransfer, end_block: int, failures: Mapping[str, str]
    ) -> None:
        failure = failures.get(prefill_transfer.request_id)
        complete = end_block == self.geometry.blocks_for(prefill_transfer.prompt_tokens)
        if failure is not None or complete:
            self._send(self._running().sent(prefill_transfer.request_id, failure))

    def take_copied(self) -> tuple[set[str], set[str]]:
        """Return (requests whose KV is in HBM or failed, those that failed) since last asked."""
        over: set[str] = set()
        failed: set[str] = set()
        while True:
            try:
                request_id, error = self._copied.get_nowait()
            except queue.Empty:
                return over, failed
            over.add(request_id)
            if error is not None:
                log.error("request %s: H2D failed: %s", request_id, error)
                failed.add(request_id)


def _first(names: str | list[str] | None) -> str | None:
    return names[0] if isinstance(names, list) else names
