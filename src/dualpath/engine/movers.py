"""The objects that move KV between memories of engines, shared by an engine's passes and copies."""

from collections.abc import Callable, Sequence

import msgspec

from dualpath.engine.counters import Counters
from dualpath.engine.device import Device
from dualpath.engine.event_waiter import EventWaiter
from dualpath.engine.hbm_layout import HbmLayout, PartViews
from dualpath.engine.health import Health
from dualpath.engine.pump import TransferPump
from dualpath.engine.settings import EngineSettings
from dualpath.engine.stalls import StalledAgents, WaitBudget
from dualpath.engine.step_transfers import ONLY, Replica, StepTransfers
from dualpath.engine.threads import Threads
from dualpath.engine.trace import TraceRecorder
from dualpath.transport.contract import RegionInfo, Transport
from dualpath.transport.regions import span_bytes


class Movers(msgspec.Struct, frozen=True):
    """``transfer_deadline_s`` limits a wait for transfers that stall.

    ``announced`` are the layers for which the engine has called ``wait_loaded`` in any pass.
    """

    transfers: StepTransfers
    pump: TransferPump
    device: Device
    after: EventWaiter
    stalled: StalledAgents
    transfer_deadline_s: float
    trace: TraceRecorder
    health: Health
    announced: set[int] = msgspec.field(default_factory=set)

    @property
    def threads(self) -> Threads:
        """The source of all clocks, locks and events."""
        return self.health.threads

    def wait_budget(self) -> WaitBudget:
        """Return the wait budget of a new pass."""
        return WaitBudget(self.transfer_deadline_s, self.stalled, self.threads)


def open_movers(
    settings: EngineSettings,
    transport: Transport,
    device: Device,
    buffers: Sequence[tuple[RegionInfo, object]],
    hbm: HbmLayout,
    views: PartViews,
    counters: Counters,
    trace: TraceRecorder,
    health: Health,
    replica: Replica = ONLY,
    unsettled: Callable[[], None] = lambda: None,
    *,
    shares_loads: bool = False,
) -> Movers:
    """Register an engine's memories and start the threads.

    ``buffers`` are regions of Full Blocks, each with the object that keeps its memory alive;
    ``views`` defines the views of their parts.  Raises ``ConfigError`` if the device or the network
    cannot register memory.
    """
    for region, memory in (*buffers, *((region, hbm) for region in hbm.memories)):
        if region.memory == "DRAM":
            device.pin(region.base_address, span_bytes(region), memory)
        transport.register(region, memory)
        if device.copier is not None:
            device.copier.register(region)
    for view in (*hbm.views(), *(view for region, _ in buffers for view in views.of(region))):
        transport.view(view)
        if device.copier is not None:
            device.copier.register(view)
    agent = transport.info().agent
    pump = TransferPump(settings.engine_id, health, unsettled)
    pump.call(device.enter_thread)
    return Movers(
        StepTransfers(
            *(settings.role, transport, device, counters, agent, hbm, replica),
            shares_loads=shares_loads,
        ),
        pump,
        device,
        EventWaiter(device, settings.engine_id, health),
        StalledAgents(health.threads),
        settings.transfer_deadline_s,
        trace,
        health,
    )
