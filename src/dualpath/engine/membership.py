"""One engine of a cluster, of whatever kind: its data plane comes up, it joins, reports and leaves.

What kinds of engines do not share is what they give: HBM and the device it is on, the model they
serve, and what else has to be looked at from time to time.
"""

import logging
import os
import socket
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.control import PROTOCOL_VERSION, Hello, Message
from dualpath.engine.device import Device
from dualpath.engine.hbm_copy import HbmLayout
from dualpath.engine.link import ControlLink
from dualpath.engine.settings import EngineSettings
from dualpath.engine.traffic_manager import TrafficManager
from dualpath.storage.factory import open_storage
from dualpath.transport.cluster_secret import load_secret
from dualpath.transport.contract import Transport

log = logging.getLogger(__name__)

OpenTransport = Callable[[str], Transport]

_PROBE_TIMEOUT_S = 1.0


class ServedModel(msgspec.Struct, frozen=True):
    """What the router may promise clients of this engine: ``limits`` of its ``Hello``.

    Prompt and answer have at most ``max_model_len`` tokens, token ids lie below ``vocab_size``.
    """

    served_model_name: str
    max_model_len: int
    vocab_size: int


class Membership:
    """Owns the traffic manager and the control link; methods may be called from any thread.

    ``open_transport`` gets the agent's name; by default NIXL is opened.  Each process of an engine
    has an ``epoch`` of its own, by which the others know that it has restarted.  Raises
    ``ConfigError`` for a storage, buffer or transport that cannot be had.
    """

    def __init__(
        self,
        settings: EngineSettings,
        namespace: StoreNamespace,
        model: ServedModel,
        hbm: HbmLayout,
        device: Device | None = None,
        open_transport: OpenTransport | None = None,
    ) -> None:
        self.settings = settings
        self.epoch = uuid.uuid4().hex[:12]
        self._namespace = namespace
        self._model = model
        self._link: ControlLink | None = None
        storage = open_storage(
            settings.storage,
            namespace,
            mode=settings.mode,
            read_bytes_per_s=settings.snic_bytes_per_s or None,
        )
        transport = (open_transport or self._open_nixl)(f"{settings.engine_id}-{self.epoch}")
        self.manager = TrafficManager(
            settings, namespace.geometry, storage, transport, hbm, self.send, device
        )

    def join(self, api_url: str, watch: Callable[[], None] = lambda: None) -> None:
        """Register as soon as the HTTP server at ``api_url`` accepts connections.

        ``watch`` is called some times a second on the link's thread, for whatever may end this
        process.
        """

        def tick(now_ns: int) -> None:
            watch()
            self.manager.tick(now_ns)

        self._link = ControlLink(
            self.settings.router,
            lambda: self._hello(api_url),
            self.manager.report,
            self.manager.handle,
            tick,
            load_secret(self.settings.cluster_secret_file),
        )
        self._link.start()
        log.info(
            "dualpath %s engine %s: %d layers of %d-token blocks, buffer of %d tokens, HBM of %d",
            self.settings.role,
            self.settings.engine_id,
            self._namespace.geometry.layers,
            self._namespace.geometry.block_tokens,
            self.manager.buffer_tokens,
            self.manager.hbm_tokens,
        )

    def send(self, message: Message) -> None:
        """Send the router something; dropped before the engine joins and after it leaves."""
        if self._link is not None:
            self._link.send(message)

    def changed(self) -> None:
        """The load changed: report it soon."""
        if self._link is not None:
            self._link.changed()

    def leave(self) -> None:
        """Say goodbye, finish writes and give everything back; idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.close("engine shuts down")
        self.manager.close()

    def _open_nixl(self, agent: str) -> Transport:
        from dualpath.transport.nixl import NixlTransport

        return NixlTransport(
            agent,
            tls=self.settings.ucx_tls or None,
            progress_delay_us=self.settings.progress_delay_us,
            engine_config=self.settings.nixl_engine_config,
        )

    def _hello(self, api_url: str) -> Hello | None:
        url = urlsplit(api_url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((url.hostname, port), _PROBE_TIMEOUT_S).close()
        except OSError:
            return None
        settings, manager = self.settings, self.manager
        return Hello(
            version=PROTOCOL_VERSION,
            address=manager.address(self.epoch),
            namespace=self._namespace,
            api_url=api_url,
            node=settings.node_name,
            group=settings.group_name,
            mode=settings.mode.value,
            hbm_tokens=manager.hbm_tokens,
            buffer_tokens=manager.buffer_tokens,
            snic_bytes_per_s=settings.snic_bytes_per_s or None,
            limits={**msgspec.structs.asdict(self._model), "pid": os.getpid()},
        )
