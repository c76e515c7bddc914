"""A cluster of emulated engines on two raylets: it answers, loses a node, and recovers."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.plain_engine import Answer, Completion, until
from tests.emulated_commands import EMULATED
from tests.guard import GUARD_S
from tests.launched import ENTRY
from tests.ray_cluster import RayCluster

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.launch.executor import Launch, Place, Unit
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.process import Supervisor
from dualpath.launch.settings import LocalClusterSettings
from dualpath.node.cluster_secret import SECRET_VARIABLE, new_secret

pytest.importorskip("ray")

PROMPT = list(range(100))


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    made = new_secret()
    monkeypatch.setenv(SECRET_VARIABLE, made)
    return made


@pytest.fixture
def cluster(ray_cluster: RayCluster, secret: str, tmp_path: Path) -> Iterator[LocalCluster]:
    settings = LocalClusterSettings(
        transport="memory",
        model="qwen2.5-32b",
        storage=str(tmp_path / "kv"),
        log_dir=str(tmp_path / "logs"),
        port=0,
        buffer_bytes=16 << 20,
        executor="ray",
        ray_address=ray_cluster.address,
    )
    with LocalCluster(settings, commands=EMULATED) as cluster:
        yield cluster


class Request:
    """A stream that is read beside the test."""

    def __init__(self, url: str, generate: int) -> None:
        self.begun = threading.Event()
        self.token_ids: list[int] = []
        self.error = ""
        self._stream = Completion(url, PROMPT, generate)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for piece in self._stream.pieces():
                self.token_ids += piece
                self.begun.set()
        except (AssertionError, OSError) as error:
            self.error = repr(error)

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()


def answer(cluster: LocalCluster, generate: int) -> Answer:
    return Completion(cluster.endpoint, PROMPT, generate).answer()


def looked_after(cluster: LocalCluster, true: Callable[[], object], what: str) -> None:
    """Wait for a condition while the cluster is supervised as by `dualpath serve`."""

    def look() -> object:
        cluster.supervise()
        return true()

    until(look, what, GUARD_S)


def alive(cluster: LocalCluster) -> set[str]:
    return {engine["engine_id"] for engine in cluster.status()["engines"] if engine["alive"]}


def test_a_lost_node_is_a_lost_engine_which_is_placed_again_when_a_node_returns(
    cluster: LocalCluster,
    ray_cluster: RayCluster,
    secret: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dualpath.launch.ray_executor._WARN_AFTER_S", 0.5)
    first = answer(cluster, 40)
    assert len(first.token_ids) == 40
    assert not spoken(secret, ray_cluster)

    under_way = Request(cluster.endpoint, 100)
    assert under_way.begun.wait(GUARD_S)
    ray_cluster.lose()
    before = len(caplog.messages)
    looked_after(cluster, lambda: not all(p.alive for p in cluster.processes), "a lost process")
    (lost,) = (process for process in cluster.processes if not process.alive)
    assert lost.name in ("pe-0", "de-0")
    assert "lost with its actor or node: ActorDiedError" in lost.log_tail()
    until(lambda: lost.name not in alive(cluster), "the engine is lost")
    waits = f"{lost.name} waits for Ray to place it"
    looked_after(
        cluster, lambda: waits in caplog.messages[before:], "a process that waits for its place"
    )

    ray_cluster.join()
    looked_after(cluster, lambda: alive(cluster) == {"pe-0", "de-0"}, "both engines")
    since = caplog.messages[before:]
    assert any(text.startswith(f"{lost.name} was placed on ") for text in since)
    looked_after(cluster, lambda: under_way.over, "the end of the stream")
    assert (under_way.error, len(under_way.token_ids)) == ("", 100)
    assert under_way.token_ids[:40] == first.token_ids
    again = answer(cluster, 40)
    assert again.token_ids == first.token_ids
    assert again.cached_tokens == 96


def test_ray_gives_engines_their_devices_and_what_it_cannot_place_is_refused(
    ray_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.util import placement_group_table

    from dualpath.launch import ray_executor

    monkeypatch.setattr(ray_executor, "has_cpu_build", lambda: False)
    settings = LocalClusterSettings(
        model="m", storage="kv", ray_address=ray_cluster.address, ray_strategy="STRICT_PACK"
    )
    executor = ray_executor.RayExecutor(settings)
    refused = "by STRICT_PACK within 0.5 s: pe-0 needs 1 CPU, 2 GPU; de-0 needs 2 CPU; free in"
    pairs = [Unit(f"pe-{i}", (f"pe-{i}",), Role.PREFILL, i, devices=2) for i in range(2)]
    try:
        with pytest.raises(ConfigError, match="4 GPU are needed and it has 2; add nodes"):
            executor.reserve(pairs)
        apart = [pairs[0], Unit("de-0", ("de-0", "de-1"), Role.DECODE)]
        with monkeypatch.context() as impatient:
            impatient.setattr(ray_executor, "_PLACE_S", 0.5)
            with pytest.raises(ConfigError, match=refused):
                executor.reserve(apart)
        assert {g["state"] for g in placement_group_table().values()} == {"REMOVED"}
        executor.reserve(pairs[:1])
        assert not executor.on_cpus

        def launches(place: Place) -> list[Launch]:
            return [Launch(ENTRY, ["stay", *place.devices], {})]

        with Supervisor() as supervisor:
            (process,) = executor.start(pairs[0], launches, tmp_path)
            supervisor.add(process)
            assert process.wait_for_line("up", GUARD_S).split()[3:] == ["0", "1"]
    finally:
        executor.close()


def spoken(secret: str, ray_cluster: RayCluster) -> list[str]:
    """Return where a secret can be read: files of Ray, command lines."""
    found = [
        str(path)
        for path in Path(ray_cluster.folder).rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue  # ended meanwhile
        if secret.encode() in words and int(process.name) != os.getpid():
            found.append(words.decode(errors="replace"))
    return found
