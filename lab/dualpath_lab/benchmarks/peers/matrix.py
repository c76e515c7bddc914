"""Compares DualPath with other stacks in all cells; writes files of runs and one page of them.

    python -m dualpath_lab.benchmarks.peers.matrix --out FOLDER --peer NAME=ENVIRONMENT … [--cell
    NAME …]

A file contains the runs of a cell so far on one processor model, since faster cores make every
stack faster: if stopped at any point and called again, the missing runs are made.  Cells with runs
on another processor are run again only if named.  The page is rewritten after every run and names
the cells without runs.  A cell is a run of `dualpath_lab.benchmarks.peers.comparison` with the same
requirements.
"""

import enum
import itertools
import math
import re
import tempfile
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dualpath.node.machine import this_machine
from dualpath.report.files import as_json, write_file
from dualpath.report.model import NOTHING, Table
from dualpath_lab.benchmarks.peers.comparison import (
    MIB,
    MODES,
    Measurement,
    Stack,
    hit_share,
    measure,
    measurement,
    of_stack,
    own_stack,
    parse_arguments,
    session,
    stacks,
)
from dualpath_lab.benchmarks.peers.one_run import RunRecord
from dualpath_lab.experiments.report import ExperimentReport, write_experiment
from dualpath_lab.models.random_models import KV_BYTES

# ------------------------------------------------------------------------------------------- cells
# The settings (cells) in which stacks are compared; each is a command of ``measure``.


class Agents(enum.StrEnum):
    """Length of the agents' sessions, small enough for two cores."""

    SHORT = "short"
    LONG = "long"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `measure`; the model's longest context is that of the longest agent."""
        return {
            Agents.SHORT: (
                "--agents", "12", "--turns", "8", "--history", "512",
                "--append", "48", "--generate", "8", "--max-model-len", "1152",
            ),
            Agents.LONG: (
                "--agents", "6", "--turns", "60", "--history", "192",
                "--append", "6", "--generate", "2", "--max-model-len", "896",
            ),
        }[self]  # fmt: skip


class Bound(enum.StrEnum):
    """The bottleneck of a cluster that reads all KV through its PE."""

    STORAGE = "storage"
    BALANCED = "balanced"
    COMPUTE = "compute"

    @property
    def snic_mb_per_s(self) -> str:
        """Bandwidth of a node's storage NIC; the rest of a turn takes 0.5 s on two cores."""
        return {Bound.STORAGE: "20", Bound.BALANCED: "48", Bound.COMPUTE: "400"}[self]


class Fits(enum.StrEnum):
    """Share of the agents' final KV that fits a node's DRAM."""

    ALL = "all"
    QUARTER = "quarter"
    NOTHING = "nothing"

    def dram_bytes(self, working_set_bytes: int, context_bytes: int) -> float:
        """Return DRAM per node, at least the longest context, which passes through it."""
        share = {Fits.ALL: 1.25, Fits.QUARTER: 0.25, Fits.NOTHING: 0.0}[self]
        return max(share * working_set_bytes, context_bytes)


class Cell(msgspec.Struct, frozen=True):
    """One combination of settings; ``pauses``: a 1 s tool call before every turn but the first."""

    agents: Agents
    bound: Bound
    fits: Fits
    pauses: bool

    @property
    def name(self) -> str:
        """Name of the cell and of its file."""
        pauses = "pauses" if self.pauses else "no-pauses"
        return f"{self.agents}-{self.bound}-{self.fits}-{pauses}"

    def arguments(self, words: list[str]) -> Namespace:
        """Return the arguments of `measure`: ``words`` and those of this cell."""
        args = parse_arguments([
            *words,
            *("--nodes", "1P2D", "--hbm-mib", "64", "--name", self.name),
            *("--snic-mb-per-s", self.bound.snic_mb_per_s),
            *("--pause-s", "1" if self.pauses else "0"),
            *self.agents.arguments,
        ])  # fmt: skip
        tokens = sum(session(args, n).trajectory.total_tokens for n in range(args.agents))
        longest_bytes = args.max_model_len * KV_BYTES
        args.dram_mib = math.ceil(self.fits.dram_bytes(tokens * KV_BYTES, longest_bytes) / MIB)
        return args


def cells() -> Iterator[Cell]:
    """Yield all cells, the shortest ones first."""
    for agents, pauses in itertools.product(Agents, (False, True)):
        for bound, fits in itertools.product(Bound, Fits):
            yield Cell(agents, bound, fits, pauses)


# ----------------------------------------------------------------------------------- matrix report
# The page of all cells: the fastest stack, the ratios, and each stack's bottleneck.

