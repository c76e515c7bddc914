"""A thread that waits for events of the device, so that the engine and the pump do not block."""

import logging
from collections import deque
from collections.abc import Callable

from dualpath.core.errors import DualPathError
from dualpath.engine.device import Device, DeviceEvent
from dualpath.engine.health import Health
from dualpath.engine.threads import Thread, TimeLimit

log = logging.getLogger(__name__)

#: Longer than the computation of any layer of a forward pass.
_EVENT_LIMIT_S = 120.0

#: Called with None, or with the error of the device.
Work = Callable[[str | None], None]


class EventWaiter:
    """Runs callbacks after events, in the order of the calls.

    Events of one stream pass in order, so one thread that blocks on the oldest event is enough.  A
    callback whose event has passed runs at once on the calling thread unless an older one waits: on
    a CPU the thread is never started.
    """

    def __init__(self, device: Device, name: str, health: Health | None = None) -> None:
        self._health = health or Health()
        self._device = device
        self._name = f"{name}-events"
        self._change = self._health.threads.condition()
        self._waiting: deque[tuple[DeviceEvent, Work]] = deque()
        self._closing = False
        self._watchdog = self._health.watchdog(
            "the device has not reached an event", _EVENT_LIMIT_S
        )
        self._thread: Thread | None = None

    def call(self, event: DeviceEvent, work: Work) -> None:
        """Run ``work`` once ``event`` has passed, or with the error if the device failed."""
        with self._change:
            idle = not self._waiting
            if not idle or not _has_passed(event):
                self._waiting.append((event, work))
                self._start()
                self._change.notify()
                return
        work(None)

    def close(self, limit: TimeLimit) -> None:
        """Run the waiting callbacks and stop, within the limit; idempotent."""
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
                    self._watchdog.idle()
                    self._change.wait()
                if not self._waiting:
                    return
                event, work = self._waiting[0]
                self._watchdog.progressed()
            try:
                work(_wait(event))
            except Exception:  # a defect must not end the thread that posts all sends
                log.exception("work after an event of the device failed")
            with self._change:
                # Only now: until it has run, later work must not overtake it.
                self._waiting.popleft()


def _has_passed(event: DeviceEvent) -> bool:
    try:
        return event.passed()
    except DualPathError:
        return False  # the thread reports the error


def _wait(event: DeviceEvent) -> str | None:
    try:
        event.wait()
    except DualPathError as error:
        return str(error)
    return None
