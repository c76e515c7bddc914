"""Work after events of the device: in order, off the engine's thread, and informed of failures."""

import queue
import threading

from tests.guard import GUARD_S

from dualpath.core.errors import TransportError
from dualpath.engine.passes.device import PASSED, HostDevice
from dualpath.engine.passes.pump import EventWaiter
from dualpath.engine.threads import OS_THREADS, TimeLimit


class Gate:
    """An event that passes or fails when the test calls for it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._error = ""

    def let_pass(self, error: str = "") -> None:
        self._error = error
        self._open.set()

    def passed(self) -> bool:
        if self._error:
            raise TransportError(self._error)
        return self._open.is_set()

    def wait(self) -> None:
        assert self._open.wait(GUARD_S)
        if self._error:
            raise TransportError(self._error)


def test_on_a_cpu_work_runs_at_once_on_the_callers_thread() -> None:
    after = EventWaiter(HostDevice(), "pe-0")
    ran: list[tuple[str | None, int]] = []
    after.call(HostDevice().record(), lambda error: ran.append((error, threading.get_ident())))
    assert ran == [(None, threading.get_ident())]
    after.close(TimeLimit(OS_THREADS, GUARD_S))


def test_callbacks_run_after_their_events_in_order() -> None:
    after = EventWaiter(HostDevice(), "pe-0")
    ran: queue.SimpleQueue[str] = queue.SimpleQueue()
    first, second = Gate(), Gate()
    after.call(first, lambda error: ran.put("first"))
    after.call(second, lambda error: ran.put("second"))
    after.call(PASSED, lambda error: ran.put("third"))
    second.let_pass()
    assert ran.empty()
    first.let_pass()
    assert [ran.get(timeout=GUARD_S) for _ in range(3)] == ["first", "second", "third"]
    after.close(TimeLimit(OS_THREADS, GUARD_S))


def test_callbacks_get_device_errors_and_a_defect_does_not_stop_the_thread() -> None:
    after = EventWaiter(HostDevice(), "pe-0")
    ran: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    broken, whole = Gate(), Gate()

    def defective(error: str | None) -> None:
        ran.put(error)
        raise ValueError("a defect")

    after.call(broken, defective)
    after.call(whole, ran.put)
    broken.let_pass("no more GPU")
    assert ran.get(timeout=GUARD_S) == "no more GPU"
    whole.let_pass()
    assert ran.get(timeout=GUARD_S) is None
    after.close(TimeLimit(OS_THREADS, GUARD_S))
