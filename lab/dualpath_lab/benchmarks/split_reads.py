"""Reads of one side (§6.1) compared with split reads, in settings where splitting could be slower.

Same agents and seeds for both.  The criterion is the JCT, or, if agents arrive over time, the mean
and the p99 of TTFT: splitting wins or loses a setting if all seeds agree by more than ``--noise``,
and loses it if one of the two numbers is worse.  Equal settings give equal numbers.  Simulated.
"""

import statistics
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.report.model import Table
from dualpath_sim.evaluation.inputs import CatalogInputs
from dualpath_sim.evaluation.runs import agents_until
from dualpath_sim.evaluation.settings import DS_27B, DS_660B, QWEN_32B, RunSpec
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    Stage,
    one_stage,
)
from dualpath_sim.harness.numbers import Numbers
from dualpath_sim.simulator.run import simulate

_DS_660B = RunSpec(system=DS_660B, mode=Mode.DUALPATH, agents=256)
_DS_27B = RunSpec(system=DS_27B, mode=Mode.DUALPATH, agents=256, nodes=(1, 2))
_QWEN = RunSpec(system=QWEN_32B, mode=Mode.DUALPATH, agents=64)
#: Online runs end at this time; requests that have arrived by then count.
_UNTIL_S = 600.0


class SplitSettings(Settings, frozen=True, kw_only=True):
    """Seeds, each of which is a round."""

    seeds: Annotated[tuple[int, ...], Setting("seeds", ge=0)] = (1, 2, 3)
    noise: Annotated[float, Setting("differences below this share count as equal", ge=0, le=1)] = (
        0.01
    )


class Case(NamedTuple):
    """A setting: agents begin at the same time, or arrive over time."""

    name: str
    spec: RunSpec

    @property
    def online(self) -> bool:
        """Whether agents arrive over time."""
        return self.spec.agents_per_s is not None


def _changed(spec: RunSpec, **overrides: object) -> RunSpec:
    return msgspec.structs.replace(spec, overrides=tuple(overrides.items()))


def _arriving(spec: RunSpec, agents_per_s: float) -> RunSpec:
    agents = agents_until(agents_per_s, _UNTIL_S)
    return msgspec.structs.replace(spec, agents=agents, agents_per_s=agents_per_s, until_s=_UNTIL_S)


#: Contexts, and therefore hits, of a tenth of the trace's lengths.
_SHORT = msgspec.structs.replace(_DS_27B, append_scale=0.1, generation_scale=0.1)
#: Many agents, so that buffers cache only a part of their KV.
_MANY = msgspec.structs.replace(_DS_27B, agents=1024)
_LATE = {"read_latency_s": 0.02}
CELLS = (
    Case("DS 660B 2P4D, 256 agents", _DS_660B),
    Case("DS 27B 1P1D, 256 agents", msgspec.structs.replace(_DS_27B, nodes=(1, 1))),
    Case("DS 27B 1P2D, 256 agents", _DS_27B),
    Case("Qwen 32B 1P2D, 64 agents", _QWEN),
    Case("DS 27B, a tenth of the lengths", _SHORT),
    Case("DS 27B, 20 ms until a read's first byte", _changed(_DS_27B, **_LATE)),
    Case("the same, a tenth of the lengths", _changed(_SHORT, **_LATE)),
    Case("DS 27B, reads share NICs equally", _changed(_DS_27B, snic_sharing="equal")),
    Case("DS 27B, 1,024 agents, some KV cached in DRAM", _changed(_MANY, dram_tier_bytes=0.0)),
    Case("Qwen 32B, some KV cached in DRAM", _changed(_QWEN, dram_tier_bytes=0.0)),
    Case("DS 660B 2P4D, 0.4 agents/s", _arriving(_DS_660B, 0.4)),
    Case("DS 660B 2P4D, 0.8 agents/s", _arriving(_DS_660B, 0.8)),
    Case("DS 27B 1P2D, 0.2 agents/s", _arriving(_DS_27B, 0.2)),
    Case("DS 27B 1P2D, 0.6 agents/s", _arriving(_DS_27B, 0.6)),
    Case("DS 27B, a tenth, 1 agent/s", _arriving(_SHORT, 1.0)),
    Case("DS 27B, a tenth, 6 agents/s", _arriving(_SHORT, 6.0)),
    Case("the same, 20 ms until a first byte", _arriving(_changed(_SHORT, **_LATE), 6.0)),
)


