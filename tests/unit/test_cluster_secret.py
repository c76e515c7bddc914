"""Authentication of the control connection, with and without the cluster's secret."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from tests.guard import GUARD_S
from tests.unit.router_fakes import FakeEngine

from dualpath.core import cluster, control
from dualpath.core import control as envelopes
from dualpath.core.cluster import Role
from dualpath.core.control import Message
from dualpath.core.errors import ConfigError
from dualpath.engine.control.link import ControlLink, ZmqRouterConnection
from dualpath.engine.threads import LEAVE_S, OS_THREADS, TimeLimit
from dualpath.node.cluster_secret import (
    MIN_SECRET_CHARACTERS,
    SECRET_VARIABLE,
    ClusterSecret,
    check_control_url,
    is_loopback,
    load_secret,
    new_secret,
)
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusal, ControlRefusals
from dualpath.router.scheduler.control_server import ControlServer
from dualpath.router.scheduler.registry import Registry

SECRET = ClusterSecret("the cluster's own secret, in 40 letters.", "a test")
OTHER = ClusterSecret("somebody else's secret, also 40 letters.", "a test")


class WatchedRefusals(ControlRefusals):
    """Lets a test wait for a refusal."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: asyncio.Queue[ControlRefusal] = asyncio.Queue()

    def count(self, reason: ControlRefusal) -> int:
        self.reasons.put_nowait(reason)
        return super().count(reason)


class Router:
    """A control server that records registered engines."""

    def __init__(self) -> None:
        self.joined: asyncio.Queue[str] = asyncio.Queue()
        self.server = ControlServer(Registry(), self, asyncio.get_running_loop().time, 1000.0)
        self.refused = self.server._refusals = WatchedRefusals()

    async def __aenter__(self) -> "Router":
        await self.server.start("127.0.0.1", self.port, self.secret)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.server.stop()

    secret: ClusterSecret | None = SECRET
    port = 0

    def on_joined(self, info: EngineInfo) -> None:
        self.joined.put_nowait(info.engine_id)

    def on_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        pass

    def on_missed(self, missed: Sequence[EngineInfo]) -> None:
        pass

    def on_dead(self, writer: cluster.Writer) -> None:
        pass

    def in_doubt(self) -> list[cluster.Writer]:
        return []

    def on_message(self, info: EngineInfo, message: control.EngineMessage, received: int) -> None:
        pass


class Engine(FakeEngine):
    """A fake engine on the real control link of an engine."""

    def __init__(self, name: str, router: str, secret: ClusterSecret | None) -> None:
        super().__init__(name, Role.PREFILL, set())
        self.loop = asyncio.get_running_loop()
        self.arrived: asyncio.Queue[Message] = asyncio.Queue()
        self.link = ControlLink(
            ZmqRouterConnection(router, secret),
            self.hello,
            lambda: control.Report(1, control.Load(0, 0, 0, 1, 1)),
            self.receive,
            lambda reason: None,
            lambda now_ns: None,
            lambda reason: None,
        )

    def receive(self, message: Message) -> None:
        self.loop.call_soon_threadsafe(self.arrived.put_nowait, message)

    async def __aenter__(self) -> "Engine":
        self.link.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(
            self.link.close, control.Deregister(reason="test over"), TimeLimit(OS_THREADS, LEAVE_S)
        )


async def test_engine_and_router_with_the_same_secret_connect():
    async with Router() as router, Engine("pe", router.server.address, SECRET) as engine:
        async with asyncio.timeout(GUARD_S):
            assert await router.joined.get() == "pe"
            assert isinstance(await engine.arrived.get(), control.Registered)


@pytest.mark.parametrize("secret", [OTHER, None], ids=["another secret", "no secret"])
async def test_a_router_rejects_engines_without_its_secret(secret, caplog):
    async with Router() as router:
        server = router.server
        async with (
            Engine("stranger", server.address, secret) as stranger,
            asyncio.timeout(GUARD_S),
        ):
            assert await router.refused.reasons.get() is ControlRefusal.SECRET
            async with Engine("pe", server.address, SECRET):
                assert await router.joined.get() == "pe"
        assert router.joined.empty()
        assert stranger.arrived.empty()
        refused = {reason for reason, times in server.refusals().items() if times}
        assert refused == {ControlRefusal.SECRET}
    assert "does not have this router's cluster secret" in caplog.text


