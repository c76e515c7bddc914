"""Control messages between router and engines.

Messages are msgpack-encoded tagged structs in an envelope (``core.envelopes``).  An engine opens a
session (``core.sessions``) with ``Register``; the answer is ``Registered`` or ``Refused``.  KV is
never sent over this connection.

    router → engine   Registered Refused Ack PeerUp PeerDown LivenessProbe Lookup Sync Assign
                      ReserveThird Read Persist Release Retain Drained
    engine → router   Register Report CacheUpdate ConfirmedDead LookupDone Synced ReservationWaits
                      Reserved ThirdRefused ReadDone FetchDone PrefillDone KvInHbm RequestOver
                      StoredChain Released Failed Deregister

The messages about one request, and their order, are in ``core.request_messages``.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from dualpath.core.blocks import StoreNamespace, TenantTag
from dualpath.core.cluster import EngineAddress, GroupRank, Writer
from dualpath.core.errors import IncompatibleError
from dualpath.core.key_cache import Adapter
from dualpath.core.names import Name, in_one_line
from dualpath.core.rates import Rates
from dualpath.core.runs import BlockRun, HitRun

# ----------------------------------------------------------------------------------------- message
# The base class of control messages.


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all control messages."""


# -------------------------------------------------------------------------------- request messages
# Control messages about one request, from its assignment to an engine until its slots are free.
#
# Their order (Fig. 4 of the paper):
#
#     Assign(DE, reserve whole prompt, and read if the DE reads) → ReadDone, or Reserved if the DE
#     does not read or the PE does → Assign(PE, reserve and read) if it reads → ReadDone → vLLM
#     request at the PE carrying a ``PrefillTransfer``, which has the assignment of a PE that reads
#     nothing → first token and PrefillDone
#     → vLLM request at the DE carrying a ``DecodeTransfer``, upon which it writes the prompt's new
#     blocks → KvInHbm (H2D done, slots of the DE buffer free) → tokens → RequestOver
#
# Another DE may decode the prompt: after PrefillDone
#
#     Assign(other DE, fetch) → FetchDone → Sync(first DE) → Synced → Release(first DE) → vLLM
#     request at the other DE, as above
#
# With third DEs, between the grant of the DE and the first read: ReserveThird → Reserved, or
# ThirdRefused; then Read as at a DE; after PrefillDone Release → Released.


class GrantRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A storage read that begins when the slots of an ``Assign`` are granted.

    ``run``, without slots, are blocks to read, as in ``Read``; ``first_slot`` is the position of
    its first block among the reserved ones, whose keys are those of the ``Assign``.  Blocks that
    the engine caches are not read.  If it caches fewer than the first ``cached_blocks`` of the
    reserved ones, it reads nothing and answers with ``Reserved``: the read is planned again.  After
    ``deadline_s`` from the grant it answers with the blocks verified so far.  ``parent`` is the key
    before the first reserved block.  ``announced``: ``Reserved`` is sent at the grant as well, as
    another engine waits for it.
    """

    run: HitRun
    first_slot: Annotated[int, msgspec.Meta(ge=0)]
    deadline_s: float
    cached_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    parent: bytes = b""
    announced: bool = False

    def behind(self, cached_blocks: int) -> HitRun | None:
        """Return what is to be read if the first ``cached_blocks`` reserved blocks are cached.

        None if nothing is: all is cached, or so few blocks are that the read is planned again.
        """
        blocks, cut = self.run.blocks, max(cached_blocks - self.first_slot, 0)
        if cached_blocks < self.cached_blocks or cut >= blocks.count:
            return None
        return self.run.part(BlockRun(blocks.first + cut, blocks.count - cut))


class Fetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a DE finds a prompt's KV that it is to decode: in ``slots`` of another DE's buffer.

    ``slots`` are those of the prompt's blocks, in order, at ``engine_id`` in this ``epoch``, which
    writes to them no more.  A fetch that is not over ``deadline_s`` after its receipt has failed.
    """

    engine_id: Name
    epoch: Name
    slots: tuple[int, ...]
    deadline_s: float


