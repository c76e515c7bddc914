"""CPU and messages per request of a scheduler process with many engines and a few front ends.

Front ends and engines run in the measuring process.  All traffic of the scheduler goes over real
sockets; front ends call engines without HTTP, which the scheduler does not take part in.  Each
node is a data-parallel group, as in the paper's clusters: 48P96D has 1,152 engines.  With several
units each of them has a scheduler process and these nodes, and the front ends know all.
"""

import asyncio
import functools
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from dualpath.core.cluster import parse_nodes
from dualpath.core.settings import Setting, Settings
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.report.model import Table
from dualpath.router.engine_calls import Job, OpenCalls, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.http.server import serving_app
from dualpath.router.linked_front_end import LinkedFrontEnd
from dualpath.router.requests.limits import allow_many_streams
from dualpath.router.scheduler.remote import ZmqLinkConnection
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath_lab.benchmarks.overhead.servers import (
    CPU_TOLERANCE,
    IdleS,
    Rounds,
    Seed,
    cpu_s,
    scheduler_process,
)
from dualpath_lab.benchmarks.overhead.stub_engines import BLOCK_TOKENS, StubEngines, StubServer
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    Page,
    RawData,
    Stage,
    tolerance_of,
)

_READY_S = 120.0
_KEY_BYTES = 32


class _Tagged(msgspec.Struct):
    type: str


_TAGS = msgspec.msgpack.Decoder(list[tuple[str, int, int, _Tagged]])


class CountingLink:
    """A ``LinkConnection`` that counts messages, frames and received bytes."""

    def __init__(self, scheduler: str, messages: Counter[str], frames: Counter[str]) -> None:
        self._connection = ZmqLinkConnection(scheduler)
        self._messages, self._frames = messages, frames
        self.received_bytes = 0

    def send(self, frame: bytes) -> None:
        """Count and send."""
        self._count("front end →", frame)
        self._connection.send(frame)

    async def receive(self) -> bytes:
        """Count and return the next frame."""
        frame = await self._connection.receive()
        self.received_bytes += len(frame)
        self._count("→ front end", frame)
        return frame

    def _count(self, direction: str, frame: bytes) -> None:
        self._frames[direction] += 1
        for *_, message in _TAGS.decode(frame):
            self._messages[f"{direction} {message.type}"] += 1

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class StubCalls:
    """``EngineCalls`` of stub engines in this process; responses have two tokens.

    Engines of two units have the same names and other epochs.
    """

    def __init__(self, units: Sequence[StubEngines]) -> None:
        self._units = {engines.epoch: engines for engines in units}

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: PrefillTransfer
    ) -> TokenEvent:
        """Return the first token at once."""
        self._of(engine).computed(engine.engine_id, prefill_transfer)
        return TokenEvent((1,), "length")

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        """Report that the KV has arrived, then yield the last token."""
        self._of(engine).computed(engine.engine_id, decode_transfer)
        await asyncio.sleep(0)
        yield TokenEvent((2,), "length")

    def _of(self, engine: EngineInfo) -> StubEngines:
        return self._units[engine.epoch.removeprefix(f"{engine.engine_id}-")]

    async def answers(self, engine: EngineInfo) -> None:
        """The engine is healthy."""

    async def open_calls(self, engine: EngineInfo) -> OpenCalls | None:
        """The engine does not report its calls."""
        return None


class Agent:
    """A client with a prompt of at first ``prompt`` tokens that grows by ``append`` each turn."""

    def __init__(self, name: str, prompt: int, append: int, seed: str) -> None:
        self._name = name
        self._rng = random.Random(seed)
        self._append = append
        self._prompt = prompt
        self._keys: tuple[bytes, ...] = ()
        self._turns = itertools.count()

    def turn(self) -> Job:
        """Return the next request."""
        length = self._prompt + next(self._turns) * self._append
        missing = length // BLOCK_TOKENS - len(self._keys)
        self._keys += tuple(self._rng.randbytes(_KEY_BYTES) for _ in range(missing))
        return Job(
            request_id=f"{self._name}-{length}",
            prompt_token_ids=(5,) * length,
            max_new_tokens=2,
            keys=self._keys,
            keys_for=lambda tokens: self._keys,
        )


class SchedulerSettings(Settings, frozen=True, kw_only=True):
    """Engines, front ends and agents."""

    nodes: Annotated[
        tuple[str, ...], Setting("nodes of stub engines of each unit", metavar="xPyD,…")
    ] = (*("4P8D", "24P48D", "48P96D"),)
    ranks: Annotated[int, Setting("engines of a node, a data-parallel group", ge=1)] = 8
    units: Annotated[int, Setting("schedulers, each with its own engines", ge=1)] = 1
    front_ends: Annotated[int, Setting("front ends in that process", ge=1)] = 2
    agents: Annotated[tuple[int, ...], Setting("concurrent agents", ge=1)] = (1, 16, 64)
    turns: Annotated[int, Setting("turns per agent", ge=1)] = 50
    warm_up: Annotated[int, Setting("turns before the measurement", ge=0)] = 3
    prompt: Annotated[int, Setting("tokens of the first turn", ge=1)] = 32_768
    append: Annotated[int, Setting("new tokens per turn", ge=1)] = 429
    pause_s: Annotated[float, Setting("pause of an agent before its next turn", ge=0)] = 0.0
    hit_share: Annotated[float, Setting("share of stored blocks", ge=0, le=1)] = 0.987
    idle_s: IdleS = 3.0
    repeat: Rounds = 1
    seed: Seed = 0


