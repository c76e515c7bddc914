"""The compared servers as processes of this machine, their CPU time and metrics."""

import asyncio
import multiprocessing
import socket
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dualpath.core.cluster import Role
from dualpath.core.settings import Setting
from dualpath.launch.commands import ENGINE_ENTRY, ROUTER_ENTRY
from dualpath.launch.fork_server import ForkedProcess
from dualpath.launch.local_cluster import LOOPBACK_DEVICES, LocalCluster
from dualpath.launch.ports import claim_port
from dualpath.launch.process import Supervisor, all_processes, local
from dualpath.launch.settings import LocalClusterSettings
from dualpath_lab.benchmarks.overhead.client import (
    NAME,
    Api,
    Chat,
    Load,
    Response,
    TokenIds,
    Window,
    run_load,
)
from dualpath_lab.models.random_models import VOCABULARY_TOKENS
from dualpath_sim.harness.experiment import Stage, one_stage
from dualpath_sim.harness.numbers import Column, Numbers

BLOCK_TOKENS = 64
MAX_MODEL_LEN = 4096
HBM_BYTES = 256 << 20

LIGHT, VLLM = "light", "vllm"
#: Kinds of front ends: of `dualpath emulate`, with token ids, and vLLM's.
KINDS = (LIGHT, VLLM)
#: Share of a prompt's blocks that stub engines have stored, as in the paper's Table 2.
HIT_SHARE = 0.987

_STUBS_ENTRY = "dualpath_lab.benchmarks.overhead.stub_engines:main"
_START_S = 300.0
#: Clock of a process's CPU time, including ended threads (clock_getcpuclockid(3)).
_PROCESS_CLOCK = 2

#: Paced engines: very little KV to transfer, so that their own CPU use is small.
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
    """An endpoint served by ``processes``; the CPU time of ``router`` is measured.

    ``metric_urls`` by name: of the router, if there is one, and of the prefill engine.
    """

    name: str
    url: str
    api: Api
    router: int
    processes: tuple[int, ...]
    metric_urls: dict[str, str]


class SchedulerProcess(NamedTuple):
    """`dualpath scheduler`: its HTTP port, and the addresses for engines and front ends."""

    pid: int
    port: int
    control: str
    front_ends: str


class LinkedServers(NamedTuple):
    """Front ends in separate processes: process ids by HTTP port."""

    scheduler: SchedulerProcess
    front_ends: dict[int, int]
    api: Api


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of a forward pass of the emulated PE and of a step of the emulated DE."""

    prefill_s: float
    step_s: float


class FrontEndOptions(NamedTuple):
    """Longest context, tokens per chunk and API of a front end.

    ``stream_interval`` is vLLM's; the light router forwards each event as it arrives.
    """

    max_model_len: int = MAX_MODEL_LEN
    stream_interval: int = 1
    api: Api = Chat()

    @property
    def vllm_arguments(self) -> tuple[str, ...]:
        """Options for vLLM's argument parser."""
        return ("--disable-uvicorn-access-log", "--stream-interval", str(self.stream_interval))


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process without its children."""
    return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)


def read_metrics(url: str) -> dict[str, float]:
    """Return the samples of a Prometheus endpoint, summed over all labels but ``stage``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            stage = sample.labels.get("stage")
            name = f"{sample.name}/{stage}" if stage else sample.name
            found[name] = found.get(name, 0.0) + sample.value
    return found


@contextmanager
def scheduler_process(folder: Path) -> Iterator[SchedulerProcess]:
    """Run a scheduler in a separate process."""
    port, control, front_ends = claim_port(), claim_port(), claim_port()
    command = [
        "scheduler", "--port", str(port), "--control-port", str(control),
        "--front-ends-port", str(front_ends),
    ]  # fmt: skip
    with Supervisor() as servers:
        process = _start(servers, "scheduler", ROUTER_ENTRY, command, folder)
        ready = f"http://127.0.0.1:{port}/dualpath/v1/status"
        servers.wait_until_ready(lambda: "" if _responds(ready) else f"{ready} is not up", _START_S)
        local_address = "tcp://127.0.0.1:"
        yield SchedulerProcess(
            process.pid, port, f"{local_address}{control}", f"{local_address}{front_ends}"
        )


