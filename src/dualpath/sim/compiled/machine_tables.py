"""The compiled core's machine: tables with named rows and columns, like those in ``tables``.

An agent has one live round at a time, so what the reference core keeps per round in flight is kept
per agent here, and an agent's number is its request's number at the scheduler.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.agents import AgentTable
from dualpath.core.modes import Mode
from dualpath.datapath.plan import Link
from dualpath.policy.batching import UNBOUNDED_TOKENS
from dualpath.sim.compiled.tables import NONE
from dualpath.sim.costs import to_ns
from dualpath.sim.derived import Limits, buffer_bytes, limits, step_links
from dualpath.sim.layout import ClusterLayout, cluster_layout
from dualpath.sim.result import IntArray, TurnTimes
from dualpath.sim.settings import Setup

FloatArray = NDArray[np.float64]

#: Kinds of events; an event's payload is its kind in the lowest 4 bits and a number above.
(
    SUBMIT,
    ARRIVE,
    FETCH,
    READ,
    TIER_LOADED,
    START_PASS,
    COMPUTED,
    SENT,
    FILLED,
    DECODE_END,
    SNIC_END,
    READ_OVER,
) = range(12)
KIND_BITS = 4
#: Versions of a unit's or a node's next event stand above its number.
UNIT_BITS = 20

#: Columns of ``heap``: (time, number of the push, payload).
HEAP_TIME, HEAP_NUMBER, HEAP_PAYLOAD = range(3)

#: ``counters``.
(
    NOW,
    HANDLED,
    PUSHED,
    PENDING,
    FETCH_DUE,
    FINISHED,
    BATCHES,
    DECISIONS,
    TIER_USED,
    TIER_OLDEST,
    TIER_NEWEST,
    TIER_HITS,
    WINDOWS,
) = range(13)

#: Columns of ``flights``, one row per agent: engines and blocks of its live round, tokens it reads
#: on either side, what it counts for at either engine, and its neighbours in the lists it is in.
(
    ROUND,
    PE,
    DE,
    PE_BLOCKS,
    DE_BLOCKS,
    TIER_BLOCKS,
    PROMPT_BLOCKS,
    PARTS_LEFT,
    DONE,
    PE_READ,
    DE_READ,
    PE_TOKENS,
    DE_TOKENS,
    NEXT_WAITING,
    WAITS_AT_PE,
    NEXT_QUEUED,
    CHUNK_CACHED,
    CHUNK_BSZ,
    NEXT_CHUNK,
    CONTEXT,
    TIER_TOKENS,
    TIER_OLDER,
    TIER_NEWER,
) = range(23)
FLIGHT_COLUMNS = 24

#: Rows of ``engines``: true loads, and the queue of a PE.
(
    REQUESTS,
    TOKENS,
    FREE,
    READ_TOKENS,
    DIRTY,
    QUEUE_HEAD,
    QUEUE_TAIL,
    UNIT,
) = range(8)

#: Rows of ``units``; prefill units before decode units, numbered from 0 each.
(
    U_FIRST,
    U_COUNT,
    U_BUSY,
    U_CHUNK_HEAD,
    U_ROOT,
    U_REQUESTS,
    U_CONTEXT,
    U_WINDOW,
    U_VERSION,
    U_SINCE,
    U_STEP_NS,
    U_JOINED,
) = range(12)

#: Rows of ``nodes``: waiting line of the buffer; root, reads, version and time of an equal SNIC.
N_HEAD, N_TAIL, N_ROOT, N_READS, N_VERSION, N_SINCE, N_COUNT = range(7)

#: Rows of ``node_bytes``: free buffer bytes; bytes every read of an equal SNIC was served.
FREE_BYTES, SERVED_BYTES = range(2)

#: Tables of ``use``.
SNIC_READ_USE, SNIC_WRITE_USE, CNIC_USE = range(3)

#: Classes of servers in ``paths``.
NO_SERVER, CNIC_READ_SERVER, CNIC_WRITE_SERVER, DRAM_SERVER, SNIC_WRITE_SERVER = range(5)
#: Rows of ``paths``: what each kind of step loads at its PE (columns 0-3) and DE (columns 4-7).
(
    READ_PE_PATH,
    READ_DE_PATH,
    LOAD_PE_PATH,
    LOAD_DE_PATH,
    RELOAD_PATH,
    SEND_PATH,
    FILL_PATH,
    PERSIST_PATH,
) = range(8)

#: Windows a run may last; the table takes memory only where it is written.
MOST_WINDOWS = 1 << 17


class Constants(NamedTuple):
    """Numbers of a setup that do not change during a run."""

    gpus_per_node: int
    cluster_nodes: int
    prefill_nodes: int
    block_tokens: int
    block_bytes: float
    layers: int
    oracle: bool
    resident: bool
    equal_snic: bool
    overhead_ns: int
    interval_ns: int
    latency_ns: int
    admission_ns: int
    window_ns: int
    snic_bytes_per_s: float
    snic_write_bytes_per_s: float
    cnic_bytes_per_s: float
    dram_bytes_per_s: float
    batch_cap_tokens: int
    prefill_hbm_tokens: int
    affordable_s: float
    tier_tokens: int
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
    """Columns of the agent table; ``waiting_for`` are sub-agents' rounds to wait for, sorted."""

    first_round: IntArray
    agent: NDArray[np.int32]
    prompt: NDArray[np.int32]
    hit: NDArray[np.int32]
    generated: NDArray[np.int32]
    delay_ns: IntArray
    start_ns: IntArray
    waiting_for: IntArray
    waiting_agent: IntArray


