"""Settings of a campaign of faults on real processes."""

from typing import Annotated

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import DEFAULT_PARALLEL_READS
from dualpath.laboratory.chaos.matrix import Component, Fault
from dualpath.laboratory.chaos.points import EngineKind


class LoadSettings(Settings, frozen=True, kw_only=True):
    """The agents that ask while things fail; every token they are to get is known."""

    agents: Annotated[
        int, Setting("that ask all the time, each one request after the other", ge=1)
    ] = 16
    context_tokens: Annotated[int, Setting("an agent begins anew beyond it", ge=1)] = 1400
    append_tokens: Annotated[int, Setting("most tokens that a turn appends", ge=1)] = 260
    generate_tokens: Annotated[int, Setting("most tokens that a turn generates", ge=1)] = 40
    leave_share: Annotated[
        float, Setting("of turns whose client goes away in the middle", ge=0, le=1)
    ] = 0.02
    request_deadline_s: Annotated[
        float, Setting("the router's; a request that takes longer is late", gt=0)
    ] = 30.0


class EmulatedVictims(Settings, frozen=True, kw_only=True):
    """Emulated engines under test."""

    layers: Annotated[int, Setting("layers of KV of emulated engines", ge=1)] = 6
    block_tokens: Annotated[int, Setting("tokens of a Full Block", ge=1)] = 16
    kv_bytes_per_token: Annotated[float, Setting("over all layers", gt=0)] = 1536.0
    speedup: Annotated[float, Setting("emulated engines compute that much faster", gt=0)] = 20.0
    parallel_reads: Annotated[int, Setting("blocks read from storage at a time", ge=1)] = (
        DEFAULT_PARALLEL_READS
    )
    buffer_blocks: Annotated[int, Setting("of a PE or DE buffer", ge=1)] = 700
    shared_blocks: Annotated[
        int, Setting("DRAM beyond the buffers that all engines share; 0: none", ge=0)
    ] = 0
    prefill_tp: Annotated[
        int, Setting("ranks of a PE, processes that are killed and stopped one by one", ge=1)
    ] = 1
    decode_tp: Annotated[int, Setting("ranks of a DE, as prefill_tp", ge=1)] = 1
    kv_heads: Annotated[int, Setting("KV heads, which ranks share out", ge=1)] = 4

    def ranks(self, role: Role) -> int:
        """Ranks of an engine of this role."""
        return self.prefill_tp if role is Role.PREFILL else self.decode_tp


class VllmVictims(Settings, frozen=True, kw_only=True):
    """vLLM engines under test, with a tiny random model."""

    conversations: Annotated[int, Setting("rehearsed with each agent", ge=1)] = 2
    max_model_len: Annotated[int, Setting("most tokens of prompt and answer", ge=2)] = 2048
    block_tokens: Annotated[int, Setting("tokens of a Full Block", ge=1)] = 32
    hbm_bytes: Annotated[int, Setting("KV memory of an engine", ge=1)] = 256 << 20
    buffer_bytes: Annotated[int, Setting("PE or DE buffer", ge=1)] = 256 << 20


class ChaosSettings(Settings, frozen=True, kw_only=True):
    """One campaign."""

    engines: Annotated[
        EngineKind, Setting("vllm: on this machine's CPUs, with a tiny random model")
    ] = EngineKind.EMULATED
    faults: Annotated[int, Setting("to be made", ge=0)] = 1000
    blocks: Annotated[int, Setting("goes on until that many stored blocks were loaded", ge=0)] = 0
    most_s: Annotated[
        float, Setting("ends after that long, however many faults and blocks there were", gt=0)
    ] = 1e6
    seed: Annotated[
        int, Setting("of faults and agents; processes are never quite alike twice", ge=0)
    ] = 0
    at_once: Annotated[
        int, Setting("faults of different components may overlap", ge=1, le=len(Component))
    ] = 1
    components: Annotated[
        tuple[Component, ...], Setting("what faults hit", metavar="COMPONENT,…")
    ] = tuple(Component)
    without: Annotated[
        tuple[Fault, ...], Setting("kinds of faults that are not made", metavar="FAULT,…")
    ] = ()
    routers: Annotated[int, Setting("all but one of them stand by", ge=1)] = 2
    front_ends: Annotated[
        int, Setting("processes of their own that serve the clients; 0: the router does", ge=0)
    ] = 0
    prefill: Annotated[int, Setting("prefill engines", ge=1)] = 2
    decode: Annotated[int, Setting("decode engines", ge=1)] = 2
    prefill_dp: Annotated[
        int, Setting("PEs of a data-parallel group, which end and start together", ge=1)
    ] = 1
    decode_dp: Annotated[int, Setting("DEs of a data-parallel group, as prefill_dp", ge=1)] = 1
    calm_every: Annotated[
        int, Setting("faults until nobody asks for once and it is looked for what is left", ge=1)
    ] = 50
    storage: Annotated[
        str, Setting("folder on a disk; empty: one in the logs' folder", metavar="DIR")
    ] = ""

    def check(self) -> None:
        """Raise ``ConfigError`` for groups that no campaign has."""
        super().check()
        groups = (
            ("prefill", self.prefill, self.prefill_dp),
            ("decode", self.decode, self.decode_dp),
        )
        for name, engines, ranks in groups:
            if engines % ranks:
                raise ConfigError(
                    f"{{{name}}} is {engines}; it must be a multiple of {{{name}_dp}}, {ranks}; "
                    "correct one of them"
                )
        if max(self.prefill_dp, self.decode_dp) > 1 and self.engines is EngineKind.VLLM:
            raise ConfigError(
                "{engines} is vllm, whose tiny model has no experts; groups are for emulated "
                "engines here: leave {prefill_dp} and {decode_dp} out"
            )

        if self.front_ends and self.engines is EngineKind.VLLM:
            raise ConfigError(
                f"{{engines}} is vllm and {{front_ends}} {self.front_ends}; those are for emulated "
                "engines here: leave {front_ends} out"
            )

    def groups(self, role: Role) -> int:
        """Data-parallel groups of this role; an engine in none is one by itself."""
        engines = self.prefill if role is Role.PREFILL else self.decode
        return engines // self.ranks(role)

    def ranks(self, role: Role) -> int:
        """Engines of a data-parallel group of this role."""
        return self.prefill_dp if role is Role.PREFILL else self.decode_dp
