"""Remembers what an engine measured, by everything that the measurement depends on."""

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dualpath.vllm.pass_costs import PassCosts

log = logging.getLogger(__name__)


class _Remembered(msgspec.Struct, frozen=True):
    of: dict[str, str]
    costs: PassCosts


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

    def recall(self) -> PassCosts | None:
        """Return what was remembered, None if nothing was."""
        try:
            found = msgspec.json.decode(self.file.read_bytes(), type=_Remembered)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("measured costs in %s are not used: %s", self.file, error)
            return None
        costs = found.costs
        usable = costs.prefill_tokens_per_s > 0 and costs.attention.flops_per_s > 0
        return costs if found.of == self._of and usable else None

    def remember(self, costs: PassCosts) -> None:
        """Write the file, whole or not at all."""
        beside = self.file.with_suffix(f".{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(
                msgspec.json.format(msgspec.json.encode(_Remembered(self._of, costs)))
            )
            beside.replace(self.file)
        except OSError as error:
            log.warning("measured costs are not remembered in %s: %s", self.file, error)
