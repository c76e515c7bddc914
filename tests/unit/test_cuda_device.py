"""The CUDA device without a GPU: small working fakes of torch's streams and of the driver.

Streams here run nothing until a synchronisation, so code that relies on a queued copy fails.
The driver's calls have both forms of cuda-bindings, and copy in host memory.  What
this cannot show is how a GPU behaves.
"""

import ctypes
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.guard import GUARD_S

from dualpath.core.blocks import BlockGeometry
from dualpath.core.errors import ConfigError, TransportError
from dualpath.engine.passes.device import PASSED, HostDevice
from dualpath.node.host_process import has_exited, this_process
from dualpath.transport.contract import Direction, RegionInfo, TransferState
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.memory import allocate_registered, allocate_shared
from dualpath.transport.shared_memory import NearestTransport, SharedMemoryTransport
from dualpath.vllm import cuda_device
from dualpath.vllm.cache_layers import hbm_layout
from dualpath.vllm.cuda_device import CudaDevice, CudaDriver, has_rdma_nic, merge_runs, open_device

PIECE = 64


class LazyStream:
    """Work that runs when it is waited for."""

    handles: ClassVar[dict[int, "LazyStream"]] = {}

    def __init__(self, device=None):
        self.work: deque[Callable[[], object]] = deque()
        self.cuda_stream = len(self.handles) + 1
        self.handles[self.cuda_stream] = self

    def wait_event(self, event):
        self.work.append(event.synchronize)

    def synchronize(self):
        while self.work:
            self.work.popleft()()

    def query(self):
        return not self.work


class LazyEvent:
    def __init__(self, blocking):
        assert blocking, "a thread that waits must sleep"
        self.over = False

    def record(self, stream):
        self.stream = stream
        stream.work.append(lambda: setattr(self, "over", True))

    def query(self):
        return self.over

    def synchronize(self):
        while not self.over:
            self.stream.work.popleft()()


class Runtime:
    """The pinning calls of the CUDA runtime; fails above a size."""

    def __init__(self, max_bytes=1 << 20):
        self.pinned = set()
        self._most_bytes = max_bytes

    def cudaHostRegister(self, address, size_bytes, flags):
        if size_bytes > self._most_bytes:
            return SimpleNamespace(value=2)
        self.pinned.add(address)
        return SimpleNamespace(value=0)

    def cudaHostUnregister(self, address):
        self.pinned.remove(address)


class Pointer:
    """``CUdeviceptr``: batches take no plain integers."""

    def __init__(self, address):
        self.address = address


def driver_bindings(*, batches=True, status=0, major=13):
    """The functions of ``cuda.bindings.driver`` that are used; ``calls`` lists the calls."""
    calls = []

    def copy(destination, source, size, stream):
        calls.append("one")
        LazyStream.handles[stream].work.append(lambda: ctypes.memmove(destination, source, size))
        return (status,)

    def copy_batch(destinations, sources, sizes, count, attributes, indices, n, stream):
        if not batches:
            raise RuntimeError("function cuMemcpyBatchAsync is not found")
        if not count:
            return (1,)
        calls.append(f"batch of {count}")
        assert ([a.srcAccessOrder for a in attributes], indices, n) == (["stream"], [0], 1)
        assert len(destinations) == len(sources) == len(sizes) == count
        for to, source, size in zip(destinations, sources, sizes, strict=True):
            move = partial(ctypes.memmove, to.address, source.address, size)
            LazyStream.handles[stream].work.append(move)
        return (status, None) if major == 12 else (status,)

    order = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM="stream")
    return SimpleNamespace(
        cuDriverGetVersion=lambda: (0, 12080),
        cuMemcpyAsync=copy,
        cuMemcpyBatchAsync=copy_batch,
        CUdeviceptr=Pointer,
        CUmemcpyAttributes=SimpleNamespace,
        CUmemcpySrcAccessOrder=order,
        calls=calls,
    )


