"""Events that go into ``RequestScheduler.apply`` and the effects that come out, live and simulated.

Reasons are short, stable strings, made for logs, metrics and tests.
"""

from typing import NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.modes import Handover, Mode
from dualpath.core.rates import RecomputeWeight
from dualpath.core.request import CachedPrefix, Request
from dualpath.core.runs import HitRun

#: The times that α and β stand for (§A.4).
ALPHA_S = 3.0
BETA_S = 5.0
#: The turn at which β is computed from a PE's speed: the mean of the 64K dataset (§3, Table 2).
TYPICAL_CONTEXT_TOKENS = 32_721
TYPICAL_APPEND_TOKENS = 429
#: Of its prompt's tokens so many pass for each one that is computed.
TYPICAL_COMPUTED_WEIGHT = (TYPICAL_CONTEXT_TOKENS + TYPICAL_APPEND_TOKENS) / TYPICAL_APPEND_TOKENS
#: How long recomputing a hit may take by default where that is done by default.
RECOMPUTE_LIMIT_S = 10.0
#: α or β that is never exceeded.
UNLIMITED_TOKENS = 1 << 60

#: Why a request got its PE: category C2 or C3 of Algorithm 1, or round robin; its DE: phase 2 or
#: round robin; either: the blocks that the engine caches (``policy.placement``), or the request's
#: sender has chosen it.  A request has no PE, with the last reason, if its DE computes the append.
#: It got its DE with the last reason if it waited for the DE that caches it (``policy.decode``).
PE_REASONS = ("short-queue", "long-queue", "round-robin", "kept", "given", "append-at-decode")
DE_REASONS = ("low-token min-seq", "high-token min-tok", "round-robin", "kept", "given", "waited")

#: Why a DE receives a prompt in its buffer or in its HBM: the setting; or, where that allows HBM,
#: the mode is a baseline, the request has no PE, or (``Handover.AUTO``) the DE has HBM or not.
HANDOVER_REASONS = ("setting", "baseline", "append-at-decode", "hbm-free", "hbm-full")

