"""What moves KV between the memories of engines, as one engine's passes and copies share it."""

from collections.abc import Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.engine.counters import Counters
from dualpath.engine.device import Device
from dualpath.engine.event_waiter import EventWaiter
from dualpath.engine.health import Health
from dualpath.engine.pump import TransferPump
from dualpath.engine.settings import EngineSettings
from dualpath.engine.stalls import Patience, StalledAgents
from dualpath.engine.step_transfers import StepTransfers
from dualpath.engine.threads import Threads
from dualpath.engine.trace import TraceRecorder
from dualpath.transport.contract import RegionInfo, Transport
from dualpath.transport.regions import span_bytes


class Movers(msgspec.Struct, frozen=True):
    """``transfer_deadline_s`` is how long a wait for transfers that stall may take."""

    transfers: StepTransfers
    pump: TransferPump
    device: Device
    after: EventWaiter
    stalled: StalledAgents
    transfer_deadline_s: float
    trace: TraceRecorder
    threads: Threads

    def patience(self) -> Patience:
        """Return what a new pass has for each agent."""
        return Patience(self.transfer_deadline_s, self.stalled, self.threads)


def open_movers(
    settings: EngineSettings,
    geometry: BlockGeometry,
    transport: Transport,
    device: Device,
    memories: Sequence[tuple[RegionInfo, object]],
    region_of_layer: Sequence[str],
    counters: Counters,
    trace: TraceRecorder,
    health: Health,
) -> Movers:
    """Register an engine's memories, each with what keeps it alive, and start the threads.

    ``region_of_layer[l]`` names the region that holds layer ``l`` in HBM.  Raises ``ConfigError``
    if the device or the network refuses memory.
    """
    for region, memory in memories:
        if region.memory == "DRAM":
            device.pin(region.base_address, span_bytes(region), memory)
        transport.register(region, memory)
        if device.copier is not None:
            device.copier.register(region)
    agent = transport.info().agent
    pump = TransferPump(settings.engine_id, health)
    pump.call(device.enter_thread)
    return Movers(
        StepTransfers(settings.role, geometry, transport, device, counters, agent, region_of_layer),
        pump,
        device,
        EventWaiter(device, settings.engine_id, health),
        StalledAgents(health.threads),
        settings.transfer_deadline_s,
        trace,
        health.threads,
    )