@pytest.fixture
def gpu(monkeypatch):
    """A namespace in place of torch; ``gpu.compute`` is the stream of the forward pass."""
    compute, runtime = LazyStream(), Runtime()
    cuda = SimpleNamespace(
        Stream=LazyStream,
        Event=LazyEvent,
        current_stream=lambda device: compute,
        set_device=lambda device: None,
        device=lambda device: nullcontext(),
        cudart=lambda: runtime,
    )
    monkeypatch.setattr(cuda_device, "torch", SimpleNamespace(cuda=cuda))
    return SimpleNamespace(compute=compute, runtime=runtime)


def two_regions(pieces=8):
    """DRAM with pieces 0, 1, 2, … and HBM with a wider stride; on a GPU it would be VRAM."""
    dram, hbm = allocate_registered(pieces * PIECE), allocate_registered(pieces * 2 * PIECE)
    dram.array.reshape(pieces, PIECE)[:] = np.arange(pieces, dtype=np.uint8)[:, None]
    infos = (
        RegionInfo("buffer", dram.address, PIECE, PIECE, pieces),
        RegionInfo("hbm.0", hbm.address, 2 * PIECE, PIECE, pieces, memory="VRAM"),
    )
    return dram.array.reshape(pieces, PIECE), hbm.array.reshape(pieces, 2, PIECE)[:, 0], infos


def with_copier(bindings, infos):
    device = CudaDevice("cuda:0", CudaDriver(bindings))
    assert device.copier is not None
    for info in infos:
        device.copier.register(info)
    return device


@pytest.mark.parametrize(("batches", "major"), [(True, 12), (True, 13), (False, 13)])
def test_a_copy_is_one_call_if_supported_and_ends_with_its_event(gpu, batches, major):
    bindings = driver_bindings(batches=batches, major=major)
    _, hbm, infos = two_regions()
    device = with_copier(bindings, infos)
    copy = device.copier.copy("buffer", [3, 1, 7], "hbm.0", [0, 5, 2], PASSED)
    assert bindings.calls == (["batch of 3"] if batches else ["one"] * 3)
    assert copy.poll() is TransferState.MOVING
    with pytest.raises(TransportError, match="moving"):
        copy.release()
    copy.event.wait()
    assert copy.poll() is TransferState.DONE
    copy.release()
    assert copy.bytes == 3 * PIECE
    assert [int(hbm[i, 0]) for i in (0, 5, 2)] == [3, 1, 7]


def test_computation_queued_after_wait_finds_the_copy_and_a_copy_finds_what_was_computed(gpu):
    dram, hbm, infos = two_regions()
    device = with_copier(driver_bindings(), infos)
    into = device.copier.copy("buffer", [4], "hbm.0", [6], PASSED)
    device.wait(into.event)
    gpu.compute.work.append(lambda: np.copyto(hbm[6], hbm[6] + 100))
    out = device.copier.copy("hbm.0", [6], "buffer", [0], device.record())
    assert int(dram[0, 0]) == 0  # the host has not waited
    out.event.wait()
    assert int(dram[0, 0]) == 104


def test_a_driver_that_refuses_is_an_error_that_names_the_setting(gpu):
    _, _, infos = two_regions()
    device = with_copier(driver_bindings(status=719), infos)
    with pytest.raises(TransportError, match=r"719.*device_copies"):
        device.copier.copy("buffer", [1], "hbm.0", [1], PASSED)


def test_errors_without_driver_or_bindings_name_the_setting(monkeypatch):
    def no_driver():
        raise RuntimeError("DynamicLibNotFoundError: libcuda")

    with pytest.raises(ConfigError, match=r"libcuda.*device_copies to nixl"):
        CudaDriver(SimpleNamespace(cuDriverGetVersion=no_driver))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"pip install 'cuda-bindings.*device_copies to nixl"):
        CudaDriver()


