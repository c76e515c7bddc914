"""Remembers what an engine measured, by everything that the measurement depends on.

A busy machine makes passes look slow, never fast: of the first ``STARTS`` starts the fastest
counts, and what is older than ``MAX_AGE_S`` is measured anew.
"""

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dualpath.vllm.pass_costs import PassCosts

log = logging.getLogger(__name__)


#: So many starts measure before one believes what those before it found.
STARTS = 3
#: Seconds for which costs are believed: a machine gets other drivers, clocks and neighbours.
MAX_AGE_S = 7 * 24 * 3600.0


class Remembered(msgspec.Struct, frozen=True):
    """The ``costs`` found at ``measured_s`` (Unix time), the fastest of so many ``starts``."""

    of: dict[str, str]
    costs: PassCosts
    measured_s: float = 0.0
    starts: int = 1


class CostsCache:
    """One file per ``of``: names and values that must be equal for costs to be.

    Nothing fails for it: a file that cannot be read or written is as none.  Removing it makes
    the next start measure anew.
    """

    def __init__(self, directory: Path, of: Mapping[str, str]) -> None:
        """``directory`` need not exist."""
        self._of = dict(sorted(of.items()))
        digest = hashlib.sha256(msgspec.json.encode(self._of)).hexdigest()[:24]
        self.file = directory / f"costs-{digest}.json"

    def recall(self, now_s: float) -> Remembered | None:
        """Return what was remembered; None if nothing was, or too long ago."""
        try:
            found = msgspec.json.decode(self.file.read_bytes(), type=Remembered)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("measured costs in %s are not used: %s", self.file, error)
            return None
        costs = found.costs
        usable = costs.prefill_tokens_per_s > 0 and costs.attention.flops_per_s > 0
        # A time to come is one of a clock that was wrong: nobody knows how old it is.
        fresh = 0 <= now_s - found.measured_s <= MAX_AGE_S
        return found if found.of == self._of and usable and fresh else None

    def remember(self, costs: PassCosts, now_s: float) -> Remembered:
        """Write the fastest so far to the file, whole or not at all; return it."""
        before = self.recall(now_s)
        best = Remembered(self._of, costs, now_s)
        if before is not None:
            kept = before.costs.prefill_tokens_per_s > costs.prefill_tokens_per_s
            best = msgspec.structs.replace(before if kept else best, starts=before.starts + 1)
        self._write(best)
        return best

    def _write(self, best: Remembered) -> None:
        beside = self.file.with_suffix(f".{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(msgspec.json.format(msgspec.json.encode(best)))
            beside.replace(self.file)
        except OSError as error:
            log.warning("measured costs are not remembered in %s: %s", self.file, error)