class Machine(NamedTuple):
    """All state of a run but the scheduler's.

    ``heap`` pending events; ``times`` stage × round; ``flights`` per agent; ``stored_ns`` per
    agent, when its latest blocks are stored; ``busy_ns`` per server, in order CNIC read and CNIC
    write of every engine, DRAM, SNIC write and SNIC read of every node; ``use`` bytes per link
    class, window and node; ``keys`` and ``links`` nodes of the pairing heaps (decode: the agents;
    equal SNICs: two per agent from there on); ``unit_tokens`` virtual time of decode units;
    ``batches`` and ``attention_s`` of forward passes; ``decisions`` as ``sim.result.Decisions``.
    """

    heap: IntArray
    counters: IntArray
    times: IntArray
    flights: NDArray[np.int32]
    stored_ns: IntArray
    engines: IntArray
    units: IntArray
    unit_tokens: FloatArray
    nodes: IntArray
    node_bytes: FloatArray
    busy_ns: IntArray
    use: FloatArray
    paths: NDArray[np.int8]
    keys: FloatArray
    links: IntArray
    batches: IntArray
    attention_s: FloatArray
    decisions: NDArray[np.int32]
    ended: IntArray
    prefill_units: int
    groups: IntArray


def constants(setup: Setup, window_ns: int) -> Constants:
    """Return the numbers of a setup."""
    cluster, derived = setup.cluster, limits(setup)
    prefill, decode = setup.model.prefill, setup.model.decode
    tier_bytes = cluster.dram_tier_bytes * cluster.nodes
    return Constants(
        gpus_per_node=cluster.gpus_per_node,
        cluster_nodes=cluster.nodes,
        prefill_nodes=cluster.prefill_nodes,
        block_tokens=cluster.block_tokens,
        block_bytes=derived.block_bytes,
        layers=setup.model.layers,
        oracle=setup.mode is Mode.ORACLE,
        resident=not setup.mode.layerwise,
        equal_snic=cluster.snic_sharing == "equal",
        overhead_ns=to_ns(cluster.request_overhead_s),
        interval_ns=to_ns(cluster.fetch_interval_s),
        latency_ns=to_ns(cluster.read_latency_s),
        admission_ns=to_ns(cluster.decode_admission_s),
        window_ns=window_ns,
        snic_bytes_per_s=cluster.snic_bytes_per_s,
        snic_write_bytes_per_s=cluster.snic_write_bytes_per_s,
        cnic_bytes_per_s=cluster.cnic_bytes_per_s,
        dram_bytes_per_s=cluster.dram_bytes_per_s,
        batch_cap_tokens=derived.batch_cap_tokens,
        prefill_hbm_tokens=derived.prefill_hbm_tokens,
        # As ComputeQuota: one FLOP is one second here.
        affordable_s=(derived.compute_quota_s - prefill.attention_batch_s) * 1.0,
        tier_tokens=int(tier_bytes / setup.model.kv_bytes_per_token),
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
        decode_window_tokens=decode.window_tokens or UNBOUNDED_TOKENS,
    )


