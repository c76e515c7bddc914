"""Settings of the experiment on roles; this module imports no heavy dependencies."""

from typing import Annotated

import msgspec

from dualpath.core.cluster import NodesSettings
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting
from dualpath.laboratory.emulated.settings import CostsName, GpuName, Layers, Speedup
from dualpath.laboratory.experiments.settings import Repeat, Seed
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.vllm.front_end_settings import BlockTokens

#: The policy reacts quickly: agents wait for each answer, so that the backlog stays small.
_REBALANCING = RebalanceSettings(interval_s=2.0, horizon_s=10.0, margin=1.0, rest_s=4.0)


class RoleShiftSettings(NodesSettings, frozen=True, kw_only=True):
    """A load that shifts from prompts to answers, on emulated engines of one machine.

    Every agent has ``turns`` turns in each of two phases; pairs are the means of the phases, and
    lengths are log-normal with the deviation ``spread``.  Engines hold ``hbm_tokens`` of KV, which
    limits the requests of a decode node.  There is no other bottleneck: KV is small, storage is not
    throttled.
    """

    name: Annotated[str, Setting("name of the report and its files")] = "roles"
    nodes: Annotated[str, Setting("cluster at the start", metavar="xPyD")] = "3P1D"
    agents: Annotated[int, Setting("number of concurrent agents", ge=1, le=1000)] = 12
    turns: Annotated[int, Setting("turns of an agent in each phase", ge=1, le=1000)] = 6
    append_tokens: Annotated[
        tuple[float, ...], Setting("mean appended tokens of a turn in the two phases", ge=1)
    ] = (2000.0, 50.0)
    generate_tokens: Annotated[
        tuple[float, ...], Setting("mean generated tokens of a turn in the two phases", ge=1)
    ] = (4.0, 60.0)
    spread: Annotated[
        float, Setting("standard deviation of the logarithm of lengths", ge=0, le=3)
    ] = 0.3
    model: CostsName = "qwen2.5-32b"
    gpu: GpuName = "hopper"
    speedup: Speedup = 0.25
    layers: Layers = 4
    block_tokens: BlockTokens = 64
    kv_bytes_per_token: Annotated[int, Setting("bytes of KV of a token, all layers", ge=32)] = 256
    hbm_tokens: Annotated[int, Setting("tokens of KV of a decode node", ge=1)] = 40_000
    repeat: Repeat = 1
    seed: Seed = 0
    rebalancing: RebalanceSettings = _REBALANCING

    def check(self) -> None:
        """Raise ``ConfigError`` unless there are two phases."""
        super().check()
        for name in ("append_tokens", "generate_tokens"):
            if len(means := getattr(self, name)) != 2:
                raise ConfigError(f"{{{name}}} is {means}; it takes two means, like 2000,50")

    @property
    def hbm_bytes(self) -> int:
        """``hbm_tokens`` in bytes."""
        return self.hbm_tokens * self.kv_bytes_per_token


def with_prefill_rate(settings: RebalanceSettings, tokens_per_s: float) -> RebalanceSettings:
    """Return the policy's settings with this rate, unless they have one."""
    return msgspec.structs.replace(
        settings,
        prefill_node_tokens_per_s=settings.prefill_node_tokens_per_s or tokens_per_s,
    )