@contextmanager
def linked_servers(
    model: Path,
    folder: Path,
    kind: str,
    count: int,
    nodes: str,
    pace: Pace,
    options: FrontEndOptions,
) -> Iterator[LinkedServers]:
    """Run a scheduler, stub engines of ``nodes`` and ``count`` front ends of a ``kind``."""
    with scheduler_process(folder) as scheduler, Supervisor() as servers:
        stubs = [
            "--router", scheduler.control, "--nodes", nodes, "--hit-share", str(HIT_SHARE),
            "--max-model-len", str(options.max_model_len), "--prefill-s", str(pace.prefill_s),
            "--step-s", str(pace.step_s),
        ]  # fmt: skip
        _start(servers, "engines", _STUBS_ENTRY, stubs, folder)
        front_ends = {}
        for number in range(count):
            port = claim_port()
            words = ["--port", str(port), "--scheduler", scheduler.front_ends]
            words += ["--front-end-name", f"f{number}"]
            if kind == LIGHT:
                command = ["emulate", "frontend", *words]
            else:
                command = [
                    "frontend", str(model), *words, "--served-model-names", NAME,
                    "--block-tokens", str(BLOCK_TOKENS), "--dtype", "float32",
                    "--max-model-len", str(options.max_model_len),
                    "--vllm-args", *options.vllm_arguments,
                ]  # fmt: skip
            front_ends[port] = _start(servers, f"f{number}", ROUTER_ENTRY, command, folder).pid
        for port in front_ends:
            wait_ready(f"http://127.0.0.1:{port}", servers)
        yield LinkedServers(scheduler, front_ends, options.api)


