"""NIXL without dualpath: the baselines of ``experiments.data_plane`` and of benchmarks.

``RawFileReader`` reads files through the POSIX plugin; ``RawAgent`` transfers pieces between two
agents through UCX.  Both do as little in Python as NIXL's API allows.
"""

import os
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import StorageError, TransportError
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath.transport.nixl import load_nixl, nixl_errors, open_agent
from dualpath.transport.regions import piece_addresses
from dualpath.transport.ucx_config import engine_config_text

#: Pause between two polls.  The POSIX plugin submits at most 64 requests per poll.
_POLL_S = 0.0002
_LOCAL_SIDE = "NIXL_INIT_AGENT"

#: The kernel interface of the plugin: libaio or io_uring.
PosixQueue = Literal["aio", "uring"]


class FileRead(msgspec.Struct, frozen=True):
    """The first ``length_bytes`` of a file, to be placed at ``address``."""

    path: str
    address: int
    length_bytes: int


class RawFileReader:
    """An agent with NIXL's POSIX plugin for reads into ``memory``, with direct I/O if ``direct``.

    ``name`` must be unique in this process.  Not for concurrent use.
    """

    def __init__(
        self,
        memory: RegisteredMemory,
        *,
        name: str = "raw-file-reader",
        queue: PosixQueue = "aio",
        direct: bool = True,
    ) -> None:
        self._errors = nixl_errors(load_nixl())
        self._name = name
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._nixl: Any = open_agent(self._name, progress_delay_us=None)
        self._nixl.create_backend("POSIX", {f"use_{queue}": "true"})
        self._memory = self._nixl.register_memory(
            [(memory.address, memory.size_bytes, 0, "")], "DRAM"
        )

    def read(self, reads: Sequence[FileRead]) -> None:
        """Perform all reads as one request; raises ``StorageError`` if one fails or is short."""
        files = [os.open(r.path, self._flags) for r in reads]
        try:
            self._read(reads, files)
        except self._errors as error:
            raise StorageError(f"NIXL read of {len(reads)} files failed: {error}") from error
        finally:
            for file in files:
                os.close(file)

    def _read(self, reads: Sequence[FileRead], files: Sequence[int]) -> None:
        sizes = [(0, r.length_bytes, file, "") for r, file in zip(reads, files, strict=True)]
        registered = self._nixl.register_memory(sizes, "FILE")
        try:
            there = [(0, r.length_bytes, file) for r, file in zip(reads, files, strict=True)]
            here = [(r.address, r.length_bytes, 0) for r in reads]
            handle = self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs(here, "DRAM"),
                self._nixl.get_xfer_descs(there, "FILE"),
                self._name,
            )
            state = self._nixl.transfer(handle)
            while state == "PROC":
                time.sleep(_POLL_S)
                state = self._nixl.check_xfer_state(handle)
            handle.release()
            if state != "DONE":
                raise StorageError(f"NIXL read of {len(reads)} files ended in state {state}")
        finally:
            self._nixl.deregister_memory(registered)

    def close(self) -> None:
        """Deregister and drop the agent; idempotent."""
        if self._nixl is not None:
            self._nixl.deregister_memory(self._memory)
            self._nixl = None


class RawPeer(msgspec.Struct, frozen=True):
    """Address of an agent's region."""

    name: str
    metadata: bytes
    region: RegionInfo


class RawAgent:
    """An agent with the UCX backend and one region of ``pieces`` pieces, densely packed.

    ``tuned``: with dualpath's UCX settings and the pause of its progress thread; otherwise with the
    defaults of NIXL's Python API.
    """

    def __init__(self, name: str, pieces: int, piece_bytes: int, *, tuned: bool) -> None:
        self._name = name
        self._nixl: Any = open_agent(name, 1000 if tuned else 0)
        self._nixl.create_backend("UCX", {"engine_config": engine_config_text({})} if tuned else {})
        self._memory = allocate_registered(pieces * piece_bytes)
        self._memory.array[:] = 1
        self._region = RegionInfo("raw", self._memory.address, piece_bytes, piece_bytes, pieces)
        span = (self._memory.address, self._memory.size_bytes, 0, "")
        self._registered = self._nixl.register_memory([span], "DRAM")
        self._local = self._prepare(_LOCAL_SIDE, self._region)
        self._remote: Any = None
        self._peer = ""

    def peer(self) -> RawPeer:
        """Return the argument for ``connect`` of another agent."""
        return RawPeer(self._name, self._nixl.get_agent_metadata(), self._region)

    def connect(self, peer: RawPeer) -> None:
        """Prepare the peer's region, once."""
        self._nixl.add_remote_agent(peer.metadata)
        self._nixl.make_connection(peer.name)
        self._remote = self._prepare(peer.name, peer.region)
        self._peer = peer.name

    def make(self, direction: str, here: NDArray[np.int32], there: NDArray[np.int32]) -> Any:  # noqa: ANN401 - untyped library
        """Return the handle of a "READ" or "WRITE" of pieces ``here[i]`` ↔ ``there[i]``."""
        return self._nixl.make_prepped_xfer(direction, self._local, here, self._remote, there)

    def post(self, handle: Any) -> None:  # noqa: ANN401 - as above
        """Start a transfer."""
        self._nixl.transfer(handle)

    def is_moving(self, handle: Any) -> bool:  # noqa: ANN401 - as above
        """Poll a transfer; raises ``TransportError`` if it failed."""
        state = self._nixl.check_xfer_state(handle)
        if state not in ("PROC", "DONE"):
            raise TransportError(f"transfer with {self._peer!r} ended in NIXL state {state}")
        return bool(state == "PROC")

    def finish(self, handle: Any) -> None:  # noqa: ANN401 - as above
        """Wait for the end of a transfer and release its handle."""
        while self.is_moving(handle):
            time.sleep(_POLL_S)
        handle.release()

    def close(self) -> None:
        """Release all resources; idempotent."""
        if self._nixl is None:
            return
        for prepared in (self._local, self._remote):
            if prepared is not None:
                prepared.release()
        if self._peer:
            self._nixl.remove_remote_agent(self._peer)
        self._nixl.deregister_memory(self._registered)
        self._nixl = None

    def _prepare(self, side: str, region: RegionInfo) -> Any:  # noqa: ANN401 - as above
        rows = np.empty((region.pieces, 3), dtype=np.uint64)
        rows[:, 0] = piece_addresses(region, np.arange(region.pieces))
        rows[:, 1] = region.piece_bytes
        rows[:, 2] = region.device
        return self._nixl.prep_xfer_dlist(side, rows, region.memory)
