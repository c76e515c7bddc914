"""An engine leaves with all of its DRAM, and joins again as the next data plane of its process."""

import gc
import os
import resource

import msgspec
import pytest
from tests.engine_harness import GEOMETRY

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role, is_earlier_data_plane
from dualpath.core.control import Assign
from dualpath.engine.buffer.engine_memory import EngineMemory
from dualpath.engine.control.membership import Membership, ServedModel
from dualpath.engine.control.surroundings import Surroundings
from dualpath.engine.io.read_queue import ReadQueue
from dualpath.engine.passes.hbm_layout import shared_layers
from dualpath.engine.ranks.rank import ALONE, Rank
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import TimeLimit
from dualpath.transport.contract import RegionInfo
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.memory import allocate_registered

NAMESPACE = StoreNamespace(model="toy", dtype="u8", layout="toy", geometry=GEOMETRY)
STEP_1 = "step-1-0123456789abcdef"
HBM = allocate_registered(GEOMETRY.bytes_of(0))
MIB = 1 << 20
BUFFER_BYTES = 256 * MIB
#: What an allocator may keep of other memory.
SLACK_BYTES = 32 * MIB
FABRIC = InProcessFabric()


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def member(
    role: Role,
    weights: str = "",
    former_epoch: str | None = None,
    memory: EngineMemory | None = None,
) -> Membership:
    settings = EngineSettings(
        role=role,
        engine_id="e-0",
        router="tcp://127.0.0.1:9",
        api_url="",
        storage=f"memory://weights {os.getpid()}",
        buffer_bytes=BUFFER_BYTES,
        touch_memory=True,
    )
    region = RegionInfo("hbm", HBM.address, HBM.size_bytes, HBM.size_bytes, 1)
    return Membership(
        settings,
        NAMESPACE.with_weights(weights or msgspec.UNSET),
        ServedModel(served_model_name="toy", max_model_len=512, vocab_size=100),
        shared_layers([region], GEOMETRY, capacity_tokens=640),
        surroundings=Surroundings(
            open_transport=lambda agent, settings, device: InProcessTransport(agent, FABRIC)
        ),
        former_epoch=former_epoch,
        place=ALONE._replace(memory=memory),
    )


@pytest.mark.parametrize("role", list(Role))
def test_the_buffer_is_returned_to_the_machine_and_grows_again(role: Role) -> None:
    """A decode engine has its buffer in a memory file, a prefill engine in anonymous memory."""
    gc.collect()
    before = resident_bytes()
    engine = member(role)
    assert resident_bytes() > before + BUFFER_BYTES - SLACK_BYTES
    epoch = engine.epoch
    assert engine.leave("it sleeps")
    del engine
    gc.collect()
    assert resident_bytes() < before + SLACK_BYTES
    again = member(role, former_epoch=epoch)
    assert resident_bytes() > before + BUFFER_BYTES - SLACK_BYTES
    assert again.leave()


def test_the_next_membership_is_a_new_engine_of_the_same_process() -> None:
    first = member(Role.PREFILL)
    assert first.leave("its weights change")
    second = member(Role.PREFILL, STEP_1, first.epoch)
    assert is_earlier_data_plane(first.epoch, second.epoch)
    assert second.manager.address("").agents != first.manager.address("").agents
    assert second.manager.report().load.cached_buffer_tokens == 0
    assert second._namespace.weights == STEP_1
    assert second.leave()


def test_an_engine_whose_transfers_do_not_end_may_not_open_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = member(Role.PREFILL)
    close = Rank.close

    def hangs(rank: Rank, limit: TimeLimit) -> bool:
        close(rank, limit)
        return False

    monkeypatch.setattr(Rank, "close", hangs)
    assert engine.leave() is False


@pytest.mark.parametrize("role", list(Role))
def test_memory_may_be_kept_for_the_next_membership_without_its_blocks(role: Role) -> None:
    first = member(role)
    buffer = first.manager.buffer
    buffer.view(0)[:] = bytes(range(1, 2)) * len(buffer.view(0))
    assert first.leave()
    kept = first.manager.unused_memory
    assert kept is not None
    second = member(role, STEP_1, first.epoch, kept)
    assert second.manager.buffer.view(0)[0] == 1, "the same memory"
    assert list(second.manager.buffer.cached_blocks()) == []
    assert second.manager.buffer.free == second.manager.buffer.capacity
    assert second.leave()


def test_memory_that_another_process_may_write_to_is_not_kept() -> None:
    engine = member(Role.DECODE)
    engine.manager.handle(Assign("r", 3 * GEOMETRY.block_tokens, 3))
    engine.manager.end_session("test")  # A prefill engine may be sending the KV of this request.
    assert engine.manager.buffer.quarantined() == ("r",)
    assert engine.leave()
    assert engine.manager.unused_memory is None


def test_memory_with_a_read_that_hangs_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = member(Role.PREFILL)
    monkeypatch.setattr(ReadQueue, "close", lambda queue, limit: False)
    assert engine.leave()
    assert engine.manager.unused_memory is None
