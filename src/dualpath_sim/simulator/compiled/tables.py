"""The compiled core's state: tables of numbers with named rows and columns, one per kind of thing.

Tables instead of objects, since numba compiles arrays, and few wide tables instead of one array per
quantity: every array costs a compiled call seven registers, and columns that are used together
share a cache line.  With many agents most of the time is spent on waiting for memory.

Engines are numbered prefill engines (PE) first, then decode engines (DE); groups and units
likewise; nodes likewise.  An agent has one round in flight at a time, so an agent's number is also
the number of its request at the scheduler.  ``SchedulerState`` mirrors ``RequestScheduler``,
``MachineTables`` the reference core's machine; ``World`` is both with the numbers of the setup.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.plan.movements import Link
from dualpath.policy.accounts import ACCOUNT_COLUMNS, FREE_HBM, NODE
from dualpath.policy.batching import UNBOUNDED_TOKENS
from dualpath.policy.events import EngineSpec, SchedulerSettings
from dualpath.policy.placement import NOTHING_CACHED
from dualpath.policy.read_side import RULES
from dualpath.policy.scheduler import effective_alpha_tokens, places_in_turn
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.derived import (
    CHARGED,
    ClusterLayout,
    Limits,
    buffer_bytes,
    cluster_layout,
    copies,
    layer_kinds,
    limits,
)
from dualpath_sim.simulator.result import FloatArray, IntArray, TurnTimes
from dualpath_sim.simulator.rules import to_ns
from dualpath_sim.simulator.settings import Setup

PREFILL, DECODE = 0, 1
NONE = -1
CACHE_LINE_BYTES = 64

# ---------------------------------------------------------------- the scheduler's tables

#: Rows of ``SchedulerState.engines`` behind those of an account (``policy.accounts``), one column
#: per engine.  REPORTS is the number of reports so far; FIRST_SIDE is the side of the first read of
#: the PE's next new pair.  RING lists the engines of each role in ``EngineSpec.order``.
REPORTS, FIRST_SIDE, GROUP, HBM, RING = range(ACCOUNT_COLUMNS, ACCOUNT_COLUMNS + 5)
ENGINE_ROWS = ACCOUNT_COLUMNS + 5

#: Rows of ``groups``: engines [FIRST, END), tokens of the private queue, these and the engines'
#: while the global queue is drained, and the largest engine's HBM.
FIRST, END, PRIVATE_TOKENS, TOTAL_TOKENS, LARGEST_HBM = range(5)
GROUP_ROWS = 5

#: Rows of ``SchedulerState.nodes``: reading queue, and tokens assigned to read so far.
READ_Q, READ_TOTAL = range(2)

#: Columns of ``requests``, most in pairs, the PE's and the DE's.  One cache line for an assigned
#: request: the engine; the latest of the engine's reports that does not count it in; the tokens of
#: the charge and of the read (0 when struck).  One for the rest: the tokens it counts for; the wait
#: queue with its neighbours; why it got the engine; the request that entered the queue STRIDE
#: places behind it.
ENGINE, NOT_IN_REPORT, CHARGE, READ_TOKENS = range(0, 8, 2)
NUMBER, REQUEST_HIT = 16, 17
LENGTH, QUEUE, AHEAD, BEHIND, REASON, FAR_BEHIND = range(18, 30, 2)
REQUEST_COLUMNS = 32

#: Columns of ``queues``, the wait queues: the common queues of PEs and DEs come first, then one per
#: engine, of which a DE group uses that of its first engine.  From LATEST on are the latest to
#: enter, in turn, and ENTERED counts them.
QUEUE_FIRST, QUEUE_LAST, ENTERED = range(3)
LATEST = 8
QUEUE_COLUMNS = 16
#: A walk along a queue prefetches the row of the request so many places behind.
STRIDE = 8
COMMON_QUEUES = 2

#: ``SchedulerState.counters``: requests submitted so far and not assigned yet, the engine dealt to
#: last per role, PEs that have read in turn.
SUBMITTED, UNASSIGNED, LAST_DEALT, IN_TURN_PES = 0, 1, 2, 4

#: Rows of ``work``: requests placed by a fetch; their lengths for a kernel, the rows it returns and
#: why; and NOTHING_CACHED for every request, as the policy's kernels want it.
PLACED, LENGTHS, ROWS, WHY, NO_CACHED_ROWS = range(5)
WORK_ROWS = 5

#: Columns of ``assigned``; reasons are places of the tuples in ``policy.events``.
(
    A_REQUEST,
    A_PE,
    A_DE,
    A_PE_READ,
    A_DE_READ,
    A_PE_REASON,
    A_DE_REASON,
    A_READ_REASON,
) = range(8)
ASSIGNED_COLUMNS = 8


class Rules(NamedTuple):
    """``SchedulerSettings``, resolved by mode."""

    in_turn: bool
    read_rule: int
    alpha_tokens: int
    beta_tokens: int
    threshold_factor: float
    block_tokens: int
    generated_reserve_tokens: int


class SchedulerState(NamedTuple):
    """Tables as described above.

    ``snic_tokens_per_s`` of every engine.  ``sides`` is the side of the next read per PE and DE
    (§7.5's round robin).  ``no_cached`` is a table in which no engine caches KV of any request.
    ``work`` is scratch space.  ``assigned`` holds the assignments of the latest fetch.
    """

    rules: Rules
    engines: IntArray
    snic_tokens_per_s: NDArray[np.float64]
    groups: IntArray
    nodes: IntArray
    requests: NDArray[np.int32]
    queues: IntArray
    sides: NDArray[np.int8]
    no_cached: NDArray[np.int32]
    counters: IntArray
    work: IntArray
    assigned: IntArray
    first_decode_engine: int
    first_decode_group: int


def new_scheduler(
    settings: SchedulerSettings, specs: Sequence[EngineSpec], requests: int
) -> SchedulerState:
    """Return the state in which all engines have joined and ``requests`` may be live at once.

    ``specs`` name PEs before DEs, group by group in the order in which groups were joined first,
    each by ascending ``order``; that is how engines and groups are numbered here.
    """
    groups = list(dict.fromkeys(spec.group for spec in specs))
    nodes = list(dict.fromkeys(spec.node for spec in specs))
    prefill = sum(spec.role is Role.PREFILL for spec in specs)
    prefill_groups = len({spec.group for spec in specs if spec.role is Role.PREFILL})
    engines = _scheduler_engines(specs, groups, nodes)
    counters = np.zeros(5, np.int64)
    counters[LAST_DEALT : LAST_DEALT + 2] = NONE
    work = np.zeros((WORK_ROWS, requests), np.int64)
    work[NO_CACHED_ROWS] = NOTHING_CACHED
    return SchedulerState(
        rules=Rules(
            in_turn=places_in_turn(settings),
            read_rule=RULES[settings.mode],
            alpha_tokens=effective_alpha_tokens(settings),
            beta_tokens=settings.beta_tokens,
            threshold_factor=float(settings.threshold_factor),
            block_tokens=settings.block_tokens,
            generated_reserve_tokens=settings.generated_reserve_tokens,
        ),
        engines=engines,
        snic_tokens_per_s=np.array([spec.snic_tokens_per_s for spec in specs], np.float64),
        groups=_scheduler_groups(engines, len(groups)),
        nodes=np.zeros((2, len(nodes)), np.int64),
        requests=aligned_rows(requests, REQUEST_COLUMNS),
        queues=_queues(COMMON_QUEUES + len(specs)),
        sides=np.full((prefill, len(specs) - prefill), NONE, np.int8),
        no_cached=np.zeros((1, len(specs)), np.int32),
        counters=counters,
        work=work,
        assigned=np.zeros((requests, ASSIGNED_COLUMNS), np.int64),
        first_decode_engine=prefill,
        first_decode_group=prefill_groups,
    )


def aligned_rows(rows: int, columns: int) -> NDArray[np.int32]:
    """Return a table of NONE; rows of at least a cache line begin at cache lines."""
    row_bytes = columns * 4
    memory = np.empty(rows * row_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    table = memory[start : start + rows * row_bytes].view(np.int32).reshape(rows, columns)
    table[:] = NONE
    return table


def _scheduler_engines(
    specs: Sequence[EngineSpec], groups: list[str], nodes: list[str]
) -> IntArray:
    engines = np.zeros((ENGINE_ROWS, len(specs)), np.int64)
    engines[FIRST_SIDE] = NONE
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


def _scheduler_groups(engines: IntArray, count: int) -> IntArray:
    groups = np.zeros((GROUP_ROWS, count), np.int64)
    numbers = np.arange(count)
    groups[FIRST] = np.searchsorted(engines[GROUP], numbers)
    groups[END] = np.searchsorted(engines[GROUP], numbers, side="right")
    for group in range(count):
        groups[LARGEST_HBM, group] = engines[HBM, groups[FIRST, group] : groups[END, group]].max()
    return groups


# ---------------------------------------------------------------- the machine's tables

#: Kinds of events.
SUBMIT, ARRIVE, FETCH, READ, START_PASS, COMPUTED, SENT, FILLED, DECODE_END, READ_OVER = range(10)

#: Columns of ``heap``: when, and from the highest bit down: number of the push, what it is about
#: (an agent, a part of its reads or a unit), kind.  So rows compare as (time, number).
HEAP_TIME, HEAP_REST = range(2)
KIND_BITS, SUBJECT_BITS = 4, 24
NUMBER_SHIFT = KIND_BITS + SUBJECT_BITS
KIND_MASK, SUBJECT_MASK = (1 << KIND_BITS) - 1, (1 << SUBJECT_BITS) - 1

#: ``MachineTables.counters``.
NOW, HANDLED, PUSHED, PENDING, FETCH_DUE, FINISHED, BATCHES, DECISIONS, WINDOWS = range(9)
COUNTERS = 9

#: Columns of ``times``.
(
    T_SUBMITTED,
    T_ASSIGNED,
    T_GRANTED,
    T_LOADED,
    T_PREFILL,
    T_FIRST_TOKEN,
    T_DECODING,
    T_SECOND_TOKEN,
    T_FINISHED,
) = range(len(TurnTimes._fields))

#: Columns of ``flights``, one row, which is one cache line, per agent: its live round's lengths,
#: engines, tokens read on either side and blocks; its chunk in the current pass; who waits behind
#: it for a buffer; its last round.
(
    PROMPT,
    HIT,
    GENERATED,
    PE,
    DE,
    PE_READ,
    DE_READ,
    PE_BLOCKS,
    PROMPT_BLOCKS,
    PARTS_LEFT,
    DONE,
    CHUNK_BSZ,
    NEXT_WAITING,
    LAST_ROUND,
) = range(14)
FLIGHT_COLUMNS = 16

#: Columns of ``MachineTables.engines``: true loads, the queue of a PE, the engine's unit.
REQUESTS, TOKENS, FREE, READING, DIRTY, QUEUE_HEAD, QUEUE_TAIL, UNIT = range(8)
ENGINE_COLUMNS = 8

#: Columns of ``units``; prefill units before decode units, numbered from 0 each.  NEXT_END is
#: the token after which a round ends next, EXPECTED the number of that event's push.
(
    U_FIRST,
    U_COUNT,
    U_BUSY,
    U_CHUNK_HEAD,
    U_NEXT_END,
    U_REQUESTS,
    U_CONTEXT,
    U_WINDOW,
    U_EXPECTED,
    U_SINCE,
    U_STEP_NS,
) = range(11)
UNIT_COLUMNS = 16

#: Columns of ``waiting``: the ends of a node's queue for its buffer.
WAITING_HEAD, WAITING_TAIL = range(2)

#: Places of a decode unit's wheel are counted in blocks of so many.
WHEEL_BLOCK = 64

#: Tables of ``use``.
SNIC_READ_USE, SNIC_WRITE_USE, CNIC_USE = range(3)
USE_TABLES = 3

#: Classes of servers in ``paths``, AT_DE added for the DE's; a row per place of
#: ``derived.CHARGED``, which ends with NO_SERVER.
NO_SERVER, CNIC_READ_SERVER, CNIC_WRITE_SERVER, DRAM_SERVER, SNIC_WRITE_SERVER = range(5)
AT_DE = 8

#: Windows a run may last; the table takes memory only where it is written.
MOST_WINDOWS = 1 << 17
#: An event names what it is about in so many bits; an agent's reads have two parts.
MOST_AGENTS = 1 << SUBJECT_BITS - 1


class MachineTables(NamedTuple):
    """All state of a run but the scheduler's.

    ``heap`` pending events; ``times`` round x stage; ``flights`` per agent, and in arrays of their
    own, which stay in the cache, ``round_of`` its live or latest round and which agent follows it
    in the queue of its PE, in its pass and among the rounds that end together; ``stored_ns`` per
    agent, when its latest blocks are stored.  ``waiting`` and ``free_bytes`` of nodes' buffers.
    ``busy_ns`` per server, in order CNIC read and CNIC write of every engine, DRAM, SNIC write and
    SNIC read of every node; ``use`` bytes per link class, window and node; ``paths`` the servers of
    a kind of step, ``copies`` how often each carries its bytes.  ``unit_tokens`` virtual time of
    units; ``wheel`` the ends of rounds per decode unit, ``wheel_blocks`` how many of its places are
    taken per block; ``ended`` room for the agents that end their rounds together.  ``batches`` and
    ``attention_s`` of forward passes; ``decisions`` as ``simulator.result.Decisions``.
    """

    heap: IntArray
    counters: IntArray
    times: IntArray
    flights: NDArray[np.int32]
    round_of: NDArray[np.int32]
    next_queued: NDArray[np.int32]
    next_chunk: NDArray[np.int32]
    next_ending: NDArray[np.int32]
    stored_ns: IntArray
    engines: IntArray
    units: IntArray
    unit_tokens: FloatArray
    waiting: IntArray
    free_bytes: FloatArray
    busy_ns: IntArray
    use: FloatArray
    paths: NDArray[np.int8]
    copies: FloatArray
    wheel: NDArray[np.int32]
    wheel_blocks: NDArray[np.int32]
    batches: IntArray
    attention_s: FloatArray
    decisions: NDArray[np.int32]
    ended: IntArray
    prefill_units: int
    groups: IntArray


def new_machine(setup: Setup, agents: AgentTable, *, record_decisions: bool) -> MachineTables:
    """Return an idle machine.

    Raises ``ConfigError`` for more agents than an event can name.
    """
    cluster, layout = setup.cluster, cluster_layout(setup.cluster)
    count, nodes, units = agents.agents, cluster.nodes, _units(layout)
    if count > MOST_AGENTS or agents.rounds > np.iinfo(np.int32).max:
        raise ConfigError(
            f"the workload has {count} agents with {agents.rounds} rounds, the compiled core takes "
            f"{MOST_AGENTS} and {np.iinfo(np.int32).max}; run fewer or use the reference core"
        )
    flights = aligned_rows(count, FLIGHT_COLUMNS)
    flights[:, LAST_ROUND] = agents.first_round[1:] - 1
    places = _wheel_places(int(agents.generated_tokens.max()))
    return MachineTables(
        heap=np.zeros((4 * count + 4 * len(units) + 4 * nodes + 1024, 2), np.int64),
        counters=np.zeros(COUNTERS, np.int64),
        # Filled round by round: the first access to a page of memory is slow.
        times=np.empty((agents.rounds, len(TurnTimes._fields)), np.int64),
        flights=flights,
        round_of=(agents.first_round[:-1] - 1).astype(np.int32),
        next_queued=np.full(count, NONE, np.int32),
        next_chunk=np.full(count, NONE, np.int32),
        next_ending=np.zeros(count, np.int32),
        stored_ns=np.zeros(count, np.int64),
        engines=_engines(layout, limits(setup), cluster.engines),
        units=units,
        unit_tokens=np.zeros(len(units)),
        waiting=np.full((nodes, 2), NONE, np.int64),
        free_bytes=_free_bytes(setup),
        busy_ns=np.zeros(2 * cluster.engines + 3 * nodes, np.int64),
        use=np.zeros((USE_TABLES, MOST_WINDOWS, nodes)),
        paths=_paths(),
        copies=np.array(copies(setup)),
        wheel=np.zeros((len(layout.decode_units), places), np.int32),
        wheel_blocks=np.zeros((len(layout.decode_units), places // WHEEL_BLOCK), np.int32),
        batches=np.zeros((1 << 16, 4), np.int64),
        attention_s=np.zeros((1 << 16, 2)),
        decisions=np.zeros((agents.rounds if record_decisions else 0, 8), np.int32),
        ended=np.zeros(count, np.int64),
        prefill_units=len(layout.prefill_units),
        groups=np.array([[g.engines[0], g.engines[-1] + 1] for g in layout.groups], np.int64),
    )


def _engines(layout: ClusterLayout, derived: Limits, count: int) -> IntArray:
    table = np.zeros((count, ENGINE_COLUMNS), np.int64)
    table[:, [QUEUE_HEAD, QUEUE_TAIL]] = NONE
    for units in (layout.prefill_units, layout.decode_units):
        for row, unit in enumerate(units):
            table[unit[0] : unit[-1] + 1, UNIT] = row
    table[:, FREE] = derived.decode_hbm_tokens
    return table


def _units(layout: ClusterLayout) -> IntArray:
    units = [*layout.prefill_units, *layout.decode_units]
    table = np.zeros((len(units), UNIT_COLUMNS), np.int64)
    table[:, U_FIRST] = [unit[0] for unit in units]
    table[:, U_COUNT] = [len(unit) for unit in units]
    table[:, U_CHUNK_HEAD] = NONE
    table[:, U_STEP_NS] = 1
    return table


def _wheel_places(longest_generated_tokens: int) -> int:
    """Return a power of two above the distance of any two ends of rounds decoded together."""
    places = WHEEL_BLOCK
    while places < longest_generated_tokens + 8:
        places *= 2
    return places


def _free_bytes(setup: Setup) -> FloatArray:
    at_prefill, at_decode = buffer_bytes(setup)
    free = np.full(setup.cluster.nodes, at_decode)
    free[: setup.cluster.prefill_nodes] = at_prefill
    return free


def _paths() -> NDArray[np.int8]:
    servers = {
        Link.PE_CNIC_READ: CNIC_READ_SERVER,
        Link.PE_CNIC_WRITE: CNIC_WRITE_SERVER,
        Link.PE_DRAM: DRAM_SERVER,
        Link.DE_CNIC_READ: AT_DE + CNIC_READ_SERVER,
        Link.DE_CNIC_WRITE: AT_DE + CNIC_WRITE_SERVER,
        Link.DE_DRAM: AT_DE + DRAM_SERVER,
        Link.DE_SNIC_WRITE: AT_DE + SNIC_WRITE_SERVER,
    }
    table = np.zeros((len(CHARGED), len(servers) + 1), np.int8)
    for row, movement in enumerate(CHARGED):
        loaded = [servers[link] for link in movement.links if link in servers]
        table[row, : len(loaded)] = loaded
    return table


# ---------------------------------------------------------------- what does not change in a run

Number = TypeVar("Number", np.int32, np.int64, np.float32)


class Constants(NamedTuple):
    """Numbers of a setup; ``layer_kinds`` as ``rules.LayerKinds``."""

    cluster_nodes: int
    prefill_nodes: int
    prefill_engines: int
    prefill_node_engines: int
    decode_node_engines: int
    block_tokens: int
    block_bytes: float
    layer_kinds: FloatArray
    layers: int
    oracle: bool
    resident: bool
    overlap_passes: bool
    overhead_ns: int
    interval_ns: int
    latency_ns: int
    admission_ns: int
    window_ns: int
    snic_bytes_per_s: float
    snic_write_bytes_per_s: float
    prefill_cnic_bytes_per_s: float
    decode_cnic_bytes_per_s: float
    dram_bytes_per_s: float
    batch_cap_tokens: int
    prefill_hbm_tokens: int
    affordable_s: float
    pair_s: float
    index_pair_s: float
    attention_token_s: float
    window_tokens: int
    attention_batch_s: float
    batch_s: float
    feed_forward_token_s: float
    exchange_token_s: float
    interleaved: bool
    step_s: float
    request_s: float
    decode_pair_s: float
    decode_index_pair_s: float
    decode_window_tokens: int


class Rounds(NamedTuple):
    """Columns of the agent table; ``waiting_for`` are the rounds sub-agents wait for, sorted."""

    first_round: IntArray
    prompt: NDArray[np.int32]
    hit: NDArray[np.int32]
    generated: NDArray[np.int32]
    delay_s: NDArray[np.float32]
    start_ns: IntArray
    waiting_for: IntArray
    waiting_agent: IntArray


class World(NamedTuple):
    """What a compiled handler may use: machine, numbers of the setup, rounds, scheduler."""

    machine: MachineTables
    constants: Constants
    rounds: Rounds
    scheduler: SchedulerState


def constants(setup: Setup, window_ns: int) -> Constants:
    """Return the numbers of a setup."""
    cluster, derived = setup.cluster, limits(setup)
    prefill, decode = setup.model.prefill, setup.model.decode
    return Constants(
        cluster_nodes=cluster.nodes,
        prefill_nodes=cluster.prefill_nodes,
        prefill_engines=cluster.prefill_engines,
        prefill_node_engines=cluster.node_engines(Role.PREFILL),
        decode_node_engines=cluster.node_engines(Role.DECODE),
        block_tokens=cluster.block_tokens,
        block_bytes=derived.block_bytes,
        layer_kinds=np.array(layer_kinds(setup)),
        layers=setup.model.layers,
        oracle=setup.mode is Mode.ORACLE,
        resident=not setup.mode.layerwise,
        overlap_passes=cluster.overlap_passes,
        overhead_ns=to_ns(cluster.request_overhead_s),
        interval_ns=to_ns(cluster.fetch_interval_s),
        latency_ns=to_ns(cluster.read_latency_s),
        admission_ns=to_ns(cluster.decode_admission_s),
        window_ns=window_ns,
        snic_bytes_per_s=cluster.snic_bytes_per_s,
        snic_write_bytes_per_s=cluster.snic_write_bytes_per_s,
        prefill_cnic_bytes_per_s=cluster.cnic_bytes_per_s * cluster.gpus_per_engine(Role.PREFILL),
        decode_cnic_bytes_per_s=cluster.cnic_bytes_per_s * cluster.gpus_per_engine(Role.DECODE),
        dram_bytes_per_s=cluster.dram_bytes_per_s,
        batch_cap_tokens=derived.batch_cap_tokens,
        prefill_hbm_tokens=derived.prefill_hbm_tokens,
        # As ComputeQuota: one FLOP is one second here.
        affordable_s=(derived.compute_quota_s - prefill.attention_batch_s) * 1.0,
        pair_s=prefill.pair_s,
        index_pair_s=prefill.index_pair_s,
        attention_token_s=prefill.attention_token_s,
        window_tokens=prefill.window_tokens or UNBOUNDED_TOKENS,
        attention_batch_s=prefill.attention_batch_s,
        batch_s=prefill.batch_s,
        feed_forward_token_s=prefill.feed_forward_token_s,
        exchange_token_s=prefill.exchange_token_s,
        interleaved=prefill.interleaved,
        step_s=decode.step_s,
        request_s=decode.request_s,
        decode_pair_s=decode.pair_s,
        decode_index_pair_s=decode.index_pair_s,
        decode_window_tokens=decode.window_tokens,
    )


def rounds(agents: AgentTable) -> Rounds:
    """Return the agents' columns, copied only where numba would take them for another type."""
    waiting = np.flatnonzero(agents.start_after_round >= 0)
    order = np.argsort(agents.start_after_round[waiting], kind="stable")
    return Rounds(
        first_round=_column(agents.first_round, np.int64),
        prompt=_column(agents.prompt_tokens, np.int32),
        hit=_column(agents.hit_tokens, np.int32),
        generated=_column(agents.generated_tokens, np.int32),
        delay_s=_column(agents.delay_s, np.float32),
        start_ns=whole_ns(agents.start_s),
        waiting_for=_column(agents.start_after_round[waiting][order], np.int64),
        waiting_agent=waiting[order],
    )


def whole_ns(seconds: NDArray[np.floating]) -> IntArray:
    """Round as ``rules.to_ns`` does."""
    return (seconds.astype(np.float64) * 1e9 + 0.5).astype(np.int64)


def _column(values: NDArray[Number], dtype: type[Number]) -> NDArray[Number]:
    return np.require(values, dtype, ["C", "A", "W"])
