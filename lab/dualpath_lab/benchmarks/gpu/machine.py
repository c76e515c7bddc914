"""The measured machine: its device, timing, and its description."""

import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable

import numpy as np
import torch

from dualpath.engine.passes.device import PASSED, Device, DeviceEvent, HostDevice
from dualpath.transport.contract import PieceIndices, RegionInfo, TransferState
from dualpath.transport.regions import check_pair, find_region, piece_addresses
from dualpath.vllm.cuda_device import CudaDevice, CudaDriver

_SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit",
    "pcie.link.gen.current", "pcie.link.width.current", "memory.total",
)  # fmt: skip


class _DoneCopy:
    """A copy of ``HostCopier``, complete when it is created."""

    event: DeviceEvent = PASSED

    def __init__(self, size_bytes: int) -> None:
        self.bytes = size_bytes

    def poll(self) -> TransferState:
        """Return DONE."""
        return TransferState.DONE

    def error(self) -> str | None:
        """Return None."""
        return None

    def release(self) -> None:
        """Nothing to release."""


class HostCopier:
    """Copies in host memory: runs the script without a GPU, for tests."""

    def __init__(self) -> None:
        self._regions: dict[str, RegionInfo] = {}

    def register(self, region: RegionInfo) -> None:
        """Register a region."""
        self._regions[region.name] = region

    def copy(
        self,
        source: str,
        source_pieces: PieceIndices,
        destination: str,
        destination_pieces: PieceIndices,
        after: DeviceEvent,
    ) -> _DoneCopy:
        """Copy now."""
        here, there = (find_region(self._regions, name, "host") for name in (source, destination))
        indices = check_pair(here, source_pieces, there, destination_pieces)
        sources, destinations = (
            piece_addresses(here, indices[0]),
            piece_addresses(there, indices[1]),
        )
        for start, end in zip(sources.tolist(), destinations.tolist(), strict=True):
            _bytes_at(end, here.piece_bytes)[:] = _bytes_at(start, here.piece_bytes)
        return _DoneCopy(int(sources.size) * here.piece_bytes)


def _bytes_at(address: int, size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def open_machine(device: torch.device) -> Device:
    """Return the data plane's device with its own copier: CUDA's, or a substitute on a CPU."""
    if device.type == "cuda":
        return CudaDevice(device, CudaDriver())
    host = HostDevice()
    host.copier = HostCopier()
    return host


def seconds_of(
    run: Callable[[], object], device: torch.device, warm_up: int, repeats: int
) -> list[float]:
    """Return the time of each of ``repeats`` runs after ``warm_up`` runs, in seconds.

    On a GPU it is the time between two events on the current stream, so ``run`` must make that
    stream wait for all its work.
    """
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            start_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - start_s)
            continue
        torch.cuda.synchronize(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return times


def spread(times: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum in seconds."""
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def environment(device: torch.device) -> dict[str, str]:
    """Return a description of the machine; clocks are those at the time of the call."""
    facts = {
        "device": str(device),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
    }
    smi = shutil.which("nvidia-smi")
    if device.type == "cuda" and smi is not None:
        query = [smi, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
        query += ["-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            values = [value.strip() for value in answer.stdout.split(",")]
            facts |= dict(zip(_SMI_FIELDS, values, strict=True))
    return facts