def test_memory_is_pinned_in_place_until_the_device_is_closed(gpu):
    device = CudaDevice("cuda:0", None)
    device.pin(4096, 100, None)
    assert gpu.runtime.pinned == {4096}
    device.close()
    device.close()
    assert gpu.runtime.pinned == set()
    with pytest.raises(ConfigError, match="buffer_bytes"):
        device.pin(4096, 1 << 30, None)


def test_pinning_of_a_large_buffer_is_logged_with_its_time(gpu, caplog, monkeypatch):
    monkeypatch.setattr(gpu.runtime, "cudaHostRegister", lambda *_: SimpleNamespace(value=0))
    device = CudaDevice("cuda:0", None)
    with caplog.at_level("INFO"):
        device.pin(4096, 1 << 20, None)
        assert caplog.messages == []
        device.pin(1 << 30, 3 << 30, None)
    before, after = caplog.messages
    assert before == "pinning 3.0 GiB of buffer, which takes seconds"
    assert after.startswith("pinned 3.0 GiB in ")


def test_threads_allow_their_calls_during_captures_of_graphs(gpu, caplog, monkeypatch):
    """A query of the pump's thread would otherwise make vLLM's graph invalid."""
    modes, status = [], 0

    def exchange(mode):
        modes.append(mode._obj.value)
        return status

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    device = CudaDevice("cuda:0", None)
    device.enter_thread()
    relaxed = 2
    assert modes == [relaxed]
    assert caplog.messages == []
    status = 1
    device.enter_thread()
    assert "use --enforce-eager" in caplog.text


class TwoEngines:
    """A PE with HBM of 8 pieces and a DE of the same machine with a buffer of 8 pieces.

    ``transport`` is the PE's; its network moves bytes at the first poll.
    """

    def __init__(self, *, copier=True):
        self.device = CudaDevice("cuda:0", CudaDriver(driver_bindings()) if copier else None)
        fabric = InProcessFabric()
        self.memory = SharedMemoryTransport(
            "pe", this_process(), has_exited, self.device.hbm_copies()
        )
        self.transport = NearestTransport(self.memory, InProcessTransport("pe", fabric))
        _, self.hbm, (_, region) = two_regions()
        self.transport.register(region, self.hbm)

        buffer = allocate_shared(8 * PIECE)
        self.buffer = buffer.array.reshape(8, PIECE)
        self.buffer[:] = np.arange(8, dtype=np.uint8)[:, None]
        self.decode = SharedMemoryTransport("de", this_process(), has_exited)
        self.decode.register(RegionInfo("buffer", buffer.address, PIECE, PIECE, 8), buffer)
        InProcessTransport("de", fabric)

    def begin_to_connect(self):
        """Connect as a PE does, which has a view of the DE's buffer for each part of a block."""
        info = self.decode.info()
        self.transport.connect(info, [info.regions[0].part("buffer.0", 0, PIECE)])

    def connect(self):
        """Connect, and return when the thread that pins has ended."""
        self.begin_to_connect()
        for thread in threading.enumerate():
            if thread.name == "shared-memory-pin":
                thread.join(GUARD_S)

    def post(self, direction, hbm_pieces, buffer_pieces):
        return self.transport.post(direction, "hbm.0", hbm_pieces, "de", "buffer", buffer_pieces)


@pytest.fixture
def two_engines(gpu):
    engines = TwoEngines()
    yield engines
    engines.transport.close()
    engines.decode.close()


def test_a_gpu_copies_between_its_hbm_and_the_buffer_of_another_engine(two_engines):
    two_engines.connect()
    read = two_engines.post(Direction.READ, [0, 5], [3, 7])
    assert read.poll() is read.poll() is TransferState.MOVING
    two_engines.device.copier.synchronize()
    assert read.poll() is TransferState.DONE
    read.release()
    assert [int(two_engines.hbm[i, 0]) for i in (0, 5)] == [3, 7]

    write = two_engines.post(Direction.WRITE, [5], [0])
    assert write.poll() is TransferState.MOVING
    assert int(two_engines.buffer[0, 0]) == 0
    two_engines.device.copier.synchronize()
    assert write.poll() is TransferState.DONE
    assert int(two_engines.buffer[0, 0]) == 7
    assert write.bytes == PIECE


