"""A campaign: faults on a cluster under load, alternating with checks of the idle cluster."""

import asyncio
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError
from dualpath_lab.faults.cluster import ChaosCluster, Status
from dualpath_lab.faults.engine_kinds import EnginesUnderTest
from dualpath_lab.faults.failpoint_channel import FailpointServer
from dualpath_lab.faults.injector import FaultInjector, InjectedFault
from dualpath_lab.faults.load import Load
from dualpath_lab.faults.matrix import Component, Fault, PlannedFault, planned_faults
from dualpath_lab.faults.settings import ChaosSettings, LoadSettings
from dualpath_lab.faults.summary import CampaignSummary, fault_name, summarize
from dualpath_lab.faults.tested_process import loaded_blocks

# --------------------------------------------------------------------------------------- leftovers
# Leak check: a cluster without requests must hold no requests, slots, tokens or files.

_CALM_S = 20.0
_POLL_S = 0.25
#: Pools of connections and of threads grow to what the load needs.
_FEW_DESCRIPTORS = 40
_FEW_THREADS = 12


class ProcessResources(msgspec.Struct, frozen=True):
    """Kernel resources of a process."""

    pid: int
    descriptors: int
    threads: int


class LeakCheck:
    """Compares an idle cluster with ``status``, its status before any load."""

    def __init__(self, cluster: ChaosCluster, status: Status) -> None:
        self._cluster = cluster
        self._idle = {
            e["engine_id"]: (e["free_buffer_tokens"], e["free_hbm_tokens"])
            for e in status["engines"]
        }
        self._held: dict[str, ProcessResources] = {}

    async def leaks(self) -> list[str]:
        """Return descriptions of what is still held a while after the last request."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _CALM_S
        while left := await self._now():
            if loop.time() > deadline_s:
                break
            await asyncio.sleep(_POLL_S)
        return left + self._growth()

    async def _now(self) -> list[str]:
        status = await self._cluster.status()
        if status is None:
            return ["the router does not answer"]
        return [*held_in_status(status, self._idle), *self._half_written()]

    def _half_written(self) -> Iterator[str]:
        pids = {str(self._cluster.process(name).pid) for name in self._cluster.engines}
        for path in self._cluster.storage.glob("*/tmp/*"):
            if path.name.split("-")[-2:-1] and path.name.split("-")[-2] in pids:
                yield f"half-written file {path.name} of a live process"

    def _growth(self) -> list[str]:
        """Compare each process with its resources when it was idle for the first time."""
        left = []
        for name in self._cluster.names:
            now = process_resources(self._cluster.process(name).pid)
            first = self._held.get(name)
            if first is None or first.pid != now.pid:
                self._held[name] = now
            elif (
                now.descriptors > first.descriptors + _FEW_DESCRIPTORS
                or now.threads > first.threads + _FEW_THREADS
            ):
                left.append(
                    f"{name} holds {now.descriptors} descriptors and {now.threads} threads, "
                    f"{first.descriptors} and {first.threads} before"
                )
        return left


def held_in_status(status: Status, idle: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yield what is held by a router's status; ``idle`` has free (buffer, HBM) of idle engines."""
    for what in ("waiting", "running"):
        if status[what]:
            yield f"router: {status[what]} requests {what}"
    for engine in status["engines"]:
        name = engine["engine_id"]
        if not engine["alive"]:
            yield f"{name} is not alive"
            continue
        for what in ("seq", "tok", "read_queue_tokens"):
            if engine[what]:
                yield f"{name}: {what} is {engine[what]}"
        for what, all_tokens in zip(("buffer", "hbm"), idle[name], strict=True):
            if (free := engine[f"free_{what}_tokens"]) < all_tokens:
                yield f"{name}: {all_tokens - free} of {all_tokens} {what} tokens are not free"


