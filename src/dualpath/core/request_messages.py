"""Control messages about one request, from its assignment to an engine until its slots are free.

Their order (Fig. 4 of the paper):

    Assign(DE, reserve whole prompt) → Reserved → Assign(PE) and Read on the chosen side(s)
    → ReadDone → vLLM request at the PE carrying a ``PrefillTransfer`` → first token and PrefillDone
    → Persist(DE, the prompt's new blocks) and vLLM request at the DE carrying a ``DecodeTransfer``
    → KvInHbm (H2D done, slots of the DE buffer free) → tokens → Release at both → Released
"""

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockOrigin
from dualpath.core.message import Message
from dualpath.core.names import Name
from dualpath.core.runs import HitRun


class Assign(Message, frozen=True, tag=True):
    """A request now counts against this engine's load.

    ``assign_seq`` grows by one per assignment to this engine; reports echo the last one seen.
    ``reserve_blocks`` > 0 asks for that many Full Block slots of the engine's DRAM buffer, granted
    FIFO and answered with ``Reserved``.  ``keys`` are those of the first of these blocks: the
    longest cached prefix of them is granted its cached slots.
    """

    assign_seq: int
    request_id: Name
    tokens: int
    reserve_blocks: int
    keys: tuple[bytes, ...] = ()


class Reserved(Message, frozen=True, tag=True):
    """Buffer slots are granted, in block order; ``wait_s`` is how long the request waited for them.

    The first ``cached_blocks`` of them hold their blocks already.  They are read-only, as other
    requests may share them.
    """

    request_id: Name
    slots: tuple[int, ...]
    wait_s: float
    cached_blocks: int = 0


class Read(Message, frozen=True, tag=True):
    """Read a run of blocks with these ``keys`` from storage into its slots.

    The first ``run.windowless`` blocks are read without their window layers.  After ``deadline_s``
    (from receipt) the engine stops and answers with the blocks verified so far.  ``parent`` is the
    key before the first one.
    """

    request_id: Name
    run: HitRun
    keys: tuple[bytes, ...]
    deadline_s: float
    parent: bytes = b""


class ReadDone(Message, frozen=True, tag=True):
    """Outcome of ``Read``: its first ``good_blocks`` are in the buffer and verified.

    ``slots`` are all current slots of the request: after a deadline the engine may have replaced
    slots that a late read could still write to.
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

    ``origin`` has the key before the first of them.  The prompt's KV is complete and no transfer
    writes to it any more; ``hit_keys`` are the keys of its first blocks, which are stored already.
    """

    request_id: Name
    first_block: int
    keys: tuple[bytes, ...]
    origin: BlockOrigin = UNKNOWN_ORIGIN
    hit_keys: tuple[bytes, ...] = ()


class PrefillDone(Message, frozen=True, tag=True):
    """The PE's last transfer for the request is over; the DE buffer is complete iff no failure.

    The router regards a prefill as complete only after this message: the engine's HTTP answer
    proves that the first token was computed, not that the KV arrived.

    For metrics: ``forward_s`` is the time of the request's forward passes, ``transfer_s`` the part
    of it in which they waited for transfers that did not overlap with computation; 0 in modes
    without transfers.
    """

    request_id: Name
    failure: str | None = None
    forward_s: float = 0.0
    transfer_s: float = 0.0


class KvInHbm(Message, frozen=True, tag=True):
    """The DE has copied the prompt's KV to its HBM and freed the slots of its buffer."""

    request_id: Name
    h2d_s: float


class Release(Message, frozen=True, tag=True):
    """The request is over on this engine; slots are freed once nothing can write to them.

    ``writer_certain`` is False while a prefill engine may still write into the slots: they are then
    quarantined until another ``Release`` of the request has it True.
    """

    request_id: Name
    reason: str
    writer_certain: bool = True


class Released(Message, frozen=True, tag=True):
    """All of the request's slots are free again."""

    request_id: Name


class Failed(Message, frozen=True, tag=True):
    """A command for a request failed; ``reason`` is the whole error message."""

    request_id: Name
    reason: str
