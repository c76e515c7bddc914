"""Sessions of engines at the router: registration, messages, time-outs and death."""

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import GUARD_S, NAMESPACE, FakeEngine, expected, job
from tests.unit.scraped_cluster import Scrape

from dualpath.core import cluster as addresses
from dualpath.core import control
from dualpath.core import control as envelopes
from dualpath.core import control as request_messages
from dualpath.core.cluster import HostProcess, Role, Writer
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.sessions import Channel
from dualpath.router.refusals import ControlRefusal
from dualpath.router.scheduler.control_server import ControlServer, NamedPeers
from dualpath.router.scheduler.registry import Registry
from dualpath.router.settings import RouterSettings


async def refusal(made: Cluster, **options) -> str:
    version = options.pop("version", control.PROTOCOL_VERSION)
    role = options.pop("role", Role.DECODE)
    engine = FakeEngine("odd", role, set(), **options)
    engine.version = version
    made.engines["odd"] = engine
    await engine.start(made.network)
    return (await engine.saw(control.Refused)).reason


def refused(made: Cluster) -> dict[str, float]:
    """What the router's metrics say was refused, by reason."""
    scrape, name = Scrape(made.service.exposition().decode()), "dualpath:control_refusals_total"
    counted = {r: scrape.value(name, reason=r) for r in scrape.labels(name)["reason"]}
    assert counted.keys() == set(ControlRefusal)
    return {reason: times for reason, times in counted.items() if times}


async def test_engines_are_named_to_each_other_with_the_first_request_that_they_share():
    async with cluster(real_sockets=True) as made:
        assert {e.engine_id for e in made.service.registry.alive()} == {"p0", "d0"}
        for number in range(2):
            assert await made.run(job(f"r{number}", range(9))) == expected(range(9), 6)
        for engine, peer in (("p0", "d0"), ("d0", "p0")):
            (named,) = made.engines[engine].named_peers()
            assert named.engine_id == peer
            # Nothing connects to a PE; a DE learns which process may write to its buffer.
            sent_metadata = any(agent.metadata for agent in named.agents)
            assert sent_metadata == (engine == "p0")


def test_the_peers_of_a_lost_engine_are_notified_in_the_same_order_in_every_process():
    """A simulated run depends on its seed alone, not on the order of sets of strings."""
    named, lost = NamedPeers(Registry()), Writer("p0", "1")
    engines = [f"d{number}" for number in range(20)]
    for engine_id in reversed(engines):
        named.named(engine_id, lost, 1)
    assert list(named.lost(lost, certain=True)) == sorted(engines)


@pytest.mark.parametrize(
    ("options", "counted", "words"),
    [
        (
            {"version": 99},
            "version",
            ("protocol 99", f"router {control.PROTOCOL_VERSION}", "same dualpath version"),
        ),
        ({"mode": "oracle"}, "mode", ("'oracle'", "'dualpath'", "another router")),
        ({"mode": "fast"}, "mode", ("'fast'", "basic", "choose one")),
        ({"hbm_tokens": 0}, "settings", ("hbm_tokens 0", "at least 1", "correct")),
        (
            {"namespace": msgspec.structs.replace(NAMESPACE, model="other")},
            "namespace",
            ("model = other where this router has tiny", "start it with"),
        ),
    ],
)
async def test_an_engine_that_does_not_fit_is_refused_with_a_remedy(options, counted, words):
    async with cluster(real_sockets=True) as made:
        reason = await refusal(made, **options)
        assert refused(made) == {counted: 1}
        assert all(word in reason for word in words), reason
        assert {e.engine_id for e in made.service.registry.alive()} == {"p0", "d0"}
        assert await made.run(job("a", range(9))) == expected(range(9), 6)


async def test_the_router_may_insist_on_a_mode():
    settings = RouterSettings(mode=Mode.BASIC)
    async with cluster(0, 0, settings=settings, real_sockets=True) as made:
        assert "'basic'" in await refusal(made, mode="dualpath")


async def test_malformed_frames_are_counted_and_have_no_other_effect():
    async with cluster(real_sockets=True) as made:
        for frame in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Nonsense"})):
            made.engines["p0"].send_raw(frame)
        assert await made.run(job("a", range(9))) == expected(range(9), 6)
        assert refused(made) == {"malformed": 3}


async def test_an_unknown_sender_is_asked_to_register_first():
    async with cluster(real_sockets=True) as made:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(made.service.scheduler.server.address)
        goodbye = envelopes.unnumbered(control.Deregister(reason="never joined"), "made up")
        await socket.send(envelopes.encode(goodbye))
        envelope = envelopes.decode_router_message(await socket.recv())
        assert isinstance(envelope.message, control.Refused)
        assert envelope.session == "made up"
        assert envelope.message.reregister
        assert "register again" in envelope.message.reason
        assert refused(made) == {"unknown-engine": 1}
        context.destroy(linger=0)


async def reported(made: Cluster, engine_id: str, read_bytes: int) -> None:
    """Wait for a report of so many bytes read."""

    def is_last() -> bool:
        state = made.service.registry.get(engine_id)
        report = state.report if state is not None else None
        return report is not None and report.counters.get("storage_read_bytes") == read_bytes

    await made.service.arrivals.until(is_last, GUARD_S)