#: Their places, as kernels return them.
PE_SHORT_QUEUE, PE_LONG_QUEUE, PE_IN_TURN, PE_KEPT, PE_GIVEN, PE_APPEND = range(len(PE_REASONS))
DE_LOW_TOKEN, DE_HIGH_TOKEN, DE_IN_TURN, DE_KEPT, DE_GIVEN, DE_WAITED = range(len(DE_REASONS))
BY_SETTING, BASELINE, NOTHING_SENT, HBM_FREE, HBM_FULL = range(len(HANDOVER_REASONS))


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of §6.1 and §A.4, in tokens, and what goes beyond the paper.

    ``alpha_tokens`` α, short reading queue threshold (what one node reads in 3 s);
    ``beta_tokens`` β, unfinished token limit (what one GPU prefills in 5 s), of which a token
    that is computed takes ``computed_weight`` ≥ 1, hits none;
    ``threshold_factor`` the 1.05 of Z; ``block_tokens`` granularity of a split;
    ``generated_reserve_tokens`` how many of a request's generated tokens count into its length
    at the DE, at most (the prompt always counts; 0 reserves the prompt alone);
    ``recompute_limit_s`` how long recomputing a hit may take if loading it takes longer, 0 to
    load all hits; a recomputed token counts ``recompute_weight`` of β's tokens, None for
    ``computed_weight`` wherever it is;
    ``append_at_decode_tokens`` how many tokens behind a hit a DE may compute itself, 0 for none
    (``policy.read_side``);
    ``handover`` where DEs receive KV (``policy.read_side``);
    ``third_engine_reads`` how many third DEs may serve a part of a hit, 0 for none
    (``policy.read_side``);
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
    append_at_decode_tokens: int = 0
    handover: Handover = Handover.BUFFER
    third_engine_reads: int = 0
    computed_weight: float = TYPICAL_COMPUTED_WEIGHT
    recompute_weight: RecomputeWeight | None = None

    @property
    def weight_of_recomputed(self) -> RecomputeWeight:
        """How many of β's tokens a recomputed token counts."""
        return self.recompute_weight or RecomputeWeight(self.computed_weight)


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine as the scheduler sees it; ``order`` breaks ties and is unique.

    ``snic_tokens_per_s`` is the storage bandwidth of the engine's node; only ratios matter, so
    that the default means equal storage NICs everywhere.  ``lockstep``: it computes each layer
    together with other engines, as the ranks of a data-parallel group do.
    """

    engine_id: str
    role: Role
    node: str
    group: str
    order: int
    hbm_tokens: int
    snic_tokens_per_s: float = 1.0
    lockstep: bool = False


class Charge(NamedTuple):
    """What an assignment counts for at one of its engines, and what the engine's node reads."""

    engine_id: str
    tokens: int
    read_tokens: int


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's (PE, DE) pair and read side(s), each with its reason.

    ``prefill_engine`` is None if the DE computes the prompt's tokens behind the hit itself: then
    ``pe_reason`` is "append-at-decode" and all runs of ``reads`` are the DE's.
    ``reads`` is empty without hits and in Oracle mode.  Else its runs are in block order and cover
    the hit blocks exactly, but for the last ``recompute_tokens``, which are recomputed: what the DE
    caches in DRAM, what the PE caches behind it, and what is read, at the PE, at the DE,
    or at both.  Behind the cached runs there may be those of third DEs (``HitRun.third``), which
    are ``thirds``, each with what its node reads for the request.
    ``handover`` is where the DE receives the KV: in its buffer, where it reserves slots for the
    whole prompt (without a PE for the hit), or in HBM, where it reserves slots for the blocks of
    its own ``reads`` alone and allocates HBM for the prompt before them.
    Reasons are of ``PE_REASONS``, ``DE_REASONS``, ``policy.read_side.READ_REASONS`` and
    ``HANDOVER_REASONS``.
    ``prefill_tokens`` and ``decode_tokens`` are what the request counts for in tok_e of either
    engine; the DE's figure is also what it takes of HBM.  ``prefill_read_tokens`` and
    ``decode_read_tokens`` are what it counts for in the reading queues of their nodes, which is
    what storage has to read.  The hit is ``unstored_tokens`` longer than ``Request.hit_tokens``:
    these are in DRAM of the two engines and are not stored.
    """

    request_id: str
    prefill_engine: str | None
    decode_engine: str
    reads: tuple[HitRun, ...]
    pe_reason: str
    de_reason: str
    read_reason: str
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_read_tokens: int = 0
    decode_read_tokens: int = 0
    recompute_tokens: int = 0
    unstored_tokens: int = 0
    handover: Handover = Handover.BUFFER
    handover_reason: str = HANDOVER_REASONS[BY_SETTING]
    thirds: tuple[Charge, ...] = ()

    @property
    def sides(self) -> tuple[Role, ...]:
        """The roles of its engines."""
        return (Role.DECODE,) if self.prefill_engine is None else (Role.PREFILL, Role.DECODE)

    @property
    def engines(self) -> tuple[str, ...]:
        """Its engines, the PE first if it has one."""
        return tuple(self.at(side).engine_id for side in self.sides)

    def at(self, side: Role) -> Charge:
        """Return what it is at its engine of a role, one of ``sides``."""
        if side is Role.PREFILL:
            assert self.prefill_engine is not None, "its DE computes the append"
            return Charge(self.prefill_engine, self.prefill_tokens, self.prefill_read_tokens)
        return Charge(self.decode_engine, self.decode_tokens, self.decode_read_tokens)

    def blocks_at(self, side: Role) -> int:
        """Return how many hit blocks the engine of a side reads or has in DRAM."""
        return sum(run.blocks.count for run in self.reads if run.is_at(side))

    def cached_end(self, side: Role) -> int:
        """Return the end of the blocks that the engine of a side has in DRAM, 0 for none."""
        cached = (run for run in self.reads if run.cached and run.is_at(side))
        return max((run.blocks.end for run in cached), default=0)


# ------------------------------------------------------------------------ events


class SchedulerEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event"):
    """Something that happened in the cluster; ``Event`` is the union of all kinds."""


class SetThresholds(SchedulerEvent, frozen=True, tag="set_thresholds"):
    """α, β and the weights of a computed token, as in ``SchedulerSettings``, from now on.

    Requests that are placed stay where they are.
    """

    alpha_tokens: int
    beta_tokens: int
    computed_weight: float = TYPICAL_COMPUTED_WEIGHT
    recompute_weight: RecomputeWeight | None = None


class EngineJoined(SchedulerEvent, frozen=True, tag="engine_joined"):
    """An engine joins without load; its id may join again after ``EngineLost``.

    Refused with ``ConfigError`` if its id or order is in use or its group has the other role.
    """

    spec: EngineSpec


class EngineLost(SchedulerEvent, frozen=True, tag="engine_lost"):
    """An engine is gone; the effect is ``lost_requests``, the unfinished requests that it had.

    The scheduler has removed these: submit them again or fail them.  A PE, and a third DE, has a
    request until ``PrefillEnded``, a DE from its assignment until ``Finished``, and either DE of a
    move has it until ``MoveEnded``.  Requests that only
    wait stay, even if they were placed on this engine, and are placed elsewhere; but one that no
    other engine may serve is lost with it.
    Refused with ``EngineLostError`` if the engine has not joined.
    """

    engine_id: str


class EnginePaused(SchedulerEvent, frozen=True, tag="engine_paused"):
    """An engine gets no new requests; those that it was assigned go on, and so does its account.

    Requests with only one of their engines release it, whichever it is, and are queued again in
    order.  Refused with ``EngineLostError`` if the engine has not joined.
    """

    engine_id: str


class EngineResumed(SchedulerEvent, frozen=True, tag="engine_resumed"):
    """A paused engine gets requests again; an engine that joins is not paused.

    Refused with ``EngineLostError`` if the engine has not joined.
    """

    engine_id: str


class EngineReport(SchedulerEvent, frozen=True, omit_defaults=True, tag="report"):
    """Load that an engine reports when it fetches (§6.1).

    ``uncounted`` are the requests that were assigned to the engine, have not ended there and are
    not in ``load`` yet; the ledger adds them.  All others are counted in from now on.
    ``load.read_queue_tokens`` is this engine's own part of its node's reading queue; the ledger
    adds up the engines of a node, which share a storage NIC.
    If ``uncounted`` names a request that an earlier report has counted in, this report is late and
    is dropped; unknown requests in ``uncounted`` are ignored.  Refused with ``EngineLostError`` if
    the engine has not joined, with ``IncompatibleError`` for a negative load.
    """

    engine_id: str
    load: Load
    uncounted: tuple[str, ...] = ()


class Submitted(SchedulerEvent, frozen=True, tag="submit"):
    """A request waits for a PE and a DE; one with a given PE or DE waits for the other only.

    The effect is an assignment if both engines are given, the DE has room and no request waits for
    a DE.  Refused with ``BadRequestError`` for impossible lengths, an id in use, or a length that
    no joined DE can ever hold, with ``EngineLostError`` if the given PE has not joined or is
    paused, or if the only DE that may serve it has no room now.  While no DE has joined any length
    waits; see ``RequestScheduler.unplaceable``.
    """

    request: Request


class Fetch(SchedulerEvent, frozen=True, omit_defaults=True, tag="fetch"):
    """A group asks for requests; the effect: ``assignments`` of requests with both engines now.

    A request with a DE that computes the append is assigned without a PE.

    Algorithm 1 for a PE group, phases 1 and 2 for a DE group (§6.1).  A group without a live
    engine gets nothing.  ``now_s`` is the driver's time, from any origin: it bounds how long a
    request waits for the DE that caches it (``policy.decode``).
    """

    group: str
    now_s: float = 0.0


class SlotsGranted(SchedulerEvent, frozen=True, omit_defaults=True, tag="granted"):
    """A DE has granted an assigned request's slots, before anything of it is read.

    ``decode_blocks`` at the head of its hit are cached by the DE, as the DE reports;
    ``prefill_blocks`` are believed to be cached by the PE, which reports them when it grants slots
    itself.  If its engines cache less than the assignment assumes, or hits are to be recomputed,
    the effect is one assignment: the same engines with reads that are planned again for the present
    queues.  With a hand-over in HBM the DE reads what its slots suffice for.
    ``others`` are further DEs that are believed to cache blocks now.  With ``third_engine_reads``
    the effect may be an assignment with third DEs, each of which has to grant slots as well.  If
    one does not, or caches less than expected, the event is applied again: with ``third_reads``
    False for an assignment without reads by third DEs, with ``use_thirds`` False for one without
    third DEs.
    """

    request_id: str
    decode_blocks: int
    prefill_blocks: int
    others: tuple[CachedPrefix, ...] = ()
    third_reads: bool = True
    use_thirds: bool = True


class ReadsBegin(SchedulerEvent, frozen=True, omit_defaults=True, tag="reads_begin"):
    """The DE of an assigned request has slots for it, or they are ``late``: it waits for them.

    Events are needed only where hits may be recomputed.  An assigned request waits for slots until
    this event or ``SlotsGranted``.  Other requests are ignored.
    """

    request_id: str
    late: bool = False


class ReadsDone(SchedulerEvent, frozen=True, tag="read_done"):
    """All storage reads of a request are done; unknown requests are ignored."""

    request_id: str


class PrefillEnded(SchedulerEvent, frozen=True, tag="prefill_done"):
    """The prompt of an assigned request is computed; any other request is ignored.

    The PE has finished it, or its DE if it has no PE.
    """

    request_id: str


class MoveBegun(SchedulerEvent, frozen=True, tag="move_begun"):
    """Another DE fetches the KV of a request whose prompt is computed; both count it meanwhile.

    Refused with ``EngineLostError`` if that DE gets no requests or has no room for this one now,
    or if the request is unknown, has no computed prompt, or is being moved already.
    """

    request_id: str
    decode_engine: str


class MoveEnded(SchedulerEvent, frozen=True, omit_defaults=True, tag="move_ended"):
    """A move is over; with ``moved`` the request has its new DE, else it has its former one.

    Requests that are unknown or are not being moved are ignored.  ``now_s`` as in ``Finished``.
    """

    request_id: str
    moved: bool
    now_s: float = 0.0


class Finished(SchedulerEvent, frozen=True, omit_defaults=True, tag="finished"):
    """A request has ended in whatever state, also by an error; unknown requests are ignored.

    ``now_s`` is the time, as in ``Fetch``; 0 if the driver has none.
    """

    request_id: str
    now_s: float = 0.0


Event = (
    EngineReport
    | Submitted
    | Fetch
    | SlotsGranted
    | ReadsBegin
    | ReadsDone
    | PrefillEnded
    | MoveBegun
    | MoveEnded
    | Finished
    | EngineJoined
    | EngineLost
    | EnginePaused
    | EngineResumed
    | SetThresholds
)


class Effects(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an event makes the driver do: dispatch ``assignments``, resubmit ``lost_requests``.

    Lost requests are in the order of their submission.
    """

    assignments: tuple[Assignment, ...] = ()
    lost_requests: tuple[str, ...] = ()


NO_EFFECTS = Effects()
