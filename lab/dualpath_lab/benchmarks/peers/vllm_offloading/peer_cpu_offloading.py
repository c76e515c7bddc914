"""vLLM's tiered offloading for the CPU platform, which does not support it.

vLLM loads it through ``spec_module_path``; it is imported only in the peer's environment.
Everything but the copy between an engine's KV memory and the DRAM tier is vLLM's: look-ups,
eviction, the file system tier with its threads and O_DIRECT.  The copy is a ``memcpy`` on the
calling thread, complete on return of the submission.
"""

import ctypes
import time
from collections.abc import Iterator

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CPUTieringOffloadingSpec(TieringOffloadingSpec):
    """Tiered offloading with a worker that needs no GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker, created on the first call."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CopyWorker(OffloadingWorker):
    """Copies whole blocks between KV memory and chunks of the DRAM tier."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        if len(kv_caches.group_data_refs) != 1:
            raise ValueError("only models with one group of KV caches")
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        tensors = [kv_caches.tensors[ref.tensor_idx] for ref in kv_caches.group_data_refs[0]]
        self._memory = [
            tensor.tensor.view(torch.int8).view((-1, tensor.page_size_bytes)) for tensor in tensors
        ]
        self._tier = [
            region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk)
            for tensor in tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks into the tier."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks out of the tier."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: submitted copies are complete."""

    def shutdown(self) -> None:
        """Release the tier's memory."""
        self._tier.clear()
        self._region.cleanup()

    def _copy(
        self, job_id: int, memory: GPULoadStoreSpec, tier: LoadStoreSpec, *, store: bool
    ) -> bool:
        start_s = time.perf_counter()
        copied_bytes = 0
        positions = list(self._positions(memory, tier))
        for blocks, chunks in zip(self._memory, self._tier, strict=True):
            page_bytes = blocks.shape[1]
            for block, chunk, offset in positions:
                in_memory = blocks.data_ptr() + block * blocks.stride(0)
                in_tier = chunks.data_ptr() + chunk * chunks.stride(0) + offset * page_bytes
                destination, source = (in_tier, in_memory) if store else (in_memory, in_tier)
                ctypes.memmove(destination, source, page_bytes)
                copied_bytes += page_bytes
        seconds = time.perf_counter() - start_s
        self._finished.append(
            TransferResult(
                job_id=job_id, success=True, transfer_size=copied_bytes, transfer_time=seconds
            )
        )
        return True

    def _positions(
        self, memory: GPULoadStoreSpec, tier: LoadStoreSpec
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (block, chunk, block's index in the chunk); the first chunk may be partial."""
        first = memory.block_indices[0] % self._blocks_per_chunk
        chunks: np.ndarray = tier.block_ids
        for index, block in enumerate(memory.block_ids.tolist(), start=first):
            chunk, offset = divmod(index, self._blocks_per_chunk)
            yield block, int(chunks[chunk]), offset
