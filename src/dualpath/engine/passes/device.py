"""The interface of the device that computes: events in its stream, and copies by the device.

A GPU runs behind the engine's thread: when a kernel has been queued, it has not been computed.  So
the data plane never depends on the progress of the engine's thread, only on *events* of the device;
the device itself can be made to wait for one.

* Transfers of a transport are posted by the CPU, which also observes their completion.  A transfer
  that reads or overwrites memory used by a kernel is posted when that kernel's event has passed, by
  a thread that may block (``EventWaiter``); the engine's thread goes on.
* Copies by the device are ordered on the device.  The host waits for them only to learn when a slot
  is free.

On a CPU the engine's thread computes, so every event has passed when it is recorded.
"""

from typing import Protocol

from dualpath.transport.contract import PieceIndices, RegionInfo, Transfer
from dualpath.transport.shared_memory import HbmCopies


class DeviceEvent(Protocol):
    """A point in the work queued on a device; it has passed when all work before it is over."""

    def passed(self) -> bool:
        """Whether it has passed; never blocks.  Raises ``TransportError`` if the device failed."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it has passed; raises as ``passed`` does."""
        ...


class DeviceCopy(Transfer, Protocol):
    """A copy queued on the device; ``event`` passes when its last byte has arrived."""

    event: DeviceEvent


class DeviceCopier(Protocol):
    """Copies between the engine's own DRAM and HBM without the network (H2D and D2H)."""

    def register(self, region: RegionInfo) -> None:
        """Register a region; its DRAM was pinned before."""
        ...

    def copy(
        self,
        source: str,
        source_pieces: PieceIndices,
        destination: str,
        destination_pieces: PieceIndices,
        after: DeviceEvent,
    ) -> DeviceCopy:
        """Queue one batch of pieces, to start when ``after`` has passed; returns at once.

        Raises ``TransportError`` for unknown regions, lists of different lengths or an error of
        the device.
        """
        ...


class Device(Protocol):
    """The device of the forward pass.  ``copier`` is None if the transport does all copies."""

    copier: DeviceCopier | None

    def enter_thread(self) -> None:
        """Make the device current in the calling thread, which will post transfers of its HBM."""
        ...

    def pin(self, address: int, size_bytes: int, keep_alive: object) -> None:
        """Page-lock host memory, so that the device reads and writes it directly.

        ``keep_alive`` is held until ``close``.  Raises ``ConfigError`` if the device refuses.
        """
        ...

    def hbm_copies(self) -> HbmCopies | None:
        """Return this device's copies between HBM and memory of other engines of this machine.

        None if the device has no HBM, or leaves copies to the transport.
        """
        ...

    def record(self) -> DeviceEvent:
        """Return the event at which all computation queued so far by this thread is over."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Let computation queued from now on start after ``event``; returns at once."""
        ...

    def close(self) -> None:
        """Wait for the device's copies and undo ``pin``; idempotent."""
        ...


class _Passed:
    """The event of a CPU, which has always passed."""

    def passed(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


PASSED: DeviceEvent = _Passed()


class HostDevice:
    """Forward passes on the CPU: work is done when a call returns, memory needs no pinning."""

    copier: DeviceCopier | None = None

    def enter_thread(self) -> None:
        """Do nothing: threads need no preparation."""

    def pin(self, address: int, size_bytes: int, keep_alive: object) -> None:
        """Do nothing: memory needs no pinning."""

    def hbm_copies(self) -> HbmCopies | None:
        """Return None: KV is in DRAM."""
        return None

    def record(self) -> DeviceEvent:
        """Return an event that has passed: computation is synchronous."""
        return PASSED

    def wait(self, event: DeviceEvent) -> None:
        """Block the calling thread, which is the one that computes."""
        event.wait()

    def close(self) -> None:
        """Do nothing: no resource is held."""
