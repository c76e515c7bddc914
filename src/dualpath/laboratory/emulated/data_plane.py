"""The real half of an emulated engine: storage, transfers, traffic manager, control link."""

import logging
import os
import uuid
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.control import PROTOCOL_VERSION, Hello, Message, Report
from dualpath.engine.counters import Counter
from dualpath.engine.link import ControlLink
from dualpath.engine.traffic_manager import TrafficManager
from dualpath.laboratory.emulated.hbm import EmulatedHbm
from dualpath.laboratory.emulated.kv_bytes import KvFunction
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.settings import EmulatedSettings
from dualpath.laboratory.emulated.verification import CheckedAt, Verifier, Verify
from dualpath.storage.contract import BlockStorage
from dualpath.storage.factory import open_storage
from dualpath.transport.cluster_secret import load_secret
from dualpath.transport.contract import Transport

log = logging.getLogger(__name__)

OpenTransport = Callable[[str], Transport]


class CheckedTrafficManager(TrafficManager):
    """A traffic manager that lets the engine look at what lies in its DRAM buffer."""

    def check_buffer(
        self,
        verifier: Verifier,
        place: CheckedAt,
        request_id: str,
        slots: Sequence[int],
        seeds: Seeds,
    ) -> list[int]:
        """Compare the request's ``slots`` with ``seeds``; return the positions that are wrong.

        Slots that the request does not hold (any more) say nothing and are not compared.
        """
        held = set(self._buffer.slots_of(request_id))
        if not verifier.compares or not held.issuperset(slots):
            return []
        self._buffer.pin(slots)
        try:
            views = [self._buffer.view(slot) for slot in slots]
            wrong = verifier.full_blocks(place, views, seeds)
            # Released while it was compared: what was found may be another request's.
            return wrong if held == set(self._buffer.slots_of(request_id)) else []
        finally:
            self._buffer.unpin(slots)


class DataPlane:
    """Brought up by ``start``, taken down by ``close``; methods may be called from any thread.

    ``open_transport`` gets the agent's name; by default NIXL is opened.  Raises ``ConfigError``
    for a storage, buffer or transport that cannot be had.
    """

    def __init__(
        self, settings: EmulatedSettings, open_transport: OpenTransport | None = None
    ) -> None:
        self.settings = settings
        self.geometry = settings.geometry
        self.function = KvFunction(settings.geometry)
        verify = settings.verify or Verify.fitting(settings.geometry)
        self.verifier = Verifier(self.function, verify)
        self.moves_bytes = settings.engine.mode.moves_bytes
        self.epoch = uuid.uuid4().hex[:12]
        self._api_url = settings.engine.api_url
        self._link: ControlLink | None = None
        self.hbm = EmulatedHbm(self.function, settings.layer_regions, settings.hbm_bytes)
        open_agent = open_transport or self._open_nixl
        self.manager = CheckedTrafficManager(
            settings.engine,
            self.geometry,
            self._open_storage(),
            open_agent(f"{settings.engine.engine_id}-{self.epoch}"),
            self.hbm.layout(),
            self.send,
        )

    def start(self, api_url: str) -> None:
        """Join the cluster: the HTTP server at ``api_url`` takes requests from now on."""
        self._api_url = api_url
        self._link = ControlLink(
            self.settings.engine.router,
            self._hello,
            self._report,
            self.manager.handle,
            self.manager.tick,
            load_secret(self.settings.engine.cluster_secret_file),
        )
        self._link.start()

    def close(self) -> None:
        """Leave the cluster, finish writes and give everything back; idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.close("engine shuts down")
        self.manager.close()

    def send(self, message: Message) -> None:
        """Tell the router something."""
        if self._link is not None:
            self._link.send(message)

    def hbm_changed(self) -> None:
        """The free HBM changed: report it soon."""
        self.manager.set_free_hbm_tokens(self.hbm.free_tokens)
        if self._link is not None:
            self._link.changed()

    def wrong_blocks(self, place: CheckedAt, request_id: str, wrong: Sequence[int]) -> str:
        """Say loudly that KV was wrong; return the message for whoever asked for it."""
        some = ", ".join(map(str, wrong[:8]))
        message = (
            f"request {request_id}: KV of {len(wrong)} prompt blocks ({some}) is wrong in "
            f"{place.value}; this is a defect of the data path, keep the engines' logs"
        )
        log.error("%s", message)
        return message

    def _open_storage(self) -> BlockStorage:
        engine = self.settings.engine
        return open_storage(
            engine.storage,
            self.settings.namespace,
            mode=engine.mode,
            read_bytes_per_s=engine.snic_bytes_per_s or None,
        )

    def _open_nixl(self, agent: str) -> Transport:
        from dualpath.transport.nixl import NixlTransport

        engine = self.settings.engine
        return NixlTransport(
            agent,
            tls=engine.ucx_tls or None,
            progress_delay_us=engine.progress_delay_us,
            engine_config=engine.nixl_engine_config,
        )

    def _hello(self) -> Hello:
        engine, manager = self.settings.engine, self.manager
        return Hello(
            version=PROTOCOL_VERSION,
            address=manager.address(self.epoch),
            namespace=self.settings.namespace,
            api_url=self._api_url,
            node=engine.node_name,
            group=engine.group_name,
            mode=engine.mode.value,
            hbm_tokens=manager.hbm_tokens,
            buffer_tokens=manager.buffer_tokens,
            snic_bytes_per_s=engine.snic_bytes_per_s or None,
            limits={
                "max_model_len": self.settings.max_model_len,
                "vocab_size": self.settings.vocab_size,
                "served_model_name": self.settings.namespace.model,
                "pid": os.getpid(),
            },
        )

    def _report(self) -> Report:
        """Add what was verified to the traffic manager's counters."""
        report = self.manager.report()
        counts = self.verifier.counts().values()
        return msgspec.structs.replace(
            report,
            counters={
                **report.counters,
                Counter.VERIFIED_LAYER_BLOCKS.value: sum(seen for seen, _ in counts),
                Counter.WRONG_LAYER_BLOCKS.value: sum(wrong for _, wrong in counts),
            },
        )