COMMAND = "python -m dualpath_lab.benchmarks.peers.matrix --out FOLDER --peer NAME=ENVIRONMENT …"
#: From this utilization on, a link or the cores count as the bottleneck.
_FULL = 0.85
_COLUMNS = (
    *("stack", "runs", "JCT s", "to DualPath", "TTFT p50 s", "TTFT p99 s", "hit tokens"),
    *("SNICs, MB read", "CNICs, MB in", "machine busy", "CPU-s", "waits for"),
    *("same outputs as DualPath", "turns failed"),
)

_DISCUSSION = """\
Each regime is a run of `dualpath_lab.benchmarks.peers.comparison`; the run's arguments are stored
with its results in a file in `cells`; `lab/dualpath_lab/benchmarks/peers/README.md` describes the
stacks, what they have in common and where they differ. Bytes are those of the measured turns, a
number per node: prefill nodes, then decode nodes.

"Waits for" lists the bottlenecks of a stack's own run: every storage NIC and compute NIC, and the
cores, with a utilization of at least 85 %. During pauses of the agents' tools nothing has to be
busy. Where the cores are the bottleneck, a stack may be faster on more cores."""


def matrix_report(measured: Mapping[Cell, Sequence[Measurement]]) -> ExperimentReport:
    """Return the page, which also names cells without runs."""
    with_runs = [(cell, one) for cell, found in measured.items() for one in found if one.runs]
    run: dict[str, list[str]] = {}
    for cell, one in with_runs:
        run.setdefault(cell.name, []).append(one.machine.cores)
    return ExperimentReport(
        name="peers-matrix",
        title="DualPath and other stacks in every regime",
        command=COMMAND,
        settings=_setting_lines(len(run), len(measured), [one for _, one in with_runs]),
        tables=(_winners(measured), *(_cell_table(cell, one) for cell, one in with_runs)),
        discussion=_DISCUSSION,
        # The runs are in the cells' files.
        data={"regimes": run},
    )


def _setting_lines(run: int, regimes: int, measurements: Sequence[Measurement]) -> tuple[str, ...]:
    runs_of = Counter(
        f"{found.machine.cores}, {found.date}, "
        + ", ".join(f"{name} {number}" for name, number in found.versions.items())
        for found in measurements
    )
    return (
        "Real vLLM engines on CPU at 1P2D, links shaped by the kernel, a model of random weights "
        "with 32,768 bytes of KV per token in float32. Short agents: 12 with 8 turns; long ones: 6 "
        "with 60. DRAM per node holds 1.25 of their KV, a quarter, or only the longest "
        "context; storage NICs have 20, 48 or 400 MB/s; a pause is a second before a turn.",
        f"{run} of {regimes} regimes have been run. Compare only within a row: other "
        "processors are faster or slower.",
        *(f"{machine}: {count} regimes." for machine, count in runs_of.items()),
    )


def _winners(measured: Mapping[Cell, Sequence[Measurement]]) -> Table:
    columns = (
        *("agents", "bound by", "DRAM holds", "tools", "processor", "fastest", "JCT s"),
        *("DualPath's", "why"),
    )
    rows: list[tuple[str, ...]] = []
    for cell, found in measured.items():
        regime = (cell.agents, cell.bound, cell.fits, "pauses" if cell.pauses else "none")
        run = [one for one in found if one.runs]
        rows += [(*regime, one.machine.cpu_model, *_fastest(one)) for one in run]
        if not run:
            rows.append((*regime, NOTHING, "not run", *[NOTHING] * 3))
    return Table("Fastest stack", columns, tuple(rows), align="llllllrrl")


def _fastest(measured: Measurement) -> tuple[str, str, str, str]:
    """Return the fastest stack, its JCT, DualPath's JCT, and the reason."""
    ranked = sorted(_without_failures(stacks(measured.runs)), key=lambda stack: stack.jct_s)
    if not ranked:
        return "all had failed turns", NOTHING, NOTHING, NOTHING
    own, first = own_stack(ranked), ranked[0]
    own_jct = f"{own.jct_s:.1f}" if own else NOTHING
    return first.label, f"{first.jct_s:.1f}", own_jct, _why(ranked, own, measured)


def _without_failures(found: Sequence[Stack]) -> list[Stack]:
    """Return the stacks without failed turns, which would shorten their JCT."""
    return [stack for stack in found if not sum(run.turns_failed for run in stack.runs)]


def _why(ranked: Sequence[Stack], own: Stack | None, measured: Measurement) -> str:
    """Return the bottlenecks of the fastest stack and of the one it is compared with."""
    first = ranked[0]
    other = ranked[1:2] if own in (None, first) else [own]
    return "; ".join(
        f"{stack.label} waits for {waits_for(stack, measured)}, "
        f"{sum(stack.typical.snic_bytes.values()) / 1e9:.2f} GB read, "
        f"{hit_share(stack.typical)} hits"
        for stack in (first, *(one for one in other if one is not None))
    )


