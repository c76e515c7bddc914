"""Real vLLM engines under a router in this process, so that tests can look at both ends."""

import asyncio
import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from tests.e2e.plain_engine import (
    HBM_BYTES,
    MAX_MODEL_LEN,
    NAME,
    START_S,
    Answer,
    Round,
    complete,
    play_plain,
    until,
)
from tests.guard import GUARD_S
from tests.stored_runs import read_run, stored_head

from dualpath.core.blocks import block_keys
from dualpath.core.cluster import Role
from dualpath.core.modes import DEFAULT_MODE
from dualpath.launch.commands import ENGINE_ENTRY, DpRank, engine_command, engine_id, rank_id
from dualpath.launch.fork_server import ForkedProcess
from dualpath.launch.ports import claim_port
from dualpath.launch.process import Supervisor
from dualpath.launch.settings import LocalClusterSettings
from dualpath.policy.events import Assignment
from dualpath.router.scheduler.registry import EngineState
from dualpath.router.service import RouterService
from dualpath.router.settings import RouterSettings
from dualpath.storage.block_file import HEADER_BYTES, decode_header
from dualpath.storage.posix import PosixStorage
from dualpath.vllm.app import add_cluster_routes, make_app
from dualpath.vllm.engine_config import (
    adapter_paths,
    bind_listen_socket,
    make_engine_config,
    parse_front_end_arguments,
)
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath.vllm.frontend import DualPathLLM
from dualpath.vllm.generate_client import GenerateClient

#: Of prompts that a decode engine computes alone: what it stores is no hit for the cluster.
DIRECT_SALT = "direct"


