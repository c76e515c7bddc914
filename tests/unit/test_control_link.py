"""The thread of an engine's control link: when it sends what it has to send."""

import queue
import threading

from tests.guard import GUARD_S
from tests.unit.router_fakes import FakeEngine

from dualpath.core import control
from dualpath.core.cluster import Role
from dualpath.engine.control.link import ControlLink
from dualpath.engine.threads import OS_THREADS, TimeLimit

SESSION = "router-00000001"
LOAD = control.Load(0, 0, 0, 1, 1)


class Connection:
    """A router that sends frames; ``events`` are the calls of the link, in order."""

    router = "tcp://127.0.0.1:1"

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._arrived: list[bytes] = []

    def send(self, frame: bytes) -> bool:
        self.events.append(f"sent {type(control.decode_engine_message(frame).message).__name__}")
        return True

    def receive(self) -> bytes | None:
        return self._arrived.pop() if self._arrived else None

    def wait(self, timeout_s: float) -> bool:
        if (frame := self.frames.get(timeout=GUARD_S)) is not None:
            self._arrived.append(frame)
        return False

    def wake(self) -> None:
        self.events.append("woken")
        self.frames.put(None)

    def reconnect(self) -> None:
        raise AssertionError("frames are sent at once")

    def close(self) -> None:
        self.events.append("closed")


def frame(number: int, message: control.RouterMessage) -> bytes:
    return control.encode(control.Envelope(SESSION, number, 0, message))


def test_an_answer_is_sent_before_the_other_work_of_the_thread() -> None:
    events: list[str] = []
    connection, over = Connection(events), threading.Event()

    def handle(message: control.RouterMessage) -> None:
        events.append(type(message).__name__)
        if isinstance(message, control.Lookup):
            link.send(control.LookupDone(message.call_id, 1, partial=False))
        if isinstance(message, control.Ack):
            over.set()

    link = ControlLink(
        connection,
        lambda registration: FakeEngine("pe", Role.PREFILL, set()).hello(registration),
        lambda: control.Report(1, LOAD),
        handle,
        lambda reason: None,
        lambda now_ns: events.append("tick"),
        lambda reason: events.append(reason),
    )
    link.start()
    connection.frames.put(frame(0, control.Registered()))
    connection.frames.put(frame(1, control.Lookup(7, (b"k" * 32,), 1.0)))
    connection.frames.put(frame(2, control.Ack()))
    assert over.wait(GUARD_S)
    begin = events.index("Lookup")
    calls = [event for event in events[begin:] if event != "woken"]
    assert calls[:3] == ["Lookup", "sent LookupDone", "tick"]
    link.close(control.Deregister(reason="test over"), TimeLimit(OS_THREADS, GUARD_S))
    assert events[-2:] == ["sent Deregister", "closed"]


def test_another_thread_wakes_the_link_to_send() -> None:
    events: list[str] = []
    connection = Connection(events)
    joined = queue.SimpleQueue[control.RouterMessage]()
    link = ControlLink(
        connection,
        lambda registration: FakeEngine("pe", Role.PREFILL, set()).hello(registration),
        lambda: control.Report(1, LOAD),
        joined.put,
        lambda reason: None,
        lambda now_ns: None,
        lambda reason: events.append(reason),
    )
    connection.frames.put(frame(0, control.Registered()))
    link.start()
    joined.get(timeout=GUARD_S)
    link.send(control.Released("r"))
    link.close(control.Deregister(reason="test over"), TimeLimit(OS_THREADS, GUARD_S))
    assert "woken" in events
    assert "sent Released" in events
