"""Clusters of emulated engines whose every listener and URL is on ::1."""

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.e2e.small_costs import COSTS
from tests.guard import GUARD_S

from dualpath.core.addresses import http_url, tcp_endpoint
from dualpath.launch.local_cluster import ClusterStatus
from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor

HERE = "::1"
TRACE = '{"session_id": "a", "rounds": [[256, 20], [30, 10]]}\n'
ENGINE = (
    *("--model", "costs.toml", "--storage", "kv", "--transport", "memory"),
    *("--block-tokens", "16", "--buffer-bytes", "4MiB", "--hbm-bytes", "4MiB"),
)


def _has_ipv6() -> bool:
    try:
        with socket.create_server((HERE, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")


class Commands:
    """`dualpath` commands of one test, in its folder."""

    def __init__(self, folder: Path, processes: Supervisor) -> None:
        (folder / "costs.toml").write_text(COSTS)
        (folder / "trace.jsonl").write_text(TRACE)
        self.folder = folder
        self.processes = processes

    def starts(self, *words: str) -> str:
        """Start what serves; return the line that names its URL."""
        started = self.processes.add(self._spawn(words), ends_last="engine" not in words)
        return started.wait_for_line("http://", GUARD_S)

    def runs(self, *words: str) -> str:
        """Run what ends by itself; return its output."""
        command = self._spawn(words)
        assert command.wait(GUARD_S) == 0, command.output()
        return command.output()

    def engines(self, *routers: str, brackets: bool, options: Sequence[str] = ()) -> None:
        """Start a prefill and a decode engine, each with its address of the router."""
        for role, router in zip(("prefill", "decode"), routers, strict=True):
            host = f"[{HERE}]" if brackets else HERE
            words = ("--host", host, "--router", router, *ENGINE, *options)
            line = self.starts("emulate", role, *words)
            assert f"http://[{HERE}]:" in line

    def secret(self) -> Sequence[str]:
        """Return the option of a cluster secret."""
        (self.folder / "secret").write_text("a" * 64)
        (self.folder / "secret").chmod(0o600)
        return ("--cluster-secret-file", "secret")

    def serves(self, endpoint: str, cluster_url: str) -> None:
        """Wait until two engines serve; then replay, and look at the status."""
        status = ClusterStatus(endpoint, cluster_url, {})
        missing = lambda: "" if len(status.alive()) == 2 and status.serves() else "engines"  # noqa: E731
        self.processes.wait_until_ready(missing, GUARD_S)
        urls = [engine["api_url"] for engine in status.read()["engines"]]
        assert all(url.startswith(f"http://[{HERE}]:") for url in urls)
        self.runs("replay", "trace.jsonl", "--endpoint", endpoint, "--json", "out.json")
        turns = json.loads((self.folder / "out.json").read_text())["turns"]
        assert [turn["error"] for turn in turns] == [None, None]
        assert turns[1]["hit_tokens"] > 0

    def _spawn(self, words: Sequence[str]) -> SpawnedProcess:
        name = f"{len(list(self.folder.glob('*.log')))}-{words[0]}"
        return SpawnedProcess(
            name,
            [sys.executable, "-m", "dualpath.cli.main", *words],
            self.folder / f"{name}.log",
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            folder=self.folder,
        )


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with Supervisor() as processes:
        yield Commands(tmp_path, processes)


def test_a_scheduler_separate_front_ends_and_engines(commands: Commands) -> None:
    control, links, port, *fronts = (claim_port(HERE) for _ in range(5))
    commands.starts(
        *("scheduler", "--host", HERE, "--port", str(port), "--control-host", f"[{HERE}]"),
        *("--control-port", str(control), "--front-ends-port", str(links)),
    )
    for front in fronts:
        line = commands.starts(
            *("emulate", "frontend", "--host", HERE, "--port", str(front)),
            *("--scheduler", tcp_endpoint(HERE, links)),
        )
        assert f"{http_url(HERE, front)}/v1" in line
    commands.engines(*[tcp_endpoint(HERE, control)] * 2, brackets=True)
    for front in fronts:
        commands.serves(http_url(HERE, front), http_url(HERE, port))
    assert "1P1D" in commands.runs("roles", "--endpoint", http_url(HERE, port))


def test_a_router_doctor_and_record(commands: Commands) -> None:
    control, port, proxy, free = (claim_port(HERE) for _ in range(4))
    commands.starts(
        *("emulate", "router", "--host", f"[{HERE}]", "--port", str(port)),
        *("--control-host", HERE, "--control-port", str(control)),
    )
    commands.engines(*[tcp_endpoint(HERE, control)] * 2, brackets=False)
    commands.serves(http_url(HERE, port), http_url(HERE, port))
    found = commands.runs(
        *("doctor", "--host", HERE, "--ports", str(free), "--skip", "vllm,nixl"),
        *("--router", tcp_endpoint(HERE, control), "--buffer-bytes", "1MiB"),
    )
    assert f"{tcp_endpoint(HERE, control)} accepts connections" in re.sub(r"\s+", " ", found)
    recording = commands.processes.add(
        commands._spawn(
            (
                *("record", "--endpoint", http_url(HERE, port), "--out", "recorded.jsonl"),
                *("--host", HERE, "--port", str(proxy)),
            )
        )
    )
    assert f"{http_url(HERE, proxy)}" in recording.wait_for_line("recording at", GUARD_S)
    commands.serves(http_url(HERE, proxy), http_url(HERE, port))


def test_a_router_of_several_processes_on_every_address(commands: Commands) -> None:
    control, links, port, cluster = (claim_port(HERE) for _ in range(4))
    secret = commands.secret()
    commands.starts(
        *("emulate", "router", "--front-ends", "2", "--host", "::", "--port", str(port)),
        *("--control-host", "::", "--control-port", str(control), *secret),
        *("--front-ends-port", str(links), "--cluster-port", str(cluster)),
    )
    # One engine registers over IPv6, the other over IPv4.
    routers = (tcp_endpoint(host, control) for host in (HERE, "127.0.0.1"))
    commands.engines(*routers, brackets=False, options=secret)
    commands.serves(http_url(HERE, port), http_url(HERE, cluster))
    commands.serves(http_url("127.0.0.1", port), http_url("127.0.0.1", cluster))


@pytest.mark.parametrize("host", ["::", "2001:db8::1", "ip6-loopback.invalid"])
def test_a_control_address_that_cannot_be_bound_names_the_address(
    host: str, commands: Commands
) -> None:
    secret = commands.secret()
    with socket.create_server(("::", 0), family=socket.AF_INET6) as taken:
        words = ("emulate", "router", "--control-host", host, "--port", str(claim_port(HERE)))
        failed = commands._spawn(
            (
                *words,
                "--control-port",
                str(taken.getsockname()[1]),
                *secret,
            )
        )
        assert failed.wait(GUARD_S) == 2
    (line,) = failed.output().strip().splitlines()[-1:]
    remedy = "choose another control port" if host == "::" else "an address of this machine"
    assert remedy in line
