"""Contract of ``dualpath.transport.contract``, for all transports."""

import gc
import itertools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.guard import GUARD_S

from dualpath.core.cluster import HostProcess, SharedMemory
from dualpath.core.errors import ConfigError, PeerLostError, TransportError
from dualpath.node.host_process import has_exited, this_process
from dualpath.transport.contract import (
    AgentInfo,
    Direction,
    RegionInfo,
    Transfer,
    TransferState,
    Transport,
)
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.memory import RegisteredMemory, allocate_registered, allocate_shared
from dualpath.transport.nixl import NixlTransport
from dualpath.transport.shared_memory import HbmCopies, NearestTransport, SharedMemoryTransport

PIECES = 12
PIECE_BYTES = 5000
STRIDE_BYTES = 8192

OpenTransport = Callable[[str], Transport]
_names = itertools.count()


def open_in_process(agent: str, fabric: InProcessFabric) -> Transport:
    return InProcessTransport(agent, fabric)


def open_shared_memory(agent: str, fabric: InProcessFabric) -> SharedMemoryTransport:
    return SharedMemoryTransport(agent, this_process(), has_exited)


def open_nearest_on_one_machine(agent: str, fabric: InProcessFabric) -> Transport:
    return NearestTransport(open_shared_memory(agent, fabric), open_in_process(agent, fabric))


def open_nearest_on_its_own_machine(agent: str, fabric: InProcessFabric) -> Transport:
    elsewhere = HostProcess(f"machine of {agent}", 1, 1)
    memory = SharedMemoryTransport(agent, elsewhere, has_exited)
    return NearestTransport(memory, open_in_process(agent, fabric))


def open_nixl(agent: str, fabric: InProcessFabric) -> Transport:
    return NixlTransport(agent)


@pytest.fixture(
    params=[
        pytest.param(open_in_process, id="in-process"),
        pytest.param(open_shared_memory, id="shared-memory"),
        pytest.param(open_nearest_on_one_machine, id="nearest-on-one-machine"),
        pytest.param(open_nearest_on_its_own_machine, id="nearest-on-two-machines"),
        pytest.param(open_nixl, id="nixl", marks=pytest.mark.nixl),
    ]
)
def open_transport(request: pytest.FixtureRequest) -> Iterator[OpenTransport]:
    fabric = InProcessFabric()
    opened: list[Transport] = []

    def open_one(name: str) -> Transport:
        agent = f"{name}-{next(_names)}"
        transport: Transport = request.param(agent, fabric)
        opened.append(transport)
        return transport

    yield open_one
    for transport in opened:
        transport.close()


class Engine:
    """A transport with one region, ``kv``, of ``PIECES`` random pieces."""

    def __init__(self, transport: Transport, seed: int) -> None:
        self.transport = transport
        self.memory: RegisteredMemory = allocate_shared(PIECES * STRIDE_BYTES)
        self.memory.array[:] = np.random.default_rng(seed).integers(
            0, 256, self.memory.size_bytes, dtype=np.uint8
        )
        self.region = RegionInfo("kv", self.memory.address, STRIDE_BYTES, PIECE_BYTES, PIECES)
        transport.register(self.region, self.memory)
        self.agent = transport.info().agent

    def piece(self, index: int) -> bytes:
        return bytes(self.memory.view(index * STRIDE_BYTES, PIECE_BYTES))

    def gap(self, index: int) -> bytes:
        start = index * STRIDE_BYTES + PIECE_BYTES
        return bytes(self.memory.view(start, STRIDE_BYTES - PIECE_BYTES))


@pytest.fixture
def engines(open_transport: OpenTransport) -> tuple[Engine, Engine]:
    """Two connected engines."""
    prefill, decode = Engine(open_transport("pe"), 1), Engine(open_transport("de"), 2)
    prefill.transport.connect(decode.transport.info())
    decode.transport.connect(prefill.transport.info())
    return prefill, decode