class EngineCluster:
    """Router and front end on a thread of this process, engines forked; a context manager."""

    def __init__(self, settings: LocalClusterSettings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.supervisor = Supervisor()
        self._started: dict[str, tuple[Role, int, dict[str, Any]]] = {}
        self._forgotten = 0
        self._unused = itertools.count()
        self._ready = threading.Event()
        # A failed start must not keep the tests' process from ending.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> "EngineCluster":
        self._thread.start()
        assert self._ready.wait(START_S), f"the front end did not start within {START_S:g} s"
        return self

    def __exit__(self, *error: object) -> None:
        self.supervisor.end()
        self.server.should_exit = True
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        front_end = FrontEndSettings(
            model=self.settings.model,
            port=0,
            dtype=self.settings.dtype,
            max_model_len=self.settings.max_model_len,
            served_model_names=(NAME,),
            block_tokens=self.settings.block_tokens,
            lora_modules=self.settings.lora_modules,
            vllm_args=self.settings.vllm_args,
        )
        args = parse_front_end_arguments(front_end)
        listener = bind_listen_socket(args)
        config = make_engine_config(args)
        calls = GenerateClient(config.model_config.max_logprobs)
        router = RouterSettings(
            mode=self.settings.mode,
            engine_wait_s=START_S,
            dram_tier=self.settings.dram_tier,
            append_at_decode_tokens=self.settings.append_at_decode_tokens,
            handover=self.settings.handover,
            third_engine_reads=self.settings.third_engine_reads,
        )
        self.service = RouterService(router, calls, adapter_paths=adapter_paths(args))
        await self.service.start()
        self.control_port = int(self.service.scheduler.server.address.rpartition(":")[2])
        llm = DualPathLLM(
            config, self.service, block_tokens=front_end.block_tokens, log_stats=False
        )
        app = await make_app(llm, self.service, args)
        add_cluster_routes(app, self.service.scheduler)
        listener.listen()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._ready.set()
        try:
            await self.server.serve(sockets=[listener])
        finally:
            await llm.aclose()
            await self.service.stop()
            await calls.aclose()

    # ------------------------------------------------------------------ engines

    def start_engine(self, role: Role, index: int, **changes: Any) -> str:
        """Start an engine, with settings of its own; return its name."""
        name = engine_id(role, index)
        settings = msgspec.structs.replace(self.settings, **changes)
        port = claim_port()
        command = engine_command(settings, role, index, port, self.control_port)
        log = self.folder / f"{name}.log"
        self._started[name] = (role, index, changes)
        self.supervisor.add(ForkedProcess(name, ENGINE_ENTRY, command, log))
        return name

    def start_group(self, role: Role, index: int, size: int) -> list[str]:
        """Start the ranks of a data-parallel group; return their names."""
        names = [rank_id(role, index, rank, size) for rank in range(size)]
        rpc_port = claim_port()
        for rank, name in enumerate(names):
            place = DpRank(rank, size, rpc_port)
            command = engine_command(
                self.settings, role, index, claim_port(), self.control_port, dp=place
            )
            log = self.folder / f"{name}.log"
            self.supervisor.add(ForkedProcess(name, ENGINE_ENTRY, command, log))
        return names

    def restart(self, *names: str) -> None:
        """Start killed engines with the same settings, and wait until they have joined again."""
        for name in names:
            role, index, changes = self._started[name]
            self.start_engine(role, index, **changes)
        self.wait_for(*names)

    def kill(self, name: str) -> None:
        """Kill an engine and all its processes as an out-of-memory killer would."""
        process = self.supervisor.process(name)
        process.kill()
        assert process.wait(GUARD_S) is not None

    def wait_for(self, *names: str) -> None:
        """Wait until these engines are registered and alive."""
        for name in names:
            until(functools.partial(self._up, name), f"engine {name}", START_S)

    def _up(self, name: str) -> bool:
        process = self.supervisor.process(name)
        assert process.alive, process.log_tail()
        return name in self.alive()

    def alive(self) -> set[str]:
        """Names of the live engines."""
        return {info.engine_id for info in self.service.registry.alive()}

    def paused(self, name: str) -> bool:
        """Whether an engine gets no new requests."""
        state = self.service.registry.get(name)
        return state is not None and bool(state.pauses)

    def total(self, counter: str, *engines: str) -> float:
        """Sum of a counter over engines, all by default."""
        states = self.service.registry.all()
        chosen = [s for s in states if not engines or s.info.engine_id in engines]
        return sum(state.totals().get(counter, 0) for state in chosen)

    def idle(self) -> bool:
        """Whether no live engine has a request or holds any of its buffer."""
        states = [s for s in self.service.registry.all() if s.alive]
        return all(
            s.report is not None
            and s.report.load.unfinished_requests == 0
            and s.report.load.free_buffer_tokens == s.info.buffer_tokens
            for s in states
        )

    def wait_idle(self) -> None:
        """Wait until every engine has freed all buffers and HBM, and has reported its counters."""
        until(self.idle, "engines idle with free buffers")
        # A report that comes soon after another one has no counters: those of before stay.
        former = {s.info.engine_id: s.report and s.report.counters for s in self._alive()}
        until(
            lambda: all(
                s.report is not None and s.report.counters is not former.get(s.info.engine_id)
                for s in self._alive()
            ),
            "counters of idle engines",
        )

    def _alive(self) -> list[EngineState]:
        return [state for state in self.service.registry.all() if state.alive]

    def assignments(self) -> list[Assignment]:
        """Decisions since ``forget_assignments``."""
        placed = list(self.service.scheduler.dispatch.recent)[self._forgotten :]
        return [placement.assignment for placement in placed if placement.assignment is not None]

    def forget_assignments(self) -> None:
        """Begin a new list of decisions."""
        self._forgotten = len(self.service.scheduler.dispatch.recent)

    # ------------------------------------------------------------------ requests and blocks

    def ask(
        self,
        prompt: Sequence[int],
        generate: int,
        salt: str = "",
        model: str = NAME,
        hints: Mapping[str, object] | None = None,
    ) -> Answer:
        """Return the answer to one request."""
        return complete(self.url, prompt, generate, salt, model, hints)

    @property
    def decode_url(self) -> str:
        """The address of one decode engine."""
        return next(state.info.api_url for state in self._alive() if state.info.role is Role.DECODE)

    def ask_alone(self, prompt: Sequence[int], generate: int) -> list[int]:
        """Return the answer of a decode engine alone, which computes the prompt itself."""
        model = self.settings.model
        return complete(self.decode_url, prompt, generate, DIRECT_SALT, model).token_ids

    def play_alone(self, rounds: Sequence[Round]) -> list[list[int]]:
        """Return the answers of a decode engine alone to each turn of an agent."""
        return play_plain(self.decode_url, rounds, self.settings.model, DIRECT_SALT)

    def cached_blocks(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return how many blocks of a chain each engine's buffer caches, by the router's index."""
        engines = self.service.scheduler.cached._engines.items()
        return {name: n for name, engine in engines if (n := engine.buffer.head(keys))}

    @functools.cached_property
    def storage(self) -> PosixStorage:
        """The engines' storage, opened by this process as well."""
        namespace = self.service.registry.namespace
        assert namespace is not None
        return PosixStorage(self.settings.storage, namespace)

    def keys(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Keys of the full blocks of a prefix."""
        return block_keys(tokens, self.settings.block_tokens, cache_salt=salt or None)

    def wait_stored(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Wait until all full blocks of a prefix are stored; return their keys."""
        return self.wait_stored_keys(self.keys(tokens, salt))

    def wait_stored_keys(self, keys: list[bytes]) -> list[bytes]:
        """Wait until these blocks of one chain are stored."""
        storage = self.storage
        until(lambda: stored_head(storage, keys) == len(keys), f"{len(keys)} stored blocks")
        return keys

    def tenants(self, keys: Sequence[bytes]) -> set[str]:
        """Return the tenants of these stored blocks, from their headers."""
        paths = [self.storage.block_path(key) for key in keys]
        headers = [decode_header(path.read_bytes()[:HEADER_BYTES]) for path in paths]
        return {header.origin.tenant for header in headers if header is not None}

    def blocks(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the stored Full Blocks."""
        sizes = self.storage.geometry.full_block_bytes
        blocks = [bytearray(sizes) for _ in keys]
        outcome = read_run(self.storage, keys, [memoryview(block) for block in blocks])
        assert outcome.good_blocks == len(keys), outcome
        return [bytes(block) for block in blocks]

    def replay(self, rounds: Sequence[Round], salt: str) -> list[Answer]:
        """Play an agent: each turn waits until what the one before computed is stored."""
        context: list[int] = []
        answers = []
        for append, generate in rounds:
            context += append
            answer = self.ask(context, generate, salt)
            answers.append(answer)
            context += answer.token_ids
            # The last token was sampled, not computed: it has no KV.
            self.wait_stored(context[:-1], salt)
        return answers

    def replay_cached(self, rounds: Sequence[Round], salt: str) -> list[Answer]:
        """Play an agent: each turn waits until the router knows a DE that caches all before it."""
        context: list[int] = []
        answers = []
        for append, generate in rounds:
            context += append
            answers.append(self.ask(context, generate, salt))
            context += answers[-1].token_ids
            keys = self.keys(context[:-1], salt)
            until(functools.partial(self._is_cached, keys), "cached blocks of an agent")
        return answers

    def _is_cached(self, keys: list[bytes]) -> bool:
        return len(keys) in self.cached_blocks(keys).values()

    def ask_without_hits(
        self, rounds: Sequence[Round], generated: Sequence[list[int]], model: str = NAME
    ) -> Answer:
        """Send an agent's last turn, given all answers, with an unused salt."""
        turns = zip(rounds, generated, strict=True)
        tokens = [token for turn, answer in turns for token in (*turn.append, *answer)]
        prompt = tokens[: len(tokens) - len(generated[-1])]
        return self.ask(prompt, rounds[-1].generate, f"unused {next(self._unused)}", model)

    def expected_hits(self, rounds: Sequence[Round]) -> list[int]:
        """Tokens each turn finds: full blocks of all that has KV, never a whole prompt."""
        block = self.settings.block_tokens
        hits, tokens = [], 0
        for append, generate in rounds:
            stored = max(tokens - 1, 0) // block
            tokens += len(append)
            hits.append(min(stored, (tokens - 1) // block) * block)
            tokens += generate
        return hits


def tiny_cluster_settings(model: Path, storage: Path, **changes: Any) -> LocalClusterSettings:
    """Settings of a cluster of float32 engines with a quota that cuts prompts after 256 tokens.

    Every hit is read from storage, which most tests examine.
    """
    settings = LocalClusterSettings(
        model=str(model),
        storage=str(storage),
        mode=DEFAULT_MODE,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        hbm_bytes=HBM_BYTES,
        buffer_bytes=96 << 20,
        compute_quota_s=0.3,
        quota_flops_per_s=1e9,
        served_model_names=(NAME,),
        dram_tier=False,
    )
    return msgspec.structs.replace(settings, **changes)