async def test_knowing_the_routers_public_key_is_not_enough():
    """The router also checks the engines' key."""
    async with Router() as router:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        SECRET.guard_connection(socket)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(router.server.address)
        hello = FakeEngine("thief", Role.PREFILL, set())
        hello.generation = 1
        await socket.send(envelopes.encode(envelopes.unnumbered(hello.hello())))
        async with asyncio.timeout(GUARD_S):
            assert await router.refused.reasons.get() is ControlRefusal.SECRET
        assert router.joined.empty()
        context.destroy(linger=0)


async def test_an_engine_rejects_a_router_without_its_secret():
    router = Router()
    router.secret = None
    async with router, Engine("pe", router.server.address, SECRET) as engine:
        async with Engine("plain", router.server.address, None), asyncio.timeout(GUARD_S):
            assert await router.joined.get() == "plain"
        assert engine.arrived.empty()


async def test_an_engine_joins_a_router_that_restarts_with_the_right_secret():
    plain = Router()
    plain.secret = None
    async with plain, Engine("pe", plain.server.address, SECRET) as engine:
        async with Engine("plain", plain.server.address, None), asyncio.timeout(GUARD_S):
            await plain.joined.get()
        right = Router()
        right.port = int(plain.server.address.rpartition(":")[2])
        await plain.server.stop()
        async with right, asyncio.timeout(GUARD_S):
            assert await right.joined.get() == "pe"
            assert isinstance(await engine.arrived.get(), control.Registered)


async def test_messages_are_encrypted_on_the_wire():
    """A proxy between the two sees neither the engine's name nor its address."""
    seen = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async with Router() as router, asyncio.timeout(GUARD_S):
        port = int(router.server.address.rpartition(":")[2])

        async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                relay(reader, onward[1]), relay(onward[0], writer), return_exceptions=True
            )

        proxy = await asyncio.start_server(through, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with Engine("engine-with-a-name", address, SECRET):
            assert await router.joined.get() == "engine-with-a-name"
        proxy.close()
    assert len(seen) > 500
    assert b"CURVE" in seen
    assert b"engine-with-a-name" not in seen


async def test_a_reachable_control_address_needs_a_secret():
    server = ControlServer(Registry(), Router(), lambda: 0.0, 1000.0)
    for host in ("0.0.0.0", "10.0.0.1", "*", "router.example"):
        with pytest.raises(
            ConfigError, match=r"no cluster secret.*use 127.0.0.1 or ::1, or create a secret"
        ):
            await server.start(host, 0)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1.*DUALPATH_CLUSTER_SECRET"):
        ZmqRouterConnection("tcp://10.0.0.1:5700")
    check_control_url("tcp://10.0.0.1:5700", SECRET)
    await server.start("0.0.0.0", 0, SECRET)
    await server.stop()


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("*", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(host, here):
    assert is_loopback(host) is here


def test_the_secret_comes_from_the_file_before_the_environment(tmp_path: Path, caplog):
    file = tmp_path / "secret"
    file.write_text(new_secret() + "\n")
    file.chmod(0o600)
    environment = {SECRET_VARIABLE: new_secret()}
    from_file, from_variable = load_secret(str(file), environment), load_secret("", environment)
    assert from_file is not None
    assert from_variable is not None
    assert from_file._engine_public != from_variable._engine_public
    again = load_secret(str(file), {})
    assert again is not None
    assert again._engine_public == from_file._engine_public
    assert load_secret("", {}) is None
    assert not caplog.records
    file.chmod(0o644)
    load_secret(str(file), {})
    assert "chmod 600" in caplog.text


def test_invalid_secrets_are_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=rf"has 5 characters, must have at least {MIN_SECRET_CHARACTERS}"
    ):
        load_secret("", {SECRET_VARIABLE: "short"})
    with pytest.raises(ConfigError, match=r"cannot be read.*openssl rand"):
        load_secret(str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="is empty; create a secret with"):
        load_secret(str(tmp_path / "empty"))
    assert len(new_secret()) > MIN_SECRET_CHARACTERS
