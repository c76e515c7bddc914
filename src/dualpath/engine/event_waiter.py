"""A thread that waits for events of the device, so that neither the engine nor the pump has to."""

import logging
from collections import deque
from collections.abc import Callable

from dualpath.core.errors import DualPathError
from dualpath.engine.device import Device, DeviceEvent
from dualpath.engine.health import Health
from dualpath.engine.threads import Thread, TimeLimit

log = logging.getLogger(__name__)

#: No layer of a forward pass computes longer.
_EVENT_LIMIT_S = 120.0

#: Called with None, or with what went wrong on the device.
Work = Callable[[str | None], None]


class EventWaiter:
    """Runs work after events, in the order of the calls.

    Events of one stream pass in order, so one thread that blocks on the oldest is enough.  Work
    whose event has passed runs at once on the caller's thread unless older work is waiting: on a
    CPU there never is a thread.
    """

    def __init__(self, device: Device, name: str, health: Health | None = None) -> None:
        self._health = health or Health()
        self._device = device
        self._name = f"{name}-events"
        self._change = self._health.threads.condition()
        self._waiting: deque[tuple[DeviceEvent, Work]] = deque()
        self._closing = False
        self._sign = self._health.sign("the device has not come to an event", _EVENT_LIMIT_S)
        self._thread: Thread | None = None

    def call(self, event: DeviceEvent, work: Work) -> None:
        """Run ``work`` once ``event`` has passed, or with the reason if the device failed."""
        with self._change:
            idle = not self._waiting
            if not idle or not _has_passed(event):
                self._waiting.append((event, work))
                self._start()
                self._change.notify()
                return
        work(None)

    def close(self, limit: TimeLimit) -> None:
        """Finish what waits and stop, within the limit; idempotent."""
        with self._change:
            self._closing = True
            self._change.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            limit.join([thread])

    def _start(self) -> None:
        if self._thread is None:
            self._thread = self._health.start(self._name, self._run)

    def _run(self) -> None:
        self._device.enter_thread()
        while True:
            with self._change:
                while not self._waiting and not self._closing:
                    self._sign.idle()
                    self._change.wait()
                if not self._waiting:
                    return
                event, work = self._waiting[0]
                self._sign.moved()
            try:
                work(_wait(event))
            except Exception:  # a defect must not end the thread that everybody's sends pass
                log.exception("work after an event of the device failed")
            with self._change:
                # Only now: until it has run, younger work must not overtake it.
                self._waiting.popleft()


def _has_passed(event: DeviceEvent) -> bool:
    try:
        return event.passed()
    except DualPathError:
        return False  # the thread finds out why


def _wait(event: DeviceEvent) -> str | None:
    try:
        event.wait()
    except DualPathError as error:
        return str(error)
    return None
