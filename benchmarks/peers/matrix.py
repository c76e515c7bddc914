"""DualPath beside today's stacks in every regime: files of runs, and one page of all of them.

    python -m benchmarks.peers.matrix --out FOLDER --peer NAME=ENVIRONMENT … [--cell NAME …]

A file holds a regime's runs so far on one kind of processor, as faster cores make every stack
faster: ended at any point and called again there, the rest is run.  What another one has run is run
again only if named.  The page is written anew after every run, and names what is missing.  A regime
is a run of `benchmarks.peers.measure`, and needs what that needs.
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
    """What has been measured, a file per regime and kind of processor in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, cell: Cell) -> list[Measurement]:
        """Return a regime's runs, a measurement per kind of processor."""
        paths = sorted(self._folder.glob(f"{cell.name}.*.json"))
        return [msgspec.json.decode(path.read_bytes(), type=Measurement) for path in paths]

    def here(self, cell: Cell) -> Measurement | None:
        """Return a regime's runs on processors as this machine's, None if there are none."""
        cores = this_machine().cores
        return next((found for found in self.read(cell) if found.machine.cores == cores), None)

    def write(self, cell: Cell, measured: Measurement) -> None:
        """Keep a regime's runs, whole or not at all."""
        cores = re.sub("[^a-z0-9]+", "-", measured.machine.cores.lower()).strip("-")
        path = self._folder / f"{cell.name}.{cores}.json"
        whole = path.with_suffix(".new")
        write_file(whole, as_json(measured), folders=True)
        whole.replace(path)


def parse(words: list[str] | None = None) -> tuple[Namespace, list[str]]:
    """Return what is asked of the matrix, and the words that every measurement is given."""
    parser = ArgumentParser(prog="python -m benchmarks.peers.matrix", description=__doc__)
    add = parser.add_argument
    add("--out", required=True, metavar="FOLDER", help="of the page and of the regimes' files")
    add(
        "--cell",
        action="append",
        choices=[cell.name for cell in cells()],
        help="default: all that no machine has run, or this one has begun",
    )
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
        there = files.here(cell)
        asked = cell.name in args.cell if args.cell else there or not files.read(cell)
        if not asked:
            continue
        arguments = cell.arguments(words)

        def ran(runs: list[RunRecord], cell: Cell = cell, arguments: Namespace = arguments) -> None:
            files.write(cell, measurement(arguments, runs))
            write_page(files, out)

        measure(arguments, logs / cell.name, there.runs if there else [], ran)
    write_page(files, out)


def write_page(files: CellFiles, out: Path) -> None:
    """Write the page from the regimes' files that are there."""
    write_experiment(matrix_report({cell: files.read(cell) for cell in cells()}), out)


if __name__ == "__main__":
    main()
