"""Kinds of engines under test: how they and their router are started, and their expected tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.modes import DEFAULT_MODE
from dualpath.core.settings import arguments
from dualpath.engine.settings import EngineSettings
from dualpath.launch.commands import DpRank, engine_command, router_command
from dualpath.launch.fork_server import VLLM_MODULES, ForkedProcess
from dualpath.launch.process import LocalProcess
from dualpath.launch.settings import LocalClusterSettings
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath_lab.emulated.checkable_kv import TokenChain
from dualpath_lab.emulated.settings import EmulatedOptions, Verify
from dualpath_lab.faults.failpoints import EngineKind
from dualpath_lab.faults.matrix import Fault
from dualpath_lab.faults.settings import EmulatedEnginesSettings, VllmEnginesSettings
from dualpath_lab.faults.tested_process import ENTRY, ProcessSettings
from dualpath_lab.models.random_models import VOCABULARY_TOKENS, make_tiny_model

#: A model of the catalog, of which the campaign's settings replace the sizes.
_EMULATED_MODEL = "qwen2.5-32b"
_EMULATED_VOCABULARY = 32000
#: Modules that the fork server imports; not NIXL, which starts a thread.
_EMULATED_MODULES = (
    "dualpath_lab.faults.tested_process",
    "dualpath_lab.emulated.process",
    "dualpath_lab.emulated.router_server",
    "dualpath_sim.catalog.costs",
)


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of one engine to start: its name, its ports and URLs, its storage.

    ``named_as`` is the role in its name, the one it had first.
    """

    role: Role
    named_as: Role
    index: int
    name: str
    port: int
    api_url: str
    control_port: int
    storage: Path
    dp: DpRank | None = None


