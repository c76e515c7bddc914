"""Answers the router's look-ups: how many blocks at the head of a list are stored."""

import functools
import logging
from collections.abc import Callable

from dualpath.core.control import EngineMessage, Lookup, LookupDone
from dualpath.core.errors import DualPathError
from dualpath.engine.persister import Persister
from dualpath.engine.threads import OS_THREADS, Threads, Workers
from dualpath.storage.contract import BlockStorage

log = logging.getLogger(__name__)

LOOKUP_THREADS = 4
#: A look-up waits that long for a block this engine is just writing; less than the router waits.
PENDING_WRITE_WAIT_S = 1.0


class Lookups:
    """A few threads; a storage that fails a look-up counts as one that has no block."""

    def __init__(
        self,
        storage: BlockStorage,
        persister: Persister,
        send: Callable[[EngineMessage], None],
        threads: Threads = OS_THREADS,
    ) -> None:
        self._storage = storage
        self._persister = persister
        self._send = send
        self._threads = Workers(threads, "lookup", LOOKUP_THREADS)

    def begin(self, message: Lookup) -> None:
        """Look up and send ``LookupDone``; returns at once."""
        self._threads.submit(functools.partial(self._look_up, message))

    def close(self) -> None:
        """Finish the look-ups under way and drop the others; idempotent."""
        self._threads.close()

    def _look_up(self, message: Lookup) -> None:
        hit_blocks = 0
        try:
            hit_blocks = self._storage.hit_blocks(message.keys)
            while hit_blocks < len(message.keys) and self._persister.wait_written(
                message.keys[hit_blocks], PENDING_WRITE_WAIT_S
            ):
                found = self._storage.hit_blocks(message.keys[hit_blocks:])
                if found == 0:  # the write failed
                    break
                hit_blocks += found
        except DualPathError as error:
            log.warning("look-up of %d blocks failed: %s", len(message.keys), error)
        self._send(LookupDone(call_id=message.call_id, hit_blocks=hit_blocks))
