"""Schedulers with a leader lease in etcd, as processes."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from tests.guard import GUARD_S
from tests.lease_servers import ETCD, etcd

from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor
from dualpath.router.scheduler.leadership import STANDS_BY

pytestmark = pytest.mark.skipif(ETCD is None, reason="there is no etcd: apt install etcd-server")
SERVES = "dualpath scheduler: cluster at"


async def test_the_one_that_stands_by_follows_one_that_is_killed_and_ends_with_its_store(
    tmp_path: Path,
) -> None:
    ports = [str(claim_port()) for _ in range(3)]
    options = ("--port", "--control-port", "--front-ends-port")
    words = [word for pair in zip(options, ports, strict=True) for word in pair]
    with Supervisor() as started:
        async with etcd(tmp_path) as url:
            lease = url.replace("http://", "etcd://") + "/cluster"

            def scheduler(name: str) -> SpawnedProcess:
                command = (sys.executable, "-m", "dualpath.cli.main", "scheduler", *words)
                return started.add(
                    SpawnedProcess(
                        name,
                        (*command, "--standby-lease", lease),
                        tmp_path / f"{name}.log",
                        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    )
                )

            first = scheduler("first")
            await asyncio.to_thread(first.wait_for_line, SERVES, GUARD_S)
            second = scheduler("second")
            await asyncio.to_thread(second.wait_for_line, STANDS_BY, GUARD_S)
            assert second.find_line(SERVES) is None
            first.kill()
            await asyncio.to_thread(second.wait_for_line, SERVES, GUARD_S)
        # Another scheduler may have taken the lease: this one ends.
        assert await asyncio.to_thread(second.wait, GUARD_S) == 0, second.log_tail()
        assert second.find_line("could not be renewed in time") is not None