def process_resources(pid: int) -> ProcessResources:
    """Return the resources of a live process; zeros if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        threads = next(int(row.split()[1]) for row in status.splitlines() if row[:8] == "Threads:")
        return ProcessResources(pid, len(os.listdir(f"/proc/{pid}/fd")), threads)
    except (FileNotFoundError, ProcessLookupError):
        return ProcessResources(pid, 0, 0)


#: The verifier's message for wrong KV, and the router's for an attempt that failed.
_BUG = "this is a bug in the data path"
_WRONG_KV = re.compile(rf"request (\w+-\w+)(?:\.(\d+))?: KV of .* {_BUG}")
_FAILED = re.compile(rf"request (\w+-\w+): attempt (\d+) failed (?!.*{_BUG})")
#: A text that no log may contain: that of an uncaught exception.
_TRACEBACK = "Traceback (most recent call last)"
_TICK_S = 5.0
#: The last line of a traceback, after the prefix that vLLM's logging adds to every line.
_RAISED = re.compile(r"^(?:\(.*\] )?([A-Za-z_][\w.]*(?:Error|Exit|Exception|Interrupt)\b.*)$", re.M)
_RAISED_CHARACTERS = 200

Progress = Callable[[str], None]


class CampaignResult(CampaignSummary, frozen=True, kw_only=True):
    """The result of a campaign; ``engines`` describes the engines under test.

    ``missed`` counts faults at steps not reached in time, by component and step; ``leaks``
    are resources still held by the idle cluster; ``problems`` counts processes that did not end or
    restart as they should; ``tracebacks`` counts lines of logs.  ``wrong_kv`` and ``stale_kv``
    count what engines found wrong: see ``count_wrong_kv``.
    """

    engines: str = ""
    faults: int
    missed: dict[str, int] = msgspec.field(default_factory=dict)
    leaks: tuple[str, ...] = ()
    problems: dict[str, int] = msgspec.field(default_factory=dict)
    loaded_blocks: int
    refused_blocks: int
    damaged_blocks: int
    wrong_kv: int = 0
    stale_kv: int = 0
    tracebacks: dict[str, int] = msgspec.field(default_factory=dict)
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether no request was late, wrong or unclear, and nothing leaked."""
        return not (self.bad_turns or self.leaks or self.wrong_kv or self.problems)


