"""Time without placements after a SIGKILL of the scheduler of a router with front ends.

The router is `dualpath emulate router --front-ends N`: its supervisor restarts the scheduler;
engines are emulated.  Agents send requests continuously, more than the decode engines have room
for, so that at any time some requests wait, some are in prefill and most decode; every token is
compared with the expected one.  Times are measured from the kill.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import aiohttp
import msgspec

from dualpath.core.cluster import Role, parse_nodes
from dualpath.core.settings import Setting, Settings
from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor, all_processes
from dualpath.launch.scaled_router import SCHEDULER
from dualpath.report.model import Table
from dualpath_lab.benchmarks.overhead.servers import Seed, wait_ready
from dualpath_lab.faults.engine_kinds import EmulatedEngines
from dualpath_lab.faults.load import Load, Outcome, Turn
from dualpath_lab.faults.settings import EmulatedEnginesSettings, LoadSettings
from dualpath_lab.faults.summary import first_token_after
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    one_stage,
)

#: A context has up to 1,400 tokens, half of it on average: a DE has room for about eight.
_COSTS = """
name = "paced"
layers = 4
kv_bytes_per_token = 512.0
prefill_tokens_per_s = 4000.0
[prefill]
batch_s = 0.02
[decode]
step_s = 0.025
"""
_HBM_BYTES = 4 * 1400 * 512
_POLL_S = 0.01
_RECOVERY_TIMEOUT_S = 60.0


class Cluster(NamedTuple):
    """``router`` is the process id of the supervisor."""

    url: str
    cluster_url: str
    router: int
    engines: int


class Outage(NamedTuple):
    """One kill, at ``at_s``, and the seconds from it until three events.

    The next scheduler responds, all engines have registered, it has placed a request.
    """

    at_s: float
    responds_s: float
    engines_s: float
    placed_s: float


class KilledSettings(Settings, frozen=True, kw_only=True):
    """Kills and load."""

    kills: Annotated[int, Setting("kills", ge=1)] = 10
    front_ends: Annotated[int, Setting("front ends", ge=1)] = 2
    nodes: Annotated[str, Setting("emulated engines", metavar="xPyD")] = "2P2D"
    agents: Annotated[int, Setting("concurrent agents", ge=1)] = 24
    life_s: Annotated[
        float,
        Setting("run time of each scheduler; restarts are delayed after less than a minute", gt=0),
    ] = 61.0
    seed: Seed = 0


class KilledResult(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from each kill until a step of the recovery, and requests by what befell them."""

    until_s: dict[str, list[float]]
    requests: dict[str, int]
    errors: list[str]


def _run_kills(settings: KilledSettings, progress: Progress) -> KilledResult:
    with tempfile.TemporaryDirectory() as folder, _cluster(settings, Path(folder)) as cluster:
        outages, turns = asyncio.run(_run(cluster, settings, progress))
    tokens_s = [
        first[1] - outage.at_s
        for outage in outages
        if (first := first_token_after(turns, outage.at_s)) is not None
    ]
    states = [_state_at(turn, outage.at_s) for outage in outages for turn in turns]
    bad = [turn.answer for turn in turns if turn.answer.outcome is not Outcome.WELL]
    return KilledResult(
        until_s={
            "the next scheduler responds": [o.responds_s for o in outages],
            "all engines have registered": [o.engines_s for o in outages],
            "a request is placed": [o.placed_s for o in outages],
            "first token of a request sent after the kill": tokens_s,
        },
        requests={
            "total": len(turns),
            "in flight at a kill, before the first token": states.count("waiting"),
            "in flight at a kill, streaming": states.count("streaming"),
            "interrupted streams": sum(answer.first_token_s is not None for answer in bad),
            _FAILED: len(bad),
        },
        errors=[f"{answer.outcome}: {answer.detail}" for answer in bad],
    )


_FAILED = "failed, including interrupted streams"


def draw(raw: RawData[KilledSettings, KilledResult]) -> Page:
    """Draw the recovery times, and how requests ended."""
    (result,) = raw.results
    times = tuple(
        (what, f"{median(times_s):.2f}", f"{max(times_s):.2f}")
        for what, times_s in result.until_s.items()
        if times_s
    )
    counts = tuple((what, f"{n:,}") for what, n in result.requests.items())
    title = f"Seconds from a kill of the scheduler, {raw.settings.kills} kills"
    return Page(
        tables=(
            Table(title, ("until", "p50", "max"), times),
            Table("Requests", ("what", "number"), counts),
            Table("Errors", ("error",), tuple((error,) for error in result.errors)),
        ),
        results=(
            KeyResult(f"requests {_FAILED}", result.requests[_FAILED], 0, at_least=False),
            *(
                KeyResult(f"until {what}, s", median(times_s), tolerance=0.25)
                for what, times_s in result.until_s.items()
                if times_s
            ),
        ),
    )


