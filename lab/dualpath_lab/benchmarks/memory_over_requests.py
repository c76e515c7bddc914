"""Memory of router, front end and engines over many requests of mixed kinds, on this machine.

Starts a scheduler, a front end and 1P1D of emulated engines as processes: this module run as a
script is one of them.  Tables with a constant bound get a small one, so that all are full early;
then no process may grow.
"""

import asyncio
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec

from dualpath.cli.main import main as dualpath
from dualpath.core.recent import Recent
from dualpath.core.settings import Setting, Settings
from dualpath.launch.ports import claim_port
from dualpath.policy.session_warmth import SessionMemory
from dualpath.report.model import Table, cell
from dualpath.router.observe.dashboard import board
from dualpath.router.requests import front_end
from dualpath.router.scheduler import dispatch
from dualpath.storage import chain_index, janitor
from dualpath_sim.harness.experiment import Experiment, KeyResult, Page, RawData, one_stage

#: Entries of tables with a constant bound, instead of up to a million.
_BOUND = 256
_BLOCK_TOKENS = 8
_VOCABULARY = 32_000
_KEY = "the right key"
_MODULE = "dualpath_lab.benchmarks.memory_over_requests"
#: Requests under way at a time.
_AT_ONCE = 24
_START_S = 120.0
_SAMPLE_S = 2.0
_SAMPLES_PER_ROW = 10
_CALL_S = 60.0
#: Largest growth of a process with full tables; the memory that its allocator holds varies.
MOST_GROWTH = 0.03

# ---------------------------------------------------------------------------------------- processes


def serve(arguments: list[str]) -> int:
    """Run ``dualpath`` with small bounds of tables."""
    front_end._RECENT_RECORDS = dispatch._RECENT_ASSIGNMENTS = _BOUND
    board._RECENT_REQUESTS = board._MAX_ENDED = board.MAX_SAMPLES = _BOUND
    chain_index.MAX_UNSTORED, janitor.SAVE_EVENTS = _BOUND, 8 * _BOUND
    for owner in (Recent, SessionMemory):
        _bound(owner)
    return dualpath(arguments)


def _bound(owner: Any) -> None:  # noqa: ANN401 - its initialiser is replaced
    begin = owner.__init__

    def with_small_bound(self: object, bound: int) -> None:
        begin(self, min(bound, _BOUND))

    owner.__init__ = with_small_bound


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the URL for clients, and the process numbers by name."""
    http, engines_http, control, links = (claim_port() for _ in range(4))
    engine_ports = claim_port(), claim_port()
    engine = (
        *("--router", f"tcp://127.0.0.1:{control}", "--storage", str(folder / "kv")),
        *("--storage-quota", str(32 << 20), "--storage-protect-s", "2"),
        *("--model", "qwen2.5-32b", "--layers", "2", "--kv-bytes-per-token", "256"),
        *("--block-tokens", str(_BLOCK_TOKENS)),
        *("--buffer-bytes", str(1 << 20), "--hbm-bytes", str(1 << 20), "--speedup", "1000"),
        *("--transport", "memory", "--verify", "sampled", "--max-model-len", "1024"),
    )
    commands = {
        "router": (
            *("router", "--port", str(engines_http), "--control-port", str(control)),
            *("--front-ends-port", str(links), "--api-keys", _KEY),
        ),
        "front end": (
            *("frontend", "--port", str(http), "--scheduler", f"tcp://127.0.0.1:{links}"),
            *("--api-keys", _KEY),
        ),
        "PE": ("prefill", "--engine-id", "pe-0", "--port", str(engine_ports[0]), *engine),
        "DE": ("decode", "--engine-id", "de-0", "--port", str(engine_ports[1]), *engine),
    }
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, command in commands.items():
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            entry = [sys.executable, "-m", _MODULE, "emulate", *command]
            processes[name] = subprocess.Popen(entry, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(processes[name].wait)
            stack.callback(processes[name].kill)
        yield f"http://127.0.0.1:{http}", {name: p.pid for name, p in processes.items()}


def resident_kib(pid: int) -> int:
    """Return the resident memory of a live process."""
    rows = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmRSS:"))


# --------------------------------------------------------------------------------------------- load

_chance = random.Random(0)


def _prompt(tokens: int) -> list[int]:
    return [_chance.randrange(_VOCABULARY) for _ in range(tokens)]


def _answered(number: int) -> dict[str, Any]:
    return {"prompt": _prompt(40), "max_tokens": 4}


def _short(number: int) -> dict[str, Any]:
    return {"prompt": _prompt(3), "max_tokens": 2}


def _retained(number: int) -> dict[str, Any]:
    hints = {"session_id": f"agent-{number}", "retain_s": 3600.0}
    return _answered(number) | {"vllm_xargs": hints}


def _done(number: int) -> dict[str, Any]:
    return _answered(number) | {"vllm_xargs": {"session_id": f"agent-{number}", "done": True}}


def _salted(number: int) -> dict[str, Any]:
    return {"prompt": [*range(40)], "max_tokens": 4, "cache_salt": f"tenant-{number}"}


def _bad(number: int) -> dict[str, Any]:
    return {"prompt": [-1 - number], "max_tokens": 4}


def _overlong(number: int) -> dict[str, Any]:
    return {"prompt": [1] * 1500, "max_tokens": 4}


#: Bodies by kind, with the right key.
_BODIES: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "answered": _answered,
    "short": _short,
    "retained session": _retained,
    "done session": _done,
    "tenant": _salted,
    "unknown token": _bad,
    "overlong": _overlong,
    "wrong key": _answered,
    "client leaves": _answered,
}


class Load:
    """Sends ``most`` requests of all kinds in turn, until ``end_s``; counts kinds and statuses."""

    def __init__(self, http: aiohttp.ClientSession, url: str, most: int, end_s: float) -> None:
        self._http, self._url, self._end_s = http, f"{url}/v1/completions", end_s
        self._numbers = iter(range(most))
        self.ended: Counter[tuple[str, str]] = Counter()

    @property
    def requests(self) -> int:
        """Number of requests that have ended."""
        return self.ended.total()

    async def run(self) -> None:
        """Send requests one after the other."""
        for number in self._numbers:
            if time.monotonic() >= self._end_s:
                return
            kind = [*_BODIES][number % len(_BODIES)]
            self.ended[kind, await self._one(kind, number)] += 1

    async def _one(self, kind: str, number: int) -> str:
        key = f"wrong key {number}" if kind == "wrong key" else _KEY
        limit_s = _chance.uniform(0.0, 0.05) if kind == "client leaves" else _CALL_S
        headers, body = {"Authorization": f"Bearer {key}"}, _BODIES[kind](number)
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.post(self._url, json=body, headers=headers) as response,
            ):
                await response.read()
                return str(response.status)
        except TimeoutError:
            return "left"
        except (aiohttp.ClientError, OSError) as error:
            return type(error).__name__


async def started(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until a request is answered."""
    async with asyncio.timeout(_START_S):
        load = Load(http, url, 1 << 30, 0.0)
        while True:
            with contextlib.suppress(KeyError):
                if await load._one("answered", 0) == "200":
                    return
            await asyncio.sleep(0.5)


