"""Reading files into memory through NIXL's POSIX plugin (libaio).

The candidate that ``storage_read.py`` measures against ``dualpath.storage.posix``.
"""

import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from dualpath.core.errors import StorageError
from dualpath.transport.nixl_agent import load_nixl, nixl_errors, open_agent

#: The plugin submits at most 64 requests per poll; polling faster than this only burns CPU.
POLL_S = 0.0002


class FileRead(msgspec.Struct, frozen=True):
    """``length_bytes`` at ``offset_bytes`` of an open file, to be placed at ``address``."""

    descriptor: int
    offset_bytes: int
    address: int
    length_bytes: int


class NixlFileReader:
    """One agent with the POSIX plugin; not for concurrent use.

    ``memory``: (address, bytes) of all memory that reads may fill, registered once.
    """

    def __init__(self, name: str, memory: Sequence[tuple[int, int]]) -> None:
        self._errors = nixl_errors(load_nixl())
        self._name = name
        self._nixl: Any = open_agent(name, progress_delay_us=None)
        self._nixl.create_backend("POSIX", {"use_aio": "true"})
        spans = [(address, size, 0, "") for address, size in memory]
        self._memory = self._nixl.register_memory(spans, "DRAM")

    def read(self, reads: Sequence[FileRead]) -> None:
        """Perform all reads; raises ``StorageError`` if one fails or is short."""
        last_bytes = {r.descriptor: r.offset_bytes + r.length_bytes for r in reads}
        files = self._nixl.register_memory(
            [(0, size, descriptor, "") for descriptor, size in last_bytes.items()], "FILE"
        )
        try:
            handle = self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs([(r.address, r.length_bytes, 0) for r in reads], "DRAM"),
                self._nixl.get_xfer_descs(
                    [(r.offset_bytes, r.length_bytes, r.descriptor) for r in reads], "FILE"
                ),
                self._name,
            )
            state = self._nixl.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_S)
                state = self._nixl.check_xfer_state(handle)
            handle.release()
            if state != "DONE":
                raise StorageError(f"NIXL read of {len(reads)} pieces ended in state {state}")
        except self._errors as error:
            raise StorageError(f"NIXL read of {len(reads)} pieces failed: {error}") from error
        finally:
            self._nixl.deregister_memory(files)

    def close(self) -> None:
        """Deregister and drop the agent; idempotent."""
        if self._nixl is not None:
            self._nixl.deregister_memory(self._memory)
            self._nixl = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_for_reading(path: str, *, direct: bool) -> int:
    """Return a descriptor, past the page cache if ``direct``."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
