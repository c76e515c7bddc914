"""Peers of an engine: who cannot be reached now harms nobody, and is tried again."""

import pytest

from dualpath.core.addresses import EngineAddress
from dualpath.core.cluster import Role
from dualpath.core.errors import TransportError
from dualpath.engine.peers import Peers
from dualpath.transport.in_process import InProcessFabric, InProcessTransport


def address(engine_id: str) -> EngineAddress:
    return EngineAddress(engine_id, "1", Role.DECODE, f"{engine_id}-1", b"in-process", ())


def test_a_peer_that_cannot_be_reached_does_not_keep_others_away() -> None:
    fabric = InProcessFabric()
    peers = Peers(Role.PREFILL, InProcessTransport("pe-0-1", fabric))
    InProcessTransport("de-1-1", fabric)
    for peer in (address("de-0"), address("de-1")):
        peers.up(peer)
    assert peers.agent_of("de-1", "1") == "de-1-1"
    with pytest.raises(TransportError, match="cannot be reached"):
        peers.agent_of("de-0", "1")


def test_a_peer_that_was_out_of_reach_is_connected_when_it_is_needed() -> None:
    fabric = InProcessFabric()
    peers = Peers(Role.PREFILL, InProcessTransport("pe-0-1", fabric))
    peers.up(address("de-0"))
    InProcessTransport("de-0-1", fabric)
    assert peers.agent_of("de-0", "1") == "de-0-1"
