"""Clusters of emulated engines as processes: real router, NIXL, files and checksums, no vLLM."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.control_network import Arrivals
from tests.e2e.small_costs import COSTS
from tests.guard import GUARD_S
from tests.stored_runs import stored_head

from dualpath.core.blocks import BlockGeometry, block_keys
from dualpath.core.modes import Handover, Mode
from dualpath.launch.process import ManagedProcess, SpawnedProcess, Supervisor
from dualpath.plan.counts import new_full_blocks
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.router.token_api.wire import EventLines
from dualpath.storage.factory import open_storage
from dualpath.storage.sealed_blocks import KeyRing
from dualpath.transport.nixl import nixl_package
from dualpath.workload.replay.client import RealClock
from dualpath.workload.replay.endpoint import CompletionBody, complete, completion_body
from dualpath_lab.emulated.metrics import engine_counts
from dualpath_lab.emulated.router_server import emulated_router

pytest.importorskip(nixl_package())
pytestmark = pytest.mark.nixl

ENGINE = (
    *("--model", "costs.toml", "--storage", "kv", "--block-tokens", "16", "--speedup", "4"),
    *("--buffer-bytes", "16MiB", "--hbm-bytes", "16MiB", "--batch-cap-tokens", "64"),
    *("--compute-quota-s", "0.001", "--verify", "full"),
    # Layers of two parts, a large one, and small ones with a window.
    *("--layer-parts", "192+64*3,512,128@64*2"),
)
STORAGE_KEY, KEY = "storage.key", "0123456789abcdef" * 4
#: Two of the clusters seal stored blocks.
STORED = {
    Mode.DUALPATH: ("--storage-key-file", STORAGE_KEY),
    Mode.BASIC: ("--storage-key-file", STORAGE_KEY, "--storage-protection", "authenticated"),
}
#: Agents' rounds as (tokens to append, tokens to generate).
AGENTS = (
    ((150, 40), (33, 20), (5, 30)),
    ((64, 16), (16, 17), (90, 9)),
    ((201, 8), (1, 60), (40, 12)),
)


class Processes(Supervisor):
    """Commands of a cluster in a folder."""

    def __init__(self, folder: Path, mode: Mode) -> None:
        super().__init__()
        self._folder = folder
        self._mode = mode

    def start(self, name: str, role: str, control: str, *more: str) -> SpawnedProcess:
        """Start one; ``control`` is where engines register.  A router ends after them."""
        if role == "router":
            where = ["--control-port", control.rpartition(":")[2]]
        else:
            where = ["--router", control]
        process = SpawnedProcess(
            name,
            (
                *(sys.executable, "-m", "dualpath.cli.main", "emulate", role),
                *(*where, "--mode", self._mode.value, *more),
            ),
            self._folder / f"{name}.log",
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            folder=self._folder,
        )
        return self.add(process, ends_last=role == "router")


async def first_line(process: ManagedProcess, begin: str = "dualpath emulated ") -> str:
    """Return its first line that is not a log line; the router here serves meanwhile."""
    return await asyncio.to_thread(process.wait_for_line, begin, GUARD_S)


async def ended(process: ManagedProcess) -> list[str]:
    """End a process as an operator would; return its output after the first line."""
    process.terminate()
    assert await asyncio.to_thread(process.wait, GUARD_S) == 0, process.log_tail()
    return [line for line in process.output().splitlines() if " INFO " not in line][1:]


@contextlib.asynccontextmanager
async def engines(
    folder: Path, control: str, mode: Mode, prefill: int, decode: int, *own: str
) -> AsyncIterator[list[str]]:
    """Run engine processes; yields their URLs.  None of them may print anything else."""
    (folder / "costs.toml").write_text(COSTS)
    names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
    with Processes(folder, mode) as started:
        for name in names:
            role = name.partition("-")[0]
            more = (*ENGINE, *STORED.get(mode, ()), "--engine-id", name, *own)
            started.start(f"{mode.value}-{name}", role, control, *more)
        lines = [await first_line(process) for process in started.processes]
        yield [found[0] for line in lines if (found := re.findall(r"http://[\d.:]+\d", line))]
        assert [await ended(process) for process in started.processes] == [[]] * len(names)


class Player:
    """Plays agents against an endpoint; each turn waits until the last turn's blocks are stored."""

    def __init__(self, folder: Path, endpoint: str, service: RouterService, mode: Mode) -> None:
        self._url = f"{endpoint}/v1/completions"
        namespace = service.registry.namespace
        assert namespace is not None
        self.geometry: BlockGeometry = namespace.geometry
        keys = KeyRing(KEY, STORAGE_KEY)
        self._storage = open_storage(folder / "kv", namespace, mode=mode, keys=keys)
        # An engine reports what it has stored.
        self._arrivals = Arrivals(service)

    async def play(self) -> list[list[tuple[list[int], int]]]:
        """Return per agent and round (generated tokens, hit blocks)."""
        async with aiohttp.ClientSession() as http, asyncio.timeout(GUARD_S):
            agents = (self._agent(http, n, rounds) for n, rounds in enumerate(AGENTS))
            played = await asyncio.gather(*agents)
        self._storage.close()
        return played

    async def _agent(
        self, http: aiohttp.ClientSession, number: int, rounds: tuple[tuple[int, int], ...]
    ) -> list[tuple[list[int], int]]:
        context: list[int] = []
        answers = []
        for append, generate in rounds:
            context += [1000 * number + len(context) + i for i in range(append)]
            body = completion_body("any", context, generate, f"agent-{number}")
            answer = await complete(http, self._url, body, RealClock())
            assert answer.cached_tokens is not None
            answers.append((answer.token_ids, answer.cached_tokens // self.geometry.block_tokens))
            context += answer.token_ids
            await self._stored(context[:-1], f"agent-{number}")
        return answers

    async def _stored(self, tokens: list[int], salt: str) -> None:
        keys = block_keys(tokens, self.geometry.block_tokens, cache_salt=salt)
        await self._arrivals.until(lambda: stored_head(self._storage, keys) == len(keys), GUARD_S)


def ideal_hits(geometry: BlockGeometry) -> list[list[int]]:
    """Blocks each round can hit: all full blocks with KV, never the whole prompt."""
    hits: list[list[int]] = []
    for rounds in AGENTS:
        hits.append([])
        tokens = 0
        for append, generate in rounds:
            with_kv = new_full_blocks(0, max(tokens - 1, 0), geometry.block_tokens)
            tokens += append
            hits[-1].append(min(with_kv, geometry.max_hit_blocks(tokens)))
            tokens += generate
    return hits


async def verified_and_wrong(urls: list[str]) -> tuple[int, int]:
    """Sum Layer Blocks over all engines and places."""
    verified = wrong = 0
    async with aiohttp.ClientSession() as http:
        for url in urls:
            async with http.get(f"{url}/metrics") as response:
                found = engine_counts(await response.text())
            verified += sum(found.verified.values())
            wrong += sum(found.wrong.values())
    return verified, wrong


async def played(
    folder: Path,
    mode: Mode,
    prefill: int,
    decode: int,
    *own: str,
    handover: Handover = Handover.BUFFER,
) -> list[list[list[int]]]:
    """Play all agents on a cluster of its own, check it, return what was generated.

    ``own`` are more arguments of its engines.
    """
    folder.mkdir()
    (folder / STORAGE_KEY).write_text(KEY)
    (folder / STORAGE_KEY).chmod(0o600)
    settings = RouterSettings(mode=mode, handover=handover)
    async with emulated_router(settings, "127.0.0.1", 0) as (endpoint, service):
        address = service.scheduler.server.address
        async with engines(folder, address, mode, prefill, decode, *own) as urls:
            await service.wait_ready(prefill, decode, GUARD_S)
            player = Player(folder, endpoint, service, mode)
            agents = await player.play()
            verified, wrong = await verified_and_wrong(urls)
            assert wrong == 0
            assert (verified > 0) == mode.moves_bytes
            received = {one["handover"] for one in service.status()["assignments"]}
            assert received == {handover.value}
    assert [[hits for _, hits in rounds] for rounds in agents] == ideal_hits(player.geometry)
    assert service.metrics.retries == 0
    return [[tokens for tokens, _ in rounds] for rounds in agents]


async def test_agents_get_the_same_answers_in_all_modes_and_every_byte_is_right(
    tmp_path: Path,
) -> None:
    clusters = [
        (Mode.BASIC, 1, 1),
        (Mode.DUALPATH, 1, 2),
        (Mode.SPLIT, 1, 2),
        (Mode.ORACLE, 1, 1),
    ]
    answers = await asyncio.gather(
        *(played(tmp_path / mode.value, mode, p, d) for mode, p, d in clusters)
    )
    assert answers[1:] == answers[:-1]
    assert [[len(tokens) for tokens in rounds] for rounds in answers[0]] == [
        [generate for _, generate in rounds] for rounds in AGENTS
    ]


async def test_kv_arrives_in_hbm_through_memory_files_and_through_nixl(tmp_path: Path) -> None:
    """No layer has a window: with windows engines receive KV in their buffer."""
    layers = ("--layer-parts", "192+64*3,512,128+64*2")
    answers = await asyncio.gather(
        played(tmp_path / "buffer", Mode.SPLIT, 1, 2, *layers),
        *(
            played(
                *(tmp_path / way, Mode.SPLIT, 1, 2, *layers, "--transport", way),
                handover=Handover.HBM,
            )
            for way in ("auto", "nixl", "memory")
        ),
    )
    assert answers[1:] == answers[:-1]


async def test_a_request_survives_the_end_of_its_decode_engine(tmp_path: Path) -> None:
    """Router and engines are separate commands; the request continues at the other DE."""
    (tmp_path / "costs.toml").write_text(COSTS)
    with Processes(tmp_path, Mode.DUALPATH) as started:
        router = started.start("router", "router", "tcp://127.0.0.1:0")
        endpoint, control = re.findall(
            r"((?:http|tcp)://[\d.:]+)", await first_line(router, "dualpath emulated router")
        )
        engine, *decoders = [
            started.start(name, name.partition("-")[0], control, *ENGINE, "--speedup", "1")
            for name in ("prefill", "decode-0", "decode-1")
        ]
        for process in (engine, *decoders):
            await first_line(process)
        body = completion_body("any", list(range(100)), 300, None)
        async with aiohttp.ClientSession() as http, asyncio.timeout(GUARD_S):
            cut = await killing_its_decoder(http, endpoint, body, decoders)
            whole = await complete(http, f"{endpoint}/v1/completions", body, RealClock())
        assert cut == whole.token_ids
        assert whole.cached_tokens == 96
        for process in (*decoders, engine, router):
            if process.alive:
                await ended(process)
        assert [process.exit_code for process in (router, engine)] == [0, 0]
        assert sorted(process.exit_code or 0 for process in decoders) == [-signal.SIGKILL, 0]


async def killing_its_decoder(
    http: aiohttp.ClientSession, endpoint: str, body: CompletionBody, decoders: list[SpawnedProcess]
) -> list[int]:
    """Return a stream's tokens; the engine it came from is killed after the first few."""
    lines, killed = EventLines(), False
    token_ids: list[int] = []
    url, content = f"{endpoint}/v1/completions", msgspec.json.encode(body)
    headers = {"Content-Type": "application/json"}
    async with http.post(url, data=content, headers=headers) as response:
        async for received in response.content.iter_any():
            for payload in lines.feed(received):
                for choice in msgspec.json.decode(payload)["choices"]:
                    token_ids += choice["token_ids"]
            if lines.ended:
                return token_ids
            if len(token_ids) >= 5 and not killed:
                killed = True
                await kill_the_busy_one(http, endpoint, decoders)
    raise AssertionError("the stream has no end")


async def kill_the_busy_one(
    http: aiohttp.ClientSession, endpoint: str, decoders: list[SpawnedProcess]
) -> None:
    async with http.get(f"{endpoint}/dualpath/v1/status") as response:
        engines = (await response.json())["engines"]
    (busy,) = (e["engine_id"] for e in engines if e["role"] == "decode" and e["seq"])
    (victim,) = (process for process in decoders if busy == f"decode-{process.pid}")
    victim.kill()
    assert await asyncio.to_thread(victim.wait, GUARD_S) == -signal.SIGKILL