class Assign(Message, frozen=True, tag=True):
    """A request of ``tokens`` now counts against this engine's load.

    A ``Report`` counts it if its envelope acknowledges this message.
    ``reserve_blocks`` > 0 asks for that many Full Block slots of the engine's DRAM buffer, granted
    FIFO.  ``keys`` are those of these blocks, or of the first of them: the longest cached prefix of
    the first ``shared_blocks`` is granted its cached slots.  For a DE they are those of all full
    blocks of the prompt, under which it stores them (``DecodeTransfer``).  The answer is
    ``Reserved``, or with ``read`` ``ReadDone``.  With ``read`` an engine that cannot grant the
    slots at once answers ``ReservationWaits``, and then sends ``Reserved`` at the grant as well.

    ``hbm_prompt_tokens`` > 0, without ``read``: the PE will send the prompt's KV into this DE's
    HBM.  The DE then also reserves HBM for the prompt and for ``hbm_new_tokens`` generated tokens,
    FIFO after the slots; ``Reserved`` names its blocks.

    ``fetch``, without ``read`` and ``hbm_prompt_tokens``: the DE reads the prompt's KV from there
    into its own slots, but for the blocks that it caches.  It grants the slots at once or not at
    all, since another request may hold slots here and wait for those of the other DE.  The answer
    is ``FetchDone``.

    ``peer`` is named as by ``PeerUp`` before anything else of this message.

    ``used_blocks`` > 0: storage counts the first so many blocks of the prompt as used now, which it
    does for each look-up.  The router knows that they are stored without one.
    """

    request_id: Name
    tokens: int
    reserve_blocks: int
    keys: tuple[bytes, ...] = ()
    shared_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    read: GrantRead | None = None
    hbm_prompt_tokens: int = 0
    hbm_new_tokens: int = 0
    fetch: Fetch | None = None
    used_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    peer: EngineAddress | None = None


class ReserveThird(Message, frozen=True, tag=True):
    """A third DE is to serve these blocks of a request from its buffer, if that costs it nothing.

    ``keys`` are those of consecutive hit blocks.  The first ``cached_blocks`` of them have to be in
    its buffer; ``Read`` orders the read of the others.  It is answered at once: with ``Reserved``,
    one slot per block, or with ``ThirdRefused``, where a block is not cached, one would have to be
    evicted, a reservation waits, or fewer than ``spare_blocks`` slots would be left for a request
    of the engine's own.  The request does not count against the engine's load, only its reads do.
    """

    request_id: Name
    keys: tuple[bytes, ...]
    cached_blocks: Annotated[int, msgspec.Meta(ge=0)]
    spare_blocks: Annotated[int, msgspec.Meta(ge=0)]


class ThirdRefused(Message, frozen=True, tag=True):
    """The engine serves nothing of the request of a ``ReserveThird``, and why."""

    request_id: Name
    reason: str


class ReservationWaits(Message, frozen=True, tag=True):
    """The slots of an ``Assign`` with ``read`` are not free; they are granted later."""

    request_id: Name


class Reserved(Message, frozen=True, tag=True):
    """Buffer slots are granted, in block order; ``wait_s`` is how long the request waited for them.

    The first ``cached_blocks`` of them hold their blocks already.  They are read-only, as other
    requests may share them.  ``hbm_blocks`` are the HBM blocks of the prompt, in block order, if
    the ``Assign`` asked for HBM.
    """

    request_id: Name
    slots: tuple[int, ...]
    wait_s: float
    cached_blocks: int = 0
    hbm_blocks: tuple[int, ...] = ()


class Read(Message, frozen=True, tag=True):
    """Read a run of blocks from storage into its slots.

    Their keys are those of the request's ``Assign`` from ``first_key`` on.  The first
    ``run.windowless`` blocks are read without their window layers.  After ``deadline_s`` (from
    receipt) the engine stops and answers with the blocks verified so far.  ``parent`` is the key
    before the first one.
    """

    request_id: Name
    run: HitRun
    first_key: Annotated[int, msgspec.Meta(ge=0)]
    deadline_s: float
    parent: bytes = b""


class ReadDone(Message, frozen=True, tag=True):
    """Outcome of ``Read``: its first ``good_blocks`` are in the buffer and verified.

    ``slots`` are all current slots of the request: after a deadline the engine may have replaced
    slots that a late read could still write to.  After ``Assign`` with ``read``, ``wait_s`` and
    ``cached_blocks`` are those of ``Reserved``.
    """

    request_id: Name
    good_blocks: int
    reason: str | None
    bytes_read: int
    queue_s: float
    read_s: float
    slots: tuple[int, ...]
    wait_s: float = 0.0
    cached_blocks: int = 0


