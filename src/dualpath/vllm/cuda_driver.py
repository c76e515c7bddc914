"""Two copy calls of the CUDA driver that torch does not expose, through NVIDIA's cuda-bindings.

With drivers that lack the batch call of the bindings' form (before CUDA 12.8; before 13.0 with
bindings 13), each copy is one call.  The bindings wrap every address, which costs about 0.1 µs.

This has not been run on a GPU yet.  Bindings 12.9 and 13.5 were run with a fake ``libcuda`` that
copies in host memory; tests call the same code with fake bindings.
"""

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError, TransportError
from dualpath.core.extras import extra


class CudaDriver:
    """Driver calls through ``bindings``, by default the module ``cuda.bindings.driver``.

    Raises ``ConfigError`` without the bindings or a driver.  Calls use the calling thread's CUDA
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
        """Return whether the driver can copy a whole batch with one call."""
        try:
            self._cuda.cuMemcpyBatchAsync([], [], [], 0, [], [], 0, 0)
        except RuntimeError:  # the driver lacks this function
            return False
        return True

    def copy_batch(
        self,
        sources: NDArray[np.int64],
        destinations: NDArray[np.int64],
        sizes: NDArray[np.int64],
        stream: int,
    ) -> None:
        """Queue copies of ``sizes[i]`` bytes on ``stream``, which must not be the default stream.

        Raises ``TransportError`` if the driver refuses; some copies may have been queued.
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
        """Do the same as ``copy_batch``, with one call per copy."""
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
    """Return (sources, destinations, sizes) with pieces contiguous on both sides merged."""
    if not sources.size:
        return sources, destinations, np.zeros(0, np.int64)
    follows = (np.diff(sources) == piece_bytes) & (np.diff(destinations) == piece_bytes)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    sizes = np.diff(np.concatenate((starts, [sources.size]))) * piece_bytes
    return sources[starts], destinations[starts], sizes
