"""KV events of blocks outside HBM, which vLLM publishes with its own (``--kv-events-config``).

vLLM announces the blocks of its prefix cache with the medium ``GPU``.  Here the medium is ``CPU``
for the engine's DRAM cache and ``STORAGE`` for what it has written to storage.  Block hashes are
those of vLLM, so subscribers can join the events of all media and engines.  Tokens are left out, as
vLLM's own offloading connector leaves them out: the data plane knows blocks by their keys.

A worker's events travel with the output of an engine step.  So those of an idle engine are
published with its next request.
"""

from collections.abc import Iterable

from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVConnectorKVEvents,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from dualpath.engine.block_events import BlockEvent


class ConnectorEvents(KVConnectorKVEvents):
    """The events of one step: the engine's first rank alone has any."""

    def __init__(self, events: list[KVCacheEvent]) -> None:
        self._events = list(events)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Add the events of another rank."""
        self._events += events

    def aggregate(self) -> "ConnectorEvents":
        """Return all events: ranks do not repeat each other's."""
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Do nothing: an event needs no other rank's."""

    def get_all_events(self) -> list[KVCacheEvent]:
        """Return all events, in order."""
        return self._events

    def get_number_of_workers(self) -> int:
        """Return 1, the rank that has events."""
        return 1

    def clear_events(self) -> None:
        """Remove all events."""
        self._events = []


def connector_events(events: Iterable[BlockEvent], block_tokens: int) -> ConnectorEvents | None:
    """Return the events of a step in vLLM's form, None without any."""
    made = [_event(event, block_tokens) for event in events]
    return ConnectorEvents(made) if made else None


def _event(event: BlockEvent, block_tokens: int) -> KVCacheEvent:
    hashes = [maybe_convert_block_hash(BlockHash(key)) for key in event.keys]
    if not event.stored:
        return BlockRemoved(block_hashes=hashes, medium=event.medium.value)
    parent = event.parent
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=maybe_convert_block_hash(BlockHash(parent)) if parent else None,
        token_ids=[],
        block_size=block_tokens,
        lora_id=None,
        medium=event.medium.value,
        lora_name=None,
    )