class FetchDone(Message, frozen=True, tag=True):
    """Answer to ``Assign`` with ``fetch``: all of the prompt's KV is in ``slots``, in block order.

    Or ``failure`` is why it is not; then nothing of it is used, and the router sends ``Release``.
    The first ``cached_blocks`` of the slots had their blocks already.
    """

    request_id: Name
    slots: tuple[int, ...] = ()
    cached_blocks: int = 0
    failure: str | None = None


class Persist(Message, frozen=True, tag=True):
    """Write the prompt's blocks from ``first_block`` on to storage.

    A ``DecodeTransfer`` has the same effect.  This message comes before a ``Release`` where the DE
    may not have got the transfer, and has no effect if it has.

    Keys are those of the request's ``Assign``.  The KV of the first ``blocks`` full blocks of the
    prompt is complete, and no transfer writes to it any more; those before ``first_block`` are
    stored already.  ``tenant`` owns the others.  If the PE has sent the KV into the DE's HBM,
    ``hits`` are the runs of the prompt's blocks that are in the DE's buffer, with their slots; all
    other blocks are in HBM only.
    """

    request_id: Name
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    blocks: Annotated[int, msgspec.Meta(ge=0)]
    tenant: TenantTag = ""
    hits: tuple[HitRun, ...] = ()


class PrefillDone(Message, frozen=True, tag=True):
    """The PE's last transfer for the request is over; the DE has all KV iff no failure.

    The router regards a prefill as complete only after this message: the engine's HTTP answer
    proves that the first token was computed, not that the KV arrived.  Without a failure the PE has
    released the request, as if it had got a ``Release`` and had answered ``Released``.

    For metrics: ``forward_s`` is the time of the request's forward passes, ``transfer_s`` the part
    of it in which they waited for transfers that did not overlap with computation; 0 in modes
    without transfers.
    """

    request_id: Name
    failure: str | None = None
    forward_s: float = 0.0
    transfer_s: float = 0.0


class KvInHbm(Message, frozen=True, tag=True):
    """The DE has copied the prompt's KV to its HBM and freed the slots of its buffer.

    An event of a ``Report``.
    """

    request_id: Name
    h2d_s: float


class RequestOver(Message, frozen=True, tag=True):
    """A request has ended at the DE by itself, after ``KvInHbm``: the DE has released it.

    An event of a ``Report``.
    """

    request_id: Name


class StoredChain(Message, frozen=True, tag=True):
    """A request has ended at the DE by itself, and all blocks that it has written are stored.

    ``prompt_tail`` is the key of the last full block of its prompt, ``generated`` are the keys of
    the blocks behind it, in order.  ``new_blocks`` of all that it has written were not stored
    before.  A part of a ``Report``, which may be lost: the router then asks what is stored.
    """

    prompt_tail: bytes
    generated: tuple[bytes, ...]
    new_blocks: Annotated[int, msgspec.Meta(ge=0)]


class Release(Message, frozen=True, tag=True):
    """The request is over on this engine; slots are freed once nothing can write to them.

    ``writer_certain`` is False while a prefill engine may still write into the slots, or into HBM
    reserved for the request: both are then quarantined until another ``Release`` has it True.
    ``assignment`` is the number of the ``CallAssignment`` of the request, 0 if it has none: a PE
    that has not got the call yet refuses it from now on.
    """

    request_id: Name
    reason: str
    writer_certain: bool = True
    assignment: Annotated[int, msgspec.Meta(ge=0)] = 0


class Released(Message, frozen=True, tag=True):
    """All of the request's slots are free again.

    From a third DE also the proof that it has held them until then: it drops them by itself only at
    the end of the session.
    """

    request_id: Name


class Failed(Message, frozen=True, tag=True):
    """A command for a request failed; ``reason`` is the whole error message."""

    request_id: Name
    reason: str


