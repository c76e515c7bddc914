"""CPU and messages per request of a scheduler process with many engines and a few front ends.

Front ends and engines run in the measuring process.  All traffic of the scheduler goes over real
sockets; front ends call engines without HTTP, which the scheduler does not take part in.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.linked_front_end import LinkedFrontEnd
from dualpath.router.scheduler.remote import ZmqLinkConnection
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath_lab.benchmarks.overhead.servers import cpu_s, median, print_table, scheduler_process
from dualpath_lab.benchmarks.overhead.stub_engines import BLOCK_TOKENS, StubEngines

_READY_S = 60.0
_KEY_BYTES = 32


class _Tagged(msgspec.Struct):
    type: str


_TAGS = msgspec.msgpack.Decoder(list[tuple[str, int, int, _Tagged]])


class CountingLink:
    """A ``LinkConnection`` that counts messages and frames."""

    def __init__(self, scheduler: str, messages: Counter[str], frames: Counter[str]) -> None:
        self._connection = ZmqLinkConnection(scheduler)
        self._messages, self._frames = messages, frames

    def send(self, frame: bytes) -> None:
        """Count and send."""
        self._count("front end →", frame)
        self._connection.send(frame)

    async def receive(self) -> bytes:
        """Count and return the next frame."""
        frame = await self._connection.receive()
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
    """``EngineCalls`` of stub engines in this process; responses have two tokens."""

    def __init__(self, engines: StubEngines) -> None:
        self._engines = engines

    async def prefill(
        self, engine: EngineInfo, job: Job, prefill_transfer: PrefillTransfer
    ) -> TokenEvent:
        """Return the first token at once."""
        self._engines.computed(engine.engine_id, prefill_transfer)
        return TokenEvent((1,), "length")

    async def decode(
        self,
        engine: EngineInfo,
        job: Job,
        decode_transfer: DecodeTransfer,
        prior_tokens: Sequence[int],
    ) -> AsyncIterator[TokenEvent]:
        """Report that the KV has arrived, then yield the last token."""
        self._engines.computed(engine.engine_id, decode_transfer)
        await asyncio.sleep(0)
        yield TokenEvent((2,), "length")

    async def answers(self, engine: EngineInfo) -> None:
        """The engine is healthy."""


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


class Measured(NamedTuple):
    """The scheduler's CPU and messages by type with a number of agents."""

    agents: int
    turns: int
    cpu_s: float
    idle_share: float
    wall_s: float
    messages: Counter[str]
    frames: Counter[str]

    @property
    def cpu_ms(self) -> float:
        """CPU per turn, including the scheduler's periodic work."""
        return self.cpu_s / self.turns * 1e3


def measure(args: argparse.Namespace) -> None:
    """Measure and print the tables."""
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(_measure(args, Path(name)))
    rows = [
        [
            str(one.agents),
            str(one.turns),
            f"{one.turns / one.wall_s:.0f}",
            f"{one.cpu_s / one.wall_s:.0%}",
            f"{one.cpu_ms:.3f}",
            f"{one.idle_share:.1%}",
            f"{1 / one.cpu_ms * 1e3:.0f}",
        ]
        for one in found
    ]
    print_table(
        f"Scheduler process with {args.nodes} and {args.front_ends} front ends",
        ["concurrent agents", "turns", "turns/s", "of a core", "CPU ms per turn", "idle CPU",
         "turns/s per core"],
        rows,
    )  # fmt: skip
    _print_messages(found[-1])
    print(f"CPU ms per turn, median: {median([one.cpu_ms for one in found]):.3f}")


def _print_messages(one: Measured) -> None:
    rows = [[kind, f"{count / one.turns:.2f}"] for kind, count in sorted(one.messages.items())]
    rows.append(["total", f"{one.messages.total() / one.turns:.2f}"])
    rows += [
        [f"frames {direction}", f"{n / one.turns:.2f}"]
        for direction, n in sorted(one.frames.items())
    ]
    print_table(f"Messages per turn, {one.agents} concurrent agents", ["message", "per turn"], rows)


async def _measure(args: argparse.Namespace, folder: Path) -> list[Measured]:
    async with AsyncExitStack() as stack:
        scheduler = stack.enter_context(scheduler_process(folder))
        print(f"scheduler: process {scheduler.pid}", file=sys.stderr, flush=True)
        longest = args.prompt + args.append * (args.turns + 1)
        engines = StubEngines(
            scheduler.control, args.nodes, hit_share=args.hit_share, max_model_len=2 * longest
        )
        frames: Counter[str] = Counter()
        front_ends = []
        for number in range(args.front_ends):
            link = LinkSettings(scheduler=scheduler.front_ends, front_end_name=f"f{number}")
            connection = CountingLink(scheduler.front_ends, engines.message_counts, frames)
            service = LinkedFrontEnd(
                RouterSettings(), link, StubCalls(engines), connection=connection
            )
            await service.start()
            stack.push_async_callback(service.stop)
            front_ends.append(service)
        await stack.enter_async_context(engines.running(lambda engine_id: f"stub://{engine_id}"))
        for service in front_ends:
            await _wait_for_engines(service, args.nodes)
        found = []
        for count in args.agents:
            await _run(args, front_ends, count, args.warm_up, "warm-up")
            start_s, spent_s = time.perf_counter(), cpu_s(scheduler.pid)
            await asyncio.sleep(args.idle_s)
            idle = (cpu_s(scheduler.pid) - spent_s) / (time.perf_counter() - start_s)
            engines.message_counts.clear()
            frames.clear()
            start_s, spent_s = time.perf_counter(), cpu_s(scheduler.pid)
            turns = await _run(args, front_ends, count, args.turns, "turns")
            spent_s, wall_s = cpu_s(scheduler.pid) - spent_s, time.perf_counter() - start_s
            messages = Counter(engines.message_counts)
            found.append(Measured(count, turns, spent_s, idle, wall_s, messages, Counter(frames)))
        return found


async def _wait_for_engines(service: LinkedFrontEnd, nodes: str) -> None:
    prefill, _, decode = nodes.rstrip("D").partition("P")
    await service.wait_ready(int(prefill), int(decode), _READY_S)


async def _run(
    args: argparse.Namespace,
    front_ends: Sequence[LinkedFrontEnd],
    agents: int,
    turns: int,
    label: str,
) -> int:
    """Run the turns of concurrent agents and return their number."""

    async def run_agent(number: int) -> None:
        name = f"{args.seed}/{label}/{agents}/{number}"
        agent = Agent(name, args.prompt, args.append, name)
        service = front_ends[number % len(front_ends)]
        for _ in range(turns):
            async for _ in service.submit(agent.turn()):
                pass

    await asyncio.gather(*(run_agent(number) for number in range(agents)))
    return agents * turns
