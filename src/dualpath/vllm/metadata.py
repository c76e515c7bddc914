"""What the connector's scheduler side hands its worker side for one engine step."""

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
    """What the worker says to the scheduler once, before the first step."""

    geometry: BlockGeometry
    costs: PassCosts | None


@dataclass(frozen=True)
class DecodeWork:
    """A prompt whose KV is to be copied into this DE's HBM before the request may run.

    ``hbm_blocks`` of its blocks 0 and following; without ids where HBM has had the KV before.
    ``waits``: the request does not run before vLLM hears that the copy is over, also where nothing
    is copied, as in mode Oracle.  Without it the request runs already, as HBM has had all of it,
    and only the buffer is to be given back.
    """

    vllm_request_id: str
    decode_transfer: DecodeTransfer
    hbm_blocks: tuple[HbmBlock, ...]
    waits: bool = True


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work; picklable, since scheduler and worker may be different processes.

    ``rejected`` are prefill transfers for which nothing can be moved, and why, by the request id
    of the transfer.  ``refused`` are requests of vLLM that this engine must not compute, by its id.
    ``ended`` are decode transfers whose requests are over, by the request id of the transfer.
    """

    prefills: list[PromptPart] = field(default_factory=list)
    decodes: list[DecodeWork] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    generated: list[GeneratedBlock] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    free_hbm_tokens: int | None = None