def waits_for(stack: Stack, measured: Measurement) -> str:
    """Return the bottlenecks of a stack's typical run."""
    run, arguments = stack.typical, measured.arguments
    snic_bytes_per_s = float(str(arguments["snic_mb_per_s"])) * 1e6
    cnic_bytes_per_s = float(str(arguments["cnic_gbit_per_s"])) * 1e9 / 8
    uses = {f"storage at {n}": b / snic_bytes_per_s for n, b in run.snic_bytes.items()}
    uses |= {f"CNIC of {n}": b / cnic_bytes_per_s for n, b in run.cnic_in_bytes.items()}
    shares = {name: used_s / run.jct_s for name, used_s in uses.items()} | {"cores": run.busy}
    saturated = {name: share for name, share in shares.items() if share >= _FULL}
    if not saturated:
        return "nothing saturated"
    return ", ".join(f"{name} ({share:.0%})" for name, share in saturated.items())


def _cell_table(cell: Cell, measured: Measurement) -> Table:
    found = stacks(measured.runs)
    own = own_stack(found)
    rows = [of_stack(stack, own) | _waits(stack, measured) for stack in found]
    title = f"{cell.name}, {measured.machine.cores}"
    return Table(title, _COLUMNS, tuple(tuple(row[name] for name in _COLUMNS) for row in rows))


def _waits(stack: Stack, measured: Measurement) -> dict[str, str]:
    """Return a stack's bytes, CPU time and bottlenecks by column."""
    run = stack.typical
    return {
        "SNICs, MB read": _megabytes(run.snic_bytes),
        "CNICs, MB in": _megabytes(run.cnic_in_bytes),
        "CPU-s": f"{sum(run.cpu_s.values()):.0f}",
        "waits for": waits_for(stack, measured),
    }


def _megabytes(of_nodes: Mapping[str, int]) -> str:
    return " + ".join(f"{count / 1e6:.0f}" for count in of_nodes.values())


class CellFiles:
    """The measurements, a file per cell and processor model in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, cell: Cell) -> list[Measurement]:
        """Return the runs of a cell, a measurement per processor model."""
        paths = sorted(self._folder.glob(f"{cell.name}.*.json"))
        return [msgspec.json.decode(path.read_bytes(), type=Measurement) for path in paths]

    def on_this_processor(self, cell: Cell) -> Measurement | None:
        """Return the runs of a cell on this machine's processor model, None without runs."""
        cores = this_machine().cores
        return next((found for found in self.read(cell) if found.machine.cores == cores), None)

    def write(self, cell: Cell, measured: Measurement) -> None:
        """Write the runs of a cell atomically."""
        cores = re.sub("[^a-z0-9]+", "-", measured.machine.cores.lower()).strip("-")
        path = self._folder / f"{cell.name}.{cores}.json"
        temporary = path.with_suffix(".new")
        write_file(temporary, as_json(measured), folders=True)
        temporary.replace(path)


def parse(words: list[str] | None = None) -> tuple[Namespace, list[str]]:
    """Return the arguments of the matrix, and those that are passed to every measurement."""
    parser = ArgumentParser(
        prog="python -m dualpath_lab.benchmarks.peers.matrix", description=__doc__
    )
    add = parser.add_argument
    add("--out", required=True, metavar="FOLDER", help="folder of the page and of the cells' files")
    add(
        "--cell",
        action="append",
        choices=[cell.name for cell in cells()],
        help="default: all cells without runs, or with runs on this processor",
    )
    add("--peer", action="append", default=[], metavar="NAME=ENVIRONMENT")
    add("--modes", default=MODES, help="modes of DualPath's engines, separated by commas")
    add("--repeats", type=int, default=1)
    add("--logs", metavar="FOLDER", help="write logs and replays to this folder")
    args = parser.parse_args(words)
    peers = [f"--peer={peer}" for peer in args.peer]
    return args, [f"--repeats={args.repeats}", f"--modes={args.modes}", *peers]


def main() -> None:
    """Make the missing runs, cell by cell."""
    args, words = parse()
    out = Path(args.out)
    logs = Path(args.logs or tempfile.mkdtemp(prefix="dualpath-peers-"))
    files = CellFiles(out / "cells")
    for cell in cells():
        existing = files.on_this_processor(cell)
        selected = cell.name in args.cell if args.cell else existing or not files.read(cell)
        if not selected:
            continue
        arguments = cell.arguments(words)

        def after_run(
            runs: list[RunRecord], cell: Cell = cell, arguments: Namespace = arguments
        ) -> None:
            files.write(cell, measurement(arguments, runs))
            write_page(files, out)

        measure(arguments, logs / cell.name, existing.runs if existing else [], after_run)
    write_page(files, out)


def write_page(files: CellFiles, out: Path) -> None:
    """Write the page from the existing files of the cells."""
    write_experiment(matrix_report({cell: files.read(cell) for cell in cells()}), out)


if __name__ == "__main__":
    main()
