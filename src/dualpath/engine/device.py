"""The device that computes, as the data plane sees it: events in its work, and copies of its own.

A GPU works behind the engine's thread: when a kernel has been queued, nothing has been computed.
So the data plane never asks what the engine's thread has done, only whether a *event* of the
device has passed, and it can order the device itself to wait for one.

* What a transport moves is posted by the CPU and seen over by the CPU.  A transfer that reads or
  overwrites what a kernel uses is posted when that kernel's event has passed, by a thread that
  may wait (``EventWaiter``); the engine's thread goes on.
* What the device copies itself is ordered on the device.  Nobody on the host waits for it, except
  to know when a slot is free.

On a CPU the engine's thread computes, so every event has passed when it is recorded.
"""

from typing import Protocol

from dualpath.transport.contract import PieceIndices, RegionInfo, Transfer


class DeviceEvent(Protocol):
    """A point in the work queued on a device; passed when all work queued before it is over."""

    def passed(self) -> bool:
        """Whether it has passed; never blocks.  Raises ``TransportError`` if the device failed."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it has; raises as ``passed`` does."""
        ...


class DeviceCopy(Transfer, Protocol):
    """A copy queued on the device; ``event`` passes when its last byte has arrived."""

    event: DeviceEvent


class DeviceCopier(Protocol):
    """Copies between the engine's own DRAM and HBM without the network (H2D and D2H)."""

    def register(self, region: RegionInfo) -> None:
        """Make a region known; its DRAM was pinned before."""
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

        Raises ``TransportError`` for unknown regions, lists that do not match or a device that
        refuses.
        """
        ...


class Device(Protocol):
    """Where the forward pass runs.  ``copier`` is None where the transport does all copies."""

    copier: DeviceCopier | None

    def enter_thread(self) -> None:
        """Make the device current for the calling thread, which will post transfers of its HBM."""
        ...

    def pin(self, address: int, size_bytes: int, keep_alive: object) -> None:
        """Lock host memory in place, so that the device reads and writes it directly.

        ``keep_alive`` is held until ``close``.  Raises ``ConfigError`` if the device refuses.
        """
        ...

    def record(self) -> DeviceEvent:
        """Return the event at which all computation queued so far by this thread is over."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Let computation queued from now on start after ``event``; returns at once."""
        ...

    def close(self) -> None:
        """Wait for own copies and undo ``pin``; idempotent."""
        ...


class _Passed:
    """The only event of a CPU."""

    def passed(self) -> bool:
        """It has."""
        return True

    def wait(self) -> None:
        """Nothing is left to wait for."""


PASSED: DeviceEvent = _Passed()


class HostDevice:
    """Forward passes on the CPU: work is done when the call returns, memory needs no pinning."""

    copier: DeviceCopier | None = None

    def enter_thread(self) -> None:
        """Threads need nothing."""

    def pin(self, address: int, size_bytes: int, keep_alive: object) -> None:
        """Memory needs nothing."""

    def record(self) -> DeviceEvent:
        """What was computed is computed."""
        return PASSED

    def wait(self, event: DeviceEvent) -> None:
        """Block the caller, who is the one that computes."""
        event.wait()

    def close(self) -> None:
        """Nothing was taken."""
