"""How far the transfers of one layer in one direction are."""

from dualpath.engine.device import DeviceEvent
from dualpath.engine.threads import OS_THREADS, Threads


class LayerWork:
    """One layer's loads or sends; the pump's thread counts, the engine's thread waits.

    ``over``: every transfer has ended.  ``queued``: those of the transport have, and the device's
    own copies, which end at ``events``, are queued: the device can wait for the rest itself.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self.queued = threads.event()
        self.over = threads.event()
        self.events: list[DeviceEvent] = []
        self._lock = threads.lock()
        self._left_to_queue = 0
        self._left = 0

    def begin(self, parts: int) -> None:
        """Expect that many transfers."""
        self._left = self._left_to_queue = parts

    def copy_queued(self, event: DeviceEvent) -> None:
        """The device will have done one part at ``event``."""
        self.events.append(event)
        self._part_queued()

    def part_over(self, *, by_device: bool) -> bool:
        """One part has ended; return whether it was the last one.

        The caller then sets ``over``, after what has to follow.
        """
        if not by_device:
            self._part_queued()
        with self._lock:
            self._left -= 1
            return self._left == 0

    def _part_queued(self) -> None:
        with self._lock:
            self._left_to_queue -= 1
            all_queued = self._left_to_queue == 0
        if all_queued:
            self.queued.set()
