"""Job completion times behind a proxy that sends two legs, against dualpath's own router.

Emulated engines serve both: a scheduler that is also the router, so that every way meets the same
processes.  The proxy is this process: like most it takes the engines of a role in turn and does not
read which decode engine has the KV.  Agents play at once; a turn's context is all that the agent
has sent and got.  Each way has cells of its own, and the ways of a round follow each other.
"""

import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import aiohttp
import msgspec

from dualpath.core.cluster import Role, parse_nodes
from dualpath.core.errors import EngineLostError
from dualpath.core.settings import Setting, Settings
from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor
from dualpath.report.model import Table
from dualpath.router.token_api.wire import GENERATE_PATH
from dualpath.workload.replay.endpoint import counter_changes, status
from dualpath_lab.benchmarks.overhead.servers import Rounds, Seed, wait_ready
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    one_stage,
)

#: A turn of 300 tokens takes about 0.1 s of prefill and 1.5 s of decode.
_COSTS = """
name = "paced"
layers = 4
kv_bytes_per_token = 4096.0
prefill_tokens_per_s = 4000.0
[prefill]
batch_s = 0.02
[decode]
step_s = 0.025
"""
_HBM_BYTES = 1 << 27
_TURN_S = 120.0
ROUTER = "router"
IN_TURN = "one leg after the other"
AT_ONCE = "both legs at once"
#: The JCT may be this much of the router's.
MOST = 1.05


class TwoLegsSettings(Settings, frozen=True, kw_only=True):
    """Engines and agents."""

    nodes: Annotated[tuple[str, ...], Setting("emulated engines", metavar="xPyD,…")] = (
        "1P1D",
        "1P2D",
    )
    agents: Annotated[int, Setting("agents at a time", ge=1)] = 4
    turns: Annotated[int, Setting("turns of an agent", ge=1)] = 5
    append: Annotated[int, Setting("tokens that an agent appends in a turn", ge=1)] = 300
    generate: Annotated[int, Setting("tokens that are generated in a turn", ge=1)] = 60
    move_kv: Annotated[
        bool,
        Setting("move KV to the decode engine of a second leg, instead of passing the leg on"),
    ] = False
    repeat: Rounds = 3
    seed: Seed = 0


class Way(NamedTuple):
    """A way to the engines of a cluster."""

    nodes: str
    legs: str

    @property
    def name(self) -> str:
        """Name of its runs."""
        return f"{self.nodes} {self.legs}"


class TwoLegsResult(msgspec.Struct, frozen=True, kw_only=True):
    """JCTs of agents in seconds; the tokens of all prompts, those prefilled, and those read."""

    jct_s: list[float]
    prompt_tokens: int
    prefilled_tokens: int
    hit_tokens: int
    snic_read_bytes: dict[str, int]

    @property
    def mean_jct_s(self) -> float:
        """The mean JCT."""
        return mean(self.jct_s)


class Cluster(NamedTuple):
    """URLs of the router and of the engines by role."""

    router: str
    engines: dict[Role, list[str]]


class Proxy:
    """Sends turns on one way; ``http`` is its session."""

    def __init__(self, cluster: Cluster, way: Way, http: aiohttp.ClientSession) -> None:
        self._router, self._http, self._way = cluster.router, http, way
        self._engines = {role: itertools.cycle(urls) for role, urls in cluster.engines.items()}
        self._names = itertools.count()

    async def answer(self, prompt: list[int], tokens: int) -> list[int]:
        """Return the tokens that are generated.  Raises ``EngineLostError`` for an error."""
        async with asyncio.timeout(_TURN_S):
            if self._way.legs == ROUTER:
                body = {"prompt": prompt, "max_tokens": tokens}
                return _token_ids(await self._post(f"{self._router}/v1/completions", body))
            name = {"transfer_id": f"turn-{next(self._names)}"}
            first = {"do_remote_decode": True, **name}
            if self._way.legs == AT_ONCE:
                second = {"do_remote_prefill": True, **name}
                _, answer = await asyncio.gather(
                    self._leg(Role.PREFILL, prompt, 1, first),
                    self._leg(Role.DECODE, prompt, tokens, second),
                )
            else:
                found = await self._leg(Role.PREFILL, prompt, 1, first)
                second = found["kv_transfer_params"]
                answer = await self._leg(Role.DECODE, prompt, tokens, second)
            return _token_ids(answer)

    async def _leg(
        self, role: Role, prompt: list[int], tokens: int, params: dict[str, Any]
    ) -> dict[str, Any]:
        body = {
            "request_id": "",
            "token_ids": prompt,
            "sampling_params": {"max_tokens": tokens},
            "kv_transfer_params": params,
        }
        return await self._post(next(self._engines[role]) + GENERATE_PATH, body)

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(url, json=body) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != HTTPStatus.OK:
                raise EngineLostError(f"{url} answered {response.status}: {answer}; see its log")
            return answer


