"""Links of front ends over real sockets, with and without the cluster secret."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.guard import GUARD_S
from tests.unit.router_cluster import cluster

from dualpath.core.errors import ConfigError
from dualpath.node.cluster_secret import ClusterSecret, load_secret
from dualpath.router.scheduler.control_socket import ZmqControlSocket
from dualpath.router.scheduler.front_end_server import FrontEndServer
from dualpath.router.scheduler.remote import RemoteScheduling, ZmqLinkConnection


@pytest.fixture
def secret(tmp_path: Path) -> ClusterSecret:
    file = tmp_path / "secret"
    file.write_text("a secret of at least thirty-two characters, for tests")
    file.chmod(0o600)
    loaded = load_secret(str(file))
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("guarded", [False, True])
async def test_a_front_end_learns_which_engines_there_are(
    guarded: bool, secret: ClusterSecret
) -> None:
    key = secret if guarded else None
    async with cluster(real_sockets=True) as made, asyncio.timeout(GUARD_S):
        server = FrontEndServer(made.service.scheduler, ZmqControlSocket(), time.monotonic, 10.0)
        await server.start("127.0.0.1", 0, key)
        connection = ZmqLinkConnection(server.address, key)
        link = RemoteScheduling(connection, "f", "1", time.monotonic, server.address)
        link.start()
        try:
            await link.wait_for_engines(1, 1, GUARD_S)
            assert {engine.engine_id for engine in link.engines.alive()} == {"p0", "d0"}
        finally:
            await link.stop()
            await server.stop()


async def test_a_link_server_may_be_stopped_twice_at_a_time() -> None:
    async with cluster() as made, asyncio.timeout(GUARD_S):
        server = FrontEndServer(made.service.scheduler, ZmqControlSocket(), time.monotonic, 10.0)
        await server.start("127.0.0.1", 0)
        # By the end of the scheduler's turn, and by the end of its process.
        await asyncio.gather(server.stop(), server.stop())


def test_a_scheduler_on_another_machine_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="secret"):
        ZmqLinkConnection("tcp://192.0.2.1:5701")
