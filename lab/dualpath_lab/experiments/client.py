"""The client of a run, a process on the lab's head node: waits for engines and replays agents.

During the replay it samples how long requests have been in each stage of the router (Fig. 12), and
it may end the replay by the rule of §7.4.

Over its ``NodeChannel`` it sends ``READY`` when the engines are up and the warm-up replay is done;
it then receives a line to begin, sends ``DONE`` when the last agent has its answer, and then
``ClientResult``.
"""

import asyncio
import contextlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from http import HTTPStatus

import aiohttp
import msgspec
import numpy as np

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.node.http_client import client_session
from dualpath.router.api_keys import client_headers
from dualpath.workload.conversation.sessions import Session
from dualpath.workload.formats import read_trace
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath.workload.replay.endpoint import status
from dualpath.workload.replay.result import ReplayResult, SentHints, ToolDelays, TurnRecord
from dualpath_lab.emulated.metrics import EngineCounts, engine_counts
from dualpath_lab.experiments.node_channel import read_arguments, send_line
from dualpath_sim.evaluation.runs import Ending, EndRule, ending

_POLL_S = 0.05
_METRIC_TIMEOUT_S = 10.0
#: How often the stages of requests are sampled, and the rule that ends a replay is evaluated.
SAMPLE_S = 2.0

READY, DONE = "ready", "done"


class ClientTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task: wait for ``engines`` engines, replay ``before`` unless empty, then ``trace``.

    The replay of ``before`` takes at most ``before_timeout_s`` and is not measured.  Each of
    ``ready_urls`` must answer 200 first.  ``engine_metrics``: whether engines report at /metrics
    what they have verified.  ``end_rule`` ends the replay, else ``longest_s`` does; without a rule
    all agents are replayed to their ends.
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
    end_rule: EndRule | None = None
    longest_s: float = 0.0

    @property
    def ready_within_s(self) -> float:
        """Time-out until the measured replay can begin."""
        return self.start_timeout_s + (self.before_timeout_s if self.before else 0.0)


class StageSample(msgspec.Struct, frozen=True):
    """Totals of the router at ``time_s`` since the replay began.

    ``seconds`` is the time of requests in each stage, ``counts`` how many have ended that stage;
    ``first_tokens`` is the number of requests that have their first token.
    """

    time_s: float
    seconds: dict[str, float]
    counts: dict[str, float]
    first_tokens: float


class ClientResult(msgspec.Struct, frozen=True, kw_only=True):
    """The replay, and sums over the metrics of all engines.

    ``verified`` and ``wrong`` count Layer Blocks by place since the engines started;
    ``thread_cpu_s`` has the CPU seconds of their threads during the replay, by name.  ``stages``
    were sampled every ``SAMPLE_S``.  ``ending`` is None if no rule was to end the replay.
    """

    replay: ReplayResult
    verified: dict[str, int] = {}
    wrong: dict[str, int] = {}
    thread_cpu_s: dict[str, float] = {}
    stages: list[StageSample] = []
    ending: Ending | None = None


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
        watched = WatchedReplay(http, task)
        found = await watched.run(sessions)
        send_line(DONE)
        after = await _counts(http, task)
    took_s = {
        name: s - before.thread_cpu_s.get(name, 0.0) for name, s in after.thread_cpu_s.items()
    }
    return ClientResult(
        replay=found,
        verified=after.verified,
        wrong=after.wrong,
        thread_cpu_s=took_s,
        stages=watched.stages,
        ending=watched.ending,
    )


class WatchedReplay:
    """A replay that is sampled while it runs, and ended by the task's rule if it has one."""

    def __init__(self, http: aiohttp.ClientSession, task: ClientTask) -> None:
        self.stages: list[StageSample] = []
        self.ending: Ending | None = None
        self._http = http
        self._task = task
        #: Of each turn that is over the time of its first token, and its TTFT.
        self._first_tokens: list[tuple[float, float]] = []

    async def run(self, sessions: Sequence[Session]) -> ReplayResult:
        """Replay the agents to their ends, or until the rule ends the replay."""
        task, loop = self._task, asyncio.get_running_loop()
        replaying = asyncio.create_task(
            replay(
                sessions,
                task.endpoint,
                task.options,
                partial=task.end_rule is not None,
                each_turn=self._turn_over,
            )
        )
        begin_s = loop.time()
        try:
            while not replaying.done():
                await asyncio.wait([replaying], timeout=SAMPLE_S)
                now_s = loop.time() - begin_s
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    self.stages.append(await self._sample(now_s))
                if self._ends(now_s):
                    break
        finally:
            replaying.cancel()
        return await replaying

    def _turn_over(self, turn: TurnRecord) -> None:
        if turn.ttft_s is not None:
            self._first_tokens.append((turn.start_s + turn.ttft_s, turn.ttft_s))

    def _ends(self, now_s: float) -> bool:
        """Apply the rule to what is known; return whether the replay ends."""
        rule = self._task.end_rule
        if rule is None:
            return False
        times = np.array(self._first_tokens, float).reshape(-1, 2)
        self.ending = ending(times[:, 0], times[:, 1], now_s, rule)
        return self.ending.rule != "horizon" or now_s >= self._task.longest_s

    async def _sample(self, now_s: float) -> StageSample:
        async with self._http.get(f"{self._task.endpoint}/metrics") as response:
            return stage_sample(now_s, await response.text())


_STAGE = re.compile(r'^dualpath:stage_seconds_(sum|count)\{stage="(\w+)"\} (\S+)$', re.MULTILINE)
_FIRST_TOKENS = re.compile(r"^dualpath:time_to_first_token_seconds_count (\S+)$", re.MULTILINE)


def stage_sample(time_s: float, exposition: str) -> StageSample:
    """Return the totals in the metrics of a router."""
    found: dict[str, dict[str, float]] = {"sum": {}, "count": {}}
    for kind, stage, value in _STAGE.findall(exposition):
        found[kind][stage] = float(value)
    first_tokens = _FIRST_TOKENS.search(exposition)
    number = float(first_tokens[1]) if first_tokens else 0.0
    return StageSample(time_s, found["sum"], found["count"], number)


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
