"""Many small copies between pinned DRAM and HBM: one by one, as one batch, with a kernel.

Layer Blocks of one layer are a Full Block apart in DRAM and anywhere in HBM.  Methods:

* *one by one*: one ``cuMemcpyAsync`` per block
* *torch, one by one*: ``copy_(non_blocking=True)`` per block
* *one batch*: one ``cuMemcpyBatchAsync`` (CUDA 12.8), as in the engine's ``DeviceCopier``
* *one copy and a kernel*: one contiguous copy through HBM; ``index_copy_`` scatters the blocks
  (H2D) or ``index_select`` gathers them (D2H). It needs contiguous DRAM, which DualPath does not
  have: with the layers of a Full Block side by side (§A.5) the CPU would have to gather first
* *one copy*: the same number of bytes in one piece, the rate of the link
"""

import time
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import torch

from dualpath.engine.passes.device import Device
from dualpath.transport.memory import allocate_registered
from dualpath.vllm.cuda_device import CudaDriver
from dualpath_lab.benchmarks.gpu.machine import seconds_of, spread


class CopyCase(msgspec.Struct, frozen=True):
    """``pieces`` blocks of ``piece_bytes``, ``full_block_layers`` apart in DRAM."""

    direction: Literal["h2d", "d2h"]
    pieces: int
    piece_bytes: int
    full_block_layers: int
    seed: int


class Copies:
    """The memory of one case, and the methods to copy it."""

    def __init__(self, case: CopyCase, device: Device, torch_device: torch.device) -> None:
        self._case = case
        self._cuda = torch_device.type == "cuda"
        size = (case.pieces, case.full_block_layers, case.piece_bytes)
        self._memory = allocate_registered(int(np.prod(size)))
        device.pin(self._memory.address, self._memory.size_bytes, self._memory)
        self._all_dram = torch.from_numpy(self._memory.array)
        self._dram = self._all_dram.view(size)[:, 1 % case.full_block_layers]
        self._contiguous = self._all_dram[: case.pieces * case.piece_bytes].view(case.pieces, -1)
        generator = torch.Generator().manual_seed(case.seed)
        order = torch.randperm(2 * case.pieces, generator=generator)[: case.pieces]
        self._block = order.tolist()
        self._block_on_device = order.to(torch_device)
        self._hbm = torch.zeros(
            2 * case.pieces, case.piece_bytes, dtype=torch.uint8, device=torch_device
        )
        self._scratch = torch.empty(
            case.pieces, case.piece_bytes, dtype=torch.uint8, device=torch_device
        )
        self._driver = CudaDriver() if self._cuda else None

    def ways(self) -> dict[str, Callable[[], None]]:
        """Return the methods available on this machine, by name."""
        found: dict[str, Callable[[], None]] = {
            "torch, one by one": self.torch_one_by_one,
            "one copy and a kernel": self.one_copy_and_a_kernel,
            "one copy": self.one_copy,
        }
        if self._driver is not None:
            found["one by one"] = lambda: self._drive(batch=False)
            if self._driver.batches:
                found["one batch"] = lambda: self._drive(batch=True)
        return found

    def torch_one_by_one(self) -> None:
        """One call of torch per block."""
        for piece, block in enumerate(self._block):
            here, there = self._dram[piece], self._hbm[block]
            if self._case.direction == "h2d":
                there.copy_(here, non_blocking=True)
            else:
                here.copy_(there, non_blocking=True)

    def one_copy_and_a_kernel(self) -> None:
        """Contiguous DRAM; a kernel scatters or gathers in HBM."""
        if self._case.direction == "h2d":
            self._scratch.copy_(self._contiguous, non_blocking=True)
            self._hbm.index_copy_(0, self._block_on_device, self._scratch)
        else:
            torch.index_select(self._hbm, 0, self._block_on_device, out=self._scratch)
            self._contiguous.copy_(self._scratch, non_blocking=True)

    def one_copy(self) -> None:
        """The same number of bytes, contiguous."""
        if self._case.direction == "h2d":
            self._scratch.copy_(self._contiguous, non_blocking=True)
        else:
            self._contiguous.copy_(self._scratch, non_blocking=True)

    def _drive(self, *, batch: bool) -> None:
        assert self._driver is not None
        dram = self._dram.data_ptr() + np.arange(self._case.pieces) * self._dram.stride(0)
        hbm = self._hbm.data_ptr() + np.array(self._block) * self._case.piece_bytes
        sizes = np.full(self._case.pieces, self._case.piece_bytes)
        ends = (dram, hbm) if self._case.direction == "h2d" else (hbm, dram)
        stream = torch.cuda.current_stream().cuda_stream
        queue = self._driver.copy_batch if batch else self._driver.copy_each
        queue(*ends, sizes, stream)

    def check(self, way: str, run: Callable[[], None]) -> bool:
        """Run one method on new content; return whether every block arrived."""
        generator = torch.Generator().manual_seed(self._case.seed + 1)
        into_hbm = self._case.direction == "h2d"
        self._hbm.zero_()
        self._all_dram.zero_()
        side = self._contiguous if "kernel" in way or way == "one copy" else self._dram
        content = torch.randint(0, 256, side.shape, generator=generator, dtype=torch.uint8)
        if into_hbm:
            side.copy_(content)
        else:
            self._scratch.copy_(content)
            self._hbm[self._block_on_device] = self._scratch
        run()
        if self._cuda:
            torch.cuda.synchronize()
        if not into_hbm:
            return bool(torch.equal(side, content))
        arrived = self._scratch if way == "one copy" else self._hbm[self._block_on_device]
        return bool(torch.equal(arrived.cpu(), content))


def measure_copies(
    case: CopyCase, device: Device, torch_device: torch.device, warm_up: int, repeats: int
) -> dict[str, object]:
    """Check and time every method; ``post_s`` is the CPU time to queue it.

    CUDA's copies run on a separate stream, as the driver refuses batches in the default one.
    """
    stream = torch.cuda.Stream(torch_device) if torch_device.type == "cuda" else None
    with torch.cuda.stream(stream):
        copies = Copies(case, device, torch_device)
        rows = {}
        for way, run in copies.ways().items():
            right = copies.check(way, run)
            times = spread(seconds_of(run, torch_device, warm_up, repeats))
            posts = []
            for _ in range(repeats):
                start_s = time.perf_counter()
                run()
                posts.append(time.perf_counter() - start_s)
                if torch_device.type == "cuda":
                    torch.cuda.synchronize(torch_device)
            rows[way] = {**times, "post_s": sorted(posts)[len(posts) // 2], "right": right}
    return {**msgspec.structs.asdict(case), "ways": rows}