def _run(inputs: CatalogInputs, case: Case, seed: int) -> Numbers:
    """Run one cell with reads of one side and with split reads, same agents."""
    found: Numbers = {}
    for mode in (Mode.DUALPATH, Mode.SPLIT):
        spec = msgspec.structs.replace(case.spec, mode=mode)
        result = simulate(inputs.setup(spec), inputs.agents(spec, seed), until_s=spec.until_s)
        ttft_s = result.ttft_s()
        found[f"{mode.value}_ttft_s"] = float(np.nanmean(ttft_s))
        found[f"{mode.value}_ttft_p99_s"] = float(np.nanquantile(ttft_s, 0.99))
        if not case.online:
            found[f"{mode.value}_jct_s"] = result.jct_s
    return found


def saved(runs: Sequence[Numbers], name: str) -> list[float]:
    """Return what splitting saves of a number, for each seed; empty without the number."""
    before, after = (f"{mode.value}_{name}_s" for mode in (Mode.DUALPATH, Mode.SPLIT))
    return [1 - run[after] / run[before] for run in runs if before in run]


def verdict(runs: Sequence[Numbers], noise: float) -> str:
    """Return whether splitting wins or loses: the JCT decides or, online, mean and p99 of TTFT."""
    jct = saved(runs, "jct")
    decide = [jct] if jct else [saved(runs, "ttft"), saved(runs, "ttft_p99")]
    if any(max(number) < -noise for number in decide):
        return "loses"
    return "wins" if any(min(number) > noise for number in decide) else "ties"


def draw(raw: RawData[SplitSettings, Numbers]) -> Page:
    """Draw savings and verdicts."""
    rows = []
    for name in raw.cells:
        runs = raw.of(name)
        base = "dualpath_jct_s" if "dualpath_jct_s" in runs[0] else "dualpath_ttft_s"
        numbers = [_range(saved(runs, number)) for number in ("jct", "ttft", "ttft_p99")]
        base_s = statistics.fmean(run[base] for run in runs)
        rows.append((name, f"{base_s:,.2f}", *numbers, verdict(runs, raw.settings.noise)))
    columns = (
        *("setting", "JCT, or mean TTFT, s", "saved of JCT", "of mean TTFT", "of p99 TTFT"),
        "split",
    )
    title = "Simulated: split reads compared with reads of one side, 64K"
    return Page(
        settings=(f"Seeds {', '.join(map(str, raw.settings.seeds))}.",),
        tables=(Table(title, columns, tuple(rows)),),
        results=tuple(
            KeyResult(
                f"{name}: mean TTFT with split reads, s",
                raw.median(name, lambda run: run["split_ttft_s"]),
                tolerance=0.0,
                any_machine=True,
            )
            for name in raw.cells
        ),
    )


def _range(found: Sequence[float]) -> str:
    return f"{np.mean(found):+.1%} ({min(found):+.1%} to {max(found):+.1%})" if found else ""


def _stages(settings: SplitSettings, progress: Progress) -> list[Stage[Case, Numbers]]:
    inputs = CatalogInputs()
    return one_stage(
        {case.name: case for case in CELLS},
        lambda case, number: _run(inputs, case, settings.seeds[number]),
    )


SPLIT_READS = Experiment(
    name="split-reads",
    title="Reads of one side compared with split reads",
    settings=SplitSettings(),
    result=Numbers,
    stages=_stages,
    draw=draw,
    repeat=lambda settings: len(settings.seeds),
)
