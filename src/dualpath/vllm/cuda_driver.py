"""The two copy calls of the CUDA driver that torch has no name for, from NVIDIA's cuda-bindings.

Drivers without a batch call of the bindings' form (before CUDA 12.8; before 13.0 with bindings 13)
are asked copy by copy.  The bindings wrap each address on its own, which costs some 0.1 µs.

Not run on a GPU yet.  Bindings 12.9 and 13.5 were run on a stand-in for ``libcuda`` that copies in
host memory; tests call the same code with a stand-in for the bindings.
"""

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError, TransportError
from dualpath.core.extras import extra


class CudaDriver:
    """``bindings``: anything with the driver's calls, ``cuda.bindings.driver`` by default.

    Raises ``ConfigError`` without the bindings or a driver.  Calls act on the calling thread's
    context.
    """

    def __init__(self, bindings: Any = None) -> None:  # noqa: ANN401 - a module without types
        try:
            self._cuda = bindings or importlib.import_module("cuda.bindings.driver")
            self._cuda.cuDriverGetVersion()
        except ImportError as error:
            raise ConfigError(
                f"device_copies needs NVIDIA's cuda-bindings ({error}); "
                f"{extra('gpu').remedy}, or set device_copies to nixl"
            ) from error
        except RuntimeError as error:
            raise ConfigError(
                f"the CUDA driver cannot be loaded ({error}); set device_copies to nixl"
            ) from error
        self.batches = self._finds_batch_call()

    def _finds_batch_call(self) -> bool:
        """Return whether the driver copies a whole batch with one call."""
        try:
            self._cuda.cuMemcpyBatchAsync([], [], [], 0, [], [], 0, 0)
        except RuntimeError:  # not among the driver's functions
            return False
        return True

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
        if not self.batches:
            self.copy_each(sources, destinations, sizes, stream)
            return
        if not sizes.size:
            return
        cuda = self._cuda
        attributes = cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # With bindings 12 the index of the first failed copy follows the status.
        status, *_ = cuda.cuMemcpyBatchAsync(
            [cuda.CUdeviceptr(address) for address in destinations.tolist()],
            [cuda.CUdeviceptr(address) for address in sources.tolist()],
            sizes.tolist(),
            sizes.size,
            [attributes],
            [0],
            1,
            stream,
        )
        _check(status, "cuMemcpyBatchAsync", f"{sizes.size} copies")

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
            (status,) = self._cuda.cuMemcpyAsync(destination, source, size, stream)
            _check(status, "cuMemcpyAsync", f"{size} bytes")


def _check(status: int, call: str, what: str) -> None:
    if status != 0:
        raise TransportError(
            f"{call} of {what} failed with CUDA error {int(status)}; see the driver's log, or set "
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