@contextmanager
def _cluster(settings: KilledSettings, folder: Path) -> Iterator[Cluster]:
    (folder / "costs.toml").write_text(_COSTS)
    port, cluster_port, control_port = claim_port(), claim_port(), claim_port()
    router = [
        "router", "--port", str(port), "--front-ends", str(settings.front_ends),
        "--cluster-port", str(cluster_port), "--control-port", str(control_port),
    ]  # fmt: skip
    engine = [
        "--router", f"tcp://127.0.0.1:{control_port}", "--model", "costs.toml",
        "--storage", "storage", "--block-tokens", "16", "--transport", "memory",
        "--hbm-bytes", str(_HBM_BYTES), "--buffer-bytes", str(16 * _HBM_BYTES),
    ]  # fmt: skip
    nodes = parse_nodes(settings.nodes)
    with Supervisor() as servers:
        started = servers.add(_process("router", router, folder), ends_last=True)
        for role, count in zip(Role, nodes, strict=True):
            for number in range(count):
                name = f"{role.value}-{number}"
                words = [role.value, "--engine-id", name, *engine]
                servers.add(_process(name, words, folder))
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, servers)
        yield Cluster(url, f"http://127.0.0.1:{cluster_port}", started.pid, sum(nodes))


def _process(name: str, words: Sequence[str], folder: Path) -> SpawnedProcess:
    argv = (sys.executable, "-m", "dualpath.cli.main", "emulate", *words)
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return SpawnedProcess(name, argv, folder / f"{name}.log", {**os.environ, **path}, folder=folder)


async def _run(
    cluster: Cluster, settings: KilledSettings, progress: Progress
) -> tuple[list[Outage], list[Turn]]:
    agents = LoadSettings(agents=settings.agents, generate_tokens=200, leave_share=0.0)
    engines = EmulatedEngines(EmulatedEnginesSettings())
    outages = []
    async with (
        aiohttp.ClientSession(cluster.cluster_url) as http,
        Load(cluster.url, agents, engines, settings.seed) as load,
    ):
        for number in range(settings.kills):
            await asyncio.sleep(settings.life_s)
            outages.append(await _kill(cluster, http))
            progress(f"kill {number}: {outages[-1]}")
        await load.pause()  # Every request ends.
        load.check()
    return outages, load.turns


async def _kill(cluster: Cluster, http: aiohttp.ClientSession) -> Outage:
    """Kill the scheduler and poll the next one until it has placed a request."""
    at_s = time.monotonic()
    os.kill(_scheduler(cluster.router), signal.SIGKILL)
    until: dict[str, float] = {}
    async with asyncio.timeout(_RECOVERY_TIMEOUT_S):
        while "placed" not in until:
            await asyncio.sleep(_POLL_S)
            if (status := await _status(http)) is None:
                continue
            now_s = time.monotonic() - at_s
            until.setdefault("responds", now_s)
            if sum(engine["alive"] for engine in status["engines"]) == cluster.engines:
                until.setdefault("engines", now_s)
            # Counted by the next scheduler, which starts at none.
            if status["assignments"]:
                until["placed"] = now_s
                until.setdefault("engines", now_s)
    return Outage(at_s, until["responds"], until["engines"], until["placed"])


async def _status(http: aiohttp.ClientSession) -> dict[str, Any] | None:
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get("/dualpath/v1/status") as answer:
            found: dict[str, Any] = await answer.json()
            return found
    return None


def _scheduler(router: int) -> int:
    """Return the scheduler's process id, a child of the router's process."""
    children = (pid for pid, stat in all_processes() if stat.parent == router)
    return next(pid for pid in children if SCHEDULER.encode() in _command_line(pid))


def _command_line(process_id: int) -> list[bytes]:
    return Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")


def _state_at(turn: Turn, at_s: float) -> str:
    """Return a turn's state at a time, empty if it was not in flight."""
    if not turn.begin_s < at_s < turn.end_s:
        return ""
    first_s = turn.answer.first_token_s
    return "streaming" if first_s is not None and first_s < at_s else "waiting"


KILLED_SCHEDULER = Experiment(
    name="killed-scheduler",
    title="Time without placements after a kill of the scheduler",
    settings=KilledSettings(),
    result=KilledResult,
    stages=lambda settings, progress: one_stage(
        {"kills": None}, lambda _, number: _run_kills(settings, progress)
    ),
    draw=draw,
)
