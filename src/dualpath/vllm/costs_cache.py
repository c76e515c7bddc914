"""Caches an engine's measured pass costs in a file, keyed by all that the measurement depends on.

A busy machine makes passes look slower, never faster: the fastest of the first ``STARTS`` starts is
used.  Costs older than ``MAX_AGE_S`` are measured again.
"""

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dualpath.vllm.pass_costs import PassCosts

log = logging.getLogger(__name__)


#: Number of starts that measure; later starts use the cached costs.
STARTS = 3
#: Seconds for which cached costs are valid: drivers, clocks and other load of a machine change.
MAX_AGE_S = 7 * 24 * 3600.0


class CachedCosts(msgspec.Struct, frozen=True):
    """The fastest ``costs`` of ``starts`` starts, measured at ``measured_s`` (Unix time).

    ``of`` are the names and values that the costs depend on.
    """

    of: dict[str, str]
    costs: PassCosts
    measured_s: float = 0.0
    starts: int = 1


class CostsCache:
    """One file per ``of``: the names and values that the costs depend on.

    A file that cannot be read or written is ignored with a warning.  After the file is removed, the
    next start measures again.
    """

    def __init__(self, directory: Path, of: Mapping[str, str]) -> None:
        """``directory`` need not exist."""
        self._of = dict(sorted(of.items()))
        digest = hashlib.sha256(msgspec.json.encode(self._of)).hexdigest()[:24]
        self.file = directory / f"costs-{digest}.json"

    def load(self, now_s: float) -> CachedCosts | None:
        """Return the cached costs; None if there are none or they are too old."""
        try:
            found = msgspec.json.decode(self.file.read_bytes(), type=CachedCosts)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("measured costs in %s are not used: %s", self.file, error)
            return None
        costs = found.costs
        usable = costs.prefill_tokens_per_s > 0 and costs.attention.flops_per_s > 0
        # A time in the future comes from a wrong clock, so the age is unknown.
        fresh = 0 <= now_s - found.measured_s <= MAX_AGE_S
        return found if found.of == self._of and usable and fresh else None

    def store(self, costs: PassCosts, now_s: float) -> CachedCosts:
        """Write the fastest costs so far to the file atomically; return them."""
        before = self.load(now_s)
        best = CachedCosts(self._of, costs, now_s)
        if before is not None:
            faster = before.costs.prefill_tokens_per_s > costs.prefill_tokens_per_s
            best = msgspec.structs.replace(before if faster else best, starts=before.starts + 1)
        self._write(best)
        return best

    def _write(self, best: CachedCosts) -> None:
        temporary = self.file.with_suffix(f".{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(best)))
            temporary.replace(self.file)
        except OSError as error:
            log.warning("measured costs cannot be written to %s: %s", self.file, error)
