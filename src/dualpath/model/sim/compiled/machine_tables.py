"""The compiled core's machine: tables with named rows and columns (``columns``).

An agent has one live round at a time, so what the reference core keeps per round in flight is kept
per agent here, and an agent's number is its request's number at the scheduler.  Whatever an event
needs of an agent stands side by side: with many agents, most of the time is waiting for memory.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.columns.agent_table import AgentTable
from dualpath.model.sim.compiled.columns import (
    AT_DE,
    CNIC_READ_SERVER,
    CNIC_WRITE_SERVER,
    COUNTERS,
    DRAM_SERVER,
    ENGINE_COLUMNS,
    FLIGHT_COLUMNS,
    FREE,
    FREE_BYTES,
    KEPT_COLUMNS,
    KEY,
    LAST_ROUND,
    LINK_COLUMNS,
    N_HEAD,
    N_NEWEST,
    N_OLDEST,
    N_ROOT,
    N_TAIL,
    NODE_COLUMNS,
    NONE,
    QUEUE_HEAD,
    QUEUE_TAIL,
    SNIC_WRITE_SERVER,
    SUBJECT_BITS,
    U_CHUNK_HEAD,
    U_COUNT,
    U_FIRST,
    U_STEP_NS,
    UNIT,
    UNIT_COLUMNS,
    USE_TABLES,
    WHEEL_BLOCK,
)
from dualpath.model.sim.compiled.constants import Constants, Rounds
from dualpath.model.sim.compiled.tables import SchedulerState, aligned_rows
from dualpath.model.sim.derived import CHARGED, Limits, buffer_bytes, copies, keeps, limits
from dualpath.model.sim.layout import ClusterLayout, cluster_layout
from dualpath.model.sim.result import FloatArray, IntArray, TurnTimes
from dualpath.model.sim.settings import Setup
from dualpath.plan.movements import Link

#: Windows a run may last; the table takes memory only where it is written.
MOST_WINDOWS = 1 << 17
#: An event names what it is about in so many bits; an agent's reads have two parts.
MOST_AGENTS = 1 << SUBJECT_BITS - 1


class MachineTables(NamedTuple):
    """All state of a run but the scheduler's.

    ``heap`` pending events; ``times`` round × stage; ``flights`` per agent, and in arrays of their
    own, which stay in the cache, ``round_of`` its live or latest round and whom it is followed by
    in the queue of its PE, in its pass and among the rounds that end together; ``stored_ns`` per
    agent, when its latest blocks are stored.  ``busy_ns`` per server, in order CNIC read and CNIC
    write of every engine, DRAM, SNIC write and SNIC read of every node; ``use`` bytes per link
    class, window and node; ``paths`` the servers of a kind of step, ``copies`` how often each
    carries its bytes; ``kept`` what the buffers of nodes keep, by node and agent; ``links`` nodes
    of the equal SNICs' pairing heaps, two per agent, and ``keys`` their first column as floats.
    ``unit_tokens`` virtual time of units; ``wheel`` the ends of rounds per decode unit,
    ``wheel_blocks`` how many of its places are taken per block; ``ended`` room for the agents whose
    rounds end together.  ``batches`` and ``attention_s`` of forward passes; ``decisions`` as
    ``sim.result.Decisions``.
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
    nodes: IntArray
    node_bytes: FloatArray
    kept: NDArray[np.int32]
    busy_ns: IntArray
    use: FloatArray
    paths: NDArray[np.int8]
    copies: FloatArray
    keys: FloatArray
    links: IntArray
    wheel: NDArray[np.int32]
    wheel_blocks: NDArray[np.int32]
    batches: IntArray
    attention_s: FloatArray
    decisions: NDArray[np.int32]
    ended: IntArray
    prefill_units: int
    groups: IntArray


class World(NamedTuple):
    """All that a compiled handler may touch: machine, numbers of the setup, rounds, scheduler."""

    machine: MachineTables
    constants: Constants
    rounds: Rounds
    scheduler: SchedulerState


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
    counters = np.zeros(COUNTERS, np.int64)
    flights = aligned_rows(count, FLIGHT_COLUMNS)
    flights[:, LAST_ROUND] = agents.first_round[1:] - 1
    # Two rows at least, or numba takes the keys for an array of another layout.
    reads = 2 * count if cluster.snic_sharing == "equal" else 2
    links = np.full((reads, LINK_COLUMNS), NONE, np.int64)
    places = _wheel_places(int(agents.generated_tokens.max()))
    return MachineTables(
        heap=np.zeros((4 * count + 4 * len(units) + 4 * nodes + 1024, 2), np.int64),
        counters=counters,
        # Filled round by round: memory is slow to come.
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
        nodes=_nodes(nodes),
        node_bytes=_node_bytes(setup),
        kept=np.zeros(((nodes, count) if keeps(setup) else (1, 1)) + (KEPT_COLUMNS,), np.int32),
        busy_ns=np.zeros(2 * cluster.engines + 3 * nodes, np.int64),
        use=np.zeros((USE_TABLES, MOST_WINDOWS, nodes)),
        paths=_paths(),
        copies=np.array(copies(setup)),
        keys=links.view(np.float64)[:, KEY],
        links=links,
        wheel=np.zeros((len(layout.decode_units), places), np.int32),
        wheel_blocks=np.zeros((len(layout.decode_units), places // WHEEL_BLOCK), np.int32),
        batches=np.zeros((1 << 16, 4), np.int64),
        attention_s=np.zeros((1 << 16, 2)),
        decisions=np.zeros((agents.rounds if record_decisions else 0, 10), np.int32),
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
    """Return a power of two no two ends of rounds that are decoded together are apart."""
    places = WHEEL_BLOCK
    while places < longest_generated_tokens + 8:
        places *= 2
    return places


def _nodes(count: int) -> IntArray:
    table = np.zeros((count, NODE_COLUMNS), np.int64)
    table[:, [N_HEAD, N_TAIL, N_ROOT, N_OLDEST, N_NEWEST]] = NONE
    return table


def _node_bytes(setup: Setup) -> FloatArray:
    table = np.zeros((setup.cluster.nodes, 2))
    at_prefill, at_decode = buffer_bytes(setup)
    table[:, FREE_BYTES] = at_decode
    table[: setup.cluster.prefill_nodes, FREE_BYTES] = at_prefill
    return table


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
