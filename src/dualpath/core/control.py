"""Control messages between router and engines.

Messages are msgpack-encoded tagged structs in an envelope (``core.envelopes``).  An engine opens a
session (``core.sessions``) with ``Register``; the answer is ``Registered`` or ``Refused``.  KV is
never sent over this connection.

    router → engine   Registered Refused Ack PeerUp PeerDown LivenessProbe Lookup Sync Assign Read
                      Persist Release Retain Drained
    engine → router   Register Report CacheUpdate ConfirmedDead LookupDone Synced Reserved ReadDone
                      PrefillDone KvInHbm Released Failed Deregister

The messages about one request, and their order, are in ``core.request_messages``.
"""

from typing import Annotated, Any

import msgspec

from dualpath.core.adapters import Adapter
from dualpath.core.addresses import EngineAddress, Writer
from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import GroupRank
from dualpath.core.message import Message
from dualpath.core.names import Name
from dualpath.core.rates import Rates
from dualpath.core.request_messages import (
    Assign,
    Failed,
    KvInHbm,
    Persist,
    PrefillDone,
    Read,
    ReadDone,
    Release,
    Released,
    Reserved,
)

#: Incremented whenever a message changes its form or meaning; both ends must agree.
PROTOCOL_VERSION = 9

#: Length of a truncated key in ``CacheUpdate``, and how many keys one message has.
CACHE_UPDATE_KEY_BYTES = 8
MAX_CACHE_UPDATE_KEYS = 4096


class NodeDramShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The DRAM that an engine shares with other engines of its node.

    ``directory_id`` identifies it on that node; ``tokens`` is its capacity for KV of all engines
    together.
    """

    directory_id: Name
    tokens: Annotated[int, msgspec.Meta(ge=0)]


class Register(Message, frozen=True, tag=True):
    """First message of an engine; asks for a session (after a restart with a new epoch).

    ``registration`` numbers the sessions that this process asks for, by which the router
    distinguishes a resent or late ``Register`` from a request for a new session.  In-doubt attempts
    of earlier sessions: ``unsettled`` are attempts whose transfers this PE has not seen end,
    ``quarantined`` are attempts whose slots in this DE's buffer one of ``writers`` may still write
    to.

    ``api_url`` is the base URL of the engine's own HTTP server; ``node`` and ``group`` place it
    (§6.1: engines of one node share a group, and a storage NIC).  ``hbm_tokens`` and
    ``buffer_tokens`` are capacities in tokens; ``limits`` are the engine's limits that the front
    end enforces (``max_model_len``, ``vocab_size``, ``served_model_name`` …), ``rates`` its
    measured or configured speeds, ``adapters`` the LoRA adapters that requests may name.  ``dp`` is
    its place in a data-parallel group, whose ranks join and are lost together.  ``node_dram`` is
    the DRAM that it shares with other engines, None without.
    """

    version: int
    address: EngineAddress
    namespace: StoreNamespace
    api_url: Name
    node: Name
    group: Name
    mode: str
    hbm_tokens: int
    buffer_tokens: int
    snic_bytes_per_s: float | None = None
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    rates: Rates = Rates()
    registration: int = 1
    unsettled: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    writers: tuple[Writer, ...] = ()
    dp: GroupRank | None = None
    adapters: tuple[Adapter, ...] = ()
    node_dram: NodeDramShare | None = None


class Registered(Message, frozen=True, tag=True):
    """Answer to the ``Register`` with this ``registration``: the session of its envelope has begun.

    ``peers`` are the engines of the other role.  ``enable_caching``: whether the engine caches
    blocks in its DRAM buffer for later requests.
    """

    peers: tuple[EngineAddress, ...]
    registration: int = 1
    enable_caching: bool = True


class Refused(Message, frozen=True, tag=True):
    """The engine may not join; ``reason`` names value, limit and remedy.

    Also the answer to a rank while its group is incomplete: the rank goes on registering.
    ``reregister``: the session of its envelope is over or never began, and the engine has to
    register again.
    """

    reason: str
    reregister: bool = False


class Ack(Message, frozen=True, tag=True):
    """Heartbeat of the router; its envelope acknowledges the engine's messages."""


class PeerUp(Message, frozen=True, tag=True):
    """An engine of the other role joined."""

    address: EngineAddress


class PeerDown(Message, frozen=True, tag=True):
    """An engine of the other role is lost; its transfers must be treated as failed.

    ``certain``: its process is known to have ended and writes nothing more.
    """

    engine_id: Name
    epoch: Name
    certain: bool


