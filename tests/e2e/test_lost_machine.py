"""A scheduler's machine fails silently: its front ends and engines find the next one soon.

Machines are network namespaces here.  A lost machine sends no packets any more, no
acknowledgement either.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tests.e2e.plain_engine import until
from tests.e2e.small_costs import COSTS
from tests.e2e.test_emulated_cluster import ENGINE
from tests.guard import GUARD_S
from zmq.utils.monitor import recv_monitor_message

from dualpath.core.sessions import ROUTER_TIMEOUT_S
from dualpath.engine.control.link import prepare_dealer
from dualpath.launch.process import SpawnedProcess, Supervisor
from dualpath.node.cluster_secret import SECRET_VARIABLE
from dualpath.transport.nixl import nixl_package

#: Address of the serving scheduler, as that of a Kubernetes Service.
ADDRESS = "10.217.0.1"
CLIENTS, FIRST, SECOND = MACHINES = ("clients", "first", "second")


class Network:
    """Two machines that have the address, and one of clients, which reach it at the first."""

    def __init__(self) -> None:
        for machine in MACHINES:
            run("ip", "netns", "add", name(machine))
            ip(machine, "link", "set", "lo", "up")
        for number, machine in enumerate((FIRST, SECOND), 1):
            peer = ("type", "veth", "peer", "name", CLIENTS, "netns", name(machine))
            ip(CLIENTS, "link", "add", machine, *peer)
            for at, device, last in ((CLIENTS, machine, 1), (machine, CLIENTS, 2)):
                ip(at, "address", "add", f"10.217.{number}.{last}/30", "dev", device)
                ip(at, "link", "set", device, "up")
            ip(machine, "address", "add", f"{ADDRESS}/32", "dev", "lo")
            to_it, table = ("via", f"10.217.{number}.2"), ("table", str(number))
            ip(CLIENTS, "route", "add", ADDRESS, *to_it, *table)
            ip(CLIENTS, "rule", "add", *table, "priority", str(number + 100))

    def lose(self, machine: str) -> None:
        """Drop all packets from a machine."""
        ip(machine, "route", "add", "blackhole", "10.217.1.1/32")

    def move(self) -> None:
        """Let the address lead to the second machine.

        Connections begun before stay where they are, as they do where addresses are translated.
        """
        for port in self.ports("all"):
            pinned = ("ipproto", "tcp", "sport", str(port), "table", "1", "priority", "100")
            ip(CLIENTS, "rule", "add", *pinned)
        ip(CLIENTS, "rule", "del", "priority", "101")

    def ports(self, state: str) -> list[int]:
        """Return the clients' ports of connections to the address that are in a state."""
        shown = ("ss", "-Htn", "state", state, "dst", ADDRESS)
        lines = run("ip", "netns", "exec", name(CLIENTS), *shown).splitlines()
        ours = (next(word for word in line.split() if ":" in word) for line in lines)
        return [int(end.rpartition(":")[2]) for end in ours]


def name(machine: str) -> str:
    return f"dualpath-{os.getpid()}-{machine}"


def ip(machine: str, *words: str) -> None:
    run("ip", "-n", name(machine), *words)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "ss"))):
        pytest.skip("needs root, ip and ss")
    try:
        yield Network()
    finally:
        for machine in MACHINES:
            subprocess.run(("ip", "netns", "del", name(machine)), check=False)


class Processes(Supervisor):
    """Commands on machines, which have one cluster secret."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            SECRET_VARIABLE: "c" * 64,
        }

    def start(self, called: str, machine: str, *words: str) -> SpawnedProcess:
        argv = ("ip", "netns", "exec", name(machine), sys.executable, "-m", "dualpath.cli.main")
        log = self._folder / f"{called}.log"
        process = SpawnedProcess(
            called, (*argv, *words), log, self._environment, folder=self._folder
        )
        return self.add(process)

    def scheduler(self, machine: str) -> SpawnedProcess:
        where = ("--control-host", ADDRESS, "--control-port", "5700", "--front-ends-port", "5701")
        process = self.start(machine, machine, "scheduler", *where)
        process.wait_for_line("dualpath scheduler", GUARD_S)
        return process


@pytest.mark.long
@pytest.mark.nixl
def test_engines_and_front_ends_of_a_lost_machine_find_the_scheduler_that_follows(
    tmp_path: Path, network: Network
) -> None:
    pytest.importorskip(nixl_package())
    (tmp_path / "costs.toml").write_text(COSTS)
    with Processes(tmp_path) as processes:
        first, second = processes.scheduler(FIRST), processes.scheduler(SECOND)
        to_it = ("--router", f"tcp://{ADDRESS}:5700", "--engine-id", "decode")
        processes.start("engine", CLIENTS, "emulate", "decode", *to_it, *ENGINE)
        to_it = ("--scheduler", f"tcp://{ADDRESS}:5701", "--front-end-name", "front")
        processes.start("front end", CLIENTS, "emulate", "frontend", "--port", "0", *to_it)
        joined = ("decode engine decode joined", "front end front joined")
        for line in joined:
            first.wait_for_line(line, GUARD_S)
        network.lose(FIRST)
        # Both close their connection and open others, still to the lost machine.
        until(
            lambda: not network.ports("established") and len(network.ports("syn-sent")) == 2,
            "both connections are given up",
        )
        network.move()
        for line in joined:
            second.wait_for_line(line, GUARD_S)
        processes.end(hard=True)  # engines would leave, and wait for an answer


def test_the_kernel_gives_a_connection_up_before_its_session_ends() -> None:
    with (
        zmq.Context() as context,
        socket.create_server(("127.0.0.1", 0)) as listener,
        context.socket(zmq.DEALER) as dealer,
    ):
        prepare_dealer(dealer, None)
        connected = dealer.get_monitor_socket(zmq.EVENT_CONNECTED)
        dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert connected.poll(int(GUARD_S * 1000))
        file = recv_monitor_message(connected)["value"]
        with socket.socket(fileno=os.dup(file)) as connection:
            limit_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert 0 < limit_ms < ROUTER_TIMEOUT_S * 1000
        dealer.disable_monitor()
        connected.close()
        dealer.close(linger=0)