def test_the_network_serves_an_engine_until_its_buffer_is_pinned(two_engines, gpu, monkeypatch):
    pinned, register = threading.Event(), gpu.runtime.cudaHostRegister

    def register_late(*arguments):
        assert pinned.wait(GUARD_S)
        return register(*arguments)

    monkeypatch.setattr(gpu.runtime, "cudaHostRegister", register_late)
    two_engines.begin_to_connect()
    early = two_engines.post(Direction.READ, [1], [4])
    assert early.poll() is TransferState.DONE
    pinned.set()
    two_engines.connect()
    late = two_engines.post(Direction.READ, [2], [4])
    assert late.poll() is TransferState.MOVING
    two_engines.device.copier.synchronize()
    assert late.poll() is TransferState.DONE
    assert int(two_engines.hbm[1, 0]) == int(two_engines.hbm[2, 0]) == 4


def test_the_buffer_of_a_lost_engine_is_unpinned_when_the_gpu_copies_no_more(two_engines, gpu):
    two_engines.connect()
    assert len(gpu.runtime.pinned) == 1
    copying = two_engines.post(Direction.WRITE, [1], [1])
    waiting = two_engines.post(Direction.WRITE, [2], [2])
    assert copying.poll() is TransferState.MOVING

    two_engines.transport.disconnect("de")

    assert copying.poll() is TransferState.MOVING
    assert waiting.poll() is TransferState.FAILED  # It was not queued, so nothing is written.
    gc.collect()
    assert len(gpu.runtime.pinned) == 1
    two_engines.device.copier.synchronize()
    assert copying.poll() is TransferState.FAILED
    assert "disconnected" in copying.error()
    gc.collect()
    assert gpu.runtime.pinned == set()
    assert int(two_engines.buffer[2, 0]) == 2


def test_a_buffer_that_cannot_be_pinned_is_reached_through_the_network(
    two_engines, gpu, monkeypatch, caplog
):
    monkeypatch.setattr(gpu.runtime, "cudaHostRegister", lambda *_: SimpleNamespace(value=2))
    two_engines.connect()
    assert "reaches de through the network: 512 bytes of buffer cannot be pinned" in caplog.text
    read = two_engines.post(Direction.READ, [1], [4])
    assert read.poll() is TransferState.DONE


def test_a_gpu_that_leaves_copies_to_nixl_uses_the_network(gpu, caplog):
    engines = TwoEngines(copier=False)
    with caplog.at_level("INFO"):
        engines.connect()
    assert "reaches de through the network: its GPU leaves copies to NIXL" in caplog.text
    read = engines.post(Direction.READ, [1], [4])
    assert read.poll() is TransferState.DONE
    engines.transport.close()


def test_a_device_that_fails_fails_the_copy(gpu, monkeypatch):
    _, _, infos = two_regions()
    device = with_copier(driver_bindings(), infos)
    copy = device.copier.copy("buffer", [1], "hbm.0", [1], PASSED)

    def fail(event):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(LazyEvent, "query", fail)
    assert copy.poll() is TransferState.FAILED
    assert "illegal address" in copy.error()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20))
def test_merged_runs_are_the_same_bytes(pairs):
    sources = np.array([s for s, _ in pairs], np.int64) * PIECE
    destinations = np.array([d for _, d in pairs], np.int64) * PIECE
    merged = merge_runs(sources, destinations, PIECE)
    unfolded = [
        (int(s) + offset, int(d) + offset)
        for s, d, size in zip(*merged, strict=True)
        for offset in range(0, int(size), PIECE)
    ]
    assert unfolded == list(zip(sources.tolist(), destinations.tolist(), strict=True))


def test_neighbours_on_both_sides_are_one_copy():
    consecutive = np.arange(5, dtype=np.int64) * PIECE
    merged = merge_runs(consecutive, consecutive + 4096, PIECE)
    assert [column.tolist() for column in merged] == [[0], [4096], [5 * PIECE]]


