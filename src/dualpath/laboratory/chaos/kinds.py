"""Kinds of engines under test: how they and their router are started, what they have to answer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.modes import DEFAULT_MODE
from dualpath.core.settings import arguments
from dualpath.engine.settings import EngineSettings
from dualpath.laboratory.chaos.matrix import Fault
from dualpath.laboratory.chaos.points import EngineKind
from dualpath.laboratory.chaos.settings import EmulatedVictims, VllmVictims
from dualpath.laboratory.chaos.victim import ENTRY, VictimSettings
from dualpath.laboratory.emulated.prefix import TokenChain
from dualpath.laboratory.emulated.settings import EmulatedOptions, Verify
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS, make_tiny_model
from dualpath.ops.launch.commands import DpRank, engine_command, router_command
from dualpath.ops.launch.fork_server import VLLM_MODULES, ForkedProcess
from dualpath.ops.launch.process import LocalProcess
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.router.links.settings import LinkSettings
from dualpath.router.settings import RouterSettings

#: Of the catalog; sizes are the campaign's own.
_EMULATED_MODEL = "qwen2.5-32b"
_EMULATED_VOCABULARY = 32000
#: Not NIXL, which starts a thread.
_EMULATED_MODULES = (
    "dualpath.laboratory.chaos.victim",
    "dualpath.laboratory.emulated.process",
    "dualpath.laboratory.emulated.front_door",
    "dualpath.model.catalog.costs",
)


class EngineAt(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to be: who it is, where it listens, how it is reached and reaches the router.

    ``named_as`` is the role that it had first.
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


class Victims(Protocol):
    """A kind of engines with a router for them.

    Clients call the model ``model``; its token ids lie between 0 and ``vocab_size``.  Blocks have
    ``block_tokens``.  Where agents can ask only what was rehearsed, each has ``conversations``,
    over and over; None: without end.  ``impossible`` faults are not made.
    """

    kind: EngineKind
    model: str
    vocab_size: int
    block_tokens: int
    conversations: int | None
    impossible: frozenset[Fault]

    @property
    def described(self) -> str:
        """What the engines are, in words."""
        ...

    def ranks(self, role: Role) -> int:
        """Return how many ranks an engine of a role has."""
        ...

    def router(
        self, victim: VictimSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """Start a router that serves at ``port``; ``limits`` say where its control port is."""
        ...

    def front_end(
        self, victim: VictimSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """Start a front end of the router with these limits; all of them serve at ``port``."""
        ...

    def engine(self, victim: VictimSettings, at: EngineAt, log: Path) -> LocalProcess:
        """Start an engine."""
        ...

    def following(self, prompt: Sequence[int]) -> Iterator[int]:
        """Yield the tokens that must follow a prompt."""
        ...

    def learn(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take note of what follows a prompt, as heard when nothing failed."""
        ...


