"""Implements ``engine.device`` for a CUDA GPU: CUDA events, and streams for H2D and D2H copies.

Events are recorded on the calling thread's current stream, which is the compute stream in vLLM's
hooks, and use blocking synchronisation: a waiting thread sleeps instead of spinning.  H2D and D2H
copies have a stream each, because a GPU has a copy engine for each direction.

This has not been run on a GPU yet.
"""

import ctypes
import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError, TransportError
from dualpath.core.extras import extra
from dualpath.engine.passes.device import PASSED, Device, DeviceCopier, DeviceEvent, HostDevice
from dualpath.engine.settings import NET_DEVICES
from dualpath.transport.contract import PieceIndices, RegionInfo, TransferState
from dualpath.transport.regions import check_pair, find_region, piece_addresses
from dualpath.transport.shared_memory import HbmCopies

# ------------------------------------------------------------------------------------- cuda driver
# Two copy calls of the CUDA driver that torch does not expose, through NVIDIA's cuda-bindings.
#
# With drivers that lack the batch call of the bindings' form (before CUDA 12.8; before 13.0 with
# bindings 13), each copy is one call.  The bindings wrap every address, which costs about 0.1 µs.
#
# This has not been run on a GPU yet.  Bindings 12.9 and 13.5 were run with a fake ``libcuda`` that
# copies in host memory; tests call the same code with fake bindings.


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


log = logging.getLogger(__name__)

#: Buffers from this size on are logged before and after they are pinned.
_LONG_PIN_BYTES = 1 << 30
#: ``cudaHostRegisterPortable``: pinned for every context of the process.
_REGISTER_PORTABLE = 1

#: The driver, and its ``CU_STREAM_CAPTURE_MODE_RELAXED``.
_DRIVER_LIBRARY, _CAPTURE_RELAXED = "libcuda.so.1", 2

_NET_DEVICES_VARIABLE = f"UCX_{NET_DEVICES}"
INFINIBAND_DEVICES = Path("/sys/class/infiniband")


def open_device(device: torch.device, device_copies: str) -> Device:
    """Return the device of an engine's KV memory, with its copier between DRAM and HBM.

    ``device_copies`` is "nixl", "cuda", or "auto", which means CUDA if no RDMA NIC is up.  Raises
    ``ConfigError`` for "cuda" without a GPU, its driver or cuda-bindings.
    """
    if device.type != "cuda":
        if device_copies == "cuda":
            raise ConfigError(
                f"device_copies is cuda, but the KV cache is on {device.type}; set it to auto"
            )
        return HostDevice()
    own, reason = device_copies == "cuda", f"device_copies is {device_copies}"
    if device_copies == "auto":
        own = not has_rdma_nic()
        reason = f"UCX may use {'no' if own else 'an'} RDMA device with an active port"
    log.info("copies between DRAM and HBM are made by %s: %s", "CUDA" if own else "NIXL", reason)
    return CudaDevice(device, CudaDriver() if own else None)


def has_rdma_nic(
    devices: Path = INFINIBAND_DEVICES, environment: Mapping[str, str] = os.environ
) -> bool:
    """Whether UCX may use an RDMA device of this machine with an active port.

    ``UCX_NET_DEVICES`` of the environment may name others only: `dualpath serve` sets it to the
    loopback device on a machine where no GPU has such a port.
    """
    active = {
        state.parent.parent.parent.name
        for state in devices.glob("*/ports/*/state")
        if "ACTIVE" in _text(state)
    }
    chosen = environment.get(_NET_DEVICES_VARIABLE, "all")
    allowed = {device.partition(":")[0].strip() for device in chosen.split(",")}
    return bool(active) and ("all" in allowed or bool(active & allowed))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@contextmanager