class EnginesUnderTest(Protocol):
    """A kind of engines with a router for them.

    Clients call the model ``model``; its token ids are below ``vocab_size``.  Blocks have
    ``block_tokens``.  If agents can only repeat prompts of which the answers were recorded, each
    repeats ``conversations`` conversations; None: any prompt.  ``impossible`` faults are not
    injected.  ``http_relayed``: engines are called through a relay.
    """

    kind: EngineKind
    model: str
    vocab_size: int
    block_tokens: int
    conversations: int | None
    impossible: frozenset[Fault]
    http_relayed: bool

    @property
    def described(self) -> str:
        """Description of the engines for the report."""
        ...

    def ranks(self, role: Role) -> int:
        """Return how many ranks an engine of a role has."""
        ...

    def router(
        self, process: ProcessSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """Start a router that serves at ``port``; ``limits`` has its control port."""
        ...

    def front_end(
        self, process: ProcessSettings, port: int, link: str, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """Start a front end of the router with these limits; all of them serve at ``port``.

        ``link`` is the address at which it reaches the router.
        """
        ...

    def engine(self, process: ProcessSettings, at: EngineLaunch, log: Path) -> LocalProcess:
        """Start an engine."""
        ...

    def expected_tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """Yield the right tokens after a prompt."""
        ...

    def record_answer(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """Record the answer to a prompt in a run without faults."""
        ...


class EmulatedEngines:
    """Emulated engines: the tokens after a prompt are a hash of it."""

    kind = EngineKind.EMULATED
    model = "emulated"
    vocab_size = _EMULATED_VOCABULARY
    conversations: int | None = None
    http_relayed = True

    def __init__(self, settings: EmulatedEnginesSettings) -> None:
        self._settings = settings
        has_ranks = max(map(settings.ranks, Role)) > 1
        #: An engine without ranks is one process, which other faults kill and stop.
        self.impossible = frozenset() if has_ranks else frozenset({Fault.KILL_ONE, Fault.STOP_ONE})
        self.block_tokens = settings.block_tokens

    @property
    def described(self) -> str:
        """See ``EnginesUnderTest``."""
        own = self._settings
        return (
            "engines are emulated: their kernels only take time; processes, router, transfers, "
            "files and checksums are real, and every byte of KV is compared where it arrives; "
            f"blocks of {own.block_tokens} tokens, {own.layers} layers, "
            f"{own.kv_bytes_per_token:g} bytes per token; they "
            f"compute {own.speedup:g} times as fast as the model's; a PE has "
            f"{own.prefill_tp} and a DE {own.decode_tp} ranks; engines share {own.shared_blocks} "
            "blocks of DRAM"
        )

    def ranks(self, role: Role) -> int:
        """See ``EnginesUnderTest``."""
        return self._settings.ranks(role)

    def router(
        self, process: ProcessSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """See ``EnginesUnderTest``."""
        command = ["emulate", "router", "--port", str(port), *arguments(limits)]
        return _forked(process, command, log, _EMULATED_MODULES)

    def front_end(
        self, process: ProcessSettings, port: int, link: str, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """See ``EnginesUnderTest``."""
        linked = LinkSettings(link, process.process, True)
        own = msgspec.structs.replace(limits, front_ends_port=None, standby_lock="")
        command = ["emulate", "frontend", "--port", str(port), *arguments(linked), *arguments(own)]
        return _forked(process, command, log, _EMULATED_MODULES)

    def engine(self, process: ProcessSettings, at: EngineLaunch, log: Path) -> LocalProcess:
        """See ``EnginesUnderTest``."""
        own = self._settings
        block_bytes = own.block_tokens * own.kv_bytes_per_token
        memory = int(own.buffer_blocks * block_bytes)
        engine = EngineSettings(
            role=at.role,
            engine_id=at.name,
            router=f"tcp://127.0.0.1:{at.control_port}",
            api_url=at.api_url,
            storage=str(at.storage),
            mode=DEFAULT_MODE,
            buffer_bytes=memory,
            dram_bytes=own.shared_bytes,
            # Beside the storage: faults of the disk must not hit memory.
            dram_dir=f"{at.storage}-dram" if own.shared_blocks else "",
            parallel_reads=own.parallel_reads,
        )
        emulated = EmulatedOptions(
            port=at.port,
            model=_EMULATED_MODEL,
            layers=own.layers,
            kv_bytes_per_token=own.kv_bytes_per_token,
            block_tokens=own.block_tokens,
            speedup=own.speedup,
            hbm_bytes=memory,
            verify=Verify.FULL,
            kv_heads=own.kv_heads,
            tensor_parallel_size=own.ranks(at.role),
            **_dp_options(at.dp),
        )
        role, *flags = arguments(engine, positional=("role",))
        command = ["emulate", role, *flags, *arguments(emulated)]
        return _forked(process, command, log, _EMULATED_MODULES)

    def expected_tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """See ``EnginesUnderTest``."""
        chain = TokenChain(prompt, self.vocab_size)
        while True:
            token = chain.next_token
            chain.append(token)
            yield token

    def record_answer(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """See ``EnginesUnderTest``: all answers are computed, none is recorded."""


class VllmEngines:
    """vLLM engines with a tiny random model; its right answers are recorded before the faults."""

    kind = EngineKind.VLLM
    vocab_size = VOCABULARY_TOKENS
    #: An engine registers once its HTTP address answers; behind a relay it always does.
    http_relayed = False
    impossible: frozenset[Fault] = frozenset({Fault.RESET_HTTP, Fault.SILENT_HTTP})

    def __init__(self, settings: VllmEnginesSettings) -> None:
        self.conversations: int | None = settings.conversations
        self._recorded: dict[tuple[int, ...], list[int]] = {}
        self._cluster = LocalClusterSettings(
            model=str(make_tiny_model("qwen2")),
            storage="",
            mode=DEFAULT_MODE,
            # In bfloat16 the greedy token depends on the other requests of the batch.
            dtype="float32",
            max_model_len=settings.max_model_len,
            block_tokens=settings.block_tokens,
            hbm_bytes=settings.hbm_bytes,
            buffer_bytes=settings.buffer_bytes,
            prefill_tp=settings.prefill_tp,
            decode_tp=settings.decode_tp,
        )
        self.model = self._cluster.model
        self.block_tokens = settings.block_tokens

    @property
    def described(self) -> str:
        """See ``EnginesUnderTest``."""
        return (
            "engines are vLLM's CPU build with a tiny random model in float32; expected "
            f"tokens were recorded in a run without faults; blocks of {self.block_tokens} tokens; "
            f"a PE has {self._cluster.prefill_tp} and a DE {self._cluster.decode_tp} ranks"
        )

    def ranks(self, role: Role) -> int:
        """See ``EnginesUnderTest``: further ranks have no failpoints here."""
        return 1

    def router(
        self, process: ProcessSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """See ``EnginesUnderTest``."""
        command = router_command(self._cluster, port, limits.control_port)
        # First, since all arguments after --vllm-args are vLLM's.
        return _forked(process, [*command[:2], *arguments(limits), *command[2:]], log, VLLM_MODULES)

    def front_end(
        self, process: ProcessSettings, port: int, link: str, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """See ``EnginesUnderTest``; ``ChaosSettings`` refuses them."""
        raise NotImplementedError

    def engine(self, process: ProcessSettings, at: EngineLaunch, log: Path) -> LocalProcess:
        """See ``EnginesUnderTest``."""
        cluster = msgspec.structs.replace(self._cluster, storage=str(at.storage))
        command = engine_command(
            cluster, at.role, at.index, at.port, at.control_port, named_as=at.named_as
        )
        return _forked(process, command, log, VLLM_MODULES)

    def expected_tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """See ``EnginesUnderTest``; raises ``KeyError`` for a prompt without recorded answer."""
        return iter(self._recorded[tuple(prompt)])

    def record_answer(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """See ``EnginesUnderTest``."""
        self._recorded[tuple(prompt)] = list(token_ids)


def _forked(
    process: ProcessSettings, command: list[str], log: Path, preload: Sequence[str]
) -> LocalProcess:
    """Fork it from a server that has imported all modules: a restart takes little CPU time."""
    return ForkedProcess(
        process.process, ENTRY, [process.argument(), *command], log, preload=preload
    )


def _dp_options(dp: DpRank | None) -> dict[str, Any]:
    if dp is None:
        return {}
    address = f"{dp.address}:{dp.rpc_port}"
    return {"dp_size": dp.size, "dp_rank": dp.rank, "dp_address": address}


def router_limits(
    request_deadline_s: float,
    control_port: int,
    standby_lock: Path,
    front_ends_port: int | None = None,
) -> RouterSettings:
    """Return the settings of a router under test: time-outs well below the request deadline."""
    return RouterSettings(
        control_port=control_port,
        mode=DEFAULT_MODE,
        read_deadline_s=request_deadline_s / 6,
        read_margin_s=request_deadline_s / 10,
        engine_wait_s=request_deadline_s,
        request_deadline_s=request_deadline_s,
        drain_timeout_s=request_deadline_s,
        standby_lock=str(standby_lock.absolute()),
        front_ends_port=front_ends_port,
    )
