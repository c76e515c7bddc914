"""What the experiment on roles is asked to do; importing it costs nothing heavy."""

from typing import Annotated

import msgspec

from dualpath.core.cluster import NodesSettings
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting
from dualpath.laboratory.emulated.settings import CostsName, GpuName, Layers, Speedup
from dualpath.laboratory.experiments.settings import Repeat, Seed
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.vllm.front_end_settings import BlockTokens

#: Agents ask again only when they were answered, so that a backlog is small: it has to weigh soon.
_REBALANCING = RebalanceSettings(interval_s=2.0, horizon_s=10.0, margin=1.0, rest_s=4.0)


class RoleShiftSettings(NodesSettings, frozen=True, kw_only=True):
    """A load whose weight moves from prompts to answers, on emulated engines of one machine.

    Every agent has ``turns`` turns of each phase; pairs are means of the first and of the second
    phase, from which turns differ by a factor whose logarithm has the deviation ``spread``.
    Engines hold ``hbm_tokens`` of KV, which bounds how many requests a decode node has.  Nothing
    else binds: KV is small, storage is not throttled.
    """

    name: Annotated[str, Setting("of the report and its files")] = "roles"
    nodes: Annotated[str, Setting("the division it starts from", metavar="xPyD")] = "3P1D"
    agents: Annotated[int, Setting("all at once", ge=1, le=1000)] = 12
    turns: Annotated[int, Setting("of an agent in each phase", ge=1, le=1000)] = 6
    append_tokens: Annotated[
        tuple[float, ...], Setting("a turn's, in the first and the second phase", ge=1)
    ] = (2000.0, 50.0)
    generate_tokens: Annotated[
        tuple[float, ...], Setting("a turn's, in the first and the second phase", ge=1)
    ] = (4.0, 60.0)
    spread: Annotated[float, Setting("of the logarithm of lengths", ge=0, le=3)] = 0.3
    model: CostsName = "qwen2.5-32b"
    gpu: GpuName = "hopper"
    speedup: Speedup = 0.25
    layers: Layers = 4
    block_tokens: BlockTokens = 64
    kv_bytes_per_token: Annotated[int, Setting("over all layers", ge=32)] = 256
    hbm_tokens: Annotated[int, Setting("KV of a decode node", ge=1)] = 40_000
    repeat: Repeat = 1
    seed: Seed = 0
    rebalancing: RebalanceSettings = _REBALANCING

    def check(self) -> None:
        """Raise ``ConfigError`` for other than two phases."""
        super().check()
        for name in ("append_tokens", "generate_tokens"):
            if len(means := getattr(self, name)) != 2:
                raise ConfigError(f"{{{name}}} is {means}; it takes two means, like 2000,50")

    @property
    def hbm_bytes(self) -> int:
        """The same in bytes."""
        return self.hbm_tokens * self.kv_bytes_per_token


def with_prefill_rate(settings: RebalanceSettings, tokens_per_s: float) -> RebalanceSettings:
    """Return the policy's settings with a rate that is not given."""
    return msgspec.structs.replace(
        settings,
        prefill_node_tokens_per_s=settings.prefill_node_tokens_per_s or tokens_per_s,
    )