#: Incremented whenever a message changes its form or meaning; both ends must agree.
PROTOCOL_VERSION = 13

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
    of earlier sessions: for ``unsettled`` attempts this PE has not seen the transfers end; one of
    ``writers`` may still write to the slots of ``quarantined`` attempts in this DE's buffer.

    ``api_url`` is the base URL of the engine's own HTTP server.  Engines of one ``node`` share a
    storage NIC.  ``group`` is the name of its role, or the scheduling group (§6.1) that it was
    given, which counts before the scheduler's ``engine_groups``.  ``hbm_tokens`` and
    ``buffer_tokens`` are capacities in tokens; ``limits`` are the engine's limits that the front
    end enforces (``max_model_len``, ``vocab_size``, ``served_model_name`` …), ``rates`` its
    measured or configured speeds, ``adapters`` the LoRA adapters that requests may name.  ``dp`` is
    its place in a data-parallel group; the ranks of a group join and are lost together.
    ``node_dram`` is the DRAM that it shares with other engines, None without.
    ``hbm_refusal``: why it takes no part in hand-overs in HBM, empty if it does.
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
    hbm_refusal: str = ""


class Registered(Message, frozen=True, tag=True):
    """Answer to the ``Register`` with this ``registration``: the session of its envelope has begun.

    ``enable_caching``: whether the engine caches blocks in its DRAM buffer for later requests.
    ``session`` is that of the envelope, for an engine's data plane.
    """

    registration: int = 1
    enable_caching: bool = True
    session: Name = ""


class Refused(Message, frozen=True, tag=True):
    """The engine may not join; ``reason`` names value, limit and remedy.

    Also the answer to a rank while its group is incomplete: the rank goes on registering.
    ``reregister``: the session of its envelope is over or never began, and the engine has to
    register again.
    """

    reason: str
    reregister: bool = False


class Ack(Message, frozen=True, tag=True):
    """Heartbeat of the router; its envelope acknowledges the engine's messages.

    ``heartbeat_s`` is the interval of heartbeats of both ends from now on, None for
    ``core.sessions.HEARTBEAT_S``: in large clusters the router asks for fewer of them.
    """

    heartbeat_s: float | None = None


class PeerUp(Message, frozen=True, tag=True):
    """An engine with which this engine shares a request: of the other role, or to a DE another DE.

    Each engine is named once in a session, with the first request that both share, so that no
    message grows with the number of engines: by its ``Assign`` if there is one, else by this
    message.  A DE needs to know which process of a PE may write to its buffer, and the agents of
    PEs have no metadata there; it connects to a DE from which it is to fetch KV.  With a
    ``call_id`` it is answered with ``Synced``.
    """

    address: EngineAddress
    call_id: int = 0


class PeerDown(Message, frozen=True, tag=True):
    """An engine that ``PeerUp`` has named is lost; its transfers must be treated as failed.

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
    """Answer to ``Sync``, or to ``PeerUp``."""

    call_id: int


class Retain(Message, frozen=True, tag=True):
    """Retain blocks in the DRAM buffer of a DE for a turn that may follow; not answered.

    They are the full blocks of a prompt that it was assigned, of which ``prompt_tail`` is the last
    key (none if that is empty), and those of ``keys`` behind it.  A DE that does not know the
    prompt any more does nothing.

    For ``retain_s`` these blocks are evicted after all other unreferenced blocks; 0: before all
    others.  ``fetch``: missing blocks are read into free slots while no request waits for storage.
    The turn is expected in ``expected_s``: of retained blocks, the one with the latest expected
    turn is evicted first.
    """

    prompt_tail: bytes
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


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load of an engine (§6.1), as the engine reports it and the scheduler's rules read it.

    ``unfinished_requests`` seq_e, ``unfinished_tokens`` tok_e, ``read_queue_tokens`` the engine's
    part of its node's read_q, free HBM and free DRAM buffer in tokens; ``cached_buffer_tokens`` of
    the free buffer hold cached KV.  ``quarantined_buffer_tokens`` and ``quarantined_hbm_tokens``
    are not free, as a process of unknown state may write to them.  ``unallocated_hbm_tokens``: what
    the counted requests will take of a DE's free HBM that is not allocated to them yet.
    """

    unfinished_requests: int
    unfinished_tokens: int
    read_queue_tokens: int
    free_hbm_tokens: int
    free_buffer_tokens: int
    cached_buffer_tokens: int = 0
    quarantined_buffer_tokens: int = 0
    unallocated_hbm_tokens: int = 0
    quarantined_hbm_tokens: int = 0