class Cell(NamedTuple):
    """A number of agents, and the nodes of the cluster that they use."""

    nodes: str
    agents: int


class Cluster(NamedTuple):
    """The schedulers' process ids, engines and front ends of this process, counted frames.

    ``ready_s`` is the time from the start of the engines until each front end knew all of them,
    ``join_cpu_s`` the schedulers' CPU time in it, ``join_bytes`` what a front end received.
    """

    schedulers: Sequence[int]
    ready_s: float
    join_cpu_s: float
    join_bytes: int
    messages: Counter[str]
    frames: Counter[str]
    front_ends: Sequence[LinkedFrontEnd]

    def cpu_s(self) -> float:
        """Return the CPU time of all schedulers."""
        return sum(map(cpu_s, self.schedulers))


class SchedulerResult(msgspec.Struct, frozen=True, kw_only=True):
    """CPU of all schedulers and messages by type with a number of agents.

    ``ready_s``, ``join_cpu_s`` and ``join_bytes`` are those of the cluster.
    """

    ready_s: float
    join_cpu_s: float
    join_bytes: int
    turns: int
    cpu_s: float
    idle_share: float
    wall_s: float
    messages: dict[str, int]
    frames: dict[str, int]

    @property
    def cpu_ms(self) -> float:
        """CPU per turn, including the scheduler's periodic work."""
        return self.cpu_s / self.turns * 1e3

    @property
    def messages_per_turn(self) -> float:
        """Messages of all kinds per turn."""
        return sum(self.messages.values()) / self.turns


@contextmanager
def _running(settings: SchedulerSettings, nodes: str) -> Iterator[Measure[Cell, SchedulerResult]]:
    allow_many_streams()
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner:
        made = _cluster(settings, nodes, Path(name))
        cluster = runner.run(made.__aenter__())
        try:
            yield lambda cell, number: runner.run(_run_turns(settings, cluster, cell.agents))
        finally:
            runner.run(made.__aexit__(None, None, None))


def draw(raw: RawData[SchedulerSettings, SchedulerResult]) -> Page:
    """Draw the costs, and the messages of the last cell."""
    turns, joins = [], []
    for name in raw.cells:
        cpu_ms = raw.median(name, lambda one: one.cpu_ms) or 0.0
        one = raw.of(name)[-1]
        turns.append(
            (
                *(name, str(one.turns), f"{one.turns / one.wall_s:.0f}"),
                f"{one.cpu_s / raw.settings.units / one.wall_s:.0%}",
                *(f"{cpu_ms:.3f}", f"{one.messages_per_turn:.1f}", f"{1 / cpu_ms * 1e3:.0f}"),
            )
        )
        joins.append(
            (
                *(name, f"{one.ready_s:.1f}", f"{one.join_cpu_s:.1f}"),
                *(f"{one.join_bytes / 1e6:.2f}", f"{one.idle_share:.1%}"),
            )
        )
    columns = (
        *("cell", "turns", "turns/s", f"of a core{', each' * (raw.settings.units > 1)}"),
        *("CPU ms per turn", "messages per turn"),
        "turns/s per core",
    )
    join_columns = ("cell", "s until ready", "CPU s", "MB to a front end", "idle CPU")
    settings = raw.settings
    units = f"{settings.units} units of these nodes, " * (settings.units > 1)
    shape = f"{units}{settings.ranks} stub engines per node, {settings.front_ends} front ends"
    return Page(
        settings=(f"{shape}, seed {settings.seed}.",),
        tables=(
            Table("Scheduler process", columns, tuple(turns)),
            Table("Before the turns", join_columns, tuple(joins)),
            _messages(raw),
        ),
        results=tuple(
            KeyResult(
                f"{name}: CPU ms per turn",
                raw.median(name, lambda one: one.cpu_ms),
                tolerance=tolerance_of(CPU_TOLERANCE, len(raw.of(name))),
            )
            for name in raw.cells
        ),
    )


def _messages(raw: RawData[SchedulerSettings, SchedulerResult]) -> Table:
    one = raw.results[-1]
    rows = [(kind, f"{count / one.turns:.2f}") for kind, count in sorted(one.messages.items())]
    rows.append(("total", f"{one.messages_per_turn:.2f}"))
    rows += [(f"frames {way}", f"{n / one.turns:.2f}") for way, n in sorted(one.frames.items())]
    return Table(f"Messages per turn, {raw.runs[-1].cell}", ("message", "per turn"), tuple(rows))


