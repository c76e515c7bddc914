"""Reads stored files through NIXL's storage plugins, into the caller's memory.

Uses a separate agent with one plugin, with settings independent of the agent that transfers KV
between engines.  Source and destination are registered for each read only: file plugins keep a
table of both.
"""

import contextlib
import errno
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.transport.nixl import load_nixl, nixl_errors, open_agent

#: Pause between polls of a transfer; polls also drive its progress.
_POLL_S = 0.0002
#: Requirements of plugins that a machine may lack.
_NEEDS = {
    "GDS": "NVIDIA's GPUDirect Storage (libcufile, nvidia-fs) and a GPU",
    "GDS_MT": "NVIDIA's GPUDirect Storage (libcufile, nvidia-fs) and a GPU",
}

Descriptor = tuple[int, int, int]


class NixlReader:
    """Reads files through one plugin; thread-safe.

    Raises ``ConfigError`` if the plugin is not installed or refuses its ``parameters``.  Calls
    block until the transfer has ended, however long that takes: only then the memory can be
    reused.  They raise ``OSError``, always with ``EINVAL``, as NIXL does not report whether the
    reason is direct I/O that the file system does not support.
    """

    def __init__(self, plugin: str, parameters: Mapping[str, str] | None = None) -> None:
        self._plugin = plugin
        self._errors = nixl_errors(load_nixl())
        self._agent_name = f"storage-{uuid.uuid4().hex[:12]}"
        self._nixl: Any = open_agent(self._agent_name, progress_delay_us=None)
        try:
            self._nixl.create_backend(plugin, dict(parameters or {}))
        except self._errors as error:
            needs = _NEEDS.get(plugin, "its libraries")
            raise ConfigError(
                f"NIXL's plugin {plugin} cannot be used on this machine ({error}); install "
                f"{needs}, or give the storage as a path"
            ) from error

    def fill_from_file(
        self,
        descriptor: int,
        buffers: Sequence[memoryview],
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Fill buffers from the beginning of an open file; return how many bytes were read.

        ``on_progress`` is never called: pieces complete in any order.
        """
        available_bytes = os.fstat(descriptor).st_size
        whole = [(0, available_bytes, descriptor, "")]
        wanted = _first(buffers, available_bytes)
        here = [(_address(buffer), buffer.nbytes, 0) for buffer in wanted if buffer.nbytes]
        ends = list(itertools.accumulate(size_bytes for _, size_bytes, _ in here))
        there = [(end - one[1], one[1], descriptor) for end, one in zip(ends, here, strict=True)]
        if not here:
            return 0
        try:
            with (
                self._registered(whole, "FILE"),
                self._registered([(*one, "") for one in here], "DRAM"),
            ):
                failures = self._move(here, there)
        except self._errors as error:
            failures = [str(error)]
        if failures:
            raise OSError(errno.EINVAL, f"NIXL's plugin {self._plugin}: {failures[0]}")
        return ends[-1]

    def close(self) -> None:
        """Drop the agent; idempotent."""
        self._nixl = None

    @contextlib.contextmanager
    def _registered(self, spans: Sequence[tuple[int, int, int, str]], kind: str) -> Iterator[None]:
        descriptors = self._nixl.register_memory(spans, kind)
        try:
            yield
        finally:
            self._nixl.deregister_memory(descriptors)

    def _move(self, here: list[Descriptor], there: list[Descriptor]) -> list[str]:
        """Transfer every piece separately; return the failures once all transfers have ended.

        After a transfer of several pieces failed, NIXL does not report whether others still move.
        """
        handles: list[Any] = []
        failures: list[str] = []
        try:
            for place, origin in zip(here, there, strict=True):
                places = self._nixl.get_xfer_descs([place], "DRAM")
                origins = self._nixl.get_xfer_descs([origin], "FILE")
                handles.append(
                    self._nixl.initialize_xfer("READ", places, origins, self._agent_name)
                )
            moving, ask = handles, self._nixl.transfer
            while moving := [one for one in moving if self._is_moving(ask, one, failures)]:
                ask = self._nixl.check_xfer_state
                time.sleep(_POLL_S)
        finally:
            for handle in handles:
                handle.release()
        return failures

    def _is_moving(
        self,
        ask: Callable[[Any], str],
        handle: Any,  # noqa: ANN401 - untyped library
        failures: list[str],
    ) -> bool:
        try:
            state = ask(handle)
        except self._errors as error:
            failures.append(str(error))
            return False
        if state not in ("PROC", "DONE"):
            failures.append(f"state {state}")
        return state == "PROC"


def _first(buffers: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """Return the first ``size_bytes`` of buffers, or all of them."""
    found, left_bytes = [], size_bytes
    for buffer in buffers:
        found.append(buffer[:left_bytes])
        left_bytes -= found[-1].nbytes
    return found


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
