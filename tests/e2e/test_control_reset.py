"""Router and engine over real sockets that are reset: no message is lost or comes twice."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import pytest
from tests.guard import GUARD_S
from tests.unit.router_fakes import FakeEngine

from dualpath.core import cluster, control
from dualpath.core import control as request_messages
from dualpath.core.cluster import Role
from dualpath.engine.control import link as router_session
from dualpath.engine.control.link import ControlLink, ZmqRouterConnection
from dualpath.engine.threads import LEAVE_S, OS_THREADS, TimeLimit
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.control_server import ControlServer
from dualpath.router.scheduler.registry import Registry
from dualpath_lab.faults.cluster import Relay

RESETS = 5
#: Between two resets, each way: enough that some are under way when the connection is cut.
MESSAGES = 40


class Router:
    """The real control server, and the messages it receives."""

    def __init__(self) -> None:
        self.server = ControlServer(
            Registry(), self, asyncio.get_running_loop().time, engine_timeout_s=GUARD_S
        )
        self.received: list[str] = []
        self.events: asyncio.Queue[str] = asyncio.Queue()

    def on_joined(self, info: EngineInfo) -> None:
        self.events.put_nowait("joined")

    def on_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        self.events.put_nowait(f"lost: {reason}")

    def on_missed(self, missed: Sequence[EngineInfo]) -> None:
        self.events.put_nowait("missed")

    def on_dead(self, writer: cluster.Writer) -> None:
        self.events.put_nowait("dead")

    def on_message(self, info: EngineInfo, message: control.EngineMessage, received: int) -> None:
        if isinstance(message, request_messages.Released):
            self.received.append(message.request_id)
            if message.request_id == "last":
                self.events.put_nowait("last")

    def in_doubt(self) -> Iterable[cluster.Writer]:
        return ()


def engine_link(address: str, take: Callable[[control.RouterMessage], None]) -> ControlLink:
    """An idle engine's end; its load never changes."""
    return ControlLink(
        ZmqRouterConnection(f"tcp://{address}"),
        FakeEngine("p0", Role.PREFILL, set()).hello,
        lambda: control.Report(1, control.Load(0, 0, 0, 1, 1)),
        take,
        lambda reason: None,
        lambda now_ns: None,
        lambda reason: None,
    )


async def test_a_connection_that_is_reset_again_and_again_loses_and_doubles_nothing() -> None:
    router, loop = Router(), asyncio.get_running_loop()
    await router.server.start("127.0.0.1", 0)
    received: list[str] = []
    welcomed, over = asyncio.Event(), asyncio.Event()

    def take(message: control.RouterMessage) -> None:
        if isinstance(message, control.Registered):
            loop.call_soon_threadsafe(welcomed.set)
        if isinstance(message, request_messages.Release):
            received.append(message.request_id)
            if message.request_id == "last":
                loop.call_soon_threadsafe(over.set)

    port = int(router.server.address.rpartition(":")[2])
    async with Relay(port) as relay, asyncio.timeout(GUARD_S):
        link = engine_link(relay.address, take)
        link.start()
        assert await router.events.get() == "joined"
        await welcomed.wait()
        sent = []
        for reset in range(RESETS + 1):
            for number in range(MESSAGES):
                sent.append(f"{reset}.{number}")
                router.server.send("p0", request_messages.Release(sent[-1], "test"))
                link.send(request_messages.Released(sent[-1]))
                await asyncio.sleep(0)
            if reset < RESETS:
                while not relay.reset():  # the connection before has not come back yet
                    await asyncio.sleep(0.01)
        router.server.send("p0", request_messages.Release("last", "test"))
        link.send(request_messages.Released("last"))
        assert await router.events.get() == "last"
        await over.wait()
        await asyncio.to_thread(
            link.close, control.Deregister(reason="test"), TimeLimit(OS_THREADS, LEAVE_S)
        )
    await router.server.stop()
    assert received == router.received == [*sent, "last"]


async def test_an_engine_talks_to_the_next_router_without_a_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for never in ("HEARTBEAT_S", "ROUTER_TIMEOUT_S"):
        monkeypatch.setattr(router_session, never, float("inf"))
    first = Router()
    await first.server.start("127.0.0.1", 0)
    address = first.server.address
    link = engine_link(address.removeprefix("tcp://"), lambda message: None)
    link.start()
    async with asyncio.timeout(GUARD_S):
        assert await first.events.get() == "joined"
        await first.server.stop()
        following = Router()
        await following.server.start("127.0.0.1", int(address.rpartition(":")[2]))
        assert await following.events.get() == "joined"
        await asyncio.to_thread(
            link.close, control.Deregister(reason="test"), TimeLimit(OS_THREADS, LEAVE_S)
        )
    await following.server.stop()