async def test_a_restarted_engine_replaces_its_dead_self():
    async with cluster(real_sockets=True) as made:
        old = made.engines["p0"].epoch
        assert await made.run(job("first", range(9))) == expected(range(9), 6)
        made.engines["p0"].counters = {"storage_read_bytes": 70}
        made.engines["p0"].report()
        await reported(made, "p0", 70)
        await made.engines["p0"].kill()
        await made.revive("p0")
        down = await made.engines["d0"].saw(control.PeerDown)
        assert (down.engine_id, down.epoch, down.certain) == ("p0", old, True)
        made.engines["p0"].counters = {"storage_read_bytes": 5}
        made.engines["p0"].report()
        await reported(made, "p0", 5)
        assert made.service.status()["counters"]["snic_read_bytes"]["p0"] == 75
        assert made.service.status()["counters"]["bytes"]["pe_path"] == 75
        assert await made.run(job("a", range(9))) == expected(range(9), 6)


async def test_two_live_processes_do_not_fight_for_one_id():
    async with cluster(real_sockets=True) as made:
        old = made.engines["p0"]
        new = FakeEngine("p0", Role.PREFILL, set())
        new.generation = 7
        made.engines["new"] = new
        await new.join(made.network)
        old.report()
        assert (await old.saw(control.Refused)).reregister
        answer = await old.saw(control.Refused, lambda m: "replaced" in m.reason)
        assert "an engine_id of its own" in answer.reason
        assert refused(made).keys() == {"unknown-engine", "replaced"}
        assert made.service.registry.alive(Role.PREFILL)[0].epoch == new.epoch


async def test_an_address_in_use_is_named():
    async with cluster(real_sockets=True) as made:
        port = int(made.service.scheduler.server.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"{port} cannot be bound"):
            async with cluster(settings=RouterSettings(control_port=port), real_sockets=True):
                pass


async def test_absurd_settings_are_refused():
    with pytest.raises(ConfigError, match="max_attempts"):
        RouterSettings(max_attempts=0)