class LivenessProbe(Message, frozen=True, tag=True):
    """Ask an engine on the same machine whether a lost process has ended.

    Answered with ``ConfirmedDead`` if it has, otherwise not at all; the router asks repeatedly.
    """

    writer: Writer


class ConfirmedDead(Message, frozen=True, tag=True):
    """The process table of a machine proves that a process has ended, and so have its transfers."""

    writer: Writer


class Lookup(Message, frozen=True, tag=True):
    """Ask how many blocks at the head of ``keys`` are stored.

    Answered within ``deadline_s`` (from receipt) with the blocks found by then.
    """

    call_id: int
    keys: tuple[bytes, ...]
    deadline_s: float


class LookupDone(Message, frozen=True, tag=True):
    """Answer to ``Lookup``; ``partial``: the deadline came first, more blocks may be stored."""

    call_id: int
    hit_blocks: int
    partial: bool = False


class Sync(Message, frozen=True, tag=True):
    """A barrier: ask for an answer once all earlier messages to this engine are processed.

    The engine answers in the order of commands.  So its earlier messages reach the router before
    the answer, and a request that reaches the engine on another connection afterwards cannot
    overtake an earlier command.
    """

    call_id: int


class Synced(Message, frozen=True, tag=True):
    """Answer to ``Sync``."""

    call_id: int


class Retain(Message, frozen=True, tag=True):
    """Retain blocks in the DRAM buffer of a DE for a turn that may follow; not answered.

    For ``retain_s`` these blocks are evicted after all other unreferenced blocks; 0: before all
    others.  ``fetch``: missing blocks are read into free slots while no request waits for storage.
    The turn is expected in ``expected_s``: of retained blocks, the one with the latest expected
    turn is evicted first.
    """

    keys: tuple[bytes, ...]
    retain_s: float
    fetch: bool = False
    expected_s: float = 0.0


class Drained(Message, frozen=True, tag=True):
    """To an engine that drains: it has no request left and gets none."""


class StorageUse(msgspec.Struct, frozen=True):
    """The last status of a storage's janitor: bytes and blocks stored, and the quota.

    ``age_s`` is the age of that status.  ``surveyed``: whether the janitor has listed the whole
    storage.
    """

    used_bytes: int
    quota_bytes: int
    blocks: int
    age_s: float
    surveyed: bool


class Report(Message, frozen=True, tag=True):
    """Load of an engine (§6.1), sent on change and as heartbeat.

    ``unfinished_requests`` seq_e, ``unfinished_tokens`` tok_e, ``read_queue_tokens`` read_q of the
    engine's node, free HBM and free DRAM buffer in tokens.  ``assign_seq`` is the last ``Assign``
    already counted in.  ``counters`` are monotonic totals for metrics (names in
    ``engine/counters.py``).  ``unhealthy``: why the data plane is blocked or broken, None if it
    works; ``storage``: how full the storage is, None without a janitor; ``draining``: why the
    engine drains, None if it does not: it leaves once it receives ``Drained``.
    ``cached_buffer_tokens``: how many of the free tokens of the buffer hold cached KV.
    """

    report_seq: int
    assign_seq: int
    unfinished_requests: int
    unfinished_tokens: int
    read_queue_tokens: int
    free_hbm_tokens: int
    free_buffer_tokens: int
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    unhealthy: str | None = None
    storage: StorageUse | None = None
    draining: str | None = None
    cached_buffer_tokens: int = 0


class CacheUpdate(Message, frozen=True, tag=True):
    """Blocks that were added to the engine's DRAM cache or removed since the last update.

    Each is named by the first ``CACHE_UPDATE_KEY_BYTES`` of its key.  A session begins with an
    empty cache; an update has at most ``MAX_CACHE_UPDATE_KEYS`` keys of each list.  The router uses
    them as hints for planning: the blocks that a request finds are in ``Reserved``.  ``in_node``:
    the blocks are in the DRAM that engines of the node share (``Register.node_dram``), as far as
    this engine has observed it.
    """

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    in_node: bool = False


class Deregister(Message, frozen=True, tag=True):
    """The engine shuts down; ``settled`` if all of its transfers are over."""

    reason: str
    settled: bool = True


RouterMessage = (
    Registered
    | Refused
    | Ack
    | PeerUp
    | PeerDown
    | LivenessProbe
    | Lookup
    | Sync
    | Assign
    | Read
    | Persist
    | Release
    | Retain
    | Drained
)
EngineMessage = (
    Register
    | Report
    | CacheUpdate
    | ConfirmedDead
    | LookupDone
    | Synced
    | Reserved
    | ReadDone
    | PrefillDone
    | KvInHbm
    | Released
    | Failed
    | Deregister
)
