"""The client of a run, a process on the lab's head node: waits, replays, asks what was verified.

    python -m dualpath.laboratory.experiments.client TASK.json

It prints ``begin`` when the first agent starts and ``end`` when the last has its answer, and writes
``ClientResult`` to the task's ``result``.
"""

import asyncio
import re
import sys
from pathlib import Path

import aiohttp
import msgspec

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.laboratory.workload.formats import read_trace
from dualpath.laboratory.workload.replay.client import replay
from dualpath.laboratory.workload.replay.options import ReplayOptions
from dualpath.laboratory.workload.replay.result import ReplayResult
from dualpath.laboratory.workload.replay.server import status

_POLL_S = 0.05
_METRIC_TIMEOUT_S = 10.0
_COUNT = re.compile(
    r'dualpath_emulated:(verified|wrong)_layer_blocks_total\{place="([^"]+)"\} ([0-9.e+]+)'
)

BEGIN, END = "begin", "end"


class ClientTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: wait for ``engines`` engines, replay ``trace``, write to ``result``.

    ``engine_metrics``: whether engines tell at /metrics what they verified.
    """

    endpoint: str
    engines: int
    trace: str
    options: ReplayOptions
    result: str
    engine_metrics: bool = True
    start_timeout_s: float = 60.0


class ClientResult(msgspec.Struct, frozen=True, kw_only=True):
    """The replay, and Layer Blocks verified and found wrong by place, over all engines."""

    replay: ReplayResult
    verified: dict[str, int] = {}
    wrong: dict[str, int] = {}


async def run_client(task: ClientTask) -> ClientResult:
    """Carry out a task.  Raises ``EngineLostError`` if the engines do not come up in time."""
    sessions = read_trace(task.trace)
    timeout = aiohttp.ClientTimeout(total=_METRIC_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await _ready(http, task)
        _say(BEGIN)
        found = await replay(sessions, task.endpoint, task.options)
        _say(END)
        counts: dict[str, dict[str, int]] = {"verified": {}, "wrong": {}}
        if task.engine_metrics:
            for url in await _engine_urls(http, task.endpoint):
                await _add_counts(http, url, counts)
    return ClientResult(replay=found, verified=counts["verified"], wrong=counts["wrong"])


async def _ready(http: aiohttp.ClientSession, task: ClientTask) -> None:
    try:
        async with asyncio.timeout(task.start_timeout_s):
            while await _alive(http, task.endpoint) < task.engines:
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise EngineLostError(
            f"fewer than {task.engines} engines were up within {task.start_timeout_s:g} s"
        ) from error


async def _alive(http: aiohttp.ClientSession, endpoint: str) -> int:
    try:
        told = await status(http, endpoint)
    except DualPathError:
        return 0
    return 0 if told is None else sum(engine.alive for engine in told.engines)


async def _engine_urls(http: aiohttp.ClientSession, endpoint: str) -> list[str]:
    told = await status(http, endpoint)
    return [] if told is None else [engine.api_url for engine in told.engines if engine.alive]


async def _add_counts(
    http: aiohttp.ClientSession, url: str, counts: dict[str, dict[str, int]]
) -> None:
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    for what, place, value in _COUNT.findall(text):
        counts[what][place] = counts[what].get(place, 0) + int(float(value))


def _say(word: str) -> None:
    print(word, flush=True)


def main() -> None:
    """Run the task of the file named by the first argument."""
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ClientTask)
    try:
        found = asyncio.run(run_client(task))
    except DualPathError as error:
        sys.exit(f"dualpath: {error}")
    Path(task.result).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
