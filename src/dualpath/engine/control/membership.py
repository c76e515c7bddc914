"""The membership of an engine in a cluster: it starts its data plane, registers, reports, leaves.

It is the same for all kinds of engines.  A kind of engine provides its HBM, its device, the model
that it serves, and a callback that watches its process.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import GroupRank, next_data_plane
from dualpath.core.control import (
    PROTOCOL_VERSION,
    Deregister,
    Drained,
    EngineMessage,
    Register,
    Report,
    RouterMessage,
)
from dualpath.core.extras import extra
from dualpath.core.key_cache import Adapter
from dualpath.core.rates import Rate, RateOrigin, Rates, RecomputeWeight, StorageCodec
from dualpath.engine.buffer.hbm_reservations import HbmPool
from dualpath.engine.control.link import ControlLink
from dualpath.engine.control.surroundings import LIVE, Surroundings
from dualpath.engine.control.traffic_manager import TrafficManager
from dualpath.engine.io.read_speed import PROBE_MODEL, measure
from dualpath.engine.io.storage_maintenance import MaintenanceThread, needs_maintenance
from dualpath.engine.passes.device import Device, HostDevice
from dualpath.engine.passes.hbm_layout import HbmLayout
from dualpath.engine.passes.pass_transfers import BlockHolder
from dualpath.engine.ranks.rank import ALONE, RankPlace
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import LEAVE_S, TimeLimit
from dualpath.storage.compression import chosen_codec, find_zstd, measure_codec

log = logging.getLogger(__name__)

#: Time for the last report to be sent before a process ends itself.
_LAST_REPORT_NS = 200_000_000
#: Minimum interval between reports with counters, which are for metrics only.
_COUNTERS_GAP_NS = 500_000_000
#: A draining engine without requests waits so many heartbeats for a router that sends nothing.  The
#: router may have ended at the same time, and container runtimes kill a process 10 s after SIGTERM.
#: A router that lives gets a ``Deregister`` as from any engine that leaves.
_DRAIN_SILENCE_HEARTBEATS = 3


class ServedModel(msgspec.Struct, frozen=True):
    """The model of an engine and its limits for requests.

    Prompt and answer have at most ``max_model_len`` tokens, token ids are below ``vocab_size``;
    requests may name one of ``adapters``.  A prompt has at most ``max_prompt_tokens``, None if only
    ``max_model_len`` limits it.
    """

    served_model_name: str
    max_model_len: int
    vocab_size: int
    adapters: tuple[Adapter, ...] = ()
    max_prompt_tokens: int | None = None

    def limits(self) -> dict[str, Any]:
        """Return the ``limits`` of a ``Register``."""
        fields = msgspec.structs.asdict(self)
        del fields["adapters"]
        return {name: value for name, value in fields.items() if value is not None}


class Membership:
    """Owns the traffic manager and the control link; methods may be called from any thread.

    Each process of an engine has a unique ``epoch``, so that others detect a restart.  A process
    whose weights change, or that has slept, leaves and joins again with a new membership, to which
    it passes ``former_epoch``: memory, caches, namespace and connections are new, as those of a
    restarted engine.  With ``former_rates`` nothing is measured again.  Raises ``ConfigError`` if
    the storage, buffer or transport cannot be opened.
    """

    def __init__(
        self,
        settings: EngineSettings,
        namespace: StoreNamespace,
        model: ServedModel,
        hbm: HbmLayout,
        device: Device | None = None,
        surroundings: Surroundings = LIVE,
        holder: BlockHolder | None = None,
        place: RankPlace = ALONE,
        former_epoch: str | None = None,
        hbm_pool: HbmPool | None = None,
        former_rates: Rates | None = None,
    ) -> None:
        self.rates = former_rates or Rates(read_bytes=_bounded(settings.snic_bytes_per_s))
        self._surroundings = surroundings
        if former_rates is None:
            self.rates = self._with_codec(settings, namespace)
        codec = self.rates.storage_codec
        settings = msgspec.structs.replace(
            settings, storage_codec="off" if codec is None else codec.codec
        )
        self.settings = settings
        new_epoch = surroundings.new_epoch()
        self.epoch = new_epoch if former_epoch is None else next_data_plane(former_epoch)
        self._namespace = namespace
        self._model = model
        self._link: ControlLink | None = None
        self._broken_ns: int | None = None
        self._draining: str | None = None
        self._drained: Callable[[], None] | None = None
        self._empty = False
        self._counters_due_ns = 0
        self._maintenance: MaintenanceThread | None = None
        storage = surroundings.open_storage(settings, namespace)
        tree = surroundings.open_tree(settings)
        if needs_maintenance(tree, settings):
            # This id becomes a part of objects' names, for which an engine's id is not safe.
            self._maintenance = MaintenanceThread(
                *(storage, tree, settings, namespace, new_epoch, surroundings.threads),
                surroundings.now_s,
            )
            storage = self._maintenance.storage
        device = device or HostDevice()
        agent = f"{settings.engine_id}-{self.epoch}"
        transport = surroundings.open_transport(agent, settings, device)
        self.manager = TrafficManager(
            settings,
            namespace.geometry,
            storage,
            transport,
            hbm,
            self.send,
            device,
            surroundings.threads,
            surroundings.has_exited,
            holder,
            place,
            surroundings.open_node_dram(settings, namespace),
            hbm_pool,
        )

    def join(
        self,
        api_url: str,
        watch: Callable[[], None] = lambda: None,
        dp: GroupRank | None = None,
    ) -> None:
        """Register as soon as the HTTP server at ``api_url`` accepts connections.

        ``dp`` is the engine's rank in a data-parallel group, None without one.  ``watch`` is called
        several times a second on the link's thread, for conditions that end this process.
        """

        def tick(now_ns: int) -> None:
            watch()
            self._end_if_broken(now_ns)
            self.manager.tick(now_ns)
            self._leave_if_drained()

        self._link = ControlLink(
            self._surroundings.connect(self.settings),
            lambda registration: self._register(api_url, registration, dp),
            self._report,
            self._handle,
            self._end_session,
            tick,
            self._failed,
            self._surroundings.threads,
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

    def measure_reading(self) -> None:
        """Measure the read rate of storage and report it from the next registration on.

        With a throttle, its rate is reported without a measurement.  Takes a second or two, at most
        ten.
        """
        if self.rates.read_bytes is None and self.settings.mode.moves_bytes:
            rate = self._measured_reading(self.settings, self._namespace)
            codec = self.rates.storage_codec
            if rate is not None and codec is not None and codec.codec != "off":
                rate = Rate(codec.kv_bytes_per_s(rate.per_s), rate.origin)
            self.rates = msgspec.structs.replace(self.rates, read_bytes=rate)

    def _measured_reading(self, settings: EngineSettings, namespace: StoreNamespace) -> Rate | None:
        """Measure reads of blocks that cannot be compressed."""
        plain = msgspec.structs.replace(settings, storage_codec="off")
        probed = msgspec.structs.replace(namespace, model=PROBE_MODEL)
        return measure(
            self._surroundings.open_storage(plain, probed),
            settings.parallel_reads,
            self._surroundings.threads,
        )

    def _with_codec(self, settings: EngineSettings, namespace: StoreNamespace) -> Rates:
        """Return the rates with the choice of the storage's codec, None if none is set.

        ``auto`` measures storage unless its rate is set; that is measured once.
        """
        if settings.storage_codec == "off":
            return self.rates
        reading, threads = (
            self.rates.read_bytes,
            (settings.parallel_reads, settings.parallel_writes),
        )
        chooses, why = settings.storage_codec == "auto", settings.codec_refusal
        if chooses and why is None and find_zstd() is None:
            why = f"the package backports.zstd is not installed; {extra('zstd').remedy}"
        if why is not None:
            codec = StorageCodec("off", why)
        elif chooses:
            reading = reading or self._measured_reading(settings, namespace)
            per_s = None if reading is None else reading.per_s
            codec = chosen_codec(measure_codec(namespace, *threads), per_s)
        else:
            codec = measure_codec(namespace, *threads)
        if reading is not None and codec.codec != "off":
            reading = Rate(codec.kv_bytes_per_s(reading.per_s), reading.origin)
        log.info(
            "storage_codec is %s: blocks are written %s (%s)",
            settings.storage_codec,
            "plain" if codec.codec == "off" else f"with {codec.codec}",
            codec.reason,
        )
        return msgspec.structs.replace(self.rates, read_bytes=reading, storage_codec=codec)

    def set_compute_rate(
        self,
        prefill_tokens: Rate,
        computed_weight: float,
        recompute_weight: RecomputeWeight | None = None,
    ) -> None:
        """Report these rates of computation from the next registration on; see ``Rates``."""
        self.rates = msgspec.structs.replace(
            self.rates,
            prefill_tokens=prefill_tokens,
            computed_weight=computed_weight,
            recompute_weight=recompute_weight,
        )

    def _end_if_broken(self, now_ns: int) -> None:
        """Report a broken data plane, then end this process."""
        if (reason := self.manager.broken) is None:
            return
        if self._broken_ns is None:
            self._broken_ns = now_ns
            self.changed()
        elif now_ns - self._broken_ns > _LAST_REPORT_NS:
            self._failed(reason)

    def send(self, message: EngineMessage) -> None:
        """Send a message to the router; dropped before the engine joins and after it leaves."""
        if self._link is not None:
            self._link.send(message)

    def changed(self) -> None:
        """The load has changed: report it soon."""
        if self._link is not None:
            self._link.changed()

    def drain(self, reason: str, drained: Callable[[], None]) -> None:
        """Request no new requests from the router and finish the present ones.

        ``drained`` is called once when no request is left: the router has sent ``Drained``, this
        engine has no session, or it has no request and the router has been silent for
        ``_DRAIN_SILENCE_HEARTBEATS``; and requests that decode without a session are over.  Then
        call ``leave``.  Only the first call has an effect.
        """
        if self._drained is not None:
            return
        self._draining, self._drained = reason, drained
        if self._link is None:
            drained()
        else:
            self.changed()

    def leave(self, reason: str = "engine shuts down") -> bool:
        """Deregister, finish writes and free all resources, within ``LEAVE_S``; idempotent.

        Return whether all transfers are over.  If not, this process may not open another data
        plane: its HBM is not to be reused, and peers could take its late transfers for over.
        """
        limit = TimeLimit(self._surroundings.threads, LEAVE_S)
        link, self._link = self._link, None
        settled = True
        if link is not None:
            self.manager.end_session(reason)
            settled = not self.manager.in_doubt().unsettled
            link.close(Deregister(reason=reason, settled=settled), limit)
        settled = self.manager.close(limit) and settled
        if self._maintenance is not None:
            self._maintenance.close(limit)
        return settled

    def _report(self) -> Report:
        report = msgspec.structs.replace(self.manager.report(), draining=self._draining)
        maintenance, now_ns = self._maintenance, self._surroundings.threads.now_ns()
        counters = report.counters | (maintenance.totals() if maintenance is not None else {})
        if now_ns < self._counters_due_ns:
            counters = {}
        else:
            self._counters_due_ns = now_ns + _COUNTERS_GAP_NS
        storage = maintenance.use() if maintenance is not None else None
        return msgspec.structs.replace(report, counters=counters, storage=storage)

    def _end_session(self, reason: str) -> None:
        self._counters_due_ns = 0
        self.manager.end_session(reason)

    def _handle(self, message: RouterMessage) -> None:
        if isinstance(message, Drained):
            self._empty = True
        else:
            self.manager.handle(message)

    def _leave_if_drained(self) -> None:
        """Called on the link's thread, which owns the state of the session."""
        link, drained = self._link, self._drained
        if drained is None or link is None or self.manager.active.any_detached:
            return
        if self._empty or link.unregistered or self._router_left_idle(link):
            self._drained = _nothing
            drained()

    def _router_left_idle(self, link: ControlLink) -> bool:
        silent = link.silent_s >= _DRAIN_SILENCE_HEARTBEATS * link.heartbeat_s
        return silent and self.manager.active.load()[0] == 0

    def _failed(self, reason: str) -> None:
        """End this process, so that a failed engine does not seem alive."""
        log.critical("engine %s ends itself: %s", self.settings.engine_id, reason)
        self._surroundings.end_process()

    def _register(self, api_url: str, registration: int, dp: GroupRank | None) -> Register | None:
        # An unhealthy engine registers when it has recovered; a draining one does not register.
        unavailable = self._draining is not None or self.manager.health() is not None
        if unavailable or not self._surroundings.listens(api_url):
            return None
        settings, manager = self.settings, self.manager
        in_doubt = manager.in_doubt()
        return Register(
            version=PROTOCOL_VERSION,
            address=manager.address(self.epoch, self._surroundings.this_process()),
            namespace=self._namespace,
            api_url=api_url,
            node=settings.node_name,
            group=settings.group_name,
            mode=settings.mode.value,
            hbm_tokens=manager.hbm_tokens,
            buffer_tokens=manager.buffer_tokens,
            snic_bytes_per_s=settings.snic_bytes_per_s or None,
            rates=self.rates,
            limits={**self._model.limits(), "pid": os.getpid()},
            registration=registration,
            unsettled=in_doubt.unsettled,
            quarantined=in_doubt.quarantined,
            writers=in_doubt.writers,
            dp=dp,
            adapters=self._model.adapters,
            node_dram=manager.node_dram,
            hbm_refusal=manager.hbm_refusal,
        )


def _bounded(bytes_per_s: float) -> Rate | None:
    return Rate(bytes_per_s, RateOrigin.SET) if bytes_per_s else None


def _nothing() -> None:
    """Do nothing: the engine has drained already."""