class EmulatedEngines:
    """Emulated engines: what follows a prompt is a hash of it."""

    kind = EngineKind.EMULATED
    model = "emulated"
    vocab_size = _EMULATED_VOCABULARY
    conversations: int | None = None
    impossible: frozenset[Fault] = frozenset()

    def __init__(self, settings: EmulatedVictims) -> None:
        self._settings = settings
        self.block_tokens = settings.block_tokens

    @property
    def described(self) -> str:
        """See ``Victims``."""
        own = self._settings
        return (
            "engines are emulated: their kernels only take time; processes, router, transfers, "
            "files and checksums are real, every byte of KV is compared where it arrives; blocks "
            f"of {own.block_tokens} tokens, {own.layers} layers, {own.kv_bytes_per_token:g} bytes "
            f"per token; they compute {own.speedup:g} times as fast as the model's; a PE has "
            f"{own.prefill_tp} and a DE {own.decode_tp} ranks; engines share {own.shared_blocks} "
            "blocks of DRAM"
        )

    def ranks(self, role: Role) -> int:
        """See ``Victims``."""
        return self._settings.ranks(role)

    def router(
        self, victim: VictimSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """See ``Victims``."""
        command = ["emulate", "router", "--port", str(port), *arguments(limits)]
        return _forked(victim, command, log, _EMULATED_MODULES)

    def front_end(
        self, victim: VictimSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """See ``Victims``."""
        link = LinkSettings(f"tcp://127.0.0.1:{limits.front_ends_port}", victim.process, True)
        own = msgspec.structs.replace(limits, front_ends_port=None, standby_lock="")
        command = ["emulate", "frontend", "--port", str(port), *arguments(link), *arguments(own)]
        return _forked(victim, command, log, _EMULATED_MODULES)

    def engine(self, victim: VictimSettings, at: EngineAt, log: Path) -> LocalProcess:
        """See ``Victims``."""
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
            dram_bytes=int(own.shared_blocks * block_bytes),
            # Beside the storage, which is broken in ways that memory is not.
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
            **_place(at.dp),
        )
        role, *flags = arguments(engine, positional=("role",))
        command = ["emulate", role, *flags, *arguments(emulated)]
        return _forked(victim, command, log, _EMULATED_MODULES)

    def following(self, prompt: Sequence[int]) -> Iterator[int]:
        """See ``Victims``."""
        chain = TokenChain(prompt, self.vocab_size)
        while True:
            token = chain.next_token
            chain.append(token)
            yield token

    def learn(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """Everything is known."""


class VllmEngines:
    """vLLM engines with a tiny random model: what follows a prompt is what a rehearsal heard."""

    kind = EngineKind.VLLM
    vocab_size = VOCABULARY_TOKENS
    #: Such an engine joins once its address answers, and a relay in front of it always does.
    impossible: frozenset[Fault] = frozenset({Fault.RESET_HTTP})

    def __init__(self, settings: VllmVictims) -> None:
        self.conversations: int | None = settings.conversations
        self._heard: dict[tuple[int, ...], list[int]] = {}
        self._cluster = LocalClusterSettings(
            model=str(make_tiny_model("qwen2")),
            storage="",
            mode=DEFAULT_MODE,
            # In bfloat16 the greedy token depends on who shares the batch.
            dtype="float32",
            max_model_len=settings.max_model_len,
            block_tokens=settings.block_tokens,
            hbm_bytes=settings.hbm_bytes,
            buffer_bytes=settings.buffer_bytes,
        )
        self.model = self._cluster.model
        self.block_tokens = settings.block_tokens

    @property
    def described(self) -> str:
        """See ``Victims``."""
        return (
            "engines are vLLM's CPU build with a tiny random model in float32; what must be "
            f"answered is what a rehearsal without faults was answered; blocks of "
            f"{self.block_tokens} tokens"
        )

    def ranks(self, role: Role) -> int:
        """See ``Victims``: others have no steps of their own here."""
        return 1

    def router(
        self, victim: VictimSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """See ``Victims``."""
        command = router_command(self._cluster, port, limits.control_port)
        # Before the rest: what follows --vllm-args is vLLM's.
        return _forked(victim, [*command[:2], *arguments(limits), *command[2:]], log, VLLM_MODULES)

    def front_end(
        self, victim: VictimSettings, port: int, limits: RouterSettings, log: Path
    ) -> LocalProcess:
        """See ``Victims``; ``ChaosSettings`` refuses them."""
        raise NotImplementedError

    def engine(self, victim: VictimSettings, at: EngineAt, log: Path) -> LocalProcess:
        """See ``Victims``."""
        cluster = msgspec.structs.replace(self._cluster, storage=str(at.storage))
        command = engine_command(
            cluster, at.role, at.index, at.port, at.control_port, named_as=at.named_as
        )
        return _forked(victim, command, log, VLLM_MODULES)

    def following(self, prompt: Sequence[int]) -> Iterator[int]:
        """See ``Victims``; raises ``KeyError`` for what was not rehearsed."""
        return iter(self._heard[tuple(prompt)])

    def learn(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """See ``Victims``."""
        self._heard[tuple(prompt)] = list(token_ids)


def _forked(
    victim: VictimSettings, command: list[str], log: Path, preload: Sequence[str]
) -> LocalProcess:
    """Start it from a server that has imported everything: a restart takes little of a core."""
    return ForkedProcess(victim.process, ENTRY, [victim.argument(), *command], log, preload=preload)


def _place(dp: DpRank | None) -> dict[str, Any]:
    if dp is None:
        return {}
    address = f"{dp.address}:{dp.rpc_port}"
    return {"dp_size": dp.size, "dp_rank": dp.rank, "dp_address": address}


def limits_of(
    request_deadline_s: float,
    control_port: int,
    standby_lock: Path,
    front_ends_port: int | None = None,
) -> RouterSettings:
    """Return the limits of a router under test: all well below the deadline of a request."""
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