def _token_ids(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def _play(
    cluster: Cluster, way: Way, settings: TwoLegsSettings, number: int
) -> TwoLegsResult:
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
    ) as http:
        proxy = Proxy(cluster, way, http)
        sent = 0

        async def agent(name: str, turns: int) -> float:
            nonlocal sent
            source, context = random.Random(name), list[int]()
            began_s = time.perf_counter()
            for _ in range(turns):
                context += source.choices(range(1, 32000), k=settings.append)
                sent += len(context)
                context += await proxy.answer(context, settings.generate)
            return time.perf_counter() - began_s

        await asyncio.gather(*(agent(f"{settings.seed}/warm-up/{n}", 1) for n in range(2)))
        before, sent = await status(http, cluster.router), 0
        names = [f"{settings.seed}/{number}/{way.name}/{n}" for n in range(settings.agents)]
        jct_s = await asyncio.gather(*(agent(name, settings.turns) for name in names))
        after = await status(http, cluster.router)
    spent = counter_changes(before, after)
    assert spent is not None, "a router of ours counts"
    return TwoLegsResult(
        jct_s=list(jct_s),
        prompt_tokens=sent,
        prefilled_tokens=spent.other["prompt_tokens"],
        hit_tokens=spent.hit_tokens or 0,
        snic_read_bytes=spent.snic_read_bytes,
    )


def _run(settings: TwoLegsSettings, way: Way, number: int) -> TwoLegsResult:
    """Play the agents of one run.  Raises ``DualPathError`` if a turn fails."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _cluster(way.nodes, Path(folder), move_kv=settings.move_kv) as cluster,
    ):
        return asyncio.run(_play(cluster, way, settings, number))


@contextmanager
def _cluster(nodes: str, folder: Path, *, move_kv: bool) -> Iterator[Cluster]:
    (folder / "costs.toml").write_text(_COSTS)
    port, control_port, front_ends_port = claim_port(), claim_port(), claim_port()
    router = [
        "router", "--port", str(port), "--control-port", str(control_port),
        "--front-ends-port", str(front_ends_port), "--mode", "split", "--no-dram-tier",
        "--move-kv" if move_kv else "--no-move-kv",
    ]  # fmt: skip
    engine = [
        "--router", f"tcp://127.0.0.1:{control_port}", "--model", "costs.toml", "--mode", "split",
        "--two-leg-scheduler", f"tcp://127.0.0.1:{front_ends_port}", "--storage", "storage",
        "--block-tokens", "16", "--transport", "memory", "--verify", "checksum",
        "--hbm-bytes", str(_HBM_BYTES), "--buffer-bytes", str(_HBM_BYTES),
    ]  # fmt: skip
    urls: dict[Role, list[str]] = {role: [] for role in Role}
    with Supervisor() as servers:
        servers.add(_process("router", router, folder), ends_last=True)
        for role, count in zip(Role, parse_nodes(nodes), strict=True):
            for number in range(count):
                name, engine_port = f"{role.value}-{number}", claim_port()
                words = [role.value, "--engine-id", name, "--port", str(engine_port), *engine]
                servers.add(_process(name, words, folder))
                urls[role].append(f"http://127.0.0.1:{engine_port}")
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, servers)
        for one in itertools.chain(*urls.values()):
            wait_ready(one, servers)
        yield Cluster(url, urls)


def _process(name: str, words: Sequence[str], folder: Path) -> SpawnedProcess:
    argv = (sys.executable, "-m", "dualpath.cli.main", "emulate", *words)
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return SpawnedProcess(name, argv, folder / f"{name}.log", {**os.environ, **path}, folder=folder)


def _ways(settings: TwoLegsSettings) -> dict[str, Way]:
    ways = [Way(nodes, legs) for nodes in settings.nodes for legs in (ROUTER, IN_TURN, AT_ONCE)]
    return {way.name: way for way in ways}


def draw(raw: RawData[TwoLegsSettings, TwoLegsResult]) -> Page:
    """Draw JCTs, absolute and relative to the router's, and what was prefilled and read."""
    rows, results = [], []
    for name, way in _ways(raw.settings).items():
        if not (runs := raw.of(name)):
            continue
        base = Way(way.nodes, ROUTER).name
        jct_s = raw.median(name, lambda run: run.mean_jct_s) or 0.0
        relative = raw.ratio(name, base, lambda run: run.mean_jct_s)
        read = [sum(run.snic_read_bytes.values()) / run.prompt_tokens for run in runs]
        rows.append(
            (
                *(way.nodes, way.legs, f"{jct_s:.2f}", f"{relative:.3f}" if relative else ""),
                f"{mean(run.prefilled_tokens / run.prompt_tokens for run in runs):.2f}",
                f"{mean(run.hit_tokens / run.prefilled_tokens for run in runs):.2f}",
                f"{mean(read):.0f}",
            )
        )
        if way.legs != ROUTER:
            what = f"{name}: JCT relative to the router's"
            results.append(KeyResult(what, relative, MOST, at_least=False))
    settings = raw.settings
    title = (
        f"JCT of {settings.agents} agents of {settings.turns} turns, {settings.append} tokens "
        f"appended and {settings.generate} generated"
    )
    columns = (
        *("engines", "way", "JCT s (median of runs)", "relative to the router's"),
        *("prompt tokens planned per token sent", "hits", "bytes read per token sent"),
    )
    return Page(tables=(Table(title, columns, tuple(rows)),), results=tuple(results))


def _stages(settings: TwoLegsSettings, progress: Progress) -> Any:  # noqa: ANN401 - of the harness
    return one_stage(_ways(settings), lambda way, number: _run(settings, way, number))


TWO_LEGS = Experiment(
    name="two-legs",
    title="Another proxy with two legs, against dualpath's router",
    settings=TwoLegsSettings(),
    result=TwoLegsResult,
    stages=_stages,
    draw=draw,
    summary=lambda run: f"JCT {run.mean_jct_s:.2f} s",
    packages=("dualpath",),
)