@asynccontextmanager
async def _cluster(settings: SchedulerSettings, nodes: str, folder: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        longest = settings.prompt + settings.append * (settings.turns + 1)
        messages: Counter[str] = Counter()
        frames: Counter[str] = Counter()
        schedulers, units = [], []
        for number in range(settings.units):
            own = folder / f"unit-{number}"
            own.mkdir()
            schedulers.append(stack.enter_context(scheduler_process(own)))
            engines = StubEngines(
                schedulers[-1].control,
                nodes,
                hit_share=settings.hit_share,
                max_model_len=2 * longest,
                ranks=settings.ranks,
                message_counts=messages,
            )
            units.append(engines)
        front_ends, links = [], []
        for number in range(settings.front_ends):
            addresses = [scheduler.front_ends for scheduler in schedulers]
            own_links = [CountingLink(address, messages, frames) for address in addresses]
            service = LinkedFrontEnd(
                RouterSettings(),
                LinkSettings(scheduler=",".join(addresses), front_end_name=f"f{number}"),
                StubCalls(units),
                connections=own_links,
            )
            await service.start()
            stack.push_async_callback(service.stop)
            front_ends.append(service)
            links.append(own_links)
        start_s = time.perf_counter()
        spent_s = sum(cpu_s(scheduler.pid) for scheduler in schedulers)
        for engines in units:
            # A scheduler asks the HTTP servers of idle engines whether they live.
            app = StubServer(engines, prefill_s=0.0, step_s=0.0).app()
            port = await stack.enter_async_context(serving_app(app, "127.0.0.1", 0))
            url = f"http://127.0.0.1:{port}"
            running = engines.running(functools.partial("{}/{}".format, url))
            await stack.enter_async_context(running)
        prefill, decode = (count * settings.ranks * settings.units for count in parse_nodes(nodes))
        for service in front_ends:
            await service.wait_ready(prefill, decode, _READY_S)
        pids = [scheduler.pid for scheduler in schedulers]
        yield Cluster(
            pids,
            time.perf_counter() - start_s,
            sum(map(cpu_s, pids)) - spent_s,
            max(sum(link.received_bytes for link in own) for own in links),
            messages,
            frames,
            front_ends,
        )


async def _run_turns(settings: SchedulerSettings, cluster: Cluster, agents: int) -> SchedulerResult:
    """Measure the schedulers with concurrent agents, and its idle CPU before."""
    await _run(settings, cluster.front_ends, agents, settings.warm_up, "warm-up")
    start_s, spent_s = time.perf_counter(), cluster.cpu_s()
    await asyncio.sleep(settings.idle_s)
    idle = (cluster.cpu_s() - spent_s) / (time.perf_counter() - start_s)
    cluster.messages.clear()
    cluster.frames.clear()
    start_s, spent_s = time.perf_counter(), cluster.cpu_s()
    turns = await _run(settings, cluster.front_ends, agents, settings.turns, "turns")
    spent_s, wall_s = cluster.cpu_s() - spent_s, time.perf_counter() - start_s
    return SchedulerResult(
        ready_s=cluster.ready_s,
        join_cpu_s=cluster.join_cpu_s,
        join_bytes=cluster.join_bytes,
        turns=turns,
        cpu_s=spent_s,
        idle_share=idle,
        wall_s=wall_s,
        messages=dict(cluster.messages),
        frames=dict(cluster.frames),
    )


async def _run(
    settings: SchedulerSettings,
    front_ends: Sequence[LinkedFrontEnd],
    agents: int,
    turns: int,
    label: str,
) -> int:
    """Run the turns of concurrent agents and return their number."""

    async def run_agent(number: int) -> None:
        name = f"{settings.seed}/{label}/{agents}/{number}"
        agent = Agent(name, settings.prompt, settings.append, name)
        service = front_ends[number % len(front_ends)]
        for _ in range(turns):
            async for _ in service.submit(agent.turn()):
                pass
            await asyncio.sleep(settings.pause_s)

    await asyncio.gather(*(run_agent(number) for number in range(agents)))
    return agents * turns


def _stage(settings: SchedulerSettings, nodes: str) -> Stage[Cell, SchedulerResult]:
    cells = {f"{nodes}, {agents} agents": Cell(nodes, agents) for agents in settings.agents}
    return Stage(cells, lambda: _running(settings, nodes))


SCHEDULER_COST = Experiment(
    name="scheduler",
    title="CPU and messages per request of a scheduler process",
    settings=SchedulerSettings(),
    result=SchedulerResult,
    stages=lambda settings, progress: [_stage(settings, nodes) for nodes in settings.nodes],
    draw=draw,
    summary=lambda one: f"{one.cpu_ms:.3f} CPU-ms per turn",
)
