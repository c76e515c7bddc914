"""The in-process transport exposes ordering mistakes and injects faults."""

import pytest

from dualpath.core.errors import ConfigError, PeerLostError, TransportError
from dualpath.transport.contract import Direction, RegionInfo, TransferState
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.memory import RegisteredMemory, allocate_registered


def join(fabric: InProcessFabric, agent: str) -> tuple[InProcessTransport, RegisteredMemory]:
    transport, memory = InProcessTransport(agent, fabric), allocate_registered(100)
    transport.register(RegionInfo("kv", memory.address, 10, 10, 10), memory)
    return transport, memory


@pytest.fixture
def fabric() -> InProcessFabric:
    return InProcessFabric()


def test_nothing_is_copied_before_the_first_poll(fabric: InProcessFabric) -> None:
    (pe, source), (de, target) = join(fabric, "pe"), join(fabric, "de")
    pe.connect(de.info())
    source.array[:10] = 1
    transfer = pe.post(Direction.WRITE, "kv", [0], "de", "kv", [0])
    assert not target.array.any()
    source.array[:10] = 2
    assert transfer.poll() is TransferState.DONE
    assert set(target.array[:10]) == {2}


def test_a_killed_agent_fails_current_and_later_transfers(fabric: InProcessFabric) -> None:
    (pe, _), (de, target) = join(fabric, "pe"), join(fabric, "de")
    pe.connect(de.info())
    moving = pe.post(Direction.WRITE, "kv", [0], "de", "kv", [0])
    fabric.kill("de")
    assert moving.poll() is TransferState.FAILED
    assert moving.error() == "agent 'de' is dead"
    assert not target.array.any()
    with pytest.raises(PeerLostError):
        pe.post(Direction.WRITE, "kv", [0], "de", "kv", [0])
    with pytest.raises(PeerLostError):
        pe.connect(de.info())


def test_an_injected_failure_hits_one_transfer_of_the_named_agent(fabric: InProcessFabric) -> None:
    (pe, _), (de, _) = join(fabric, "pe"), join(fabric, "de")
    pe.connect(de.info())
    de.connect(pe.info())
    fabric.fail_next("cable pulled", agent="de")
    unharmed = pe.post(Direction.WRITE, "kv", [0], "de", "kv", [0])
    struck = de.post(Direction.READ, "kv", [0], "pe", "kv", [0])
    next_one = de.post(Direction.READ, "kv", [0], "pe", "kv", [0])
    assert unharmed.poll() is TransferState.DONE
    assert struck.poll() is TransferState.FAILED
    assert struck.error() == "cable pulled"
    assert next_one.poll() is TransferState.DONE


def test_disconnecting_fails_moving_transfers(fabric: InProcessFabric) -> None:
    (pe, _), (de, _) = join(fabric, "pe"), join(fabric, "de")
    pe.connect(de.info())
    moving = pe.post(Direction.WRITE, "kv", [0], "de", "kv", [0])
    with pytest.raises(TransportError, match="moving"):
        moving.release()
    pe.disconnect("de")
    assert moving.poll() is TransferState.FAILED


def test_agent_names_are_unique_and_free_again_after_close(fabric: InProcessFabric) -> None:
    pe, _ = join(fabric, "pe")
    with pytest.raises(ConfigError, match="unique"):
        InProcessTransport("pe", fabric)
    pe.close()
    join(fabric, "pe")
