"""The compiled scheduler's state: a few tables of integers with named rows and columns.

Tables instead of one array per quantity, because every array that a compiled function is given
costs it seven registers, and because a request's columns then share cache lines.

Engines are numbered PEs before DEs, groups likewise; a group is a run of engines.  A request is an
integer below the length of its table, free to be used again once the request is over.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.policy.accounts import ACCOUNT_COLUMNS, FREE_HBM, NODE, IntArray
from dualpath.policy.events import EngineSpec, SchedulerSettings
from dualpath.policy.read_side import RULES
from dualpath.policy.scheduler import effective_alpha_tokens, places_in_turn

PREFILL, DECODE = 0, 1
NONE = -1
CACHE_LINE_BYTES = 64

#: Rows of ``engines`` beyond the columns of an account (``policy.accounts``), one per engine:
#: FIRST_PENDING and LAST_PENDING, ends of the list of requests that the engine was assigned and has
#: not reported; FIRST_SIDE, the side of the first read of the PE's next new pair.  RING holds, in
#: place of an account, the engines of each role in ``EngineSpec.order``.
FIRST_PENDING, LAST_PENDING, FIRST_SIDE, GROUP, HBM, RING = range(
    ACCOUNT_COLUMNS, ACCOUNT_COLUMNS + 6
)
ENGINE_ROWS = ACCOUNT_COLUMNS + 6

#: Rows of ``groups``: engines [FIRST, END), tokens of the private queue, these and the engines'
#: while the global queue is drained, the largest engine's HBM, and the most that any of its engines
#: keeps of the request that is being dealt.
FIRST, END, PRIVATE_TOKENS, TOTAL_TOKENS, LARGEST_HBM, MOST_KEPT = range(6)
GROUP_ROWS = 6

#: Rows of ``nodes``: reading queue, and tokens given to read so far.
READ_Q, READ_TOTAL = range(2)

#: Columns of ``requests``, most in pairs, PE's and DE's.  One cache line for what is asked of an
#: assigned request: the tokens that its PE has yet to compute; the engine; the assignment number,
#: the tokens of the charge and of the read (0 when struck); the neighbours in the engine's list of
#: pending requests.  One for the rest: whether any engine keeps any of its hit; the tokens it
#: counts for; the wait queue with its neighbours; why it got the engine; the request that entered
#: the queue STRIDE places behind it.
ASSIGNED, TO_COMPUTE = 0, 1
ENGINE, ASSIGN_SEQ, CHARGE, READ, PENDING_BEFORE, PENDING_AFTER = range(2, 14, 2)
NUMBER, PROMPT, HIT, KEPT_ANY = range(16, 20)
LENGTH, QUEUE, AHEAD, BEHIND, REASON, FAR_BEHIND = range(20, 32, 2)
REQUEST_COLUMNS = 32

#: Columns of ``queues``, the wait queues: the common queues of PEs and DEs come first, then one per
#: engine, of which a DE group uses that of its first engine.  From LATEST on stand the latest to
#: enter, in turn, and ENTERED counts them.
QUEUE_FIRST, QUEUE_LAST, ENTERED = range(3)
LATEST = 8
QUEUE_COLUMNS = 16
#: Whoever walks a queue asks for the row of the request so many places behind, so that it has come
#: from memory when it is needed.
STRIDE = 8
COMMON_QUEUES = 2

#: ``counters``: requests submitted so far and not assigned yet, engine dealt to last per role, PEs
#: that have read in turn.
SUBMITTED, UNASSIGNED, LAST_DEALT, IN_TURN_PES = 0, 1, 2, 4

#: Rows of ``work``: requests placed by a fetch; lengths and rows of ``kept`` that a kernel is
#: given, and what it returns.
PLACED, LENGTHS, KEPT_ROWS, ROWS, WHY = range(5)
WORK_ROWS = 5

#: Columns of ``assigned``; reasons are places of the tuples in ``policy.events``.
(
    A_REQUEST,
    A_PE,
    A_DE,
    A_PE_READ,
    A_DE_READ,
    A_PE_KEPT,
    A_DE_KEPT,
    A_RECOMPUTE,
    A_PE_REASON,
    A_DE_REASON,
    A_READ_REASON,
    A_PE_SEQ,
    A_DE_SEQ,
) = range(13)
ASSIGNED_COLUMNS = 13


class Rules(NamedTuple):
    """``SchedulerSettings``, resolved by mode."""

    in_turn: bool
    read_rule: int
    alpha_tokens: int
    beta_tokens: int
    threshold_factor: float
    block_tokens: int
    generated_reserve_tokens: int
    recompute_limit_s: float
    computed_weight: float


class SchedulerState(NamedTuple):
    """Tables as described above.

    ``snic_tokens_per_s`` of every engine.  ``sides`` is the side of the next read per PE and DE
    (§7.5's round robin).  ``kept`` are the tokens that an engine is believed to keep of a
    request's hit, with a row for each request where there is a DRAM tier, else one.  ``work`` is
    room to work in.  ``assigned`` holds the assignments of the latest fetch.
    """

    rules: Rules
    engines: IntArray
    snic_tokens_per_s: NDArray[np.float64]
    groups: IntArray
    nodes: IntArray
    requests: NDArray[np.int32]
    queues: IntArray
    sides: NDArray[np.int8]
    kept: NDArray[np.int32]
    counters: IntArray
    work: IntArray
    assigned: IntArray
    first_decode_engine: int
    first_decode_group: int


def new_scheduler(
    settings: SchedulerSettings, specs: Sequence[EngineSpec], requests: int, *, keeps: bool = False
) -> SchedulerState:
    """Return the state in which all engines have joined and ``requests`` may be live at once.

    ``keeps``: engines keep KV in their DRAM.

    ``specs`` name PEs before DEs, group by group in the order in which groups were joined first,
    each by ascending ``order``; that is how engines and groups are numbered here.
    """
    groups = list(dict.fromkeys(spec.group for spec in specs))
    nodes = list(dict.fromkeys(spec.node for spec in specs))
    prefill = sum(spec.role is Role.PREFILL for spec in specs)
    prefill_groups = len({spec.group for spec in specs if spec.role is Role.PREFILL})
    engines = _engine_table(specs, groups, nodes)
    table = aligned_rows(requests, REQUEST_COLUMNS)
    counters = np.zeros(5, np.int64)
    counters[LAST_DEALT : LAST_DEALT + 2] = NONE
    return SchedulerState(
        rules=_rules(settings),
        engines=engines,
        snic_tokens_per_s=np.array([spec.snic_tokens_per_s for spec in specs], np.float64),
        groups=_group_table(engines, len(groups)),
        nodes=np.zeros((2, len(nodes)), np.int64),
        requests=table,
        queues=_queues(COMMON_QUEUES + len(specs)),
        sides=np.full((prefill, len(specs) - prefill), NONE, np.int8),
        kept=np.zeros((requests if keeps else 1, len(specs)), np.int32),
        counters=counters,
        work=np.zeros((WORK_ROWS, requests), np.int64),
        assigned=np.zeros((requests, ASSIGNED_COLUMNS), np.int64),
        first_decode_engine=prefill,
        first_decode_group=prefill_groups,
    )


def aligned_rows(rows: int, columns: int) -> NDArray[np.int32]:
    """Return a table of NONE whose rows begin where cache lines do, if they are as long."""
    row_bytes = columns * 4
    memory = np.empty(rows * row_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    table = memory[start : start + rows * row_bytes].view(np.int32).reshape(rows, columns)
    table[:] = NONE
    return table


def _engine_table(specs: Sequence[EngineSpec], groups: list[str], nodes: list[str]) -> IntArray:
    engines = np.zeros((ENGINE_ROWS, len(specs)), np.int64)
    engines[[FIRST_PENDING, LAST_PENDING, FIRST_SIDE]] = NONE
    engines[NODE] = [nodes.index(spec.node) for spec in specs]
    engines[GROUP] = [groups.index(spec.group) for spec in specs]
    engines[HBM] = engines[FREE_HBM] = [spec.hbm_tokens for spec in specs]
    engines[RING] = sorted(
        range(len(specs)), key=lambda e: (specs[e].role is Role.DECODE, specs[e].order)
    )
    return engines


def _queues(count: int) -> IntArray:
    queues = np.full((count, QUEUE_COLUMNS), NONE, np.int64)
    queues[:, ENTERED] = 0
    return queues


def _group_table(engines: IntArray, count: int) -> IntArray:
    groups = np.zeros((GROUP_ROWS, count), np.int64)
    numbers = np.arange(count)
    groups[FIRST] = np.searchsorted(engines[GROUP], numbers)
    groups[END] = np.searchsorted(engines[GROUP], numbers, side="right")
    for group in range(count):
        groups[LARGEST_HBM, group] = engines[HBM, groups[FIRST, group] : groups[END, group]].max()
    return groups


def _rules(settings: SchedulerSettings) -> Rules:
    return Rules(
        in_turn=places_in_turn(settings),
        read_rule=RULES[settings.mode],
        alpha_tokens=effective_alpha_tokens(settings),
        beta_tokens=settings.beta_tokens,
        threshold_factor=float(settings.threshold_factor),
        block_tokens=settings.block_tokens,
        generated_reserve_tokens=settings.generated_reserve_tokens,
        recompute_limit_s=float(settings.recompute_limit_s),
        computed_weight=float(settings.computed_weight),
    )
