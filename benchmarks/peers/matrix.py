"""DualPath beside today's stacks in every regime: a file per regime, one page of all of them.

    python -m benchmarks.peers.matrix --out FOLDER --peer NAME=ENVIRONMENT … [--cell NAME …]

A regime's file holds its runs so far: ended at any point and called again, the rest is run, on a
machine of the same kind.  The page is written anew after every run, and names what is missing.  A
regime is a run of `benchmarks.peers.measure`, and needs what that needs.
"""

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec
from benchmarks.peers.cells import Cell, cells
from benchmarks.peers.matrix_report import matrix_report
from benchmarks.peers.measure import MODES, measure, measurement
from benchmarks.peers.one_run import RunRecord
from benchmarks.peers.report import Measurement

from dualpath.laboratory.experiments.report import write_experiment
from dualpath.laboratory.workload.replay.machine import this_machine
from dualpath.report.files import as_json, write_file


class CellFiles:
    """What has been measured, a file per regime in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, cell: Cell) -> Measurement | None:
        """Return a regime's runs, None if there are none."""
        path = self.path(cell)
        return msgspec.json.decode(path.read_bytes(), type=Measurement) if path.exists() else None

    def write(self, cell: Cell, measured: Measurement) -> None:
        """Keep a regime's runs, whole or not at all."""
        path = self.path(cell)
        whole = path.with_suffix(".new")
        write_file(whole, as_json(measured), folders=True)
        whole.replace(path)

    def path(self, cell: Cell) -> Path:
        """Return where a regime's runs are kept."""
        return self._folder / f"{cell.name}.json"


def parse(words: list[str] | None = None) -> tuple[Namespace, list[str]]:
    """Return what is asked of the matrix, and the words that every measurement is given."""
    parser = ArgumentParser(prog="python -m benchmarks.peers.matrix", description=__doc__)
    add = parser.add_argument
    add("--out", required=True, metavar="FOLDER", help="of the page and of the regimes' files")
    add("--cell", action="append", choices=[cell.name for cell in cells()], help="default: all")
    add("--peer", action="append", default=[], metavar="NAME=ENVIRONMENT")
    add("--modes", default=MODES, help="of DualPath's own engines, with commas")
    add("--repeats", type=int, default=1)
    add("--logs", metavar="FOLDER", help="keep logs and replays here")
    args = parser.parse_args(words)
    peers = [f"--peer={peer}" for peer in args.peer]
    return args, [f"--repeats={args.repeats}", f"--modes={args.modes}", *peers]


def main() -> None:
    """Run what is missing, cell by cell."""
    args, words = parse()
    out = Path(args.out)
    logs = Path(args.logs or tempfile.mkdtemp(prefix="dualpath-peers-"))
    files = CellFiles(out / "cells")
    for cell in cells():
        if args.cell and cell.name not in args.cell:
            continue
        arguments = cell.arguments(words)
        there = files.read(cell)
        if there is not None and (trouble := not_comparable(there)):
            print(
                f"{cell.name}: {trouble}; remove {files.path(cell)} to run all stacks anew",
                file=sys.stderr,
                flush=True,
            )
            continue

        def ran(runs: list[RunRecord], cell: Cell = cell, arguments: Namespace = arguments) -> None:
            files.write(cell, measurement(arguments, runs))
            write_page(files, out)

        measure(arguments, logs / cell.name, there.runs if there else [], ran)
    write_page(files, out)


def not_comparable(there: Measurement) -> str | None:
    """Say why runs of this machine cannot stand beside those that are there, None if they can.

    A machine whose cores are faster makes every stack faster.
    """
    theirs, ours = there.machine.cores, this_machine().cores
    return f"its runs are of {theirs}, this machine has {ours}" if theirs != ours else None


def write_page(files: CellFiles, out: Path) -> None:
    """Write the page from the regimes' files that are there."""
    write_experiment(matrix_report({cell: files.read(cell) for cell in cells()}), out)


if __name__ == "__main__":
    main()
