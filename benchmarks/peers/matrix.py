"""Compares DualPath with other stacks in all cells; writes files of runs and one page of them.

    python -m benchmarks.peers.matrix --out FOLDER --peer NAME=ENVIRONMENT … [--cell NAME …]

A file contains the runs of a cell so far on one processor model, since faster cores make every
stack faster: if stopped at any point and called again, the missing runs are made.  Cells with runs
on another processor are run again only if named.  The page is rewritten after every run and names
the cells without runs.  A cell is a run of `benchmarks.peers.measure` with the same requirements.
"""

import re
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
    parser = ArgumentParser(prog="python -m benchmarks.peers.matrix", description=__doc__)
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
