"""What goes into ``RequestScheduler`` and what comes out, live and simulated.

Reasons are short, stable strings, made for logs, metrics and tests.
"""

from typing import NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.core.runs import HitRun

#: The times that α and β stand for (§A.4).
ALPHA_S = 3.0
BETA_S = 5.0
#: The turn at whose speed a PE computes β: the mean of the 64K dataset (§3, Table 2).
TYPICAL_CONTEXT_TOKENS = 32_721
TYPICAL_APPEND_TOKENS = 429
#: Of its prompt's tokens so many pass for each one that is computed.
TYPICAL_COMPUTED_WEIGHT = (TYPICAL_CONTEXT_TOKENS + TYPICAL_APPEND_TOKENS) / TYPICAL_APPEND_TOKENS
#: α or β that is never exceeded.
UNLIMITED_TOKENS = 1 << 60

#: Why a request got its PE: categories C2 and C3 of Algorithm 1, or its turn; its DE: phase 2, or
#: its turn; either: for what its DRAM keeps (``policy.kept``); and why its hits are read where they
#: are (``policy.read_side``): ``kept`` if nothing is read, ``recompute`` if a part of them is
#: computed again (``policy.recompute``).
PE_REASONS = ("short-queue", "long-queue", "round-robin", "kept")
DE_REASONS = ("low-token min-seq", "high-token min-tok", "round-robin", "kept")
READ_REASONS = (
    "no-hit",
    "oracle",
    "pe-only",
    "round-robin",
    "shorter-queue",
    "tie",
    "split",
    "kept",
    "recompute",
)

#: Their places, as kernels return them.
PE_SHORT_QUEUE, PE_LONG_QUEUE, PE_IN_TURN, PE_KEPT = range(len(PE_REASONS))
DE_LOW_TOKEN, DE_HIGH_TOKEN, DE_IN_TURN, DE_KEPT = range(len(DE_REASONS))


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of §6.1 and §A.4, in tokens, and what goes beyond the paper.

    ``alpha_tokens`` α, short reading queue threshold (what one node reads in 3 s);
    ``beta_tokens`` β, unfinished token limit (what one GPU prefills in 5 s), of which a token
    that is computed takes ``computed_weight`` ≥ 1, hits none;
    ``threshold_factor`` the 1.05 of Z; ``block_tokens`` granularity of a split;
    ``generated_reserve_tokens`` how many of a request's generated tokens count into its length
    at the DE, at most (the prompt always counts; 0 reserves the prompt alone);
    ``recompute_limit_s`` how long hits may take to compute that would take longer to load, 0 to
    load whatever is stored;
    ``balanced_baselines`` places Basic and Layerwise by token count instead of in turn.
    """

    mode: Mode
    alpha_tokens: int
    beta_tokens: int
    block_tokens: int = 64
    threshold_factor: float = 1.05
    generated_reserve_tokens: int = 256
    balanced_baselines: bool = False
    recompute_limit_s: float = 0.0
    computed_weight: float = TYPICAL_COMPUTED_WEIGHT


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of ``SchedulerSettings`` from now on; they follow from the engines there are."""

    alpha_tokens: int
    beta_tokens: int
    computed_weight: float = TYPICAL_COMPUTED_WEIGHT


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine as the scheduler sees it; ``order`` breaks ties and is unique.

    ``snic_tokens_per_s`` is the storage bandwidth of the engine's node; only ratios matter, so
    that the default means equal storage NICs everywhere.
    """

    engine_id: str
    role: Role
    node: str
    group: str
    order: int
    hbm_tokens: int
    snic_tokens_per_s: float = 1.0


class EngineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load an engine reports when it fetches (§6.1).

    Everything up to and including assignment ``assign_seq`` is counted in; the ledger adds what
    was assigned since.  ``read_queue_tokens`` is this engine's own part of its node's reading
    queue; the ledger adds up the engines of a node, which share a storage NIC.
    """

    engine_id: str
    assign_seq: int
    unfinished_requests: int
    unfinished_tokens: int
    read_queue_tokens: int
    free_hbm_tokens: int
    free_buffer_tokens: int


class Granted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A DE has granted a request's slots; so much of its hit's head its engines' DRAM keeps now.

    ``decode_blocks`` the DE has said, ``prefill_blocks`` is believed of the PE, which says it when
    it grants slots itself.
    """

    request_id: str
    decode_blocks: int
    prefill_blocks: int


class Charge(NamedTuple):
    """What an assignment is at one of its engines: its number there, what it counts for, reads."""

    engine_id: str
    assign_seq: int
    tokens: int
    read_tokens: int


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's (PE, DE) pair and read side(s), each with its reason.

    ``reads`` is empty without hits and in Oracle mode.  Else its runs are in block order and cover
    the hit blocks exactly, but for the last ``recompute_tokens`` of them, which are computed: what
    the DE's DRAM keeps, what the PE's keeps behind it, and what is read, at the PE, at the DE,
    or at both.
    Reasons are of ``PE_REASONS``, ``DE_REASONS`` and ``READ_REASONS``.
    ``prefill_tokens`` and ``decode_tokens`` are what the request counts for in tok_e of either
    engine; the DE's figure is also what it takes of HBM.  ``prefill_read_tokens`` and
    ``decode_read_tokens`` are what it counts for in the reading queues of their nodes, which is
    what storage has to read.
    """

    request_id: str
    prefill_engine: str
    decode_engine: str
    prefill_assign_seq: int
    decode_assign_seq: int
    reads: tuple[HitRun, ...]
    pe_reason: str
    de_reason: str
    read_reason: str
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_read_tokens: int = 0
    decode_read_tokens: int = 0
    recompute_tokens: int = 0

    def at(self, side: Role) -> Charge:
        """Return what it is at its engine of a role."""
        if side is Role.PREFILL:
            return Charge(
                *(self.prefill_engine, self.prefill_assign_seq),
                *(self.prefill_tokens, self.prefill_read_tokens),
            )
        return Charge(
            *(self.decode_engine, self.decode_assign_seq),
            *(self.decode_tokens, self.decode_read_tokens),
        )

    def kept_end(self, side: Role) -> int:
        """Return the block at which ends what is taken from a side's DRAM, 0 for nothing."""
        ends = (run.blocks.end for run in self.reads if run.cached and run.side is side)
        return max(ends, default=0)