def finish(transfer: Transfer) -> TransferState:
    """Poll to the end; polling alone must make progress."""
    deadline = os.times().elapsed + GUARD_S
    while (state := transfer.poll()) is TransferState.MOVING:
        assert os.times().elapsed < deadline, "transfer did not end"
    return state


def test_a_write_copies_only_the_selected_pieces(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    before = [decode.piece(i) for i in range(PIECES)]
    gaps = [decode.gap(i) for i in range(PIECES)]

    transfer = prefill.transport.post(
        Direction.WRITE, "kv", [0, 5, 6], decode.agent, "kv", [11, 2, 3]
    )

    assert finish(transfer) is TransferState.DONE
    assert transfer.bytes == 3 * PIECE_BYTES
    assert transfer.error() is None
    expected = dict(enumerate(before)) | {
        11: prefill.piece(0),
        2: prefill.piece(5),
        3: prefill.piece(6),
    }
    assert {i: decode.piece(i) for i in range(PIECES)} == expected
    assert [decode.gap(i) for i in range(PIECES)] == gaps
    transfer.release()


def test_a_read_needs_no_action_of_the_peer(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    indices = np.arange(PIECES, dtype=np.int64)

    transfer = prefill.transport.post(
        Direction.READ, "kv", indices, decode.agent, "kv", indices[::-1]
    )

    assert finish(transfer) is TransferState.DONE
    assert [prefill.piece(i) for i in range(PIECES)] == [
        decode.piece(i) for i in reversed(range(PIECES))
    ]
    transfer.release()


@pytest.mark.parametrize("direction", list(Direction))
def test_an_engine_reaches_itself(engines: tuple[Engine, Engine], direction: Direction) -> None:
    prefill, _ = engines
    hbm = allocate_registered(PIECES * PIECE_BYTES)
    prefill.transport.register(
        RegionInfo("hbm", hbm.address, PIECE_BYTES, PIECE_BYTES, PIECES), hbm
    )

    transfer = prefill.transport.post(direction, "kv", [1], prefill.agent, "hbm", [4])

    expected = prefill.piece(1) if direction is Direction.WRITE else bytes(PIECE_BYTES)
    assert finish(transfer) is TransferState.DONE
    assert prefill.piece(1) == bytes(hbm.view(4 * PIECE_BYTES, PIECE_BYTES)) == expected


def test_many_transfers_overlap_and_each_ends(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    posted = [
        prefill.transport.post(Direction.WRITE, "kv", [i], decode.agent, "kv", [i])
        for i in range(PIECES)
    ]
    assert [finish(t) for t in reversed(posted)] == [TransferState.DONE] * PIECES
    assert [decode.piece(i) for i in range(PIECES)] == [prefill.piece(i) for i in range(PIECES)]
    for transfer in posted:
        transfer.release()


def test_threads_share_a_transport(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines

    def move(index: int) -> TransferState:
        piece = index % PIECES
        transfer = prefill.transport.post(
            Direction.WRITE, "kv", [piece], decode.agent, "kv", [piece]
        )
        state = finish(transfer)
        transfer.release()
        return state

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(move, range(400))) == {TransferState.DONE}
    assert [decode.piece(i) for i in range(PIECES)] == [prefill.piece(i) for i in range(PIECES)]


def test_a_view_is_a_part_of_every_piece(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    prefill.transport.view(prefill.region.part("here", 100, 30))
    prefill.transport.connect(decode.transport.info(), [decode.region.part("there", 7, 30)])
    before = decode.piece(9)

    transfer = prefill.transport.post(Direction.WRITE, "here", [7], decode.agent, "there", [9])

    assert finish(transfer) is TransferState.DONE
    assert transfer.bytes == 30
    assert decode.piece(9) == before[:7] + prefill.piece(7)[100:130] + before[37:]


def test_views_are_not_sent_to_peers(engines: tuple[Engine, Engine]) -> None:
    prefill, _ = engines
    prefill.transport.view(prefill.region.part("here", 0, 1))
    assert prefill.transport.info().regions == (prefill.region,)


def test_a_view_must_be_part_of_a_registered_region(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    region, there = prefill.region, decode.region
    for view, message in [
        (region.part("kv", 0, 1), "registered already"),
        (
            msgspec.structs.replace(region.part("a", 0, 1), base_address=1),
            "not part of a registered region",
        ),
        (
            msgspec.structs.replace(region, name="b", pieces=PIECES + 1),
            "not part of a registered region",
        ),
        (
            msgspec.structs.replace(region, name="c", stride_bytes=9000),
            "not part of a registered region",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            prefill.transport.view(view)
    beyond = msgspec.structs.replace(there.part("d", 1, PIECE_BYTES - 1), piece_bytes=PIECE_BYTES)
    with pytest.raises(ConfigError, match="not part of a registered region"):
        prefill.transport.connect(decode.transport.info(), [beyond])
    with pytest.raises(ConfigError, match="exceeds the pieces of 5000 bytes"):
        region.part("e", 1, PIECE_BYTES)


def test_a_transfer_of_no_pieces_is_done(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    transfer = prefill.transport.post(Direction.WRITE, "kv", [], decode.agent, "kv", [])
    assert finish(transfer) is TransferState.DONE
    assert transfer.bytes == 0
    transfer.release()


def test_connecting_twice_is_connecting_once(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    prefill.transport.connect(decode.transport.info())
    transfer = prefill.transport.post(Direction.WRITE, "kv", [0], decode.agent, "kv", [0])
    assert finish(transfer) is TransferState.DONE


@pytest.mark.parametrize(
    ("local", "local_pieces", "remote", "remote_pieces", "message"),
    [
        ("nowhere", [0], "kv", [0], "nowhere"),
        ("kv", [0], "nowhere", [0], "nowhere"),
        ("kv", [0], "kv", [PIECES], "0..11"),
        ("kv", [-1], "kv", [0], "0..11"),
        ("kv", [0, 1], "kv", [0], "equally long"),
        ("small", [0], "kv", [0], "must be equal"),
    ],
)
def test_an_invalid_address_is_refused_before_bytes_are_copied(
    engines: tuple[Engine, Engine],
    local: str,
    local_pieces: list[int],
    remote: str,
    remote_pieces: list[int],
    message: str,
) -> None:
    prefill, decode = engines
    small = allocate_registered(64)
    prefill.transport.register(RegionInfo("small", small.address, 64, 64, 1), small)
    with pytest.raises(TransportError, match=message):
        prefill.transport.post(
            Direction.WRITE, local, local_pieces, decode.agent, remote, remote_pieces
        )


def test_an_unknown_traffic_class_is_refused(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    with pytest.raises(TransportError, match="collectives"):
        prefill.transport.post(
            Direction.WRITE, "kv", [0], decode.agent, "kv", [0], traffic_class="collectives"
        )


def test_regions_are_checked_when_registered(open_transport: OpenTransport) -> None:
    engine = Engine(open_transport("pe"), 1)
    address = engine.memory.address
    for bad, message in [
        (engine.region, "registered already"),
        (RegionInfo("a", address, 10, 20, 3), "stride"),
        (RegionInfo("b", address, 10, 10, 0), "at least 1"),
        (RegionInfo("c", address, 10, 10, 1, memory="TAPE"), "TAPE"),
    ]:
        with pytest.raises(ConfigError, match=message):
            engine.transport.register(bad, None)


def test_an_unknown_peer_is_a_lost_peer(open_transport: OpenTransport) -> None:
    engine = Engine(open_transport("pe"), 1)
    with pytest.raises(PeerLostError, match="stranger"):
        engine.transport.post(Direction.WRITE, "kv", [0], "stranger", "kv", [0])
    engine.transport.disconnect("stranger")


def test_a_disconnected_peer_can_be_connected_again(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    prefill.transport.disconnect(decode.agent)
    with pytest.raises(PeerLostError):
        prefill.transport.post(Direction.WRITE, "kv", [0], decode.agent, "kv", [0])

    prefill.transport.connect(decode.transport.info())
    transfer = prefill.transport.post(Direction.WRITE, "kv", [3], decode.agent, "kv", [3])
    assert finish(transfer) is TransferState.DONE
    assert decode.piece(3) == prefill.piece(3)


def test_registered_memory_lives_until_close(open_transport: OpenTransport) -> None:
    class Owner:
        pass

    transport = open_transport("pe")
    memory = allocate_registered(4096)
    owner = Owner()
    gone: list[bool] = []
    weakref.finalize(owner, gone.append, True)
    transport.register(RegionInfo("kv", memory.address, 4096, 4096, 1), owner)
    del owner
    gc.collect()
    assert not gone
    transport.close()
    gc.collect()
    assert gone


def test_close_is_idempotent_and_ends_everything(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    moving = prefill.transport.post(Direction.WRITE, "kv", [0], decode.agent, "kv", [0])
    prefill.transport.close()
    prefill.transport.close()
    assert moving.poll() in (TransferState.DONE, TransferState.FAILED)
    with pytest.raises(TransportError):
        prefill.transport.post(Direction.WRITE, "kv", [0], decode.agent, "kv", [0])


# --- a second process -----------------------------------------------------------------------------

ALL_PIECES = list(range(PIECES))


OpenAgent = Callable[[str, InProcessFabric], Transport]


def serve_peer(name: str, control: Connection, open_agent: OpenAgent) -> None:
    """Register one region, send its address and the contents of its pieces; runs in a child."""
    engine = Engine(open_agent(name, InProcessFabric()), 7)
    control.send(engine.transport.info())
    while (index := control.recv()) is not None:
        control.send(engine.piece(index))
    engine.transport.close()


class Peer:
    """A child process that serves one engine."""

    def __init__(self, open_agent: OpenAgent = open_nixl) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.agent = f"de-{next(_names)}-{os.getpid()}"
        self._control, there = spawn.Pipe()
        arguments = (self.agent, there, open_agent)
        self.process = spawn.Process(target=serve_peer, args=arguments, daemon=True)
        self.process.start()
        there.close()
        self.info: AgentInfo = self._receive()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGKILL:
            self.process.join(GUARD_S)

    def piece(self, index: int) -> bytes:
        self._control.send(index)
        answer: bytes = self._receive()
        return answer

    def stop(self) -> None:
        if self.process.is_alive():
            self._control.send(None)
            self.process.join(GUARD_S)
            assert self.process.exitcode == 0

    def _receive(self) -> Any:
        assert self._control.poll(GUARD_S)
        return self._control.recv()


@pytest.fixture
def shared_memory_files() -> Iterator[None]:
    """Fail the test if it leaves files in shared memory."""
    folder = Path("/dev/shm")
    before = set(folder.iterdir()) if folder.exists() else set()
    yield
    gc.collect()
    after = set(folder.iterdir()) if folder.exists() else set()
    assert {path for path in after - before if "ucx" in path.name or "nixl" in path.name} == set()


@pytest.fixture(params=["ucx-chooses", "tcp"])
def engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shared_memory_files: None
) -> Iterator[Engine]:
    """An engine of this process; its peers inherit its choice of UCX transports."""
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    opened = Engine(NixlTransport(f"pe-{next(_names)}-{os.getpid()}"), 1)
    yield opened
    opened.transport.close()


@pytest.mark.nixl
def test_done_means_that_the_other_process_sees_the_bytes(engine: Engine) -> None:
    peer = Peer()
    engine.transport.connect(peer.info)
    for round_number in range(200):
        source, target = round_number % PIECES, (round_number * 5) % PIECES
        engine.memory.view(source * STRIDE_BYTES, 8)[:] = round_number.to_bytes(8, "little")
        written = engine.transport.post(Direction.WRITE, "kv", [source], peer.agent, "kv", [target])
        assert finish(written) is TransferState.DONE
        written.release()
        assert peer.piece(target) == engine.piece(source)
    peer.stop()


@pytest.mark.nixl
def test_a_killed_peer_fails_its_transfers_and_its_successor_is_reached(engine: Engine) -> None:
    peer = Peer()
    engine.transport.connect(peer.info)
    warm = engine.transport.post(Direction.WRITE, "kv", [0], peer.agent, "kv", [0])
    assert finish(warm) is TransferState.DONE

    peer.signal(signal.SIGKILL)
    doomed = engine.transport.post(Direction.WRITE, "kv", ALL_PIECES, peer.agent, "kv", ALL_PIECES)
    assert finish(doomed) is TransferState.FAILED
    assert peer.agent in (doomed.error() or "")
    doomed.release()
    with pytest.raises(PeerLostError):
        engine.transport.post(Direction.WRITE, "kv", ALL_PIECES, peer.agent, "kv", ALL_PIECES)
    engine.transport.disconnect(peer.agent)

    successor = Peer()
    engine.transport.connect(successor.info)
    again = engine.transport.post(
        Direction.WRITE, "kv", ALL_PIECES, successor.agent, "kv", ALL_PIECES
    )
    assert finish(again) is TransferState.DONE
    assert successor.piece(3) == engine.piece(3)
    successor.stop()


@pytest.mark.nixl
def test_a_dead_peer_cannot_be_connected_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    engine = Engine(NixlTransport(f"pe-{next(_names)}-{os.getpid()}"), 1)
    peer = Peer()
    peer.signal(signal.SIGKILL)
    with pytest.raises(PeerLostError, match=peer.agent):
        engine.transport.connect(peer.info)
    engine.transport.close()


@pytest.mark.nixl
@pytest.mark.parametrize("engine", ["tcp"], indirect=True)
def test_a_read_from_a_hanging_peer_is_moving_until_no_bytes_can_arrive(engine: Engine) -> None:
    peer = Peer()
    engine.transport.connect(peer.info)
    peer.signal(signal.SIGSTOP)
    read = engine.transport.post(Direction.READ, "kv", ALL_PIECES, peer.agent, "kv", ALL_PIECES)

    engine.transport.disconnect(peer.agent)

    assert read.poll() is TransferState.MOVING
    with pytest.raises(TransportError, match="moving"):
        read.release()
    with pytest.raises(PeerLostError):
        engine.transport.post(Direction.READ, "kv", [0], peer.agent, "kv", [0])

    peer.signal(signal.SIGCONT)
    assert finish(read) is TransferState.FAILED
    assert "disconnected" in (read.error() or "")
    read.release()
    engine.memory.array[:] = 0
    peer.stop()
    assert not engine.memory.array.any()


@pytest.mark.nixl
@pytest.mark.parametrize("engine", ["tcp"], indirect=True)
def test_a_peer_killed_in_the_middle_of_a_transfer_fails_it(engine: Engine) -> None:
    peer = Peer()
    engine.transport.connect(peer.info)
    peer.signal(signal.SIGSTOP)
    read = engine.transport.post(Direction.READ, "kv", ALL_PIECES, peer.agent, "kv", ALL_PIECES)
    assert read.poll() is TransferState.MOVING
    peer.signal(signal.SIGKILL)
    assert finish(read) is TransferState.FAILED
    read.release()


# --- memory of another process of this machine ----------------------------------------------------


@pytest.fixture
def mapped() -> Iterator[tuple[Engine, Peer]]:
    """An engine that has mapped another process's memory."""
    here, peer = Engine(open_shared_memory("pe", InProcessFabric()), 1), Peer(open_shared_memory)
    here.transport.connect(peer.info)
    yield here, peer
    peer.stop()
    here.transport.close()


def maps(shared: SharedMemory) -> bool:
    """Whether this process has mapped a memory file of the process that shares it."""
    inode = os.stat(f"/proc/{shared.process.pid}/fd/{shared.descriptor}").st_ino
    return maps_file(inode)


def maps_file(inode: int) -> bool:
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split()[4] == str(inode) for line in lines)


def test_memory_of_a_process_is_written_and_read_while_it_hangs(
    mapped: tuple[Engine, Peer],
) -> None:
    here, peer = mapped
    theirs = peer.piece(3)
    peer.signal(signal.SIGSTOP)
    written = here.transport.post(
        Direction.WRITE, "kv", [0] * 1500, peer.agent, "kv", [index % 2 for index in range(1500)]
    )
    assert finish(written) is TransferState.DONE
    read = here.transport.post(Direction.READ, "kv", [5], peer.agent, "kv", [3])
    assert finish(read) is TransferState.DONE
    peer.signal(signal.SIGCONT)
    assert here.piece(5) == theirs
    assert [peer.piece(0), peer.piece(1)] == [here.piece(0)] * 2
    assert peer.piece(3) == theirs


def test_memory_of_a_killed_process_is_unmapped(mapped: tuple[Engine, Peer]) -> None:
    here, peer = mapped
    assert isinstance(here.transport, SharedMemoryTransport)
    (shared,) = peer.info.shared
    inode = os.stat(f"/proc/{shared.process.pid}/fd/{shared.descriptor}").st_ino
    here.transport.drop_exited()
    assert maps_file(inode)
    moving = here.transport.post(Direction.READ, "kv", ALL_PIECES, peer.agent, "kv", ALL_PIECES)
    before = here.piece(0)
    peer.signal(signal.SIGKILL)

    here.transport.drop_exited()

    assert moving.poll() is TransferState.FAILED
    assert f"agent {peer.agent!r} was disconnected" in (moving.error() or "")
    assert here.piece(0) == before
    with pytest.raises(PeerLostError, match="not connected"):
        here.transport.post(Direction.READ, "kv", [0], peer.agent, "kv", [0])
    assert not maps_file(inode)
    with pytest.raises(PeerLostError, match="cannot be reached"):
        here.transport.connect(peer.info)


def test_memory_of_a_disconnected_process_is_unmapped(mapped: tuple[Engine, Peer]) -> None:
    here, peer = mapped
    assert maps(peer.info.shared[0])
    here.transport.disconnect(peer.agent)
    assert not maps(peer.info.shared[0])


def test_a_process_with_a_reused_process_number_is_not_accessed(
    mapped: tuple[Engine, Peer],
) -> None:
    here, peer = mapped
    (shared,) = peer.info.shared
    process = msgspec.structs.replace(shared.process, start_ticks=shared.process.start_ticks - 1)
    former = msgspec.structs.replace(shared, process=process)
    with pytest.raises(PeerLostError, match="'former' cannot be reached: its process has exited"):
        here.transport.connect(AgentInfo("former", b"", peer.info.regions, (former,)))


def test_a_file_without_the_nonce_of_the_peer_is_not_accessed(mapped: tuple[Engine, Peer]) -> None:
    here, peer = mapped
    shared = msgspec.structs.replace(peer.info.shared[0], nonce=bytes(16))
    with pytest.raises(PeerLostError, match="is not the memory that it shares"):
        here.transport.connect(AgentInfo("other", b"", peer.info.regions, (shared,)))


def test_a_descriptor_of_another_kind_of_file_is_not_mapped(
    mapped: tuple[Engine, Peer], tmp_path: Path
) -> None:
    here, _ = mapped
    reader, writer = os.pipe()
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(1 << 20)
        for descriptor in (reader, file.fileno()):
            shared = SharedMemory(this_process(), descriptor, 4096, 4096, bytes(16))
            with pytest.raises(PeerLostError, match="is not the memory of an engine"):
                here.transport.connect(AgentInfo("other", b"", (), (shared,)))
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("host", "message"), [("elsewhere", "is on another machine"), (None, "shares no memory")]
)
def test_agents_without_memory_on_this_machine_are_refused(host: str | None, message: str) -> None:
    here = Engine(open_shared_memory("pe", InProcessFabric()), 1)
    (own,) = here.transport.info().shared
    shared = msgspec.structs.replace(own, process=HostProcess(host or "", 1, 1))
    with pytest.raises(PeerLostError, match=message):
        here.transport.connect(AgentInfo("de", b"", (), (shared,) if host else ()))


def test_a_process_that_cannot_be_recognised_shares_no_memory() -> None:
    with pytest.raises(ConfigError, match="--transport nixl"):
        SharedMemoryTransport("pe", HostProcess(), has_exited)


def test_an_address_outside_shared_memory_fails_the_transfer_and_not_the_process(
    mapped: tuple[Engine, Peer],
) -> None:
    here, peer = mapped
    (region,) = peer.info.regions
    below = msgspec.structs.replace(region, name="below", base_address=region.base_address - 1)
    beyond = msgspec.structs.replace(region, name="beyond", pieces=PIECES + 1)
    here.transport.connect(msgspec.structs.replace(peer.info, regions=(below, beyond)))
    for name, piece in (("below", 0), ("beyond", PIECES)):
        lost = here.transport.post(Direction.WRITE, "kv", [0], peer.agent, name, [piece])
        assert lost.poll() is TransferState.FAILED
        assert "not in the memory that it shares" in (lost.error() or "")


def test_device_memory_is_refused() -> None:
    transport = open_shared_memory("pe", InProcessFabric())
    with pytest.raises(ConfigError, match="is in VRAM"):
        transport.register(RegionInfo("hbm", 1, 1, 1, 1, memory="VRAM"), None)


def test_memory_of_a_peer_that_cannot_be_mapped_is_reached_through_the_network() -> None:
    """Its buffer is in a memory file, its HBM is not: one connection, two ways."""
    fabric = InProcessFabric()
    networks = [InProcessTransport(name, fabric) for name in ("near-pe", "near-de")]
    pe, de = (NearestTransport(open_shared_memory(n.agent, fabric), n) for n in networks)
    prefill, decode = Engine(pe, 1), Engine(de, 2)
    hbm = allocate_registered(PIECES * STRIDE_BYTES)
    region = RegionInfo("hbm", hbm.address, STRIDE_BYTES, PIECE_BYTES, PIECES)
    de.register(region, hbm)
    pe.connect(de.info(), [region.part("hbm-kv.0.0", 0, PIECE_BYTES)])
    to_buffer = pe.post(Direction.WRITE, "kv", [0], "near-de", "kv", [1])
    to_hbm = pe.post(Direction.WRITE, "kv", [0], "near-de", "hbm-kv.0.0", [2])
    assert not networks[0]._unfinished.keys() >= {to_buffer}, "it is mapped"
    assert networks[0]._unfinished.keys() >= {to_hbm}
    for transfer in (to_buffer, to_hbm):
        assert finish(transfer) is TransferState.DONE
        transfer.release()
    assert decode.piece(1) == prefill.piece(0)
    assert bytes(hbm.view(2 * STRIDE_BYTES, PIECE_BYTES)) == prefill.piece(0)
    fabric.kill("near-de")
    lost = pe.post(Direction.WRITE, "kv", [0], "near-de", "kv", [3])
    assert finish(lost) is TransferState.DONE, "the mapping does not depend on the network"
    for transport in (pe, de):
        transport.close()


def test_memory_of_a_peer_is_not_pinned_for_copies_between_dram() -> None:
    """A decode engine with a GPU moves whole blocks out of another one's buffer."""
    asked: list[object] = []

    def copy(*arguments: object) -> Transfer:
        raise AssertionError("the processor copies between DRAM")

    fabric = InProcessFabric()
    networks = [InProcessTransport(name, fabric) for name in ("target", "source")]
    copies = HbmCopies(lambda *pinned: asked.append(pinned), asked.append, copy)
    memory = SharedMemoryTransport("target", this_process(), has_exited, copies)
    source = NearestTransport(open_shared_memory("source", fabric), networks[1])
    target = NearestTransport(memory, networks[0])
    here, there = Engine(target, 1), Engine(source, 2)
    target.connect(source.info())
    read = target.post(Direction.READ, "kv", [0], "source", "kv", [1])
    assert not networks[0]._unfinished, "it is mapped"
    assert finish(read) is TransferState.DONE
    read.release()
    assert here.piece(0) == there.piece(1)
    for transport in (target, source):
        transport.close()
    assert asked == []
