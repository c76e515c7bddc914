"""A front end that is a process of its own: its link to the scheduler, and its requests.

It may know several schedulers, each with its own engines (``scheduler.units``).  Calls about the
cluster (engines' states, decisions, the live page, pauses, drains and roles) go to the scheduler's
own HTTP server.
"""

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dualpath.core.modes import Mode
from dualpath.node.cluster_secret import check_control_url, load_secret
from dualpath.policy.units import UnitPolicy
from dualpath.router.engine_calls import EngineCalls
from dualpath.router.engines import EngineInfo
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.status import ORACLE_NOTE
from dualpath.router.requests.front_end import FrontEnd
from dualpath.router.scheduler.registry import Registry
from dualpath.router.scheduler.remote import (
    EnginesView,
    LinkConnection,
    RemoteScheduling,
    ZmqLinkConnection,
)
from dualpath.router.scheduler.units import Units, UnitsView
from dualpath.router.served_adapters import ServedAdapters
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath.router.stages import RequestRecord


class LinkedFrontEnd(FrontEnd):
    """As ``RouterService``, without the cluster; ``start`` registers with the scheduler.

    ``adapter_paths`` are the LoRA adapters that clients may name; the scheduler reports their
    weights.  ``connections`` are those to the schedulers, in their order, by default ZMQ's;
    ``epoch`` names this process, by default it is random.

    Raises ``ConfigError`` for an address that cannot be, or one of another machine without a
    cluster secret.
    """

    def __init__(
        self,
        settings: RouterSettings,
        link: LinkSettings,
        engine_calls: EngineCalls,
        clock: Callable[[], float] = time.monotonic,
        adapter_paths: Mapping[str, str] | None = None,
        connections: Sequence[LinkConnection] = (),
        epoch: str = "",
    ) -> None:
        self.scheduler_address = link.scheduler
        self.name = (
            link.front_end_name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
        )
        epoch, adapters = epoch or uuid.uuid4().hex, ServedAdapters(adapter_paths or {})
        addresses = link.schedulers
        connections = connections or _over_zmq(settings, addresses.values())
        #: Those to its schedulers, by unit.
        self.links = {
            unit: RemoteScheduling(connection, self.name, epoch, clock, address, adapters)
            for (unit, address), connection in zip(addresses.items(), connections, strict=True)
        }
        # It has no engines of its own: none registers with it.
        metrics = RouterMetrics(Registry(), dict, clock, settings.tenant_weights)
        self._units: Units | None = None
        if len(self.links) > 1:
            metrics.define_units(self.links)
            self._units = Units(self.links, UnitPolicy(), metrics.unit_chosen, metrics.unit_serves)
        scheduling = self._units or next(iter(self.links.values()))
        #: The engines that the schedulers report.
        self.registry: EnginesView | UnitsView = scheduling.engines
        super().__init__(settings, scheduling, metrics, engine_calls, clock, _kept_nowhere)

    async def start(self) -> None:
        """Open the traces, if they are exported, and register until the schedulers answer."""
        self.open_traces()
        for link in self.links.values():
            link.start()

    async def stop(self) -> None:
        """End all requests (their streams raise ``EngineLostError``) and leave; idempotent."""
        await self.end_requests()
        await asyncio.gather(*(link.stop() for link in self.links.values()))
        await self.close_traces()

    def status(self) -> dict[str, Any]:
        """Return the body of this front end's ``GET /dualpath/v1/status``."""
        engines, (waiting, running) = self.registry, self.counts()
        names = (engine.limits.get("served_model_name") for engine in engines.alive())
        namespace = engines.namespace
        units = {} if self._units is None else {"units": self._units.status()}
        return {
            "front_end": self.name,
            "pid": os.getpid(),
            "scheduler": self.scheduler_address,
            "scheduler_missing": self.registry.away or None,
            "mode": engines.mode.value if engines.mode else None,
            "mode_note": ORACLE_NOTE if engines.mode is Mode.ORACLE else None,
            "model": next(filter(None, names), None) or (namespace.model if namespace else None),
            "vocab_size": engines.limit("vocab_size"),
            "max_model_len": engines.limit("max_model_len"),
            "block_tokens": namespace.geometry.block_tokens if namespace else None,
            "engines": self._engines(),
            "waiting": waiting,
            "running": running,
            **units,
            "queue": self.admission.report(),
        }

    def _engines(self) -> list[dict[str, Any]]:
        if self._units is None:
            return [_engine(engine) for engine in self.registry.alive()]
        return [
            {**_engine(engine), "unit": unit}
            for unit, link in self.links.items()
            for engine in link.engines.alive()
        ]


def _engine(engine: EngineInfo) -> dict[str, Any]:
    """Return an engine as the scheduler's status has it, as far as front ends know it."""
    return {
        "engine_id": engine.engine_id,
        "role": engine.role.value,
        "alive": True,
        "api_url": engine.api_url,
    }


def _over_zmq(settings: RouterSettings, schedulers: Collection[str]) -> Sequence[LinkConnection]:
    secret = load_secret(settings.cluster_secret_file)
    for scheduler in schedulers:  # Before any connection is opened.
        check_control_url(scheduler, secret)
    return [ZmqLinkConnection(scheduler, secret) for scheduler in schedulers]


def _kept_nowhere(record: RequestRecord) -> None:
    """The live page is the router's."""
