"""Where the hit of a placed request comes from, as the ledger stands at its assignment.

Blocks that its engines keep in DRAM are there (``kept``), the rest is read at either side
(``read_side``), but for the end that is computed again (``recompute``).
"""

from collections.abc import Mapping
from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.core.request import Request
from dualpath.core.runs import HitRun
from dualpath.policy.accounts import COMPUTING, NODE
from dualpath.policy.baselines import SidesInTurn
from dualpath.policy.events import READ_REASONS, SchedulerSettings
from dualpath.policy.load import Ledger
from dualpath.policy.read_side import (
    NO_READS,
    PE_READS,
    PE_SIDE,
    RECOMPUTE,
    RULES,
    SIDES_IN_TURN,
    Reader,
    Reads,
    choose_reads,
    kept_tokens,
)
from dualpath.policy.recompute import recompute_tokens


class HitSource(NamedTuple):
    """The runs of a hit and why it is these; its last ``recompute_tokens`` are in none of them."""

    runs: tuple[HitRun, ...]
    reason: str
    recompute_tokens: int

    def computing_more(self, tokens: int) -> "HitSource":
        """Return the source of a longer hit, of whose end so many tokens more are computed."""
        recomputed = self.recompute_tokens + tokens
        reason = READ_REASONS[RECOMPUTE] if recomputed else self.reason
        return HitSource(self.runs, reason, recomputed)


class HitSources:
    """Decides by the rule of a mode and charges nothing; sides take turns where the rule has any.

    ``settings`` may be replaced by such with other thresholds.
    """

    def __init__(self, settings: SchedulerSettings, ledger: Ledger) -> None:
        self.settings = settings
        self._ledger = ledger
        self._rule = RULES[settings.mode]
        self._sides = SidesInTurn()

    def kept_tokens(self, request: Request) -> dict[str, int]:
        """Return what joined engines keep of a request's hit and the mode can use, by engine."""
        if self._rule == NO_READS or not request.cached:
            return {}
        engines = self._ledger.engines
        return {
            prefix.engine_id: min(prefix.blocks * self.settings.block_tokens, request.hit_tokens)
            for prefix in request.cached
            if (engine := engines.get(prefix.engine_id)) is not None
            and (engine.spec.role is Role.PREFILL or self._rule != PE_READS)
        }

    def choose(
        self, hit_tokens: int, kept_tokens: Mapping[str, int], engines: Mapping[Role, str]
    ) -> HitSource:
        """Decide for a request that the ledger holds at both of its ``engines``.

        ``kept_tokens`` of the hit are left in engines' DRAM, by engine.
        """
        at_prefill = self._reader(engines[Role.PREFILL], kept_tokens)
        at_decode = self._reader(engines[Role.DECODE], kept_tokens)
        recomputed = self._recompute_tokens(
            hit_tokens, engines[Role.PREFILL], at_prefill, at_decode
        )
        hit_tokens -= recomputed
        runs, reason = self._choose_reads(engines, at_prefill, at_decode, hit_tokens)
        return HitSource(runs, READ_REASONS[RECOMPUTE] if recomputed else reason, recomputed)

    def _recompute_tokens(
        self, hit_tokens: int, prefill_engine: str, at_prefill: Reader, at_decode: Reader
    ) -> int:
        settings = self.settings
        kept = kept_tokens(self._rule, at_prefill.kept_tokens, at_decode.kept_tokens)
        return recompute_tokens(
            self._rule,
            hit_tokens - sum(kept),
            self._ledger.engines[prefill_engine].account(COMPUTING),
            at_prefill.queue_tokens,
            at_decode.queue_tokens,
            settings.alpha_tokens,
            settings.beta_tokens,
            settings.computed_weight,
            settings.recompute_limit_s,
            settings.block_tokens,
        )

    def _choose_reads(
        self, engines: Mapping[Role, str], at_prefill: Reader, at_decode: Reader, hit_tokens: int
    ) -> Reads:
        turn = PE_SIDE
        kept = kept_tokens(self._rule, at_prefill.kept_tokens, at_decode.kept_tokens)
        if self._rule == SIDES_IN_TURN and hit_tokens > sum(kept):
            turn = self._sides.take(engines[Role.PREFILL], engines[Role.DECODE])
        block_tokens = self.settings.block_tokens
        return choose_reads(self._rule, turn, at_prefill, at_decode, hit_tokens, block_tokens)

    def _reader(self, engine_id: str, kept_tokens: Mapping[str, int]) -> Reader:
        engine = self._ledger.engines[engine_id]
        return Reader(
            queue_tokens=self._ledger.node_read_q[engine.account(NODE)],
            total_tokens=self._ledger.node_read_total[engine.account(NODE)],
            tokens_per_s=engine.spec.snic_tokens_per_s,
            kept_tokens=kept_tokens.get(engine_id, 0),
        )