class Campaign:
    """Runs one campaign in ``folder``, where all logs go; calls ``progress`` with its progress."""

    def __init__(
        self,
        settings: ChaosSettings,
        load: LoadSettings,
        engines: EnginesUnderTest,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._engines = engines
        self._settings = settings
        self._load_settings = load
        self._folder = folder
        self._progress = progress
        self._made: list[InjectedFault] = []
        self._missed: Counter[str] = Counter()
        self._unexpected_exits: Counter[str] = Counter()
        self._leaks: list[str] = []
        self._last_leaks: list[str] = []

    async def run(self) -> CampaignResult:
        """Inject all faults and return the result.

        Raises ``EngineLostError`` or ``DeadlineError`` if the cluster does not start.
        """
        settings = self._settings
        self._begin_s = time.monotonic()
        async with AsyncExitStack() as stack:
            # The length of a Unix socket's path is limited.
            short = stack.enter_context(tempfile.TemporaryDirectory(prefix="dualpath-chaos-"))
            gates = Path(short) / "gates"
            watch = await stack.enter_async_context(FailpointServer(gates))
            self._cluster = await stack.enter_async_context(
                ChaosCluster(settings, self._load_settings, self._engines, self._folder, gates)
            )
            status = await self._cluster.status()
            if status is None:
                raise EngineLostError(f"the router does not answer; see {self._folder}")
            self._leak_check = LeakCheck(self._cluster, status)
            self._load = await stack.enter_async_context(
                Load(self._cluster.url, self._load_settings, self._engines, settings.seed)
            )
            self._injector = FaultInjector(
                self._cluster, watch, self._load, self._engines.block_tokens
            )
            await self._inject_all()
        return self._result(time.monotonic() - self._begin_s)

    # ------------------------------------------------------------------ faults

    async def _inject_all(self) -> None:
        """Inject faults until there are enough and enough blocks were loaded."""
        drawn = planned_faults(
            self._settings.seed,
            self._cluster.process_names,
            self._settings.components,
            {*self._settings.without, *self._engines.impossible, *self._impossible_here()},
        )
        while (left := self._settings.faults - len(self._made)) > 0 and not self._over:
            await self._inject_some(drawn, min(self._settings.calm_every, left))
            if left > self._settings.calm_every:
                await self._check_idle()
        while self._loaded < self._settings.blocks and not self._over:
            await asyncio.sleep(_TICK_S)
            self._load.check()
            self._report_progress()
        await self._check_idle()

    def _impossible_here(self) -> set[Fault]:
        """Return faults that this size excludes: the last engine of a role must keep its role."""
        fewest = min(self._settings.groups(role) for role in Role)
        return {Fault.OTHER_ROLE} if fewest < 2 else set()

    @property
    def _over(self) -> bool:
        return time.monotonic() - self._begin_s > self._settings.most_s

    @property
    def _loaded(self) -> int:
        return loaded_blocks(self._cluster.tallies)[0]

    async def _inject_some(self, drawn: Iterator[PlannedFault], count: int) -> None:
        """Inject ``count`` faults, at most one per component at a time."""
        wanted = len(self._made) + count
        busy: set[Component] = set()
        running: set[asyncio.Task[None]] = set()
        postponed: list[PlannedFault] = []
        while len(self._made) < wanted and not self._over:
            while len(running) < min(self._settings.at_once, wanted - len(self._made)):
                planned = self._next(drawn, postponed, busy)
                busy.add(planned.component.failure_domain)
                running.add(asyncio.create_task(self._one(planned, busy)))
            over, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in over:
                task.result()
            self._load.check()
            self._restart_exited(busy)
        for task in running:
            await task

    def _restart_exited(self, busy: set[Component]) -> None:
        """Restart processes that ended although no fault was injected into them, and record it."""
        for name, code in self._cluster.unexpected_exits(busy):
            self._unexpected_exits[f"{name} ended on its own with exit code {code}"] += 1
            self._progress(f"{name} ended on its own with exit code {code}; see its log")
            self._cluster.start(name)

    def _next(
        self, drawn: Iterator[PlannedFault], postponed: list[PlannedFault], busy: set[Component]
    ) -> PlannedFault:
        for planned in postponed:
            if planned.component.failure_domain not in busy:
                postponed.remove(planned)
                return planned
        while (planned := next(drawn)).component.failure_domain in busy:
            postponed.append(planned)
        return planned

    async def _one(self, planned: PlannedFault, busy: set[Component]) -> None:
        try:
            made = await self._injector.inject(planned)
        finally:
            busy.discard(planned.component.failure_domain)
        if made is None:
            self._missed[f"{planned.component.value}, {planned.step.value}"] += 1
            return
        self._made.append(made)
        if len(self._made) % 10 == 0:
            self._report_progress()

    async def _check_idle(self) -> None:
        """Pause the load, check the idle cluster for leaks, and resume."""
        await self._load.pause()
        leaks = await self._leak_check.leaks()
        for leak in leaks:
            # A leak that persists counts once.
            if leak not in self._last_leaks:
                self._leaks.append(f"after {len(self._made)} faults: {leak}")
                self._progress(f"leak {self._leaks[-1]}")
        self._last_leaks = leaks
        self._load.resume()

    def _report_progress(self) -> None:
        good, refused = loaded_blocks(self._cluster.tallies)
        self._progress(
            f"{len(self._made)} faults, {sum(self._missed.values())} not reached, "
            f"{len(self._load.turns)} requests, {good} blocks loaded, {refused} refused"
        )

    # ------------------------------------------------------------------ result

    def _result(self, seconds: float) -> CampaignResult:
        good, refused = loaded_blocks(self._cluster.tallies)
        cluster = self._cluster
        logs = [cluster.log(name) for name in cluster.names]
        of_engines = [cluster.log(name) for name in cluster.engines]
        others = [log for log in logs if log not in of_engines]
        wrong_kv, stale_kv = count_wrong_kv(of_engines, others)
        summary = summarize(
            *(self._load.turns, self._made, self._load_settings.request_deadline_s),
            Component.FRONT_END if self._settings.front_ends else Component.ROUTER,
        )
        return CampaignResult(
            **msgspec.structs.asdict(summary),
            engines=self._engines.described,
            faults=len(self._made),
            missed=dict(self._missed),
            leaks=tuple(self._leaks),
            problems=dict(
                Counter(f"{fault_name(m)}: {m.problem}" for m in self._made if m.problem)
                + self._unexpected_exits
            ),
            loaded_blocks=good,
            refused_blocks=refused,
            damaged_blocks=sum(made.damaged_blocks for made in self._made),
            wrong_kv=wrong_kv,
            stale_kv=stale_kv,
            tracebacks=dict(Counter(last for log in logs for last in _last_lines(log))),
            seconds=seconds,
        )


def count_wrong_kv(engines: Sequence[Path], routers: Sequence[Path]) -> tuple[int, int]:
    """Return how often the logs of engines report wrong KV, and how often for stale attempts.

    A prefill engine that was stopped or cut off goes on for a moment with an attempt that the
    router has ended as failed, and reads slots that the decode engine has reused.  Nothing of such
    an attempt is used.
    """
    text = "\n".join(log.read_text(errors="replace") for log in routers)
    failed = set(_FAILED.findall(text))
    found = [one for log in engines for one in _WRONG_KV.findall(log.read_text(errors="replace"))]
    stale = sum((request_id, number or "1") in failed for request_id, number in found)
    return len(found) - stale, stale


def _last_lines(log: Path) -> Iterator[str]:
    """Yield the last line of each traceback in a log: the exception."""
    text = log.read_text(errors="replace")
    for trace in text.split(_TRACEBACK)[1:]:
        raised = _RAISED.search(trace)
        yield raised.group(1)[:_RAISED_CHARACTERS] if raised else "(truncated)"