def rounds(agents: AgentTable) -> Rounds:
    """Return the agents' columns, delays and starts in nanoseconds."""
    waiting = np.flatnonzero(agents.start_after_round >= 0)
    order = np.argsort(agents.start_after_round[waiting], kind="stable")
    return Rounds(
        first_round=agents.first_round,
        agent=np.repeat(np.arange(agents.agents, dtype=np.int32), np.diff(agents.first_round)),
        prompt=agents.prompt_tokens,
        hit=agents.hit_tokens,
        generated=agents.generated_tokens,
        delay_ns=_ns(agents.delay_s),
        start_ns=_ns(agents.start_s),
        waiting_for=agents.start_after_round[waiting][order],
        waiting_agent=waiting[order],
    )


def new_machine(setup: Setup, agents: AgentTable, *, record_decisions: bool) -> Machine:
    """Return an idle machine."""
    cluster, derived, layout = setup.cluster, limits(setup), cluster_layout(setup.cluster)
    count, nodes, engines = agents.agents, cluster.nodes, cluster.engines
    node_table = np.zeros((7, nodes), np.int64)
    node_table[[N_HEAD, N_TAIL, N_ROOT]] = NONE
    node_bytes = np.zeros((2, nodes))
    at_prefill, at_decode = buffer_bytes(setup)
    node_bytes[FREE_BYTES] = at_decode
    node_bytes[FREE_BYTES, : cluster.prefill_nodes] = at_prefill
    counters = np.zeros(13, np.int64)
    counters[[TIER_OLDEST, TIER_NEWEST]] = NONE
    units = [*layout.prefill_units, *layout.decode_units]
    return Machine(
        heap=np.zeros((4 * count + 4 * len(units) + 4 * nodes + 1024, 3), np.int64),
        counters=counters,
        times=np.full((len(TurnTimes._fields), agents.rounds), NONE, np.int64),
        flights=np.full((count, FLIGHT_COLUMNS), NONE, np.int32),
        stored_ns=np.zeros(count, np.int64),
        engines=_engines(layout, derived, engines),
        units=_units(units),
        unit_tokens=np.zeros(len(units)),
        nodes=node_table,
        node_bytes=node_bytes,
        busy_ns=np.zeros(2 * engines + 3 * nodes, np.int64),
        use=np.zeros((3, MOST_WINDOWS, nodes)),
        paths=_paths(),
        keys=np.zeros(3 * count),
        links=np.full((3 * count, 3), NONE, np.int64),
        batches=np.zeros((1 << 16, 4), np.int64),
        attention_s=np.zeros((1 << 16, 2)),
        decisions=np.zeros((agents.rounds if record_decisions else 0, 8), np.int32),
        ended=np.zeros(count, np.int64),
        prefill_units=len(layout.prefill_units),
        groups=np.array([[g.engines[0], g.engines[-1] + 1] for g in layout.groups], np.int64),
    )


def _ns(seconds: NDArray[np.floating]) -> IntArray:
    """Round as ``costs.to_ns`` does."""
    return (seconds.astype(np.float64) * 1e9 + 0.5).astype(np.int64)


def _engines(layout: ClusterLayout, derived: Limits, count: int) -> IntArray:
    table = np.zeros((8, count), np.int64)
    table[[QUEUE_HEAD, QUEUE_TAIL]] = NONE
    for units in (layout.prefill_units, layout.decode_units):
        for row, unit in enumerate(units):
            table[UNIT, unit[0] : unit[-1] + 1] = row
    table[FREE] = derived.decode_hbm_tokens
    return table


def _units(units: list[range]) -> IntArray:
    table = np.zeros((12, len(units)), np.int64)
    table[U_FIRST] = [unit[0] for unit in units]
    table[U_COUNT] = [len(unit) for unit in units]
    table[[U_CHUNK_HEAD, U_ROOT]] = NONE
    table[U_STEP_NS] = 1
    return table


def _paths() -> NDArray[np.int8]:
    servers = {
        Link.PE_CNIC_READ: CNIC_READ_SERVER,
        Link.PE_CNIC_WRITE: CNIC_WRITE_SERVER,
        Link.DE_CNIC_READ: CNIC_READ_SERVER,
        Link.DE_CNIC_WRITE: CNIC_WRITE_SERVER,
        Link.PE_DRAM: DRAM_SERVER,
        Link.DE_DRAM: DRAM_SERVER,
        Link.DE_SNIC_WRITE: SNIC_WRITE_SERVER,
    }
    table = np.zeros((8, 8), np.int8)
    for row, links in enumerate(step_links()):
        for first, side in ((0, "pe"), (4, "de")):
            loaded = [servers[link] for link in links if link in servers and link.startswith(side)]
            table[row, first : first + len(loaded)] = loaded
    return table
