"""Contract of ``engine.passes.device``: the CPU, and CUDA's device over an emulated driver.

The driver copies in host memory with a thread for each stream, so copies end after their calls.
"""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.engine_harness import GEOMETRY, ToyCluster, full_block, kv_bytes, prompt_keys
from tests.guard import GUARD_S

from dualpath.core.errors import TransportError
from dualpath.core.runs import BlockRun
from dualpath.engine.passes.device import PASSED, Device, HostDevice
from dualpath.transport.contract import RegionInfo, TransferState
from dualpath.transport.memory import RegisteredMemory, allocate_registered
from dualpath.vllm import cuda_device
from dualpath.vllm.cuda_device import CudaDevice, CudaDriver
from dualpath_lab.benchmarks.gpu.machine import HostCopier
from dualpath_lab.gpu.emulation import cuda_driver

PIECES, PIECE_BYTES = 8, 64


def open_host(monkeypatch: pytest.MonkeyPatch) -> Device:
    return HostDevice()


def open_host_with_copier(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = HostDevice()
    device.copier = HostCopier()
    return device


def open_cuda(monkeypatch: pytest.MonkeyPatch, *, batches: bool = True) -> Device:
    cuda = SimpleNamespace(**cuda_driver.torch_cuda())
    monkeypatch.setattr(cuda_device, "torch", SimpleNamespace(cuda=cuda))
    bindings = cuda_driver.driver_module(batches=batches)
    return CudaDevice("cuda:0", CudaDriver(bindings))


def open_old_cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Open the device of a driver without the batch call."""
    return open_cuda(monkeypatch, batches=False)


DEVICES = [
    pytest.param(open_host, id="cpu"),
    pytest.param(open_host_with_copier, id="cpu with a copier"),
    pytest.param(open_cuda, id="cuda"),
    pytest.param(open_old_cuda, id="cuda without batches"),
]


class Memory:
    """DRAM, pinned, whose piece i has bytes i, and HBM with a wider stride; both registered."""

    def __init__(self, device: Device) -> None:
        assert device.copier is not None
        self.device, self.copier = device, device.copier
        self._dram, self._hbm = self._region("buffer", 1), self._region("hbm", 2)
        device.pin(self._dram.address, self._dram.size_bytes, self._dram)
        self.dram = self._dram.array.reshape(PIECES, PIECE_BYTES)
        self.hbm = self._hbm.array.reshape(PIECES, 2, PIECE_BYTES)[:, 0]
        self.dram[:] = np.arange(PIECES, dtype=np.uint8)[:, None]

    def _region(self, name: str, spread: int) -> RegisteredMemory:
        memory = allocate_registered(PIECES * spread * PIECE_BYTES)
        kind = "DRAM" if name == "buffer" else "VRAM"
        self.copier.register(
            RegionInfo(name, memory.address, spread * PIECE_BYTES, PIECE_BYTES, PIECES, memory=kind)
        )
        return memory


@pytest.fixture(params=DEVICES[1:])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    made = Memory(request.param(monkeypatch))
    yield made
    made.device.close()


def test_pieces_arrive_in_the_named_places_and_nowhere_else(memory: Memory) -> None:
    copy = memory.copier.copy("buffer", [3, 1, 2], "hbm", [0, 5, 6], PASSED)
    assert copy.bytes == 3 * PIECE_BYTES
    copy.event.wait()
    assert copy.event.passed()
    assert copy.poll() is TransferState.DONE
    assert copy.error() is None
    copy.release()
    assert memory.hbm[:, 0].tolist() == [3, 0, 0, 0, 0, 1, 2, 0]


def test_computation_after_wait_finds_the_copy_and_a_copy_finds_what_was_computed(
    memory: Memory,
) -> None:
    into = memory.copier.copy("buffer", [4], "hbm", [6], PASSED)
    memory.device.wait(into.event)
    memory.hbm[6] += 100
    out = memory.copier.copy("hbm", [6], "buffer", [0], memory.device.record())
    out.event.wait()
    assert int(memory.dram[0, 0]) == 104


def test_a_copy_starts_after_the_copy_that_it_follows(memory: Memory) -> None:
    """The second direction has a stream of its own on a GPU."""
    into = memory.copier.copy("buffer", [4], "hbm", [6], PASSED)
    out = memory.copier.copy("hbm", [6], "buffer", [0], into.event)
    out.event.wait()
    assert int(memory.dram[0, 0]) == 4


def test_a_copy_without_pieces_is_over_with_its_event(memory: Memory) -> None:
    copy = memory.copier.copy("buffer", [], "hbm", [], memory.device.record())
    copy.event.wait()
    assert copy.bytes == 0
    assert copy.poll() is TransferState.DONE


@pytest.mark.parametrize(
    ("source", "pieces", "destination", "there"),
    [("unknown", [0], "hbm", [0]), ("buffer", [0, 1], "hbm", [0]), ("buffer", [99], "hbm", [0])],
)
def test_unknown_regions_and_pieces_are_refused(
    source: str, pieces: list[int], destination: str, there: list[int], memory: Memory
) -> None:
    with pytest.raises(TransportError):
        memory.copier.copy(source, pieces, destination, there, PASSED)


def test_any_thread_may_copy_once_it_has_entered(memory: Memory) -> None:
    def run() -> None:
        memory.device.enter_thread()
        memory.copier.copy("buffer", [7], "hbm", [7], PASSED).event.wait()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(GUARD_S)
    assert int(memory.hbm[7, 0]) == 7


@pytest.mark.parametrize("open_one", DEVICES)
def test_recorded_events_pass_and_close_may_be_called_twice(
    open_one: Callable[[pytest.MonkeyPatch], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_one(monkeypatch)
    content = allocate_registered(4096)
    device.pin(content.address, content.size_bytes, content)
    event = device.record()
    device.wait(event)
    event.wait()
    assert event.passed()
    device.close()
    device.close()


@pytest.mark.parametrize("open_one", DEVICES)
@pytest.mark.parametrize("layer_buffers", [1, 2, GEOMETRY.layers])
def test_an_engine_moves_every_byte_of_a_prompt(
    layer_buffers: int,
    open_one: Callable[[pytest.MonkeyPatch], Device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hits on both sides, two chunks, decode and storage: as the property test of the paths."""
    cluster = ToyCluster(layer_buffers=layer_buffers, open_device=lambda: open_one(monkeypatch))
    keys, hbm = prompt_keys(34), list(range(40, 49))
    try:
        cluster.store(keys[:5])
        transfer = cluster.load("r", keys, 34, 3, 2)
        for first, end in ((5, 7), (7, 9)):
            chunk = (transfer, keys, BlockRun(first, end - first), hbm)
            assert cluster.forward([chunk]) == {}
        found = [cluster.de.slot_bytes(slot) for slot in transfer.de_slots]
        assert found == [full_block(key) for key in keys]
        assert cluster.hand_to_decode(transfer, keys, hbm) is None
        for layer in range(GEOMETRY.layers):
            for block, key in zip(hbm, keys, strict=True):
                assert cluster.de.hbm[layer][block].tobytes() == kv_bytes(key, layer)
    finally:
        cluster.close()