def _cuda_errors(what: str) -> Iterator[None]:
    """Convert torch's ``RuntimeError`` for a failed device to ``TransportError``."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"{what}: {error}; restart the engine") from error


class CudaEvent:
    """A recorded CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def passed(self) -> bool:
        """Whether the GPU has reached the event."""
        with _cuda_errors("the GPU failed"):
            return bool(self.event.query())

    def wait(self) -> None:
        """Sleep until the GPU has reached the event."""
        with _cuda_errors("the GPU failed"):
            self.event.synchronize()


class CudaCopy:
    """One queued batch; see ``engine.device.DeviceCopy``."""

    def __init__(self, event: CudaEvent, size_bytes: int) -> None:
        self.event: DeviceEvent = event
        self.bytes = size_bytes
        self._state = TransferState.MOVING
        self._error: str | None = None

    def poll(self) -> TransferState:
        """Return the state, updated from the event."""
        if self._state is TransferState.MOVING:
            try:
                if self.event.passed():
                    self._state = TransferState.DONE
            except TransportError as error:
                self._state, self._error = TransferState.FAILED, str(error)
        return self._state

    def error(self) -> str | None:
        """Return why the copy failed, None if it has not."""
        return self._error

    def release(self) -> None:
        """Raise ``TransportError`` while the copy is running; there is nothing to free."""
        if self._state is TransferState.MOVING:
            raise TransportError("copy released while moving; poll it to the end first")


class CudaCopier:
    """H2D and D2H copies in batches; see ``engine.device.DeviceCopier``."""

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device = device
        self._driver = driver
        self._regions: dict[str, RegionInfo] = {}
        self._into_hbm = torch.cuda.Stream(device)
        self._out_of_hbm = torch.cuda.Stream(device)

    def register(self, region: RegionInfo) -> None:
        """Register a region that copies may name."""
        self._regions[region.name] = region

    def copy(
        self,
        source: str,
        source_pieces: PieceIndices,
        destination: str,
        destination_pieces: PieceIndices,
        after: DeviceEvent,
    ) -> CudaCopy:
        """Queue one batch on the stream of its direction; may be called from any thread.

        Without pieces, for example if another rank copies them, only the event is queued.
        """
        here, there = self._region(source), self._region(destination)
        from_indices, to_indices = check_pair(here, source_pieces, there, destination_pieces)
        with _cuda_errors(f"copy from {source} to {destination}"):
            return self._queue(
                piece_addresses(here, from_indices),
                piece_addresses(there, to_indices),
                here.piece_bytes,
                self._into_hbm if there.memory == "VRAM" else self._out_of_hbm,
                after,
            )

    def copy_addresses(
        self,
        sources: NDArray[np.int64],
        destinations: NDArray[np.int64],
        piece_bytes: int,
        into_hbm: bool,
    ) -> CudaCopy:
        """Queue one batch between pinned memory and HBM; may be called from any thread."""
        stream = self._into_hbm if into_hbm else self._out_of_hbm
        with _cuda_errors("copy between memory of another engine and HBM"):
            return self._queue(sources, destinations, piece_bytes, stream, PASSED)

    def _queue(
        self,
        sources: NDArray[np.int64],
        destinations: NDArray[np.int64],
        piece_bytes: int,
        stream: torch.cuda.Stream,
        after: DeviceEvent,
    ) -> CudaCopy:
        with torch.cuda.device(self._device):
            if after is not PASSED:
                stream.wait_event(_event_of(after))
            if sources.size:
                runs = merge_runs(sources, destinations, piece_bytes)
                self._driver.copy_batch(*runs, stream.cuda_stream)
            event = _record(stream)
        return CudaCopy(event, int(sources.size) * piece_bytes)

    def synchronize(self) -> None:
        """Block until all queued copies have ended."""
        self._into_hbm.synchronize()
        self._out_of_hbm.synchronize()

    def _region(self, name: str) -> RegionInfo:
        return find_region(self._regions, name, "this engine")


