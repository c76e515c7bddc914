"""The client of a run, a process on the lab's head node: waits for engines and replays agents.

Over its ``NodeChannel`` it sends ``READY`` when the engines are up and the warm-up replay is done;
it then receives a line to begin, sends ``DONE`` when the last agent has its answer, and then
``ClientResult``.
"""

import asyncio
import sys
from collections import Counter, defaultdict
from http import HTTPStatus

import aiohttp
import msgspec

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.node.http_client import client_session
from dualpath.router.api_keys import client_headers
from dualpath.workload.formats import read_trace
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath.workload.replay.endpoint import status
from dualpath.workload.replay.result import ReplayResult, SentHints, ToolDelays
from dualpath_lab.emulated.metrics import EngineCounts, engine_counts
from dualpath_lab.experiments.node_channel import read_arguments, send_line

_POLL_S = 0.05
_METRIC_TIMEOUT_S = 10.0

READY, DONE = "ready", "done"


class ClientTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task: wait for ``engines`` engines, replay ``before`` unless empty, then ``trace``.

    The replay of ``before`` takes at most ``before_timeout_s`` and is not measured.  Each of
    ``ready_urls`` must answer 200 first.  ``engine_metrics``: whether engines report at /metrics
    what they have verified.
    """

    endpoint: str
    engines: int
    trace: str
    options: ReplayOptions
    before: str = ""
    ready_urls: tuple[str, ...] = ()
    engine_metrics: bool = True
    start_timeout_s: float = 60.0
    before_timeout_s: float = 600.0

    @property
    def ready_within_s(self) -> float:
        """Time-out until the measured replay can begin."""
        return self.start_timeout_s + (self.before_timeout_s if self.before else 0.0)


class ClientResult(msgspec.Struct, frozen=True, kw_only=True):
    """The replay, and sums over the metrics of all engines.

    ``verified`` and ``wrong`` count Layer Blocks by place since the engines started;
    ``thread_cpu_s`` has the CPU seconds of their threads during the replay, by name.
    """

    replay: ReplayResult
    verified: dict[str, int] = {}
    wrong: dict[str, int] = {}
    thread_cpu_s: dict[str, float] = {}


async def run_client(task: ClientTask) -> ClientResult:
    """Execute a task.

    Raises ``EngineLostError`` if the engines do not start in time, or fail in the warm-up.
    """
    sessions = read_trace(task.trace)
    timeout = aiohttp.ClientTimeout(total=_METRIC_TIMEOUT_S)
    async with client_session(timeout=timeout, headers=client_headers()) as http:
        await _ready(http, task)
        if task.before:
            await _replay_before(task)
        before = await _counts(http, task)
        send_line(READY)
        sys.stdin.readline()
        found = await replay(sessions, task.endpoint, task.options)
        send_line(DONE)
        after = await _counts(http, task)
    took_s = {
        name: s - before.thread_cpu_s.get(name, 0.0) for name, s in after.thread_cpu_s.items()
    }
    return ClientResult(
        replay=found, verified=after.verified, wrong=after.wrong, thread_cpu_s=took_s
    )


async def _counts(http: aiohttp.ClientSession, task: ClientTask) -> EngineCounts:
    """Return the sums over all engines; empty if they report none."""
    verified, wrong = Counter[str](), Counter[str]()
    thread_cpu_s: dict[str, float] = defaultdict(float)
    for url in await _engine_urls(http, task.endpoint) if task.engine_metrics else ():
        async with http.get(f"{url}/metrics") as response:
            counts = engine_counts(await response.text())
        verified.update(counts.verified)
        wrong.update(counts.wrong)
        for name, cpu_s in counts.thread_cpu_s.items():
            thread_cpu_s[name] += cpu_s
    return EngineCounts(dict(verified), dict(wrong), dict(thread_cpu_s))


async def _replay_before(task: ClientTask) -> None:
    options = msgspec.structs.replace(
        task.options, agents_per_s=None, session_hints=SentHints.NONE, tool_delays=ToolDelays.NONE
    )
    try:
        async with asyncio.timeout(task.before_timeout_s):
            found = await replay(read_trace(task.before), task.endpoint, options)
    except TimeoutError as error:
        raise EngineLostError(
            f"the warm-up turns took longer than {task.before_timeout_s:g} s; replay shorter "
            "histories ({scale})"
        ) from error
    if found.failed:
        errors = [turn.error for turn in found.turns if turn.error]
        raise EngineLostError(f"{len(errors)} warm-up turns failed: {errors[:1]}")


async def _ready(http: aiohttp.ClientSession, task: ClientTask) -> None:
    try:
        async with asyncio.timeout(task.start_timeout_s):
            while await _alive(http, task.endpoint) < task.engines:
                await asyncio.sleep(_POLL_S)
            for url in task.ready_urls:
                while not await _answers(http, url):
                    await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        servers = [f"{task.engines} engines at {task.endpoint}", *task.ready_urls]
        raise EngineLostError(
            f"not all servers answered within {task.start_timeout_s:g} s: {', '.join(servers)}"
        ) from error


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status == HTTPStatus.OK
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _alive(http: aiohttp.ClientSession, endpoint: str) -> int:
    try:
        found = await status(http, endpoint)
    except DualPathError:
        return 0
    return 0 if found is None else sum(engine.alive for engine in found.engines)


async def _engine_urls(http: aiohttp.ClientSession, endpoint: str) -> list[str]:
    found = await status(http, endpoint)
    return [] if found is None else [engine.api_url for engine in found.engines if engine.alive]


def main() -> None:
    """Execute the task in the first argument."""
    try:
        send_line(asyncio.run(run_client(read_arguments(ClientTask))))
    except DualPathError as error:
        sys.exit(f"dualpath: {error}")


if __name__ == "__main__":
    main()
