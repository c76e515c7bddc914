"""What the experiments on kept and on sealed KV are asked to do."""

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
from dualpath.laboratory.workload.replay.options import GivesHints, WaitsForTools
from dualpath.laboratory.workload.replay.result import HintsGiven, ToolDelays

#: Storage binds without a tier, the PE's computation with one; the paper's 8 bytes over the CNIC
#: for each from storage, at rates that leave half of two cores idle.
_LAB = msgspec.structs.replace(BENCH_LAB, snic_bytes_per_s=10e6, cnic_bytes_per_s=80e6)
_WINDOWS = WindowSettings(
    even=True, turns=6, scale_append=8.0, scale_generate=0.25, history=History.DRAM
)
#: Buffers that hold what runs and little else: what is kept lies in DRAM given on top.
_NODES = EmulatedNodes(speedup=0.15, layers=32, layer_block_bytes=10752, buffer_bytes=64 << 20)


class TierSettings(Settings, frozen=True, kw_only=True):
    """The same agents without and with a tier, by how much of the working set fits, and in Oracle.

    A share is of the KV of all agents after their last turn: so much DRAM beyond their buffers all
    decode nodes have together, and each prefill node as much as each of them.
    """

    shares: Annotated[
        tuple[float, ...],
        Setting("DRAM beyond the buffers, in parts of the working set: 1 fits, 0 nothing", ge=0),
    ] = (1.0, 0.25, 0.0)
    tool_delays: WaitsForTools = ToolDelays.NONE
    session_hints: GivesHints = HintsGiven.NONE
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
            raise ConfigError("no {shares}; name at least one, like 1")
        if len(self.jct.nodes) != 1:
            raise ConfigError(f"{{nodes}} is {self.jct.nodes}; this experiment takes one")
        if len(self.jct.mode) != 1:
            raise ConfigError(f"{{mode}} is {','.join(self.jct.mode)}; this experiment takes one")
