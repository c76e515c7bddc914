"""Control messages between router and engines.

Messages are msgpack-encoded tagged structs in an envelope (``core.envelopes``).  An engine opens a
session (``core.sessions``) with ``Hello`` and is answered with ``Welcome`` or ``Refused``.  Bulk
data never travels here.

    router → engine   Welcome Refused Heard PeerUp PeerDown IsGone Lookup Sync Assign Read Persist
                      Release Retain Drained
    engine → router   Hello Report Kept Gone LookupDone Synced Reserved ReadDone PrefillDone KvInHbm
                      Released Failed Goodbye

Those about one request are in ``core.request_messages``, which has their order.
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

#: Raised by one whenever a message changes its meaning; both ends must agree.
PROTOCOL_VERSION = 8

#: Of a key in ``Kept``, and how many of them at a time.
KEPT_KEY_BYTES = 8
MOST_KEPT_KEYS = 4096


class NodeDramShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The DRAM that an engine shares with others of its node.

    ``mark`` tells it from any other DRAM of that node; ``tokens``: how much KV all may keep there.
    """

    mark: Name
    tokens: Annotated[int, msgspec.Meta(ge=0)]


class Hello(Message, frozen=True, tag=True):
    """First message of an engine; asks for a session (after a restart with a new epoch).

    ``greeting`` grows by one with every session that this process asks for: a repeated or late
    ``Hello`` is told from the wish to begin anew.  What sessions before have left in doubt:
    ``unsettled`` are attempts whose transfers this PE has not seen end, ``quarantined`` are
    attempts whose slots in this DE's buffer one of ``writers`` may still write to.

    ``api_url`` is the base URL of the engine's own HTTP server; ``node`` and ``group`` place it
    (§6.1: engines of one node share a group, and a storage NIC).  ``hbm_tokens`` and
    ``buffer_tokens`` are capacities in tokens; ``limits`` carries what the front end has to know
    of the engine (``max_model_len``, ``vocab_size``, ``served_model_name`` …), ``rates`` what it
    knows of its own speed, ``adapters`` the LoRA adapters that requests may name.  ``dp`` is its
    place in a data-parallel group, whose ranks join and are lost together.  ``node_dram`` is what
    it shares with other engines, if anything.
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
    greeting: int = 1
    unsettled: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    writers: tuple[Writer, ...] = ()
    dp: GroupRank | None = None
    adapters: tuple[Adapter, ...] = ()
    node_dram: NodeDramShare | None = None


class Welcome(Message, frozen=True, tag=True):
    """Answer to the ``Hello`` with this ``greeting``: the session of its envelope has begun.

    ``peers`` are the engines of the other role.  ``keep_blocks``: whether blocks are to stay in the
    buffer for later requests.
    """

    peers: tuple[EngineAddress, ...]
    greeting: int = 1
    keep_blocks: bool = True


class Refused(Message, frozen=True, tag=True):
    """The engine may not join; ``reason`` names value, limit and remedy.

    So is a rank answered whose group is not complete yet: it goes on greeting.  ``again``: the
    session of its envelope is over, or none has begun; a new greeting is welcome.
    """

    reason: str
    again: bool = False


class Heard(Message, frozen=True, tag=True):
    """Nothing but its envelope: the router lives, and how far the engine's messages have come."""


class PeerUp(Message, frozen=True, tag=True):
    """An engine of the other role joined."""

    address: EngineAddress


class PeerDown(Message, frozen=True, tag=True):
    """An engine of the other role is lost; its transfers must be treated as failed.

    ``certain`` says that its process is known to be gone and writes nothing more.
    """

    engine_id: Name
    epoch: Name
    certain: bool


class IsGone(Message, frozen=True, tag=True):
    """Ask an engine on the same machine whether a lost process has ended.

    Answered with ``Gone`` if it has, else not at all; the router asks again.
    """

    writer: Writer


class Gone(Message, frozen=True, tag=True):
    """A machine's own word that a process has ended: its transfers have ended with it."""

    writer: Writer


class Lookup(Message, frozen=True, tag=True):
    """Ask how many blocks at the head of ``keys`` are stored.

    Answered within ``deadline_s`` (from receipt) with what is known by then.
    """

    call_id: int
    keys: tuple[bytes, ...]
    deadline_s: float


class LookupDone(Message, frozen=True, tag=True):
    """Answer to ``Lookup``; ``partial``: its deadline came first, there may be more blocks."""

    call_id: int
    hit_blocks: int
    partial: bool = False


class Sync(Message, frozen=True, tag=True):
    """Ask whether everything sent to this engine before has been taken up.

    The engine answers in the order in which it takes up commands: what it sent before its answer
    is at the router before it, and what reaches the engine on another connection after it cannot
    overtake an earlier command.
    """

    call_id: int


class Synced(Message, frozen=True, tag=True):
    """Answer to ``Sync``."""

    call_id: int


class Retain(Message, frozen=True, tag=True):
    """Keep blocks in the DRAM buffer of a DE, for a turn that may follow; not answered.

    For ``retain_s`` those of them that no request holds leave after all others that none holds; 0:
    before all others.  ``fetch``: what is not there is read, when no request waits for storage,
    into slots that none wants.  The turn is expected in ``expected_s``: of what is kept, that
    leaves first whose turn is expected last.
    """

    keys: tuple[bytes, ...]
    retain_s: float
    fetch: bool = False
    expected_s: float = 0.0


class Drained(Message, frozen=True, tag=True):
    """To an engine that drains: nothing of any request is on it, and nothing will be."""


class StorageUse(msgspec.Struct, frozen=True):
    """What a storage's janitor said last: how much lies there, how much may, and since when.

    ``age_s`` is how long ago that was.  ``surveyed``: whether it knows everything that lies there.
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
    ``engine/counters.py``).  ``unhealthy`` says why the data plane cannot go on, if it cannot;
    ``storage`` how full the storage is, where one looks after it;
    ``draining`` why the engine wants nothing new, if so: it goes once it is told ``Drained``.
    ``kept_buffer_tokens``: how many of the free tokens of the buffer keep their KV for requests to
    come.
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
    kept_buffer_tokens: int = 0


class Kept(Message, frozen=True, tag=True):
    """Blocks that the engine's buffer keeps since it last said so, and such that are gone.

    By the first ``KEPT_KEY_BYTES`` of their keys.  A session begins with none; at most
    ``MOST_KEPT_KEYS`` are told at a time.  The router only plans with them: what a request gets
    stands in ``Reserved``.  ``in_node``: they lie in the DRAM that the engine shares
    (``Hello.node_dram``), as far as it has seen itself.
    """

    added: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()
    in_node: bool = False


class Goodbye(Message, frozen=True, tag=True):
    """The engine leaves on purpose; ``settled`` if all of its transfers are over."""

    reason: str
    settled: bool = True


RouterMessage = (
    Welcome
    | Refused
    | Heard
    | PeerUp
    | PeerDown
    | IsGone
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
    Hello
    | Report
    | Kept
    | Gone
    | LookupDone
    | Synced
    | Reserved
    | ReadDone
    | PrefillDone
    | KvInHbm
    | Released
    | Failed
    | Goodbye
)