class Report(Message, frozen=True, tag=True):
    """State of an engine, sent on change and as heartbeat; may be lost, unless it has ``events``.

    ``report_seq`` numbers an engine's reports: of one that is older than the last one received only
    the events count.  ``load`` counts each request if the report's envelope acknowledges its
    ``Assign``, until the engine has released it, and those of ``called``, of which the assignment
    has come with their call.  ``counters`` are monotonic totals for metrics (names in
    ``engine/counters.py``), empty if they were sent a moment ago.  ``unhealthy``: why the data
    plane is blocked or broken, None if it works; ``storage``: how full the storage is, None without
    a janitor; ``draining``: why the engine drains, None if it does not: it leaves once it receives
    ``Drained``.  ``steps`` grows while the engine's core works: with each layer and each step that
    it computes, and while it waits for transfers, which have a limit of their own.  ``stored``:
    chains that are stored since the last report.
    """

    report_seq: int
    load: Load
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    unhealthy: str | None = None
    storage: StorageUse | None = None
    draining: str | None = None
    steps: int = 0
    called: tuple[Name, ...] = ()
    events: tuple[KvInHbm | RequestOver, ...] = ()
    stored: tuple[StoredChain, ...] = ()


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
    | ReserveThird
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
    | ReservationWaits
    | Reserved
    | ThirdRefused
    | ReadDone
    | FetchDone
    | PrefillDone
    | KvInHbm
    | RequestOver
    | StoredChain
    | Released
    | Failed
    | Deregister
)


# --------------------------------------------------------------------------------------- envelopes
# The wire form of control messages: each is in an envelope with its place in a session.

M = TypeVar("M", bound=Message)


class Envelope(
    msgspec.Struct, Generic[M], frozen=True, array_like=True, forbid_unknown_fields=True
):
    """A message on the wire, with its place in a session (``core.sessions.Channel``).

    ``session`` is empty before one has begun.  ``number`` counts the messages of one direction
    from 1 on, in order; 0 marks messages that may be lost.  ``received`` acknowledges all messages
    of the other direction up to this number.
    """

    session: Name
    number: Annotated[int, msgspec.Meta(ge=0)]
    received: Annotated[int, msgspec.Meta(ge=0)]
    message: M


_Decoded = TypeVar("_Decoded")

FromRouter = Envelope[RouterMessage]
FromEngine = Envelope[EngineMessage]

_ENCODER = msgspec.msgpack.Encoder()
_ROUTER_DECODER: msgspec.msgpack.Decoder[FromRouter] = msgspec.msgpack.Decoder(FromRouter)
_ENGINE_DECODER: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def unnumbered(message: M, session: str = "") -> Envelope[M]:
    """Return a message in an envelope without a number, outside of any channel."""
    return Envelope(session, 0, 0, message)


def encode(envelope: Envelope[M]) -> bytes:
    """Return the wire form of a message in its envelope."""
    return _ENCODER.encode(envelope)


def encode_batches(envelopes: Iterable[Envelope[M]], max_bytes: int) -> list[bytes]:
    """Return frames of several messages each, in order, of at most ``most_bytes``.

    A larger message is a frame of its own.
    """
    frames: list[list[msgspec.Raw]] = []
    size_bytes = max_bytes
    for envelope in envelopes:
        encoded = encode(envelope)
        size_bytes += len(encoded)
        if size_bytes > max_bytes:
            frames.append([])
            size_bytes = len(encoded)
        frames[-1].append(msgspec.Raw(encoded))
    return [_ENCODER.encode(frame) for frame in frames]


def decode_router_message(frame: bytes) -> FromRouter:
    """Decode what a router sent; raises ``IncompatibleError`` for anything malformed."""
    return decode_with(_ROUTER_DECODER, frame)


def decode_engine_message(frame: bytes) -> FromEngine:
    """Decode what an engine sent; raises ``IncompatibleError`` for anything malformed."""
    return decode_with(_ENGINE_DECODER, frame)


def decode_with(decoder: msgspec.msgpack.Decoder[_Decoded], frame: bytes) -> _Decoded:
    """Decode a frame of other messages; raises ``IncompatibleError`` for anything malformed."""
    try:
        return decoder.decode(frame)
    # ValueError: text that is not UTF-8; RecursionError: nested deeper than any message.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise IncompatibleError(
            f"control message of {len(frame)} bytes is not of protocol {PROTOCOL_VERSION}: "
            f"{in_one_line(str(error))}; run the same dualpath version on router and engines"
        ) from error
