"""One engine of a cluster, of whatever kind: its data plane comes up, it joins, reports and leaves.

What kinds of engines do not share is what they give: HBM and the device it is on, the model they
serve, and what else has to be looked at from time to time.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from dualpath.core.adapters import Adapter
from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import GroupRank
from dualpath.core.control import (
    PROTOCOL_VERSION,
    Drained,
    EngineMessage,
    Goodbye,
    Hello,
    Report,
    RouterMessage,
)
from dualpath.core.rates import Rate, RateOrigin, Rates
from dualpath.engine.chunk_transfers import BlockHolder
from dualpath.engine.device import Device
from dualpath.engine.hbm_layout import HbmLayout
from dualpath.engine.link import ControlLink
from dualpath.engine.rank import ALONE, RankPlace
from dualpath.engine.read_speed import PROBE_MODEL, measure
from dualpath.engine.settings import EngineSettings
from dualpath.engine.storage_keeping import StorageKeeping, is_kept
from dualpath.engine.surroundings import LIVE, Surroundings
from dualpath.engine.traffic_manager import TrafficManager

log = logging.getLogger(__name__)

#: For a report to leave, before a process ends itself.
_LAST_WORD_NS = 200_000_000


class ServedModel(msgspec.Struct, frozen=True):
    """What the router may promise clients of this engine.

    Prompt and answer have at most ``max_model_len`` tokens, token ids lie below ``vocab_size``;
    requests may name one of ``adapters``.  A prompt has at most ``max_prompt_tokens``, where that
    is less than the context.
    """

    served_model_name: str
    max_model_len: int
    vocab_size: int
    adapters: tuple[Adapter, ...] = ()
    max_prompt_tokens: int | None = None

    def limits(self) -> dict[str, Any]:
        """Return the ``limits`` of a ``Hello``."""
        fields = msgspec.structs.asdict(self)
        del fields["adapters"]
        return {name: value for name, value in fields.items() if value is not None}


class Membership:
    """Owns the traffic manager and the control link; methods may be called from any thread.

    Each process of an engine has an ``epoch`` of its own, by which the others know that it has
    restarted.  Raises ``ConfigError`` for a storage, buffer or transport that cannot be had.
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
    ) -> None:
        self.settings = settings
        self.rates = Rates(read_bytes=_bounded(settings.snic_bytes_per_s))
        self.epoch = surroundings.new_epoch()
        self._surroundings = surroundings
        self._namespace = namespace
        self._model = model
        self._link: ControlLink | None = None
        self._broken_ns: int | None = None
        self._draining: str | None = None
        self._drained: Callable[[], None] | None = None
        self._empty = False
        self._keeping: StorageKeeping | None = None
        storage = surroundings.open_storage(settings, namespace)
        tree = surroundings.open_tree(settings)
        if is_kept(tree, settings):
            # An engine's id is any text, this one a part of objects' names.
            threads, process = surroundings.threads, surroundings.new_epoch()
            self._keeping = StorageKeeping(
                *(storage, tree, settings, namespace, process, threads), surroundings.now_s
            )
            storage = self._keeping.storage
        transport = surroundings.open_transport(f"{settings.engine_id}-{self.epoch}", settings)
        self.manager = TrafficManager(
            settings,
            namespace.geometry,
            storage,
            transport,
            hbm,
            self.send,
            device,
            surroundings.threads,
            surroundings.is_gone,
            holder,
            place,
            surroundings.open_node_dram(settings, namespace),
        )

    def join(
        self,
        api_url: str,
        watch: Callable[[], None] = lambda: None,
        dp: GroupRank | None = None,
    ) -> None:
        """Register as soon as the HTTP server at ``api_url`` accepts connections.

        As rank ``dp`` of a data-parallel group, if so: it takes part with all ranks of its start.

        ``watch`` is called some times a second on the link's thread, for whatever may end this
        process.
        """

        def tick(now_ns: int) -> None:
            watch()
            self._end_if_broken(now_ns)
            self.manager.tick(now_ns)
            self._go_if_drained()

        self._link = ControlLink(
            self._surroundings.connect(self.settings),
            lambda greeting: self._hello(api_url, greeting, dp),
            self._report,
            self._handle,
            self.manager.end_session,
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
        """Say from the next greeting on how fast storage is read; a throttle says it without.

        Takes a second or two, ten at most.
        """
        if self.rates.read_bytes is None and self.settings.mode.moves_bytes:
            namespace = msgspec.structs.replace(self._namespace, model=PROBE_MODEL)
            rate = measure(
                self._surroundings.open_storage(self.settings, namespace),
                self.settings.parallel_reads,
                self._surroundings.threads,
            )
            self.rates = msgspec.structs.replace(self.rates, read_bytes=rate)

    def computes(self, prefill_tokens: Rate, computed_weight: float) -> None:
        """Say from the next greeting on what ``Rates`` has of computation."""
        self.rates = msgspec.structs.replace(
            self.rates, prefill_tokens=prefill_tokens, computed_weight=computed_weight
        )

    def _end_if_broken(self, now_ns: int) -> None:
        """An engine whose data plane has lost a thread says so in a report, then it is gone."""
        if (reason := self.manager.broken) is None:
            return
        if self._broken_ns is None:
            self._broken_ns = now_ns
            self.changed()
        elif now_ns - self._broken_ns > _LAST_WORD_NS:
            self._failed(reason)

    def send(self, message: EngineMessage) -> None:
        """Send the router something; dropped before the engine joins and after it leaves."""
        if self._link is not None:
            self._link.send(message)

    def changed(self) -> None:
        """The load changed: report it soon."""
        if self._link is not None:
            self._link.changed()

    def drain(self, reason: str, drained: Callable[[], None]) -> None:
        """Ask the router for nothing new; what is here goes on.  Any but the first call is void.

        ``drained`` is called once when nothing is left: the router has said so, or there is none
        with which this engine has a session, and what decodes without one is over.  Then it is time
        to ``leave``.
        """
        if self._drained is not None:
            return
        self._draining, self._drained = reason, drained
        if self._link is None:
            drained()
        else:
            self.changed()

    def leave(self) -> None:
        """Say goodbye, finish writes and give everything back; idempotent."""
        link, self._link = self._link, None
        if link is not None:
            self.manager.end_session("the engine shuts down")
            settled = not self.manager.doubts().unsettled
            link.close(Goodbye(reason="engine shuts down", settled=settled))
        self.manager.close()
        if self._keeping is not None:
            self._keeping.close()

    def _report(self) -> Report:
        report = msgspec.structs.replace(self.manager.report(), draining=self._draining)
        if self._keeping is None:
            return report
        counters = report.counters | self._keeping.totals()
        return msgspec.structs.replace(report, counters=counters, storage=self._keeping.use())

    def _handle(self, message: RouterMessage) -> None:
        if isinstance(message, Drained):
            self._empty = True
        else:
            self.manager.handle(message)

    def _go_if_drained(self) -> None:
        """Called on the link's thread, which alone knows when a session is over."""
        link, drained = self._link, self._drained
        if drained is None or link is None or self.manager.decodes_alone:
            return
        if self._empty or link.away:
            self._drained = _nothing
            drained()

    def _failed(self, reason: str) -> None:
        """End this process: an engine that cannot go on must not look as if it could."""
        log.critical("engine %s ends itself: %s", self.settings.engine_id, reason)
        self._surroundings.end_process()

    def _hello(self, api_url: str, greeting: int, dp: GroupRank | None) -> Hello | None:
        # One that is unwell is welcome again when it is not; one that drains greets nobody.
        unwanted = self._draining is not None or self.manager.health() is not None
        if unwanted or not self._surroundings.listens(api_url):
            return None
        settings, manager = self.settings, self.manager
        doubts = manager.doubts()
        return Hello(
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
            greeting=greeting,
            unsettled=doubts.unsettled,
            quarantined=doubts.quarantined,
            writers=doubts.writers,
            dp=dp,
            adapters=self._model.adapters,
            node_dram=manager.node_dram,
        )


def _bounded(bytes_per_s: float) -> Rate | None:
    return Rate(bytes_per_s, RateOrigin.SET) if bytes_per_s else None


def _nothing() -> None:
    """What was to be done is done."""
