"""How an engine of any kind joins a cluster and leaves it."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from tests.engine_harness import GEOMETRY
from tests.guard import GUARD_S
from tests.passed_waits import PassedWaits

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.control import (
    Deregister,
    EngineMessage,
    Register,
    Registered,
    Released,
    Report,
    decode_engine_message,
    encode,
    unnumbered,
)
from dualpath.core.rates import RateOrigin, Rates, StorageCodec
from dualpath.engine.control import membership as membership_module
from dualpath.engine.control.membership import Membership, ServedModel
from dualpath.engine.control.surroundings import Surroundings
from dualpath.engine.passes.hbm_layout import shared_layers
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import OS_THREADS, Threads
from dualpath.transport.contract import RegionInfo
from dualpath.transport.in_process import InProcessFabric, InProcessTransport
from dualpath.transport.memory import allocate_registered

NAMESPACE = StoreNamespace(model="toy", dtype="u8", layout="toy", geometry=GEOMETRY)
HBM = allocate_registered(GEOMETRY.bytes_of(0))


class Router:
    """The other end of the control link."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(GUARD_S * 1000))
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._engine = b""

    def next(self) -> EngineMessage:
        self._engine, frame = self._socket.recv_multipart()
        return decode_engine_message(frame).message

    def heard_nothing(self) -> bool:
        return not self._socket.poll(0)

    def welcome(self) -> None:
        self._socket.send_multipart([self._engine, encode(unnumbered(Registered(), "a session"))])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.close()


def membership(
    router: Router,
    storage: str,
    end_process: Callable[[], None] = lambda: None,
    threads: Threads = OS_THREADS,
    former_rates: Rates | None = None,
    **changed: Any,
) -> Membership:
    settings = EngineSettings(
        role=Role.DECODE,
        engine_id="de-0",
        router=router.address,
        api_url="",
        storage=f"memory://{storage}",
        buffer_bytes=4 * GEOMETRY.full_block_bytes,
        snic_bytes_per_s=1e9,
    )
    settings = msgspec.structs.replace(settings, **changed)
    region = RegionInfo("hbm", HBM.address, HBM.size_bytes, HBM.size_bytes, 1)
    hbm = shared_layers([region], GEOMETRY, capacity_tokens=640)
    fabric = InProcessFabric()
    return Membership(
        settings,
        NAMESPACE,
        ServedModel(served_model_name="toy", max_model_len=512, vocab_size=100),
        hbm,
        surroundings=Surroundings(
            open_transport=lambda agent, settings, device: InProcessTransport(agent, fabric),
            end_process=end_process,
            threads=threads,
        ),
        former_rates=former_rates,
    )


def codec_of(ratio: float) -> StorageCodec:
    return StorageCodec(
        codec="zstd",
        reason="it is set",
        ratio=ratio,
        compress_bytes_per_s=4e9,
        decompress_bytes_per_s=4e9,
    )


@pytest.mark.parametrize(
    ("setting", "ratio", "codec", "kv_bytes_per_s"),
    [
        ("off", 1.4, None, 1e9),
        ("auto", 1.4, "zstd", 1.4e9),
        ("auto", 1.05, "off", 1e9),
        ("zstd", 1.05, "zstd", 1.05e9),
    ],
)
def test_the_codec_is_chosen_before_storage_opens_and_reported_with_its_numbers(
    router: Router,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    ratio: float,
    codec: str | None,
    kv_bytes_per_s: float,
) -> None:
    """The rate of reads, by which requests are planned, is that of KV."""
    caplog.set_level("INFO")
    monkeypatch.setattr(membership_module, "measure_codec", lambda *given: codec_of(ratio))
    member = membership(router, "codec", storage_codec=setting)
    chosen = member.rates.storage_codec
    assert (chosen and chosen.codec) == codec
    assert member.settings.storage_codec == (codec or "off")
    reading = member.rates.read_bytes
    assert reading is not None
    assert reading.per_s == pytest.approx(kv_bytes_per_s)
    assert reading.origin is RateOrigin.SET
    assert ("storage_codec is" in caplog.text) == (codec is not None)
    if setting == "auto":
        assert "storage reads 1000 MB/s; compressed" in caplog.text
    again = membership(router, "codec", former_rates=member.rates, storage_codec=setting)
    assert (again.rates, again.settings) == (member.rates, member.settings), "it is not repeated"
    member.leave()
    again.leave()