# --------------------------------------------------------------------------------------- experiment


class MemorySettings(Settings, frozen=True, kw_only=True):
    """The load."""

    requests: Annotated[int, Setting("requests of all kinds", ge=1)] = 100_000
    most_s: Annotated[float, Setting("longest time of sending them", gt=0)] = 600.0


class Memory(msgspec.Struct, frozen=True):
    """Resident KiB of each process by the requests that had ended, and how requests ended."""

    samples: list[tuple[int, dict[str, int]]]
    ended: dict[str, int]

    def growth(self, name: str) -> float | None:
        """Return by what share a process grew from the third quarter of the requests to the last.

        Medians of both quarters are compared, since memory goes up and down within them.  Returns
        None if a quarter has no sample.
        """
        total = max(self.samples[-1][0], 1)
        before, after = (
            [kib[name] for count, kib in self.samples if min(4 * count // total, 3) == quarter]
            for quarter in (2, 3)
        )
        return (
            statistics.median(after) / statistics.median(before) - 1 if before and after else None
        )


async def _measure(folder: Path, settings: MemorySettings) -> Memory:
    with cluster(folder) as (url, pids):
        async with aiohttp.ClientSession() as http:
            await started(http, url)
            load = Load(http, url, settings.requests, time.monotonic() + settings.most_s)
            running = [asyncio.create_task(load.run()) for _ in range(_AT_ONCE)]
            samples = []
            while True:
                ended = all(task.done() for task in running)
                kib = {name: resident_kib(pid) for name, pid in pids.items()}
                samples.append((load.requests, kib))
                if ended:
                    break
                await asyncio.wait(running, timeout=_SAMPLE_S)
            await asyncio.gather(*running)
    return Memory(samples, {f"{kind}: {how}": n for (kind, how), n in sorted(load.ended.items())})


def _run(settings: MemorySettings, number: int) -> Memory:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), settings))


def draw(raw: RawData[MemorySettings, Memory]) -> Page:
    """Draw memory over the requests; no process may grow by more than ``MOST_GROWTH``."""
    (found,) = raw.results
    names = tuple(found.samples[0][1])
    shown = [*found.samples[:-1:_SAMPLES_PER_ROW], found.samples[-1]]
    memory = [
        (f"{count:,}", *(f"{kib[name] / 1024:.1f}" for name in names)) for count, kib in shown
    ]
    growth = {name: found.growth(name) for name in names}
    memory.append(("last quarter to third", *(cell(one, "{:+.2%}") for one in growth.values())))
    ended = tuple((how, f"{count:,}") for how, count in found.ended.items())
    return Page(
        tables=(
            Table("Memory", ("requests", *(f"{name}, MiB" for name in names)), tuple(memory)),
            Table("Requests", ("kind: how it ended", "requests"), ended),
        ),
        results=tuple(
            KeyResult(f"growth of the {name}", one, MOST_GROWTH, at_least=False)
            for name, one in growth.items()
        ),
    )


MEMORY = Experiment(
    name="memory",
    title="Memory over requests",
    settings=MemorySettings(),
    result=Memory,
    stages=lambda settings, progress: one_stage({"1P1D": settings}, _run),
    draw=draw,
    summary=lambda found: f"{found.samples[-1][0]:,} requests",
)

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