# ------------------------------------------------------------------ who copies


def test_an_rdma_nic_counts_when_a_port_is_active(tmp_path: Path):
    assert not has_rdma_nic(tmp_path / "none")
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("1: DOWN\n")
    assert not has_rdma_nic(tmp_path)
    state.write_text("4: ACTIVE\n")
    assert has_rdma_nic(tmp_path, {})
    for chosen, usable in (
        ("all", True),
        ("eth0,mlx5_0:1", True),
        ("lo", False),
        ("mlx5_1", False),
    ):
        assert has_rdma_nic(tmp_path, {"UCX_NET_DEVICES": chosen}) is usable


def test_kv_in_host_memory_needs_no_device():
    assert isinstance(open_device(torch.device("cpu"), "auto"), HostDevice)
    with pytest.raises(ConfigError, match="device_copies is cuda"):
        open_device(torch.device("cpu"), "cuda")


@pytest.mark.parametrize(
    ("setting", "nic", "own"),
    [("auto", True, False), ("auto", False, True), ("nixl", False, False), ("cuda", True, True)],
)
def test_cuda_copies_where_no_nic_does(gpu, caplog, monkeypatch, setting, nic, own):
    caplog.set_level("INFO")
    monkeypatch.setattr(cuda_device, "has_rdma_nic", lambda: nic)
    monkeypatch.setattr(cuda_device, "CudaDriver", lambda: CudaDriver(driver_bindings()))
    device = open_device(torch.device("cuda", 0), setting)
    assert (device.copier is not None) is own
    assert caplog.messages[0].startswith(
        f"copies between DRAM and HBM are made by {'CUDA' if own else 'NIXL'}: "
    )


# ------------------------------------------------------------------ KV tensors as regions

GEOMETRY = BlockGeometry.uniform(layers=1, block_tokens=64, layer_block_bytes=2 * 64 * 4 * 16 * 2)


def layout_of(cache):
    return hbm_layout([[cache]], 10, GEOMETRY).memories[0]


def test_a_block_major_tensor_is_one_region_whatever_the_order_inside_a_block():
    cache = torch.zeros(10, 4, 64, 32, dtype=torch.float16)
    region = layout_of(cache)
    assert (region.pieces, region.piece_bytes) == (10, GEOMETRY.bytes_of(0))
    inside = torch.zeros(10, 64, 4, 32, dtype=torch.float16).permute(0, 2, 1, 3)
    assert layout_of(inside).stride_bytes == region.stride_bytes


def test_the_null_block_does_not_count():
    """Otherwise an idle engine reports too little: requests that need all HBM wait for ever."""
    cache = torch.zeros(10, 4, 64, 32, dtype=torch.float16)
    assert hbm_layout([[cache]], 10, GEOMETRY).capacity_tokens == 9 * 64


def test_kernel_blocks_smaller_than_the_engines_are_combined():
    cache = torch.zeros(40, 4, 16, 32, dtype=torch.float16)
    region = layout_of(cache)
    assert (region.pieces, region.stride_bytes) == (10, GEOMETRY.bytes_of(0))


def test_layers_may_be_between_the_blocks_of_a_layer():
    cache = torch.zeros(10, 3, 4, 64, 32, dtype=torch.float16)[:, 1]
    region = layout_of(cache)
    assert region.stride_bytes == 3 * GEOMETRY.bytes_of(0)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, 10, 64, 4, 16, dtype=torch.float16),
        torch.zeros(2, 10, 64, 4, 16, dtype=torch.float16).transpose(0, 1),
        torch.zeros(4, 10, 64, 32, dtype=torch.float16).transpose(0, 1),
    ],
    ids=["keys and values first", "keys and values apart", "heads apart"],
)
def test_a_block_in_several_pieces_is_refused(cache):
    with pytest.raises(ConfigError, match="block-major"):
        layout_of(cache)
