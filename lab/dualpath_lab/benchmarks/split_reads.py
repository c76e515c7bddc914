"""Reads of one side (§6.1) compared with split reads, in settings where splitting could be slower.

Run:  ``python -m dualpath_lab.benchmarks.split_reads``.  Same agents and seeds for both.  The
criterion is the JCT, or, if agents arrive over time, the mean and the p99 of TTFT: splitting wins
or loses a setting if all seeds agree by more than ``--noise``, and loses it if one of the two
numbers is worse.  Equal commands give equal numbers.  Simulated.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from dualpath.core.modes import Mode
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath_sim.evaluation.inputs import CatalogInputs
from dualpath_sim.evaluation.runs import agents_until
from dualpath_sim.evaluation.settings import DS_27B, DS_660B, QWEN_32B, RunSpec
from dualpath_sim.simulator.run import simulate

_DS_660B = RunSpec(system=DS_660B, mode=Mode.DUALPATH, agents=256)
_DS_27B = RunSpec(system=DS_27B, mode=Mode.DUALPATH, agents=256, nodes=(1, 2))
_QWEN = RunSpec(system=QWEN_32B, mode=Mode.DUALPATH, agents=64)
#: Online runs end at this time; requests that have arrived by then count.
_UNTIL_S = 600.0


class Cell(NamedTuple):
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
    Cell("DS 660B 2P4D, 256 agents", _DS_660B),
    Cell("DS 27B 1P1D, 256 agents", msgspec.structs.replace(_DS_27B, nodes=(1, 1))),
    Cell("DS 27B 1P2D, 256 agents", _DS_27B),
    Cell("Qwen 32B 1P2D, 64 agents", _QWEN),
    Cell("DS 27B, a tenth of the lengths", _SHORT),
    Cell("DS 27B, 20 ms until a read's first byte", _changed(_DS_27B, **_LATE)),
    Cell("the same, a tenth of the lengths", _changed(_SHORT, **_LATE)),
    Cell("DS 27B, reads share NICs equally", _changed(_DS_27B, snic_sharing="equal")),
    Cell("DS 27B, 1,024 agents, some KV cached in DRAM", _changed(_MANY, dram_tier_bytes=0.0)),
    Cell("Qwen 32B, some KV cached in DRAM", _changed(_QWEN, dram_tier_bytes=0.0)),
    Cell("DS 660B 2P4D, 0.4 agents/s", _arriving(_DS_660B, 0.4)),
    Cell("DS 660B 2P4D, 0.8 agents/s", _arriving(_DS_660B, 0.8)),
    Cell("DS 27B 1P2D, 0.2 agents/s", _arriving(_DS_27B, 0.2)),
    Cell("DS 27B 1P2D, 0.6 agents/s", _arriving(_DS_27B, 0.6)),
    Cell("DS 27B, a tenth, 1 agent/s", _arriving(_SHORT, 1.0)),
    Cell("DS 27B, a tenth, 6 agents/s", _arriving(_SHORT, 6.0)),
    Cell("the same, 20 ms until a first byte", _arriving(_changed(_SHORT, **_LATE), 6.0)),
)


class Times(NamedTuple):
    """Times of one run: JCT (NaN online), TTFT of its rounds."""

    jct_s: float
    ttft_s: float
    ttft_p99_s: float


def _times(inputs: CatalogInputs, cell: Cell, mode: Mode, seed: int) -> Times:
    spec = msgspec.structs.replace(cell.spec, mode=mode)
    result = simulate(inputs.setup(spec), inputs.agents(spec, seed), until_s=spec.until_s)
    ttft_s = result.ttft_s()
    jct_s = float("nan") if cell.online else result.jct_s
    return Times(jct_s, float(np.nanmean(ttft_s)), float(np.nanquantile(ttft_s, 0.99)))


def _saved(one: Sequence[Times], split: Sequence[Times]) -> list[list[float]]:
    """Return the saving of each number by splitting, for each seed."""
    pairs = zip(zip(*one, strict=True), zip(*split, strict=True), strict=True)
    return [[1 - after / before for before, after in zip(*pair, strict=True)] for pair in pairs]


def _row(inputs: CatalogInputs, cell: Cell, seeds: Sequence[int], noise: float) -> tuple[str, ...]:
    one, split = (
        [_times(inputs, cell, mode, seed) for seed in seeds] for mode in (Mode.DUALPATH, Mode.SPLIT)
    )
    saved = _saved(one, split)
    decide = saved[1:] if cell.online else saved[:1]
    wins = any(min(number) > noise for number in decide)
    loses = any(max(number) < -noise for number in decide)
    verdict = "loses" if loses else "wins" if wins else "ties"
    base_s = float(np.mean([times[1 if cell.online else 0] for times in one]))
    print(f"{cell.name}: {verdict}", file=sys.stderr, flush=True)
    return (cell.name, f"{base_s:,.2f}", *map(_range, saved), verdict)


def _range(saved: Sequence[float]) -> str:
    if np.isnan(saved).any():
        return ""
    return f"{np.mean(saved):+.1%} ({min(saved):+.1%} to {max(saved):+.1%})"


def main() -> None:
    """Run every cell and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--noise", type=float, default=0.01, help="differences below this share count as equal"
    )
    parser.add_argument("--only", default="", help="only cells with names that contain this")
    args = parser.parse_args()
    inputs = CatalogInputs()
    rows = [_row(inputs, cell, args.seeds, args.noise) for cell in CELLS if args.only in cell.name]
    columns = (
        "setting", "JCT, or mean TTFT, s", "saved of JCT", "of mean TTFT", "of p99 TTFT", "split",
    )  # fmt: skip
    title = f"Simulated: split reads compared with reads of one side, 64K, seeds {args.seeds}"
    print(markdown.table(Table(title, columns, tuple(rows))))


if __name__ == "__main__":
    main()
