"""Control messages between router and engines.

Messages are msgpack-encoded tagged structs in an envelope (``core.envelopes``).  An engine opens a
session (``core.sessions``) with ``Hello`` and is answered with ``Welcome`` or ``Refused``.  Bulk
data never travels here.

    router → engine   Welcome Refused Heard PeerUp PeerDown IsGone Lookup Sync Assign Read Persist
                      Release Retain Drained
    engine → router   Hello Report Kept Gone LookupDone Synced Reserved ReadDone PrefillDone KvInHbm
                      Released Failed Goodbye

Life of a request (Fig. 4 of the paper):

    Assign(DE, reserve whole prompt) → Reserved → Assign(PE) and Read on the chosen side(s)
    → ReadDone → vLLM request at the PE carrying a ``PrefillTransfer`` → first token and PrefillDone
    → Persist(DE, the prompt's new blocks) and vLLM request at the DE carrying a ``DecodeTransfer``
    → KvInHbm (H2D done, DE buffer given back) → tokens → Release at both.
"""

from typing import Any

import msgspec

from dualpath.core.adapters import Adapter
from dualpath.core.addresses import EngineAddress, Writer
from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockOrigin, StoreNamespace
from dualpath.core.cluster import GroupRank
from dualpath.core.names import Name
from dualpath.core.rates import Rates
from dualpath.core.runs import HitRun

#: Raised by one whenever a message changes its meaning; both ends must agree.
PROTOCOL_VERSION = 6

#: Of a key in ``Kept``, and how many of them at a time.
KEPT_KEY_BYTES = 8
MOST_KEPT_KEYS = 4096


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all control messages."""


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
    place in a data-parallel group, whose ranks join and are lost together.
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
    limits: dict[str, Any] = {}
    rates: Rates = Rates()
    greeting: int = 1
    unsettled: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    writers: tuple[Writer, ...] = ()
    dp: GroupRank | None = None
    adapters: tuple[Adapter, ...] = ()


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


class Assign(Message, frozen=True, tag=True):
    """A request now counts against this engine's load.

    ``assign_seq`` grows by one per assignment to this engine; reports echo the last one seen.
    ``reserve_blocks`` > 0 asks for that many Full Block slots of the engine's DRAM buffer, granted
    FIFO and answered with ``Reserved``.  ``keys`` name the first of these blocks: of them, as many
    as the buffer keeps from the first on get the slots they lie in.
    """

    assign_seq: int
    request_id: Name
    tokens: int
    reserve_blocks: int
    keys: tuple[bytes, ...] = ()


class Reserved(Message, frozen=True, tag=True):
    """Buffer slots are granted, in block order; ``wait_s`` is what the request waited for them.

    The first ``kept_blocks`` of them hold their blocks already.  They are to be read only: other
    requests may have them too.
    """

    request_id: Name
    slots: tuple[int, ...]
    wait_s: float
    kept_blocks: int = 0


class Read(Message, frozen=True, tag=True):
    """Read a run of blocks, whose keys are ``keys``, from storage into its slots.

    The first ``run.windowless`` of them without window layers.
    After ``deadline_s`` (from receipt) the engine gives up and answers with the blocks verified so
    far.  ``parent`` is the key before the first.
    """

    request_id: Name
    run: HitRun
    keys: tuple[bytes, ...]
    deadline_s: float
    parent: bytes = b""


class ReadDone(Message, frozen=True, tag=True):
    """Outcome of ``Read``: its first ``good_blocks`` are in the buffer and verified.

    ``slots`` are all of the request's slots as they are *now*: after a deadline the engine may have
    replaced slots that a late read could still write to.
    """

    request_id: Name
    good_blocks: int
    reason: str | None
    bytes_read: int
    queue_s: float
    read_s: float
    slots: tuple[int, ...]


class Persist(Message, frozen=True, tag=True):
    """Write the prompt's blocks from ``first_block`` on to storage under ``keys``.

    ``origin`` has the key before the first of them.  The prompt's KV is complete and nobody writes
    to it any more; ``hit_keys`` are the keys of its first blocks, which are stored.
    """

    request_id: Name
    first_block: int
    keys: tuple[bytes, ...]
    origin: BlockOrigin = UNKNOWN_ORIGIN
    hit_keys: tuple[bytes, ...] = ()


class PrefillDone(Message, frozen=True, tag=True):
    """The PE's last transfer for the request is over; the DE buffer is complete iff no failure.

    The router takes a prefill as done only with this message: the engine's own answer says that
    the first token was computed, not that the KV arrived.

    For metrics: ``forward_s`` is what the request's forward passes took, ``transfer_s`` what of it
    they waited for transfers that computation did not hide; 0 where no bytes move.
    """

    request_id: Name
    failure: str | None = None
    forward_s: float = 0.0
    transfer_s: float = 0.0


class KvInHbm(Message, frozen=True, tag=True):
    """The DE has copied the prompt's KV to its HBM and given the buffer back."""

    request_id: Name
    h2d_s: float


class Release(Message, frozen=True, tag=True):
    """The request is over on this engine; slots are freed once nothing can write to them.

    ``writer_certain`` is False while a prefill engine may still write into the slots: they then
    stay in quarantine until another ``Release`` of the request says that none does.
    """

    request_id: Name
    reason: str
    writer_certain: bool = True


class Retain(Message, frozen=True, tag=True):
    """Keep blocks in the DRAM buffer of a DE, for a turn that may follow; not answered.

    For ``retain_s`` those of them that no request holds leave after all others that none holds; 0:
    before all others.  ``fetch``: what is not there is read, when no request waits for storage,
    into slots that none wants.
    """

    keys: tuple[bytes, ...]
    retain_s: float
    fetch: bool = False


class Drained(Message, frozen=True, tag=True):
    """To an engine that drains: nothing of any request is on it, and nothing will be."""


class Released(Message, frozen=True, tag=True):
    """All of the request's slots are free again."""

    request_id: Name


class Failed(Message, frozen=True, tag=True):
    """A command for a request could not be carried out; ``reason`` is complete."""

    request_id: Name
    reason: str


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
    counters: dict[str, float] = {}
    unhealthy: str | None = None
    storage: StorageUse | None = None
    draining: str | None = None
    kept_buffer_tokens: int = 0


class Kept(Message, frozen=True, tag=True):
    """Blocks that the engine's buffer keeps since it last said so, and such that are gone.

    By the first ``KEPT_KEY_BYTES`` of their keys.  A session begins with none; at most
    ``MOST_KEPT_KEYS`` are told at a time.  The router only plans with them: what a request gets
    stands in ``Reserved``.
    """

    added: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()


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
