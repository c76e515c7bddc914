"""`dualpath serve` and its local cluster: the errors at start, and the shutdown."""

import multiprocessing
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import tiny_cluster_settings
from tests.e2e.plain_engine import START_S, complete, tiny_model, until
from tests.guard import GUARD_S
from tests.listeners import open_listeners

from dualpath.cli.main import main
from dualpath.core.errors import EngineLostError
from dualpath.core.modes import Mode
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.process import SpawnedProcess, all_processes

pytestmark = pytest.mark.engine

PROMPT = [10 + index % 300 for index in range(200)]


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run `dualpath serve` in this process; return its error line."""
    assert main(["serve", *arguments]) == 2
    captured = capfd.readouterr()
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith("dualpath: ")
    return line


def test_a_port_in_use_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        line = refused(capfd, str(tiny_model()), "--storage", str(tmp_path), "--port", port)
    assert port in line
    assert "--port" in line


def test_a_missing_model_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "none")
    line = refused(capfd, model, "--storage", str(tmp_path), "--port", "0")
    assert model in line
    assert "config.json" in line


def test_a_storage_that_cannot_be_written_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    storage = str(tmp_path / "file" / "storage")
    line = refused(capfd, str(tiny_model()), "--storage", storage, "--port", "0")
    assert storage in line
    assert "writable" in line


@pytest.mark.parametrize("option", ["--hbm-bytes", "--buffer-bytes", "--block-tokens"])
def test_absurd_sizes_are_named(
    option: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refused(capfd, str(tiny_model()), "--storage", str(tmp_path), option, "-3")
    assert re.search(r"-\d+; it must be at least 1", line)


def test_absurd_nodes_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    storage = str(tmp_path)
    line = refused(capfd, str(tiny_model()), "--storage", storage, "--nodes", "0P1D")
    assert "--nodes is '0P1D'; it must be at least one prefill" in line


def test_an_engine_that_cannot_start_takes_the_cluster_down_with_its_reason(
    tmp_path: Path,
) -> None:
    settings = tiny_cluster_settings(
        tiny_model(), tmp_path / "storage", port=0, vllm_args=("--no-such-argument",)
    )
    before = set(multiprocessing.active_children())
    cluster = LocalCluster(settings)
    with pytest.raises(
        EngineLostError, match=r"(router|pe-0|de-0) exited with code(.|\n)*--no-such-argument"
    ):
        cluster.start()
    assert cluster.processes == ()
    assert set(multiprocessing.active_children()) <= before


@pytest.fixture
def serving(tmp_path: Path) -> "Iterator[Serving]":
    serving = Serving(tmp_path)
    yield serving
    serving.end()


def test_ctrl_c_ends_everything_and_leaves_nothing_behind(serving: "Serving") -> None:
    first = complete(serving.url, PROMPT, 70)
    context = PROMPT + first.token_ids
    # 199 + 70 tokens have KV after the answer, that is four blocks of 64.
    until(lambda: len(list(serving.storage.rglob("*.kv"))) == 4, "the blocks of the first turn")
    second = complete(serving.url, context + PROMPT[:50], 4)
    assert second.cached_tokens == 256
    processes = serving.descendants()
    assert len(processes) >= 5  # fork server, router, two API servers, their engine cores
    assert not open_listeners(process for process, _ in processes)

    os.killpg(serving.process.pid, signal.SIGINT)
    assert serving.process.wait(GUARD_S) == 0
    until(lambda: not processes & serving.running(), "the end of all processes")
    left = set(os.listdir("/dev/shm")) - serving.shared_memory_before
    assert not left - _shared_memory_in_use()


class Serving:
    """A `dualpath serve` in a process group of its own, as at a terminal."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        self.shared_memory_before = set(os.listdir("/dev/shm"))
        self.process = SpawnedProcess(
            "serve",
            [
                sys.executable, "-m", "dualpath.cli.main", "serve", str(tiny_model()),
                "--storage", str(self.storage), "--port", "0", "--mode", Mode.BASIC.value,
                "--dtype", "float32", "--max-model-len", "2048", "--hbm-bytes", "32MiB",
                "--buffer-bytes", "32MiB", "--served-model-names", "tiny",
            ],
            folder / "serve.log",
            # A hash seed, as test runners set it, must not separate engines from their blocks.
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
        )  # fmt: skip
        captured = self.process.wait_for_line("endpoint", START_S)
        (self.url,) = re.findall(r"http://[\d.]+:\d+", captured)

    def end(self) -> None:
        """End remaining processes, whether or not the test passed."""
        self.process.terminate()
        self.process.end(GUARD_S)

    def descendants(self) -> set[tuple[int, int]]:
        """Descendants of this process, by id and start time."""
        found: set[tuple[int, int]] = set()
        parents = {self.process.pid}
        while parents:
            children = {
                (pid, stat.start_ticks) for pid, stat in all_processes() if stat.parent in parents
            }
            found |= children
            parents = {pid for pid, _ in children}
        return found

    def running(self) -> set[tuple[int, int]]:
        """All processes of this machine, by id and start time."""
        return {(pid, stat.start_ticks) for pid, stat in all_processes()}


def _shared_memory_in_use() -> set[str]:
    """Names of shared memory that some process has mapped, other programs' for instance."""
    names: set[str] = set()
    for pid, _ in all_processes():
        try:
            names |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
        except OSError:  # Ended in the meantime, or another user's.
            continue
    return names
