"""A decode step on each rank of an emulated engine."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.generated import GeneratedBlock
from dualpath.engine.threads import Workers
from dualpath.laboratory.emulated.prefix import Seeds
from dualpath.laboratory.emulated.rank_plane import RankPlane
from dualpath.laboratory.emulated.verification import CheckedAt, Counts


class Fill(NamedTuple):
    """A prompt to copy into HBM; ``number`` identifies the fill, ``seeds`` are of its blocks."""

    number: int
    decode_transfer: DecodeTransfer
    hbm_blocks: tuple[int, ...]
    seeds: Seeds


class NewToken(NamedTuple):
    """A token to compute: its HBM block, its position in the block, and its seed."""

    hbm_block: int
    place: int
    seed: np.uint64


class DecodeStep(NamedTuple):
    """The work of a step in order: tokens to compute, blocks to persist, fills to start."""

    tokens: tuple[NewToken, ...]
    full: tuple[GeneratedBlock, ...]
    fills: tuple[Fill, ...]


class Filled(NamedTuple):
    """Event of a rank: it has ended its share of a fill.

    ``error``: why the copy failed; ``wrong``: message about wrong KV; ``counts``: comparisons.
    """

    number: int
    error: str | None
    wrong: str | None
    counts: Counts


class RankSteps:
    """Computes a rank's slice of each token, starts fills and persists full blocks.

    A fill may take several steps; ``RankPlane.notify`` is called with ``Filled`` when it has ended.
    """

    def __init__(self, plane: RankPlane) -> None:
        self._plane = plane
        self._checks = Workers(plane.threads, "decode-transfer", 1)

    def run(self, step: DecodeStep) -> None:
        """Run this rank's share of a step; return when all ranks have finished theirs."""
        plane = self._plane
        if plane.moves_bytes:
            for token in step.tokens:
                plane.hbm.write_token(*token)
        if step.full:
            plane.mover.persist_generated(step.full)
        for fill in step.fills:
            blocks = fill.hbm_blocks[: len(fill.decode_transfer.slots)]
            plane.mover.fill_hbm(
                fill.decode_transfer, blocks, functools.partial(self._copied, fill)
            )
        plane.group.gather(None)

    def soon(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the thread that verifies copies."""
        self._checks.submit(work)

    def close(self) -> None:
        """Wait for the current comparison."""
        self._checks.close()

    def _copied(self, fill: Fill, error: str | None) -> None:
        self.soon(functools.partial(self._check, fill, error))

    def _check(self, fill: Fill, error: str | None) -> None:
        transfer, wrong = fill.decode_transfer, None
        if error is None:
            wrong = self._plane.verify_hbm(
                CheckedAt.DE_HBM,
                transfer.request_id,
                fill.hbm_blocks[: len(transfer.slots)],
                fill.seeds,
                range(self._plane.geometry.layers),
                transfer.prompt_tokens - 1,
            )
        self._plane.notify(Filled(fill.number, error, wrong, self._plane.verifier.new_counts()))
