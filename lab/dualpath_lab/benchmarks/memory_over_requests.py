"""Memory of router, front end and engines over many requests of mixed kinds, on this machine.

    .venv/bin/python -m dualpath_lab.benchmarks.memory_over_requests --requests 100000 --most-s 600

Starts a scheduler, a front end and 1P1D of emulated engines as processes.  Tables with a constant
bound get a small one, so that all are full early; then no process may grow.  Prints resident memory
over the requests, and each process's growth in the second half of them.  ``--json FILE`` writes
both for the page *Hardening*: ``python docs/draw_lab.py --merge FILE``.
"""

import argparse
import asyncio
import contextlib
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dualpath.cli.main import main as dualpath
from dualpath.core.recent import Recent
from dualpath.launch.ports import claim_port
from dualpath.policy.session_warmth import SessionMemory
from dualpath.router.observe.dashboard import board
from dualpath.router.requests import front_end
from dualpath.router.scheduler import dispatch

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

# ---------------------------------------------------------------------------------------- processes


def serve(arguments: list[str]) -> int:
    """Run ``dualpath`` with small bounds of tables."""
    front_end._RECENT_RECORDS = dispatch._RECENT_ASSIGNMENTS = _BOUND
    board._RECENT_REQUESTS = board._MAX_ENDED = board.MAX_SAMPLES = _BOUND
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
        *(
            "--model",
            "qwen2.5-32b",
            "--layers",
            "2",
            "--kv-bytes-per-token",
            "256",
            "--block-tokens",
            str(_BLOCK_TOKENS),
        ),
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
            entry = [
                sys.executable,
                "-m",
                _MODULE,
                "--serve",
                "emulate",
                *command,
            ]
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


# ------------------------------------------------------------------------------------------- report


async def measure(folder: Path, requests: int, most_s: float, result: Path | None) -> None:
    """Run the load and print the table; write it to ``result`` as well."""
    begun_s = time.monotonic()
    with cluster(folder) as (url, pids):
        async with aiohttp.ClientSession() as http:
            await started(http, url)
            load = Load(http, url, requests, time.monotonic() + most_s)
            running = [asyncio.create_task(load.run()) for _ in range(_AT_ONCE)]
            samples: list[tuple[int, dict[str, int]]] = []
            print(f"| requests | {' | '.join(f'{name} MiB' for name in pids)} |")
            print(f"|---|{'---|' * len(pids)}")
            while True:
                memory = {name: resident_kib(pid) for name, pid in pids.items()}
                ended = all(task.done() for task in running)
                if ended or len(samples) % _SAMPLES_PER_ROW == 0:
                    row = " | ".join(f"{kib / 1024:.1f}" for kib in memory.values())
                    print(f"| {load.requests:,} | {row} |", flush=True)
                samples.append((load.requests, memory))
                if ended:
                    break
                await asyncio.wait(running, timeout=_SAMPLE_S)
            await asyncio.gather(*running)
    for (kind, status), count in sorted(load.ended.items()):
        print(f"{kind}: {count} ended with {status}")
    for name in pids:
        print(f"{name}: {growth_percent(samples, name):+.2f} % in the second half")
    if result is not None:
        found = {
            "asked_requests": requests,
            "requests": load.requests,
            "seconds": time.monotonic() - begun_s,
            "ended": {f"{kind}: {status}": n for (kind, status), n in sorted(load.ended.items())},
            "growth_percent": {name: growth_percent(samples, name) for name in pids},
            "resident_kib": [
                {"requests": count, **memory} for count, memory in samples[::_SAMPLES_PER_ROW]
            ],
        }
        result.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


def growth_percent(samples: list[tuple[int, dict[str, int]]], name: str) -> float:
    """Return how much a process grew from the third quarter of the requests to the last one.

    Medians of the samples of both quarters are compared: memory goes up and down between them.  NaN
    if one has no sample.
    """
    total = samples[-1][0]
    quarters: dict[int, list[int]] = {2: [], 3: []}
    for count, memory in samples:
        quarter = min(4 * count // max(total, 1), 3)
        if quarter in quarters:
            quarters[quarter].append(memory[name])
    if not all(quarters.values()):
        return math.nan
    before, after = (sorted(each)[len(each) // 2] for each in quarters.values())
    return 100.0 * (after / before - 1.0)


def main() -> None:
    """Run the load, or one process of the cluster."""
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--most-s", type=float, default=600.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), args.requests, args.most_s, args.json))


if __name__ == "__main__":
    main()
