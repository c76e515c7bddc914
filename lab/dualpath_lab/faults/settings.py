"""Settings of a campaign of faults on real processes."""

import math
from typing import Annotated

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.storage.block_file import HEADER_BYTES
from dualpath.storage.node_dram import page_rounded
from dualpath_lab.faults.failpoints import EngineKind
from dualpath_lab.faults.matrix import Component, Fault


class LoadSettings(Settings, frozen=True, kw_only=True):
    """The agents that send requests during faults; every expected token is known."""

    agents: Annotated[
        int, Setting("number of agents, each of which sends one request after the other", ge=1)
    ] = 16
    context_tokens: Annotated[
        int, Setting("an agent starts a new conversation beyond this", ge=1)
    ] = 1400
    append_tokens: Annotated[int, Setting("maximum of tokens that a turn appends", ge=1)] = 260
    generate_tokens: Annotated[int, Setting("maximum of tokens that a turn generates", ge=1)] = 40
    leave_share: Annotated[
        float, Setting("share of turns in which the client disconnects", ge=0, le=1)
    ] = 0.02
    request_deadline_s: Annotated[
        float, Setting("the router's deadline; a request that takes longer is late", gt=0)
    ] = 30.0


class EmulatedEnginesSettings(Settings, frozen=True, kw_only=True):
    """Emulated engines under test."""

    layers: Annotated[int, Setting("layers of KV of emulated engines", ge=1)] = 6
    block_tokens: Annotated[int, Setting("tokens of a Full Block", ge=1)] = 16
    kv_bytes_per_token: Annotated[float, Setting("bytes of KV of a token, all layers", gt=0)] = (
        1536.0
    )
    speedup: Annotated[float, Setting("factor by which emulated engines compute faster", gt=0)] = (
        20.0
    )
    parallel_reads: Annotated[int, Setting("blocks read from storage at a time", ge=1)] = (
        DEFAULT_PARALLEL_READS
    )
    buffer_blocks: Annotated[int, Setting("blocks of a PE or DE buffer", ge=1)] = 700
    shared_blocks: Annotated[
        int,
        Setting(
            "blocks of DRAM, in addition to the buffers, that all engines share; 0: none", ge=0
        ),
    ] = 0
    prefill_tp: Annotated[
        int, Setting("ranks of a PE: processes that are killed and stopped one by one", ge=1)
    ] = 1
    decode_tp: Annotated[int, Setting("ranks of a DE, as prefill_tp", ge=1)] = 1
    kv_heads: Annotated[int, Setting("KV heads, divided among the ranks", ge=1)] = 4

    @property
    def shared_bytes(self) -> int:
        """DRAM that ``shared_blocks`` take: each with its header in pages of its own."""
        block_bytes = math.ceil(self.block_tokens * self.kv_bytes_per_token)
        return self.shared_blocks * page_rounded(HEADER_BYTES + block_bytes)

    def ranks(self, role: Role) -> int:
        """Ranks of an engine of this role."""
        return self.prefill_tp if role is Role.PREFILL else self.decode_tp


class VllmEnginesSettings(Settings, frozen=True, kw_only=True):
    """vLLM engines under test, with a tiny random model."""

    conversations: Annotated[
        int, Setting("conversations per agent, recorded before the faults", ge=1)
    ] = 2
    max_model_len: Annotated[int, Setting("maximum of tokens of prompt and answer", ge=2)] = 2048
    block_tokens: Annotated[int, Setting("tokens of a Full Block", ge=1)] = 32
    hbm_bytes: Annotated[int, Setting("bytes of KV in HBM per engine", ge=1)] = 256 << 20
    buffer_bytes: Annotated[int, Setting("bytes of a PE or DE buffer", ge=1)] = 256 << 20
    prefill_tp: Annotated[
        int, Setting("ranks of a PE: processes that are killed and stopped one by one", ge=1)
    ] = 1
    decode_tp: Annotated[int, Setting("ranks of a DE, as prefill_tp", ge=1)] = 1


class ChaosSettings(Settings, frozen=True, kw_only=True):
    """One campaign."""

    engines: Annotated[
        EngineKind, Setting("vllm: on this machine's CPUs, with a tiny random model")
    ] = EngineKind.EMULATED
    faults: Annotated[int, Setting("number of faults", ge=0)] = 1000
    blocks: Annotated[int, Setting("continue until this many stored blocks were loaded", ge=0)] = 0
    most_s: Annotated[float, Setting("end after this time in any case", gt=0)] = 1e6
    seed: Annotated[
        int, Setting("of faults and agents; the timing of processes still varies", ge=0)
    ] = 0
    at_once: Annotated[
        int,
        Setting(
            "number of faults, of different components, that may overlap", ge=1, le=len(Component)
        ),
    ] = 1
    components: Annotated[
        tuple[Component, ...], Setting("components that faults hit", metavar="COMPONENT,…")
    ] = tuple(Component)
    without: Annotated[
        tuple[Fault, ...], Setting("kinds of faults to leave out", metavar="FAULT,…")
    ] = ()
    routers: Annotated[int, Setting("number of routers, of which all but one stand by", ge=1)] = 2
    front_ends: Annotated[
        int, Setting("front-end processes that serve the clients; 0: the router serves them", ge=0)
    ] = 0
    prefill: Annotated[int, Setting("prefill engines", ge=1)] = 2
    decode: Annotated[int, Setting("decode engines", ge=1)] = 2
    prefill_dp: Annotated[
        int, Setting("PEs of a data-parallel group, which end and start together", ge=1)
    ] = 1
    decode_dp: Annotated[int, Setting("DEs of a data-parallel group, as prefill_dp", ge=1)] = 1
    calm_every: Annotated[
        int, Setting("faults between two pauses of the load with a check for leaks", ge=1)
    ] = 50
    storage: Annotated[
        str, Setting("folder on a disk; empty: a folder next to the logs", metavar="DIR")
    ] = ""

    def check(self) -> None:
        """Raise ``ConfigError`` for groups that a campaign does not support."""
        super().check()
        groups = (
            ("prefill", self.prefill, self.prefill_dp),
            ("decode", self.decode, self.decode_dp),
        )
        for name, engines, ranks in groups:
            if engines % ranks:
                raise ConfigError(
                    f"{{{name}}} is {engines}; it must be a multiple of {{{name}_dp}}, {ranks}; "
                    "change one of them"
                )
        if max(self.prefill_dp, self.decode_dp) > 1 and self.engines is EngineKind.VLLM:
            raise ConfigError(
                "{engines} is vllm, and its tiny model has no experts; groups are for emulated "
                "engines here: leave {prefill_dp} and {decode_dp} out"
            )

        if self.front_ends and self.engines is EngineKind.VLLM:
            raise ConfigError(
                f"{{engines}} is vllm and {{front_ends}} {self.front_ends}; those are for emulated "
                "engines here: leave {front_ends} out"
            )

    def groups(self, role: Role) -> int:
        """Number of data-parallel groups of this role; a plain engine counts as a group."""
        engines = self.prefill if role is Role.PREFILL else self.decode
        return engines // self.ranks(role)

    def ranks(self, role: Role) -> int:
        """Number of engines of a data-parallel group of this role."""
        return self.prefill_dp if role is Role.PREFILL else self.decode_dp
