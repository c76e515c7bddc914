"""Metadata from the connector's scheduler side to its worker side for one engine step."""

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from dualpath.core.blocks import BlockGeometry
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.passes.generated import GeneratedBlock
from dualpath.engine.passes.hbm_layout import HbmBlock
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.vllm.pass_costs import PassCosts

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

# ------------------------------------------------------------------------------------- late blocks
# Holds HBM blocks that a transfer may still write out of vLLM's block pool.
#
# The worker knows these blocks, but the scheduler allocates blocks.  vLLM carries connector
# metadata from worker to scheduler at the end of each step, before it schedules the next one.  So
# blocks that vLLM has just freed with their request are removed from the free blocks before they
# are reused.


@dataclass(frozen=True)
class BlockExchange:
    """The load of a request's prompt is over: its blocks from ``first`` on become ``blocks``.

    Those are of the engine's receiving area (``vllm.receiving_area``).  ``blocks`` is empty if the
    load has failed.
    """

    vllm_request_id: str
    first: int = 0
    blocks: tuple[int, ...] = ()


@dataclass
class HeldBlocksMetadata(KVConnectorWorkerMetadata):
    """Ids of newly held and released blocks; an id may be in both lists, or several times.

    ``exchanges`` are of loads that this step reports as over, or a later one.  ``load_token_s`` is
    how long passes lately took to load a token of KV, None if that has not changed.
    """

    held: list[int]
    released: list[int]
    exchanges: list[BlockExchange] = field(default_factory=list)
    load_token_s: float | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HeldBlocksMetadata":
        """Add the blocks that another worker reports."""
        assert isinstance(other, HeldBlocksMetadata)
        return HeldBlocksMetadata(
            self.held + other.held,
            self.released + other.released,
            self.exchanges + other.exchanges,
            other.load_token_s if self.load_token_s is None else self.load_token_s,
        )


class HeldBlocks:
    """The worker's half: a ``BlockHolder`` of the data plane, read at the end of each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._released: list[int] = []
        self._exchanges: list[BlockExchange] = []

    def exchange(self, exchange: BlockExchange) -> None:
        """Exchange a request's blocks; called before its load is reported as over."""
        with self._lock:
            self._exchanges.append(exchange)

    def hold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Hold these blocks from the end of this step on."""
        with self._lock:
            self._held += hbm_blocks

    def unhold(self, hbm_blocks: tuple[int, ...]) -> None:
        """Release these blocks at the end of this step."""
        with self._lock:
            self._released += hbm_blocks

    def take(self) -> HeldBlocksMetadata | None:
        """Return the changes since the last call, None without changes."""
        with self._lock:
            if not self._held and not self._released and not self._exchanges:
                return None
            taken = HeldBlocksMetadata(self._held, self._released, self._exchanges)
            self._held, self._released, self._exchanges = [], [], []
            return taken


def apply(changes: HeldBlocksMetadata, pool: "BlockPool") -> None:
    """Take or drop a reference to the blocks in vLLM's pool, whether or not they are free now."""
    pool.touch([pool.blocks[block] for block in changes.held])
    pool.free_blocks([pool.blocks[block] for block in changes.released])


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """Facts that the worker sends to the scheduler once, before the first step."""

    geometry: BlockGeometry
    costs: PassCosts | None


@dataclass(frozen=True)
class DecodeWork:
    """A prompt's KV to load into this DE's HBM before its request may run.

    ``hbm_blocks`` are the HBM blocks of its blocks 0, 1, …, without an id for blocks that HBM
    already has.  If ``waits``, vLLM runs the request only after the copy was reported as complete,
    even if nothing is copied (mode Oracle).  Otherwise HBM already has the whole prompt, the
    request is running, and only the buffer must be freed.  With a hand-over in HBM the blocks
    change places with reserved ones once the KV is in these.
    """

    vllm_request_id: str
    decode_transfer: DecodeTransfer
    hbm_blocks: tuple[HbmBlock, ...]
    waits: bool = True


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work; picklable, since scheduler and worker may be different processes.

    ``rejected``: invalid prefill transfers and the reason, by the transfer's request id.
    ``refused``: vLLM's ids of requests that this engine must not compute.
    ``ended``: decode transfers of finished requests, by the transfer's request id.
    ``predicted_attention_s``: the compute quota's prediction for this step's attention, 0 without.
    ``received``: blocks that are in the receiving area from now on, by an exchange.
    """

    prefills: list[PrefillChunk] = field(default_factory=list)
    decodes: list[DecodeWork] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    generated: list[GeneratedBlock] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    free_hbm_tokens: int | None = None
    predicted_attention_s: float = 0.0
