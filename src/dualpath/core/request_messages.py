"""Control messages about one request, from its assignment to an engine until its slots are free.

Its life (Fig. 4 of the paper):

    Assign(DE, reserve whole prompt) → Reserved → Assign(PE) and Read on the chosen side(s)
    → ReadDone → vLLM request at the PE carrying a ``PrefillTransfer`` → first token and PrefillDone
    → Persist(DE, the prompt's new blocks) and vLLM request at the DE carrying a ``DecodeTransfer``
    → KvInHbm (H2D done, DE buffer given back) → tokens → Release at both → Released
"""

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockOrigin
from dualpath.core.message import Message
from dualpath.core.names import Name
from dualpath.core.runs import HitRun


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


class Released(Message, frozen=True, tag=True):
    """All of the request's slots are free again."""

    request_id: Name


class Failed(Message, frozen=True, tag=True):
    """A command for a request could not be carried out; ``reason`` is complete."""

    request_id: Name
    reason: str
