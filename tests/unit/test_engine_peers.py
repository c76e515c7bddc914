"""Peers of an engine: an unreachable one does not affect others and is retried."""

import msgspec
import pytest
from tests.engine_harness import GEOMETRY

from dualpath.core.cluster import AgentAddress, EngineAddress, RegionAddress, Role
from dualpath.core.control import PeerDown
from dualpath.core.errors import TransportError
from dualpath.engine.buffer.block_buffer import BUFFER_REGION
from dualpath.engine.control.peers import UNANNOUNCED_S, Peers
from dualpath.engine.passes.hbm_layout import PartViews, shared_layers
from dualpath.transport.contract import RegionInfo
from dualpath.transport.in_process import InProcessFabric, InProcessTransport

SIZE = GEOMETRY.bytes_of(0)
VIEWS = PartViews(GEOMETRY, shared_layers([RegionInfo("hbm", 4096, SIZE, SIZE, 1)], GEOMETRY, 4))


def address(engine_id: str, *regions: RegionAddress, role: Role = Role.DECODE) -> EngineAddress:
    agent = AgentAddress(f"{engine_id}-1", b"in-process", regions)
    return EngineAddress(engine_id, "1", role, (agent,))


def test_an_unreachable_peer_does_not_affect_others() -> None:
    fabric = InProcessFabric()
    peers = Peers(InProcessTransport("pe-0-1", fabric), VIEWS)
    InProcessTransport("de-1-1", fabric)
    for peer in (address("de-0"), address("de-1")):
        peers.up(peer)
    assert peers.agents_of("de-1", "1") == ("de-1-1",)
    with pytest.raises(TransportError, match="cannot be reached"):
        peers.agents_of("de-0", "1")


def test_an_unreachable_peer_is_connected_when_it_is_needed() -> None:
    fabric = InProcessFabric()
    peers = Peers(InProcessTransport("pe-0-1", fabric), VIEWS)
    peers.up(address("de-0"))
    InProcessTransport("de-0-1", fabric)
    assert peers.agents_of("de-0", "1") == ("de-0-1",)


def test_ranks_and_agents_are_paired_whatever_their_numbers() -> None:
    def pairs(ranks: int, agents: int) -> list[list[str]]:
        named = tuple(AgentAddress(str(number), b"", ()) for number in range(agents))
        peer = EngineAddress("de", "1", Role.DECODE, named)
        return [[a.agent for a in peer.agents_for(rank, ranks)] for rank in range(ranks)]

    assert pairs(1, 1) == [["0"]]
    assert pairs(2, 2) == [["0"], ["1"]]
    assert pairs(4, 2) == [["0"], ["0"], ["1"], ["1"]]
    assert pairs(2, 4) == [["0", "1"], ["2", "3"]]
    assert pairs(1, 3) == [["0", "1", "2"]]
    assert pairs(3, 2) == [["0"], ["0"], ["1"]]
    for ranks in range(1, 9):
        for agents in range(1, 9):
            found = pairs(ranks, agents)
            assert all(found)
            assert {name for each in found for name in each} == set(map(str, range(agents)))


def test_a_peer_with_other_blocks_is_refused_and_does_not_affect_others() -> None:
    fabric = InProcessFabric()
    peers = Peers(InProcessTransport("pe-0-1", fabric), VIEWS)
    for agent in ("de-0-1", "de-1-1"):
        InProcessTransport(agent, fabric)
    full = GEOMETRY.full_block_bytes
    peers.up(address("de-0", RegionAddress(BUFFER_REGION, 4096, full + 1, full + 1, 2)))
    peers.up(address("de-1", RegionAddress(BUFFER_REGION, 4096, full, full, 2)))
    with pytest.raises(TransportError, match="engine de-0: region 'buffer' has blocks of 1281"):
        peers.agents_of("de-0", "1")
    assert peers.agents_of("de-1", "1") == ("de-1-1",)


class CountingTransport(InProcessTransport):
    """Notes which agents are connected and disconnected."""

    def __init__(self, agent: str, fabric: InProcessFabric) -> None:
        super().__init__(agent, fabric)
        self.events: list[str] = []

    def connect(self, peer, views=()):
        super().connect(peer, views)
        self.events.append(f"+{peer.agent}")

    def disconnect(self, agent):
        super().disconnect(agent)
        self.events.append(f"-{agent}")


def test_connections_outlast_a_session_until_their_peers_were_not_announced_for_a_while() -> None:
    fabric = InProcessFabric()
    transport = CountingTransport("pe-0-1", fabric)
    peers = Peers(transport, VIEWS)
    for number in range(2):
        InProcessTransport(f"de-{number}-1", fabric)
        peers.up(address(f"de-{number}"))
    peers.session_begins(0)
    # A forward pass of the session before may still send to both.
    assert peers.agents_of("de-1", "1") == ("de-1-1",)
    peers.up(address("de-0"))
    peers.expire(int(UNANNOUNCED_S * 1e9) - 1)
    assert transport.events == ["+de-0-1", "+de-1-1"]
    peers.expire(int(UNANNOUNCED_S * 1e9))
    assert transport.events == ["+de-0-1", "+de-1-1", "-de-1-1"]
    assert [peer.engine_id for peer in peers.known()] == ["de-0"]
    peers.expire(int(3 * UNANNOUNCED_S * 1e9))
    assert len(transport.events) == 3


def test_a_decode_engine_connects_to_decode_engines_alone_and_only_prefill_engines_write() -> None:
    fabric = InProcessFabric()
    transport = CountingTransport("de-0-1", fabric)
    peers = Peers(transport, None)
    for name, role in (("pe-0", Role.PREFILL), ("de-1", Role.DECODE)):
        InProcessTransport(f"{name}-1", fabric)
        peers.up(address(name, role=role))
    assert transport.events == ["+de-1-1"]
    assert [writer.engine_id for writer in peers.writers()] == ["pe-0"]
    for name in ("pe-0", "de-1"):
        peers.down(PeerDown(name, "1", certain=False))
    assert transport.events == ["+de-1-1", "-de-1-1"]
    assert [writer.engine_id for writer in peers.writers()] == ["pe-0"], "it may still write"


def test_the_connection_to_a_former_process_is_closed_when_the_next_one_is_named() -> None:
    fabric = InProcessFabric()
    transport = CountingTransport("pe-0-1", fabric)
    peers = Peers(transport, VIEWS)
    for agent in ("de-0-1", "de-0-2"):
        InProcessTransport(agent, fabric)
    peers.up(address("de-0"))
    next_agent = AgentAddress("de-0-2", b"in-process", ())
    peers.up(msgspec.structs.replace(address("de-0"), epoch="2", agents=(next_agent,)))
    assert transport.events == ["+de-0-1", "-de-0-1", "+de-0-2"]
    with pytest.raises(TransportError, match="not connected"):
        peers.agents_of("de-0", "1")
