"""The two copy calls of the CUDA driver that torch has no name for, through ctypes.

``libcuda.so.1`` keeps its ABI: the symbol ``cuMemcpyBatchAsync`` has the signature of CUDA 12.8,
with ``failIdx``; the form without it is ``cuMemcpyBatchAsync_v2``.  Drivers before 12.8 lack both;
copies are then queued one by one.

Not run on a GPU yet.  Tests call the same code with functions of the same ABI that copy in host
memory.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError, TransportError

_ACCESS_IN_STREAM_ORDER = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes_v1``."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location_hint", _Location),
        ("dst_location_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """``library``: anything with the driver's symbols, ``libcuda`` by default.

    Raises ``ConfigError`` if there is no driver.  Calls act on the calling thread's context.
    """

    def __init__(self, library: Any = None) -> None:  # noqa: ANN401 - a ctypes library
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                f"the CUDA driver cannot be loaded ({error}); set device_copies to nixl"
            ) from error
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy = self._library.cuMemcpyAsync
        self._copy.argtypes = (pointer, pointer, size, pointer)
        self._copy.restype = ctypes.c_int
        self._copy_batch = getattr(self._library, "cuMemcpyBatchAsync", None)
        if self._copy_batch is not None:
            self._copy_batch.argtypes = (
                pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer,
            )  # fmt: skip
            self._copy_batch.restype = ctypes.c_int

    @property
    def batches(self) -> bool:
        """Whether the driver copies a whole batch with one call."""
        return self._copy_batch is not None

    def copy_batch(
        self,
        sources: NDArray[np.int64],
        destinations: NDArray[np.int64],
        sizes: NDArray[np.int64],
        stream: int,
    ) -> None:
        """Queue copies of ``sizes[i]`` bytes from address to address; not in the default stream.

        Raises ``TransportError`` if the driver refuses; some copies may be queued then.
        """
        if self._copy_batch is None:
            self.copy_each(sources, destinations, sizes, stream)
            return
        if not sizes.size:
            return
        from_addresses, to_addresses, lengths = (
            np.ascontiguousarray(a, dtype=np.uint64) for a in (sources, destinations, sizes)
        )
        attributes = _Attributes(src_access_order=_ACCESS_IN_STREAM_ORDER)
        first_copy = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(0)
        status = self._copy_batch(
            to_addresses.ctypes.data,
            from_addresses.ctypes.data,
            lengths.ctypes.data,
            lengths.size,
            ctypes.addressof(attributes),
            ctypes.addressof(first_copy),
            1,
            ctypes.addressof(failed),
            stream,
        )
        _check(status, "cuMemcpyBatchAsync", f"{sizes.size} copies, first failed {failed.value}")

    def copy_each(
        self,
        sources: NDArray[np.int64],
        destinations: NDArray[np.int64],
        sizes: NDArray[np.int64],
        stream: int,
    ) -> None:
        """As ``copy_batch``, with one call per copy."""
        rows = zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True)
        for source, destination, size in rows:
            status = self._copy(destination, source, size, stream)
            _check(status, "cuMemcpyAsync", f"{size} bytes")


def _check(status: int, call: str, what: str) -> None:
    if status != 0:
        raise TransportError(
            f"{call} of {what} failed with CUDA error {status}; see the driver's log, or set "
            "device_copies to nixl"
        )


def merge_runs(
    sources: NDArray[np.int64], destinations: NDArray[np.int64], piece_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (sources, destinations, sizes) in which neighbours on both sides are one copy."""
    if not sources.size:
        return sources, destinations, np.zeros(0, np.int64)
    follows = (np.diff(sources) == piece_bytes) & (np.diff(destinations) == piece_bytes)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    sizes = np.diff(np.concatenate((starts, [sources.size]))) * piece_bytes
    return sources[starts], destinations[starts], sizes