class CudaDevice:
    """One GPU; with ``driver`` None the transport does all copies."""

    def __init__(self, device: torch.device, driver: CudaDriver | None) -> None:
        self._device = device
        self._copies = None if driver is None else CudaCopier(device, driver)
        self.copier: DeviceCopier | None = self._copies
        self._pinned: list[tuple[int, object]] = []
        self._pinning = threading.Lock()

    def enter_thread(self) -> None:
        """Make the GPU's context current, which UCX requires of threads that post GPU memory.

        From now on the thread may query streams and events while vLLM captures CUDA graphs.
        """
        _allow_calls_during_captures()
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream(self._device).query()  # the first call creates the context

    def pin(self, address: int, size_bytes: int, keep_alive: object) -> None:
        """Pin host memory in place, which preserves the alignment that O_DIRECT needs."""
        started_s = time.monotonic()
        if size_bytes >= _LONG_PIN_BYTES:
            log.info("pinning %.1f GiB of buffer, which takes seconds", size_bytes / (1 << 30))
        with torch.cuda.device(self._device):
            status = _runtime().cudaHostRegister(address, size_bytes, _REGISTER_PORTABLE).value
        if status != 0:
            raise ConfigError(
                f"{size_bytes} bytes of buffer cannot be pinned (CUDA error {status}); lower "
                "buffer_bytes or raise the container's memory and locked-memory limits"
            )
        with self._pinning:
            self._pinned.append((address, keep_alive))
        if size_bytes >= _LONG_PIN_BYTES:
            elapsed_s = time.monotonic() - started_s
            log.info("pinned %.1f GiB in %.1f s", size_bytes / (1 << 30), elapsed_s)

    def hbm_copies(self) -> HbmCopies | None:
        """Return the copier's copies by address; see ``engine.passes.device.Device``."""
        if self._copies is None:
            return None
        return HbmCopies(self.pin, self._unpin, self._copies.copy_addresses)

    def _unpin(self, address: int) -> None:
        """Unpin memory that ``pin`` has pinned; ``close`` may have done so."""
        with self._pinning:
            known = [entry for entry in self._pinned if entry[0] == address]
            self._pinned = [entry for entry in self._pinned if entry[0] != address]
        if known:
            with torch.cuda.device(self._device):
                _runtime().cudaHostUnregister(address)

    def record(self) -> DeviceEvent:
        """Record an event on the calling thread's stream."""
        with _cuda_errors("the GPU failed"):
            return _record(torch.cuda.current_stream(self._device))

    def wait(self, event: DeviceEvent) -> None:
        """Make the calling thread's stream wait for the event; the thread itself does not wait."""
        if event is not PASSED:
            with _cuda_errors("the GPU failed"):
                torch.cuda.current_stream(self._device).wait_event(_event_of(event))

    def close(self) -> None:
        """Wait for queued copies and unpin host memory."""
        with self._pinning:
            pinned, self._pinned = self._pinned, []
        with torch.cuda.device(self._device):
            if self._copies is not None and pinned:
                self._copies.synchronize()
            for address, _ in pinned:
                _runtime().cudaHostUnregister(address)


def _allow_calls_during_captures() -> None:
    """Let calls of this thread succeed while another thread captures a CUDA graph.

    Otherwise a query of a stream or an event fails during a capture and makes the graph invalid.
    """
    try:
        driver = ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return  # No driver, so no captures.
    status = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))
    if status != 0:
        log.warning(
            "CUDA error %d: this thread cannot allow its calls during captures of CUDA graphs; if "
            "the engine does not start, use --enforce-eager",
            status,
        )


def _runtime() -> Any:  # noqa: ANN401 - torch's bindings carry no types
    return torch.cuda.cudart()


def _record(stream: torch.cuda.Stream) -> CudaEvent:
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return CudaEvent(event)


def _event_of(event: DeviceEvent) -> torch.cuda.Event:
    assert isinstance(event, CudaEvent), f"an event of another device: {event!r}"
    return event.event