def test_auto_without_zstandard_is_off_with_the_remedy(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "find_zstd", lambda: None)
    member = membership(router, "codec", storage_codec="auto")
    member.leave()
    assert member.rates.storage_codec is not None
    assert member.rates.storage_codec.codec == "off"
    assert "pip install 'backports.zstd>=1'" in member.rates.storage_codec.reason


def test_an_engine_registers_once_its_server_accepts_connections(router: Router) -> None:
    member = membership(router, "register")
    looked_twice = threading.Event()
    looks = iter(range(2))

    def watch() -> None:
        if next(looks, None) is None:
            looked_twice.set()

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        member.join(url, watch)
        assert looked_twice.wait(GUARD_S)
        assert router.heard_nothing()
        server.listen()
        register = router.next()
        member.leave()
    assert isinstance(register, Register)
    assert (register.api_url, register.node, register.group) == (url, "de-0", "decode")
    assert (register.hbm_tokens, register.buffer_tokens) == (640, 4 * GEOMETRY.block_tokens)
    assert register.address.epoch == member.epoch
    assert register.address.agents[0].agent == f"de-0-{member.epoch}"
    limits = {name: register.limits[name] for name in ("served_model_name", "max_model_len")}
    assert limits == {"served_model_name": "toy", "max_model_len": 512}


def test_an_engine_reports_until_it_deregisters(router: Router) -> None:
    member = membership(router, "deregister")
    member.send(Released(request_id="too early"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        member.join(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert isinstance(router.next(), Register)
        router.welcome()
        while isinstance(message := router.next(), Register):
            pass
        assert isinstance(message, Report)
        member.leave()
        member.leave()
    member.send(Released(request_id="too late"))
    while isinstance(message := router.next(), Report):
        pass
    assert message == Deregister(reason="engine shuts down")
    assert router.heard_nothing()


def test_an_idle_engine_that_drains_leaves_a_router_that_has_ended(router: Router) -> None:
    member = membership(router, "router ended")
    with socket.create_server(("127.0.0.1", 0)) as server:
        member.join(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert isinstance(router.next(), Register)
        router.welcome()
        while isinstance(router.next(), Register):
            pass
        drained = threading.Event()
        member.drain("its process got SIGTERM", drained.set)  # The router sends nothing any more.
        assert drained.wait(GUARD_S)
        member.leave()
    while isinstance(message := router.next(), Report):
        pass
    # Only an engine with a session deregisters: it did not wait until the session timed out.
    assert message == Deregister(reason="engine shuts down")


def test_an_engine_leaves_in_one_limit_though_two_of_its_threads_hang(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "LEAVE_S", 0.2)
    waits, hangs, gate = PassedWaits(), threading.Event(), threading.Event()
    member = membership(router, "hanging", threads=waits)

    def watch() -> None:
        hangs.set()
        gate.wait(GUARD_S)

    with socket.create_server(("127.0.0.1", 0)) as server:
        member.join(f"http://127.0.0.1:{server.getsockname()[1]}", watch)
        assert hangs.wait(GUARD_S)  # The thread of the control link.
        member.manager._rank.movers.pump.call(watch)
        member.leave()
    gate.set()
    assert sum(waits.passed_s) <= 0.2


def test_an_engine_whose_data_plane_has_lost_a_thread_ends_its_process(router: Router) -> None:
    ended = threading.Event()
    member = membership(router, "broken", ended.set)
    with socket.create_server(("127.0.0.1", 0)) as server:
        member.join(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert isinstance(router.next(), Register)
        router.welcome()
        member.manager._rank.health.start("doomed", lambda: [][0])
        assert ended.wait(GUARD_S)
        assert "thread doomed ended by IndexError" in str(member.manager.health())
        member.leave()


def test_each_process_of_an_engine_has_a_unique_epoch(router: Router) -> None:
    first, second = (membership(router, "epochs") for _ in range(2))
    first.leave()
    second.leave()
    assert first.epoch != second.epoch


def test_an_unhealthy_engine_registers_only_after_recovery(router: Router) -> None:
    member = membership(router, "unwell")
    looked_twice = threading.Event()
    looks = iter(range(2))

    def watch() -> None:
        if next(looks, None) is None:
            looked_twice.set()

    watchdog = member.manager._rank.health.watchdog("nothing moves", limit_s=-1.0)
    watchdog.progressed()
    with socket.create_server(("127.0.0.1", 0)) as server:
        member.join(f"http://127.0.0.1:{server.getsockname()[1]}", watch)
        assert looked_twice.wait(GUARD_S)
        assert router.heard_nothing()
        watchdog.idle()
        assert isinstance(router.next(), Register)
        member.leave()
