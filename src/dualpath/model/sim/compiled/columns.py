"""Named rows and columns of the compiled core's machine (``machine_tables``), kinds of events."""

from dualpath.model.sim.compiled.tables import NONE as NONE
from dualpath.model.sim.result import TurnTimes

#: Kinds of events.
(
    SUBMIT,
    ARRIVE,
    FETCH,
    READ,
    START_PASS,
    COMPUTED,
    SENT,
    FILLED,
    DECODE_END,
    SNIC_END,
    READ_OVER,
) = range(11)

#: Columns of ``heap``: when, and from the highest bit down: number of the push, what it is about
#: (an agent, a part of its reads, a unit or a node), kind.  So rows compare as (time, number).
HEAP_TIME, HEAP_REST = range(2)
KIND_BITS, SUBJECT_BITS = 4, 24
NUMBER_SHIFT = KIND_BITS + SUBJECT_BITS
KIND_MASK, SUBJECT_MASK = (1 << KIND_BITS) - 1, (1 << SUBJECT_BITS) - 1

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
    TIER_HITS,
    WINDOWS,
) = range(10)
COUNTERS = 10

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

#: Columns of ``flights``, one row per agent: its live round's lengths, engines, tokens read on
#: either side and blocks; its chunk in the current pass; who waits behind it for a buffer; its last
#: round.  That is one cache line with the tokens that its PE keeps; in the next are those that its
#: DE keeps, and those hit tokens that are computed again.
(
    PROMPT,
    HIT,
    GENERATED,
    PE,
    DE,
    PE_READ,
    DE_READ,
    PE_BLOCKS,
    DE_BLOCKS,
    PROMPT_BLOCKS,
    PARTS_LEFT,
    DONE,
    CHUNK_BSZ,
    NEXT_WAITING,
    LAST_ROUND,
    PE_KEPT,
    DE_KEPT,
    RECOMPUTED,
) = range(18)
FLIGHT_COLUMNS = 32

#: Columns of ``engines``: true loads, the queue of a PE, where the engine is.
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

#: Columns of ``nodes``: ends of the queue for the buffer; an equal SNIC's root, reads,
#: number of the push of its next end, time of the last look, reads so far; blocks kept in all, and
#: the agents used least and most recently of those that something is kept of; uses so far, and the
#: sums of intervals and errors of ``policy.reuse``.
N_HEAD, N_TAIL, N_ROOT, N_READS, N_EXPECTED, N_SINCE, N_COUNT, N_KEPT, N_OLDEST, N_NEWEST = range(
    10
)
N_USES, N_INTERVALS, N_ERRORS = range(10, 13)
NODE_COLUMNS = 13

#: Columns of ``kept``: blocks at the head of an agent's context, its neighbours by latest use; its
#: latest use and the interval before it (0: none).
K_BLOCKS, K_OLDER, K_NEWER, K_USED, K_INTERVAL = range(5)
KEPT_COLUMNS = 5

#: Columns of ``node_bytes``: free buffer bytes; bytes every read of an equal SNIC was served.
FREE_BYTES, SERVED_BYTES = range(2)

#: Columns of ``links``, nodes of pairing heaps: the key (a float, see ``MachineTables.keys``),
#: order among equal keys, first child, next sibling.
KEY, ORDER, CHILD, SIBLING = range(4)
LINK_COLUMNS = 4

#: Places of a decode unit's wheel are counted in blocks of so many.
WHEEL_BLOCK = 64

#: Tables of ``use``.
SNIC_READ_USE, SNIC_WRITE_USE, CNIC_USE = range(3)
USE_TABLES = 3

#: Classes of servers in ``paths``, AT_DE added for the DE's; a row per place of
#: ``derived.CHARGED``, which ends with NO_SERVER.
NO_SERVER, CNIC_READ_SERVER, CNIC_WRITE_SERVER, DRAM_SERVER, SNIC_WRITE_SERVER = range(5)
AT_DE = 8
