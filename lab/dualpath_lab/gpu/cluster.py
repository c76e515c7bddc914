"""One prefill and one decode engine under test: `dualpath serve`, and a client of its endpoint."""

import itertools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from dualpath.engine.passes.layer_stream import WAIT_TRACK
from dualpath.launch.process import SpawnedProcess
from dualpath.workload.replay.client import RealClock
from dualpath.workload.replay.endpoint import (
    Completion,
    complete,
    completion_body,
    served_model,
)
from dualpath_lab.gpu.model import model_of
from dualpath_lab.gpu.results import Check
from dualpath_lab.gpu.settings import GpuCheckSettings, engine_devices
from dualpath_lab.gpu.ucx import PROTOCOL_INFO, choices

_READ_TIMEOUT_S = 120.0
#: Lines of an engine's log that describe it.
_LOG_LINES = re.compile(
    r"Using \w+ KV cache layout|dualpath \w+ engine .*|Using \w+ attention.*|GPU KV cache size.*"
    r"|copies between DRAM and HBM are .*|rank \d+: (UCX|no RDMA) .*|pinned .* GiB in .*"
    r"|pass costs .*|Graph capturing finished.*"
)
_STOPS = "[shutdown]"
_ERROR = re.compile(r"\bERROR\b|Traceback|Error:")
_OTHER_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING)\b")
_PREFILL_RATE = re.compile(r"pass costs .*prefill_tokens_per_s=([0-9.e+]+)")
_NUMBER = re.compile(r" \d+$")


class Served(msgspec.Struct, frozen=True):
    """A streamed answer with its times."""

    tokens: list[int]
    ttft_s: float
    tpot_s: float
    cached_tokens: int | None


def serve_command(settings: GpuCheckSettings, storage: Path, logs: Path) -> list[str]:
    """Return the command line of a cluster with one prefill and one decode engine."""
    devices = engine_devices(settings)
    return [
        *(sys.executable, "-m", "dualpath.cli.main", "serve", model_of(settings)),
        *("--storage", str(storage), "--port", "0", "--dtype", settings.dtype),
        *(("--devices", ",".join(devices)) if devices else ()),
        *(("--enforce-eager",) if settings.rehearse else ()),
        *("--max-model-len", str(settings.max_model_len)),
        *("--hbm-bytes", str(settings.hbm_bytes)),
        *("--buffer-bytes", str(settings.buffer_bytes)),
        *("--trace-dir", str(logs), "--log-dir", str(logs)),
        *("--start-timeout-s", str(settings.start_timeout_s), "--no-dram-tier"),
    ]


class Client:
    """Sends greedy completions to an endpoint."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: str, model: str) -> None:
        self._http, self._url, self._model = http, f"{endpoint}/v1/completions", model

    async def complete(self, prompt: Sequence[int], count: int) -> Served:
        """Return the answer of ``count`` tokens; raises ``DualPathError`` if there is none."""
        body = completion_body(self._model, prompt, count, None)
        clock = RealClock()
        started_s = clock.now()
        found: Completion = await complete(self._http, self._url, body, clock)
        times = found.arrivals_s
        tpot_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return Served(found.token_ids, times[0] - started_s, tpot_s, found.cached_tokens)


class Cluster:
    """A context manager that starts `dualpath serve` with 1P1D, and stops it.

    ``flags`` are further flags of `serve`.  Raises ``DualPathError`` if it does not start.
    """

    def __init__(self, check: Check, name: str, *flags: str) -> None:
        self.name = name
        self._check = check
        self.logs = check.logs / name
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        settings = check.settings
        self._storage = Path(settings.storage or check.out).absolute() / f"gpu-check-{name}"
        shutil.rmtree(self._storage, ignore_errors=True)
        self._command = [*serve_command(settings, self._storage, self.logs), *flags]
        self._process: SpawnedProcess | None = None
        self.endpoint = ""
        self.start_s = 0.0

    def __enter__(self) -> Self:
        print("$", *self._command, flush=True)
        started_s = time.monotonic()
        self._process = SpawnedProcess(
            self.name,
            self._command,
            self.logs / "serve.txt",
            {**os.environ, **PROTOCOL_INFO},
            ends_with_parent=signal.SIGTERM,
        )
        try:
            line = self._process.wait_for_line(
                "endpoint http", self._check.settings.start_timeout_s
            )
        except BaseException:
            self._stop()
            raise
        self.endpoint = line.split("endpoint ")[1].split("/v1")[0]
        self.start_s = time.monotonic() - started_s
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Open a client, after a first request that compiles kernels."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            model, _ = await served_model(http, self.endpoint, None)
            client = Client(http, self.endpoint, model)
            await client.complete([5] * 200, 4)
            yield client
            await self._save(http, "metrics")
            await self._save(http, "dualpath/v1/status")

    async def _save(self, http: aiohttp.ClientSession, path: str) -> None:
        async with http.get(f"{self.endpoint}/{path}") as response:
            (self.logs / f"{path.rpartition('/')[2]}.txt").write_text(await response.text())

    def _stop(self) -> None:
        """Stop all processes, and report what logs and traces contain."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.end()
        shutil.rmtree(self._storage, ignore_errors=True)
        self._check.put(f"{self.name}: logs", log_rows(self.logs))
        self._check.put(f"{self.name}: work of engines", trace_rows(self.logs))
        self._check.put(f"{self.name}: UCX's choices", ucx_rows(self.logs))


