"""Settings of the experiment on a DRAM tier."""

from typing import Annotated

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE
from dualpath.core.settings import Setting, Settings
from dualpath.laboratory.experiments.settings import (
    BENCH_LAB,
    EmulatedNodes,
    History,
    JctSettings,
    WindowSettings,
)
from dualpath.laboratory.workload.replay.options import SentHintsSetting, ToolDelaysSetting
from dualpath.laboratory.workload.replay.result import SentHints, ToolDelays

#: Storage is the bottleneck without a tier, the PE's computation with one; the CNIC has 8 times the
#: SNIC's rate as in the paper, at rates that leave half of two cores idle.
_LAB = msgspec.structs.replace(BENCH_LAB, snic_bytes_per_s=10e6, cnic_bytes_per_s=80e6)
_WINDOWS = WindowSettings(
    even=True, turns=6, scale_append=8.0, scale_generate=0.25, history=History.DRAM
)
#: Small buffers for running requests: cached blocks are in additional DRAM.
_NODES = EmulatedNodes(speedup=0.15, layers=32, layer_block_bytes=10752, buffer_bytes=64 << 20)


class TierSettings(Settings, frozen=True, kw_only=True):
    """The same agents without and with a tier, by share of the working set that fits, and Oracle.

    The working set is the KV of all agents after their last turn.  All decode nodes together have
    this share of it as DRAM in addition to their buffers; each prefill node has as much as a decode
    node.
    """

    shares: Annotated[
        tuple[float, ...],
        Setting("DRAM in addition to the buffers, as shares of the working set", ge=0),
    ] = (1.0, 0.25, 0.0)
    tool_delays: ToolDelaysSetting = ToolDelays.NONE
    session_hints: SentHintsSetting = SentHints.NONE
    jct: JctSettings = JctSettings(
        name="dram",
        nodes=("1P2D",),
        mode=(DEFAULT_MODE,),
        agents_per_node=5,
        windows=_WINDOWS,
        lab=_LAB,
        emulated=_NODES,
    )

    def check(self) -> None:
        """Raise ``ConfigError`` for no share, and for several clusters or modes."""
        super().check()
        if not self.shares:
            raise ConfigError("no {shares}; give at least one, like 1")
        if len(self.jct.nodes) != 1:
            raise ConfigError(
                f"{{nodes}} is {self.jct.nodes}; give one cluster for this experiment"
            )
        if len(self.jct.mode) != 1:
            raise ConfigError(
                f"{{mode}} is {','.join(self.jct.mode)}; give one mode for this experiment"
            )