class Listener:
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def on_joined(self, info):
        self.events.append(("joined", info.engine_id))

    def on_lost(self, lost, reason):
        self.events += [("lost", info.engine_id) for info in lost]

    def on_missed(self, missed):
        self.events += [("missed", info.engine_id) for info in missed]

    def on_dead(self, writer):
        self.events.append(("dead", *writer.id))

    def on_message(self, info, message, received):
        self.events.append(("received", message))

    def in_doubt(self):
        return []


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Watched:
    """A server without a socket, one engine's registrations and what it says in its session."""

    def __init__(self, *, exclusive_ids: bool = False) -> None:
        self.clock, self.listener = Clock(), Listener()
        self.registry = Registry(exclusive_ids=exclusive_ids)
        self.server = ControlServer(self.registry, self.listener, self.clock, engine_timeout_s=5.0)
        self.engine = FakeEngine("p0", Role.PREFILL, set())
        self.engine.quarantined, self.engine.writers = {}, {}
        self.register()

    @property
    def events(self) -> list[tuple[object, ...]]:
        return [event for event in self.listener.events if event[0] != "received"]

    @property
    def received(self) -> list[object]:
        return [event[1] for event in self.listener.events if event[0] == "received"]

    def register(self, registration: int = 1) -> None:
        self.receive(envelopes.unnumbered(self.engine.hello(registration)))
        state = self.registry.get("p0")
        assert state is not None
        self.talk: Channel[control.EngineMessage, control.RouterMessage] = Channel(
            state.talk.session
        )

    def receive(self, envelope: envelopes.FromEngine) -> None:
        self.server._handle(b"p0", [envelopes.encode(envelope)])

    def say(self, message: control.EngineMessage) -> envelopes.FromEngine:
        envelope = self.talk.send(message, self.clock())
        self.receive(envelope)
        return envelope

    def let_pass(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.clock.now_s += 0.5
            self.server.check_liveness()


@pytest.fixture
def watched() -> Watched:
    return Watched()


REPORT = control.Report(
    report_seq=1,
    load=control.Load(
        unfinished_requests=0,
        unfinished_tokens=0,
        read_queue_tokens=0,
        free_hbm_tokens=1,
        free_buffer_tokens=1,
    ),
)


async def test_a_report_that_a_later_one_has_overtaken_is_dropped(watched: Watched):
    later = msgspec.structs.replace(REPORT, report_seq=2)
    watched.say(later)
    watched.say(REPORT)
    assert watched.received == [later]
    state = watched.registry.get("p0")
    assert state is not None
    assert state.report == later


async def test_a_silent_engine_is_lost_after_the_timeout_and_not_before(watched: Watched):
    watched.let_pass(4)
    watched.say(REPORT)
    watched.let_pass(5)
    assert watched.events == [("joined", "p0")]
    watched.let_pass(0.5)
    assert watched.events == [("joined", "p0"), ("lost", "p0")]


async def test_messages_of_a_lost_engine_count_only_in_a_new_session(watched: Watched):
    watched.let_pass(6)
    watched.say(REPORT)
    watched.register(registration=1)
    assert watched.events[-1] == ("lost", "p0")
    watched.register(registration=2)
    assert watched.events[-1] == ("joined", "p0")


async def test_an_engine_that_reregisters_has_left_its_session(watched: Watched):
    """Its requests are gone there; were it only noticed later, they would wait for nothing."""
    watched.register(registration=2)
    assert watched.events == [("joined", "p0"), ("lost", "p0"), ("joined", "p0")]


async def test_no_late_message_brings_back_a_deregistered_engine(watched: Watched):
    watched.say(control.Deregister(reason="done"))
    watched.say(REPORT)
    watched.register(registration=1)
    assert watched.events == [("joined", "p0"), ("lost", "p0"), ("dead", "p0", "p0-0")]


async def test_a_goodbye_with_open_transfers_proves_nothing(watched: Watched):
    watched.say(control.Deregister(reason="in a hurry", settled=False))
    assert watched.events == [("joined", "p0"), ("lost", "p0")]


async def test_an_engine_with_a_stalled_data_plane_is_removed(watched: Watched):
    watched.say(msgspec.structs.replace(REPORT, unhealthy="its pump has ended"))
    assert watched.events == [("joined", "p0"), ("lost", "p0")]


async def test_a_router_that_stalled_declares_no_engine_lost(watched: Watched):
    watched.let_pass(1)
    watched.clock.now_s += 60
    watched.server.check_liveness()
    assert watched.events == [("joined", "p0")]
    watched.let_pass(6)
    assert watched.events[-1] == ("lost", "p0")


async def test_a_resent_registration_changes_nothing(watched: Watched):
    watched.register()
    assert watched.events == [("joined", "p0")]


async def test_a_message_that_comes_twice_or_too_early_is_taken_up_once_in_order(watched: Watched):
    first, second = (request_messages.Released(request_id=name) for name in ("a", "b"))
    early = watched.talk.send(first, 0.0), watched.talk.send(second, 0.0)
    for envelope in (early[1], early[0], early[0], early[1], early[1]):
        watched.receive(envelope)
    assert watched.received == [first, second]


async def test_the_end_of_a_process_is_proven_once_it_is_known(watched: Watched):
    writer = watched.engine.hello().address.writer
    watched.let_pass(6)
    watched.server.declare_dead(writer)
    watched.server.declare_dead(writer)
    assert watched.events == [("joined", "p0"), ("lost", "p0"), ("dead", "p0", "p0-0")]
    stranger = addresses.Writer("px", "9")
    watched.server.declare_dead(stranger)
    assert watched.events[-1] == ("dead", "px", "9")


async def test_a_process_beside_its_former_one_is_no_proof_that_this_has_ended():
    """Two of one name may have been started by mistake, and the former may still be writing."""
    watched = Watched(exclusive_ids=True)
    machine, first = "a machine", HostProcess("a machine", 1, 1)
    watched.engine.process = first
    watched.engine.generation = 1
    watched.register()
    former = watched.engine.hello().address.writer
    watched.engine.generation, watched.engine.process = 2, HostProcess(machine, 2, 2)
    watched.register()
    assert watched.events[-2:] == [("lost", "p0"), ("joined", "p0")]
    assert watched.registry.unproven() == [former]
    assert not watched.registry.is_dead(former)
    watched.say(control.ConfirmedDead(former))
    watched.say(control.ConfirmedDead(former))
    assert watched.registry.is_dead(former)
    assert watched.registry.unproven() == []
    dead = [event for event in watched.events if event[0] == "dead"]
    assert dead == [("dead", "p0", "p0-0"), ("dead", "p0", "p0-1"), ("dead", "p0", "p0-1")]


@pytest.mark.parametrize(
    ("exclusive_ids", "former", "later", "is_proof"),
    [
        (True, "machine 1", "machine 2", True),
        (True, "machine 1", "machine 1", False),
        (True, "", "machine 2", False),
        (True, "machine 1", "", False),
        (True, "", "", False),
        (False, "machine 1", "machine 2", False),
        (False, "", "", False),
    ],
)
async def test_a_successor_proves_a_death_only_elsewhere_and_where_ids_are_exclusive(
    exclusive_ids: bool, former: str, later: str, is_proof: bool
):
    watched = Watched(exclusive_ids=exclusive_ids)
    writers = []
    for generation, host in ((1, former), (2, later)):
        watched.engine.generation = generation
        watched.engine.process = HostProcess(host, generation, generation)
        watched.register()
        writers.append(watched.engine.hello().address.writer)
    assert watched.events[-1] == ("joined", "p0")
    assert (("dead", "p0", "p0-1") in watched.events) == is_proof
    assert watched.registry.is_dead(writers[0]) == is_proof
    assert (writers[0] in watched.registry.unproven()) != is_proof
    unheard_of = addresses.Writer("p0", "p0-9", HostProcess(former, 9, 9))
    assert watched.registry.is_dead(unheard_of) == is_proof