def log_rows(folder: Path) -> list[dict[str, str]]:
    """Return the lines of the engines' logs that describe them, and their first error.

    Errors that vLLM's server logs while it stops are left out: its engine core has ended by then.
    """
    rows = []
    for path in sorted(folder.glob("*.log")):
        whole = path.read_text(errors="replace").splitlines()
        lines = list(itertools.takewhile(lambda line: _STOPS not in line, whole))
        found = dict.fromkeys(match[0] for line in lines if (match := _LOG_LINES.search(line)))
        error = next((line for line in lines if _is_error(line)), "")
        texts = [*found, *([f"first error: {error}"] if error else ())]
        rows += [{"log": path.name, "line": text[:300]} for text in texts]
    return rows


def prefill_rate(folder: Path) -> float | None:
    """Return the prefill tokens per second that the prefill engine measured at start."""
    for path in sorted(folder.glob("pe-*.log")):
        if found := _PREFILL_RATE.search(path.read_text(errors="replace")):
            return float(found[1])
    return None


def _is_error(line: str) -> bool:
    """Whether a line reports an error: a warning may name an exception, too."""
    return bool(_ERROR.search(line)) and not _OTHER_LEVEL.search(line)


def ucx_rows(folder: Path) -> list[dict[str, str]]:
    """Return which transport UCX has chosen for each operation of each engine."""
    return [
        {"log": path.name, **row}
        for path in sorted(folder.glob("*.log"))
        for row in choices(path.read_text(errors="replace").splitlines())
    ]


def trace_rows(folder: Path) -> list[dict[str, Any]]:
    """Return number, times and bytes of each kind of work in the traces of the engines."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        seconds: dict[str, list[float]] = defaultdict(list)
        moved_bytes: dict[str, int] = defaultdict(int)
        for event in _events(path):
            if event.get("ph") != "X":
                continue
            track = _track(event)
            seconds[track].append(event["dur"] / 1e6)
            steps = event.get("args", {}).get("steps") or ()
            moved_bytes[track] += sum(step.get("bytes", 0) for step in steps)
        rows += [
            {
                "engine": path.stem,
                "work": track,
                "number": len(times),
                "total_s": sum(times),
                "median_ms": 1e3 * statistics.median(times),
                "max_ms": 1e3 * max(times),
                "GB": moved_bytes[track] / 1e9,
                "GB_per_s": moved_bytes[track] / 1e9 / sum(times) if sum(times) else 0.0,
            }
            for track, times in seconds.items()
        ]
    return rows


def _track(event: Mapping[str, Any]) -> str:
    """Return the kind of work of an event; waits of a pass are for a load or for a send."""
    track = _NUMBER.sub("", str(event["tid"]))
    awaited = str(event.get("name", "")).partition(" ")[0]
    return f"{track} for {awaited}" if track == WAIT_TRACK else track


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # An engine that was killed leaves a trace without an end.
        return []
    events: list[dict[str, Any]] = (
        found.get("traceEvents", []) if isinstance(found, dict) else found
    )
    return events
