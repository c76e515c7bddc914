"""A step as every rank of an emulated decode engine computes it."""

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
    """A prompt to be copied into HBM; ``number`` is the fill's own, ``seeds`` are its blocks'."""

    number: int
    decode_transfer: DecodeTransfer
    hbm_blocks: tuple[int, ...]
    seeds: Seeds


class NewToken(NamedTuple):
    """A token whose KV is computed: block and place of it, and its seed."""

    hbm_block: int
    place: int
    seed: np.uint64


class DecodeStep(NamedTuple):
    """What the ranks do in a step, in this order."""

    tokens: tuple[NewToken, ...]
    full: tuple[GeneratedBlock, ...]
    fills: tuple[Fill, ...]


class Filled(NamedTuple):
    """A rank tells: a fill is over there; what failed, what is wrong, what it has compared."""

    number: int
    error: str | None
    wrong: str | None
    counts: Counts


class RankSteps:
    """Computes a rank's slice of each token, and has prompts and full blocks copied.

    A fill goes on beside later steps; ``RankPlane.tell`` gets a ``Filled`` when it is over.
    """

    def __init__(self, plane: RankPlane) -> None:
        self._plane = plane
        self._checks = Workers(plane.threads, "decode-transfer", 1)

    def run(self, step: DecodeStep) -> None:
        """Run this rank's share; return when all ranks have."""
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
        """Do something in turn with the comparison of what was copied."""
        self._checks.submit(work)

    def close(self) -> None:
        """Finish the comparison under way."""
        self._checks.close()

    def _copied(self, fill: Fill, error: str | None) -> None:
        self.soon(functools.partial(self._check, fill, error))

    def _check(self, fill: Fill, error: str | None) -> None:
        transfer, wrong = fill.decode_transfer, None
        if error is None:
            wrong = self._plane.wrong_in_hbm(
                CheckedAt.DE_HBM,
                transfer.request_id,
                fill.hbm_blocks[: len(transfer.slots)],
                fill.seeds,
                range(self._plane.geometry.layers),
                transfer.prompt_tokens - 1,
            )
        self._plane.tell(Filled(fill.number, error, wrong, self._plane.verifier.news()))
