"""The settings (cells) in which stacks are compared; each is a command of ``measure``."""

import enum
import itertools
import math
from argparse import Namespace
from collections.abc import Iterator

import msgspec
from benchmarks.peers.measure import MIB, parse_arguments, session

from dualpath.laboratory.models.wide import KV_BYTES


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
