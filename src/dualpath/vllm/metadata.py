"""Metadata from the connector's scheduler side to its worker side for one engine step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from dualpath.core.blocks import BlockGeometry
from dualpath.core.transfers import DecodeTransfer
from dualpath.engine.forward_pass import PromptPart
from dualpath.engine.generated import GeneratedBlock
from dualpath.engine.hbm_layout import HbmBlock
from dualpath.vllm.pass_costs import PassCosts


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """Facts that the worker sends to the scheduler once, before the first step."""

    geometry: BlockGeometry
    costs: PassCosts | None


@dataclass(frozen=True)
class DecodeWork:
    """A prompt's KV to copy from the buffer into this DE's HBM before its request may run.

    ``hbm_blocks`` are the HBM blocks of its blocks 0, 1, …, without an id for blocks that HBM
    already has.  If ``waits``, vLLM runs the request only after the copy was reported as complete,
    even if nothing is copied (mode Oracle).  Otherwise HBM already has the whole prompt, the
    request is running, and only the buffer must be freed.
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
    """

    prefills: list[PromptPart] = field(default_factory=list)
    decodes: list[DecodeWork] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    generated: list[GeneratedBlock] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    free_hbm_tokens: int | None = None