@contextmanager
def plain_server(model: Path, folder: Path, options: FrontEndOptions) -> Iterator[Server]:
    """Run one vLLM server with the arguments of the cluster's engines, without a connector."""
    port = claim_port()
    command = [
        "--model", str(model), "--served-model-name", NAME, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--block-size", str(BLOCK_TOKENS),
        "--max-model-len", str(options.max_model_len), "--kv-cache-memory-bytes", str(HBM_BYTES),
        "--no-enable-prefix-caching", "--no-async-scheduling", "--enforce-eager",
        *options.vllm_arguments,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with Supervisor() as servers:
        process = _start(servers, "vllm", ENGINE_ENTRY, command, folder)
        wait_ready(url, servers)
        pids = _groups([process.pid])
        yield Server("vLLM alone", url, options.api, process.pid, pids, {"engine": url})


@contextmanager
def real_cluster(model: Path, folder: Path) -> Iterator[Server]:
    """Run a router and one vLLM prefill and decode engine, as ``dualpath serve`` starts them."""
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
        pids = _groups([local(process).pid for process in cluster.processes])
        router = local(cluster.process("router")).pid
        yield Server(
            "router, 1P1D", cluster.endpoint, Chat(), router, pids,
            {"router": cluster.endpoint, "engine": urls[Role.PREFILL.value]},
        )  # fmt: skip


@contextmanager
def paced_cluster(
    model: Path, folder: Path, pace: Pace, options: FrontEndOptions, *, light: bool = False
) -> Iterator[Server]:
    """Run a router with emulated engines that take time but hardly any CPU.

    ``light``: `dualpath emulate router`, for token ids, instead of `dualpath router`.
    """
    folder.mkdir()
    costs = folder / "costs.toml"
    costs.write_text(_COSTS.format(prefill_s=pace.prefill_s, step_s=pace.step_s))
    port, control_port = claim_port(), claim_port()
    control, url = f"tcp://127.0.0.1:{control_port}", f"http://127.0.0.1:{port}"
    if light:
        command = ["emulate", "router", "--port", str(port)]
        command += ["--control-port", str(control_port)]
    else:
        command = [
            "router", str(model), "--port", str(port), "--control-port", str(control_port),
            "--served-model-names", NAME, "--block-tokens", str(BLOCK_TOKENS),
            "--max-model-len", str(options.max_model_len), "--dtype", "float32",
            "--vllm-args", *options.vllm_arguments,
        ]  # fmt: skip
    engine = [
        "--router", control, "--model", str(costs), "--storage", str(folder / "storage"),
        "--block-tokens", str(BLOCK_TOKENS), "--vocab-size", str(VOCABULARY_TOKENS),
        "--max-model-len", str(options.max_model_len), "--verify", "checksum",
        "--hbm-bytes", "256MiB", "--buffer-bytes", "256MiB",
    ]  # fmt: skip
    with Supervisor() as servers:
        router = _start(servers, "router", ROUTER_ENTRY, command, folder)
        for role in Role:
            words = ["emulate", role.value, "--engine-id", role.value, *engine]
            _start(servers, role.value, ROUTER_ENTRY, words, folder)
        wait_ready(url, servers)
        name, api = ("light router", TokenIds()) if light else ("router", options.api)
        pids = tuple(local(process).pid for process in servers.processes)
        yield Server(name, url, api, router.pid, pids, {"router": url})


def _start(
    servers: Supervisor, name: str, entry: str, command: list[str], folder: Path
) -> ForkedProcess:
    process = ForkedProcess(name, entry, command, folder / f"{name}.log", LOOPBACK_DEVICES)
    return servers.add(process, ends_last=name == "router")


def wait_ready(url: str, servers: Supervisor) -> None:
    """Wait until the endpoint responds; raises the supervisor's error if a server ends."""
    servers.wait_until_ready(lambda: "" if _healthy(url) else f"{url} is not up", _START_S)


def _healthy(url: str) -> bool:
    return _responds(f"{url}/health")


def _responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _groups(leaders: list[int]) -> tuple[int, ...]:
    """Return the processes of the groups; every server is the leader of its group."""
    return tuple(process_id for process_id, stat in all_processes() if stat.group in leaders)


# ----------------------------------------------------------------------------------------- measure
# One phase of load on one server: clients' times, growth of the server's metrics, CPU time.

#: The server's work after a request's last token is done within this time.
_SETTLE_S = 0.3


class Phase(NamedTuple):
    """``metrics``: growth of the server's metrics, by the process that exports them.

    ``steady``: the router's CPU time while all streams were in their steady state.
    """

    responses: list[Response]
    wall_s: float
    router_cpu_s: float
    all_cpu_s: float
    steady: Window
    metrics: dict[str, dict[str, float]]

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(response.tokens for response in self.responses)

    def quantile_s(self, of: Callable[[Response], float], share: float) -> float:
        """Return a quantile over all responses."""
        values = sorted(map(of, self.responses))
        return values[min(int(share * len(values)), len(values) - 1)]

    def mean_ttft_s(self) -> float:
        """Return the clients' mean TTFT."""
        return statistics.fmean(response.ttft_s for response in self.responses)

    def mean_s(self, source: str, metric: str, stage: str = "") -> float:
        """Return the mean of a histogram's observations in this phase, 0 without observations."""
        suffix = f"/{stage}" if stage else ""
        growth = self.metrics[source]
        observed = growth.get(f"{metric}_count{suffix}", 0.0)
        return growth.get(f"{metric}_sum{suffix}", 0.0) / observed if observed else 0.0


def run_phase(server: Server, load: Load, seed: str) -> Phase:
    """Run a load on a server; raises ``DualPathError`` if a request fails."""
    before = {name: read_metrics(url) for name, url in server.metric_urls.items()}
    router_s, all_s, start_s = cpu_s(server.router), _all_cpu_s(server), time.perf_counter()
    steady = Window(load.streams, lambda: cpu_s(server.router))
    responses = asyncio.run(run_load(server.url, server.api, load, seed, steady))
    wall_s = time.perf_counter() - start_s
    router_s, all_s = cpu_s(server.router) - router_s, _all_cpu_s(server) - all_s
    time.sleep(_SETTLE_S)
    after = {name: read_metrics(url) for name, url in server.metric_urls.items()}
    growth = {
        name: {sample: value - before[name].get(sample, 0.0) for sample, value in samples.items()}
        for name, samples in after.items()
    }
    return Phase(responses, wall_s, router_s, all_s, steady, growth)


def idle_share(server: Server, seconds: float) -> float:
    """Return the router's CPU seconds per second without load."""
    start_s = cpu_s(server.router)
    time.sleep(seconds)
    return (cpu_s(server.router) - start_s) / seconds


def _all_cpu_s(server: Server) -> float:
    return sum(map(cpu_s, server.processes))


# -------------------------------------------------------------------------------------- round trip
# Time to wake an idle process on this machine: a lower bound of every message's latency.

_TRIPS = 200
#: Long enough for both processes to sleep.
_PAUSE_S = 0.01


def idle_round_trip_s() -> float:
    """Return the median round-trip time of one byte over loopback TCP between idle processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        echo = multiprocessing.get_context("fork").Process(target=_echo, args=(listener,))
        echo.start()
        with socket.create_connection(listener.getsockname()) as connection:
            times_s = [_trip_s(connection) for _ in range(_TRIPS)]
        echo.join()
    return statistics.median(times_s)


def _trip_s(connection: socket.socket) -> float:
    time.sleep(_PAUSE_S)
    start_s = time.perf_counter()
    connection.send(b"\0")
    connection.recv(1)
    return time.perf_counter() - start_s


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while received := connection.recv(1):
            connection.send(received)


def round_trip() -> list[Stage[None, Numbers]]:
    """Return the stage that measures it."""
    name = "round trip of one byte between two idle processes"
    return one_stage({name: None}, lambda _, number: {"round_trip_ms": idle_round_trip_s() * 1e3})


ROUND_TRIP = Column("ms", "round_trip_ms")

# ---------------------------------------------------------------------------------------- settings

Seed = Annotated[int, Setting("of prompts", ge=0)]
Rounds = Annotated[int, Setting("rounds", ge=1)]
Streams = Annotated[tuple[int, ...], Setting("numbers of concurrent streams", ge=1)]
Prompt = Annotated[int, Setting("words of a prompt, or tokens", ge=1)]
Tokens = Annotated[int, Setting("generated tokens", ge=1)]
RampS = Annotated[float, Setting("period in which streams start", ge=0)]
IdleS = Annotated[float, Setting("duration of the idle CPU measurement", gt=0)]
Ids = Annotated[bool, Setting("prompts of token ids instead of text")]
MaxModelLen = Annotated[int, Setting("longest context, for longer prompts", ge=1)]
StreamInterval = Annotated[int, Setting("vLLM's setting: tokens per chunk", ge=1)]
PrefillMs = Annotated[float, Setting("duration of a PE's pass", gt=0)]
StepMs = Annotated[float, Setting("duration of a DE's step", gt=0)]
#: Tolerance of CPU times, on the same processor.
CPU_TOLERANCE = 0.15
