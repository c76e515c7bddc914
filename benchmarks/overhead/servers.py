"""The servers that are compared, as processes of this machine, and what they say of themselves."""

import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from benchmarks.overhead.client import NAME, Api, Chat, TokenIds

from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS
from dualpath.ops.launch.cluster_keys import LOOPBACK_DEVICES
from dualpath.ops.launch.commands import ENGINE_ENTRY, ROUTER_ENTRY
from dualpath.ops.launch.local_cluster import LocalCluster
from dualpath.ops.launch.process import ManagedProcess
from dualpath.ops.launch.settings import MIB, LocalClusterSettings

BLOCK_TOKENS = 64
MAX_MODEL_LEN = 4096
HBM_BYTES = 256 * MIB

_START_S = 300.0
_END_S = 15.0
_POLL_S = 0.1
#: Clock of a whole process's CPU time, threads that have ended included (clock_getcpuclockid(3)).
_PROCESS_CLOCK = 2

#: Paced engines: next to no KV to move, so that their own work disturbs little.
_COSTS = """
name = "paced"
layers = 4
kv_bytes_per_token = 64.0
prefill_tokens_per_s = 1e6
[prefill]
batch_s = {prefill_s}
[decode]
step_s = {step_s}
"""


class Server(NamedTuple):
    """An endpoint; ``processes`` serve it, ``router`` is the one whose CPU time is of interest.

    ``metric_urls`` by name: the router's, or the engine's, and those of engines behind it.
    """

    name: str
    url: str
    api: Api
    router: int
    processes: tuple[int, ...]
    metric_urls: dict[str, str]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Emulated engines: seconds of a forward pass of the PE and of a step of the DE."""

    prefill_s: float
    step_s: float


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, not of its children."""
    return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)


def metrics(url: str) -> dict[str, float]:
    """Return the samples of a Prometheus endpoint, added up over labels other than ``stage``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        name, _, labels = name.partition("{")
        if labels.startswith('stage="'):
            name += f"/{labels.split(chr(34))[1]}"
        found[name] = found.get(name, 0.0) + float(value)
    return found


@contextmanager
def plain_server(model: Path, folder: Path) -> Iterator[Server]:
    """One vLLM server with the arguments of the cluster's engines, without a connector."""
    port = free_port()
    command = [
        "--model", str(model), "--served-model-name", NAME, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--block-size", str(BLOCK_TOKENS),
        "--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(HBM_BYTES),
        "--no-enable-prefix-caching", "--no-async-scheduling", "--enforce-eager",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with _process("vllm", ENGINE_ENTRY, command, folder) as process:
        _wait_ready(url, [process])
        pids = _groups([process.pid])
        yield Server("vLLM alone", url, Chat(), process.pid, pids, {"engine": url})


@contextmanager
def real_cluster(model: Path, folder: Path) -> Iterator[Server]:
    """Router, one prefill and one decode engine of vLLM, as ``dualpath serve`` starts them."""
    settings = LocalClusterSettings(
        model=str(model),
        storage=str(folder / "storage"),
        port=0,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK_TOKENS,
        hbm_bytes=HBM_BYTES,
        buffer_bytes=HBM_BYTES,
        served_model_names=(NAME,),
        log_dir=str(folder),
    )
    with LocalCluster(settings) as cluster:
        urls = {engine["role"]: engine["api_url"] for engine in cluster.status()["engines"]}
        pids = _groups([process.pid for process in cluster.processes])
        router = cluster.process("router").pid
        yield Server(
            "router, 1P1D", cluster.endpoint, Chat(), router, pids,
            {"router": cluster.endpoint, "engine": urls[Role.PREFILL.value]},
        )  # fmt: skip


@contextmanager
def paced_cluster(model: Path, folder: Path, pace: Pace, *, light: bool) -> Iterator[Server]:
    """A router before emulated engines that take their time and hardly any CPU.

    ``light``: the front door for token ids instead of `dualpath router`.
    """
    folder.mkdir()
    costs = folder / "costs.toml"
    costs.write_text(_COSTS.format(prefill_s=pace.prefill_s, step_s=pace.step_s))
    port, control_port = free_port(), free_port()
    control, url = f"tcp://127.0.0.1:{control_port}", f"http://127.0.0.1:{port}"
    if light:
        command = ["emulate", "router", "--port", str(port), "--control", control]
    else:
        command = [
            "router", str(model), "--port", str(port), "--control-port", str(control_port),
            "--served-model-name", NAME, "--block-size", str(BLOCK_TOKENS),
            "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32",
            "--vllm-args", "--disable-uvicorn-access-log",
        ]  # fmt: skip
    engine = [
        "--control", control, "--model", str(costs), "--storage", str(folder / "storage"),
        "--block-size", str(BLOCK_TOKENS), "--vocab-size", str(VOCABULARY_TOKENS),
        "--max-model-len", str(MAX_MODEL_LEN), "--verify", "checksum",
        "--hbm-mib", "256", "--buffer-mib", "256",
    ]  # fmt: skip
    with ExitStack() as stack:
        router = stack.enter_context(_process("router", ROUTER_ENTRY, command, folder))
        processes = [router]
        for role in Role:
            words = ["emulate", role.value, "--engine-id", role.value, *engine]
            processes.append(stack.enter_context(_process(role.value, ROUTER_ENTRY, words, folder)))
        _wait_ready(url, processes)
        name, api = ("light front door", TokenIds()) if light else ("router", Chat())
        pids = tuple(process.pid for process in processes)
        yield Server(name, url, api, router.pid, pids, {"router": url})


@contextmanager
def _process(name: str, entry: str, command: list[str], folder: Path) -> Iterator[ManagedProcess]:
    process = ManagedProcess(name, entry, command, folder / f"{name}.log", LOOPBACK_DEVICES)
    try:
        yield process
    finally:
        process.terminate()
        process.end(_END_S)


def free_port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_ready(url: str, processes: list[ManagedProcess]) -> None:
    end_s = time.monotonic() + _START_S
    while not _healthy(url):
        for process in processes:
            if not process.alive or time.monotonic() > end_s:
                raise EngineLostError(f"{process.name} did not start:\n{process.log_tail()}")
        time.sleep(_POLL_S)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _groups(leaders: list[int]) -> tuple[int, ...]:
    """Return the processes of the groups; every server leads one of its own."""
    running = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return tuple(pid for pid in running if _group(pid) in leaders)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
