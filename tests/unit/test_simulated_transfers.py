"""Simulated transfers: when their bytes arrive, and when they no longer can."""

import numpy as np
import pytest

from dualpath.transport.contract import Direction, RegionInfo
from dualpath.transport.in_process import InProcessFabric
from dualpath_lab.faults.simulation.transfers import SimTransport, TransferFaults
from dualpath_lab.faults.simulation.world import Process, World

_PIECES = 4


class Pair:
    """Two engines, each with a region of four pieces; the transfers of both stall for 5 s."""

    def __init__(self) -> None:
        self.world = World(0)
        self.owner: str | None = "a request"
        fabric, faults = InProcessFabric(), TransferFaults()
        faults.to_stall, faults.stall_s = 1000, (5.0, 5.0)
        self.processes = {name: Process(self.world, name) for name in ("pe", "de")}
        self.memory = {name: np.zeros((_PIECES, 8), np.uint8) for name in self.processes}
        self.transports = {
            name: SimTransport(
                *(name, fabric, process, faults, lambda agent, region, piece: self.owner),
                lambda: None,
            )
            for name, process in self.processes.items()
        }
        for name, transport in self.transports.items():
            address = self.memory[name].ctypes.data
            transport.register(RegionInfo("buffer", address, 8, 8, _PIECES), None)
        self.transports["pe"].connect(self.transports["de"].info())
        self.memory["pe"][:] = 7

    def sends(self) -> None:
        """Let the PE post transfers until one of them stalls."""
        pieces = range(_PIECES)
        while not any("stalls" in what for _, _, what in self.world.story):
            self.memory["de"][:] = 0
            self.transports["pe"].post(Direction.WRITE, "buffer", pieces, "de", "buffer", pieces)
            self.world.run(lambda: False, 0.1)

    def arrived(self) -> int:
        """Run 10 s; return the number of pieces that have arrived completely at the DE."""
        self.memory["de"][:] = 0
        self.world.run(lambda: False, 10.0)
        return int((self.memory["de"] == 7).all(axis=1).sum())


def test_transfers_of_a_killed_process_arrive_until_its_machine_reports_its_exit() -> None:
    for dying_s, arrives in ((1.0, 0), (3.0, 2), (6.0, 4)):
        pair = Pair()
        pair.sends()
        process = pair.processes["pe"]
        process.kill()
        process.exits_s = pair.world.now_s + dying_s
        assert pair.arrived() == arrives
        assert process.has_exited
        assert not pair.world.problems


def test_a_process_has_exited_soon_after_it_was_killed() -> None:
    for seed in range(20):
        world = World(seed)
        process = Process(world, "pe")
        process.kill()
        assert not process.alive
        world.run(lambda: False, 0.1)
        assert process.has_exited


def test_transfers_to_a_disconnected_peer_continue_and_their_memory_must_not_be_reused() -> None:
    pair = Pair()
    pair.sends()
    pair.transports["pe"].disconnect("de")
    pair.owner = "another request"
    assert pair.arrived() == _PIECES
    assert "belongs to another request now" in pair.world.problems[0]


@pytest.mark.parametrize("dies", [False, True])
def test_nothing_arrives_at_a_dead_process(dies: bool) -> None:
    pair = Pair()
    pair.sends()
    if dies:
        pair.processes["de"].kill()
        pair.transports["de"].close()
    assert pair.arrived() == (0 if dies else _PIECES)
