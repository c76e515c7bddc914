"""Any frame on the control connection: the router survives, other engines are not affected."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import FakeEngine, expected, job

from dualpath.core import control
from dualpath.core import control as envelopes
from dualpath.core.cluster import Role
from dualpath.core.control import Message
from dualpath.core.errors import IncompatibleError
from dualpath.router.refusals import ControlRefusal
from dualpath_lab.faults.fuzz.campaign import Campaign
from dualpath_lab.faults.fuzz.control import ControlSubject
from dualpath_lab.faults.fuzz.control import frame as fuzzed_frame
from dualpath_lab.faults.fuzz.inputs import Inputs

EXAMPLES = settings(max_examples=60, suppress_health_check=list(HealthCheck))

_PROTOTYPE = FakeEngine("p0", Role.PREFILL, set())
_PROTOTYPE.generation = 1

#: Stands for the session of the sender of a frame, and is as long.
SESSION = "s" * 41

#: The frames of `dualpath chaos fuzz control`, of one engine and with this session.
FRAMES = st.integers(0, 1 << 32).map(
    lambda number: fuzzed_frame(Inputs(0, number), _PROTOTYPE.hello(), SESSION)
)


@settings(max_examples=300)
@given(FRAMES)
def test_a_frame_is_a_message_or_refused_as_incompatible(frame):
    for decode in (envelopes.decode_engine_message, envelopes.decode_router_message):
        try:
            envelope = decode(frame)
        except IncompatibleError:
            continue
        assert isinstance(envelope.message, Message)


class Stranger(FakeEngine):
    """An unregistered process that violates the protocol."""

    async def noise(self, made: Cluster, sent: list[list[bytes]]) -> None:
        await self.start(made.network)
        for parts in sent:
            self.send_raw(*parts)
        # Messages are handled in order: after this answer all of them have been handled.
        self.version = 99
        self.send_raw(envelopes.encode(envelopes.unnumbered(self.hello())))
        await self.saw(control.Refused, lambda refused: "protocol 99" in refused.reason)


async def served_as_before(made: Cluster) -> None:
    """Remove engines with random names; the real engines serve a request."""
    names = {engine.engine_id for engine in made.service.registry.alive()}
    assert set(made.engines) <= names
    for name in names - set(made.engines):
        made.service.server.declare_lost(name, "test", certain=True)
    request = job(f"a{len(made.calls.transfers)}", range(9))
    assert await made.run(request) == expected(range(9), 6)


def test_frames_of_unregistered_processes_do_no_harm():
    """Not even without a secret, unless they use another engine's name."""

    @EXAMPLES
    @given(st.lists(st.lists(FRAMES, min_size=1, max_size=3), min_size=1, max_size=8))
    def story(sent: list[list[bytes]]) -> None:
        runner.run(one_story(sent))

    async def one_story(sent: list[list[bytes]]) -> None:
        renamed = [[part.replace(b"p0", b"px") for part in parts] for parts in sent]
        stranger = Stranger("stranger", Role.PREFILL, set())
        await stranger.noise(made, renamed)
        await stranger.kill()
        await served_as_before(made)

    with asyncio.Runner() as runner:
        context = cluster(real_sockets=True)
        made = runner.run(context.__aenter__())
        try:
            story()
        finally:
            runner.run(context.__aexit__(None, None, None))


def test_malformed_frames_of_an_engine_affect_only_itself():
    """A registered engine sends noise; requests of other engines end as they should."""

    @EXAMPLES
    @given(st.lists(FRAMES, min_size=1, max_size=8))
    def story(sent: list[bytes]) -> None:
        runner.run(one_story(sent))

    async def one_story(sent: list[bytes]) -> None:
        mad = made.engines["p1"]
        await mad.join(made.network)
        for frame in sent:
            state = made.service.registry.get("p1")
            assert state is not None
            session = state.talk.session
            assert len(session) == len(SESSION)
            mad.send_raw(frame.replace(b"p0", b"p1").replace(SESSION.encode(), session.encode()))
        await mad.kill()
        await made.revive("p1")
        await served_as_before(made)

    with asyncio.Runner() as runner:
        context = cluster(prefill=2, real_sockets=True)
        made = runner.run(context.__aenter__())
        try:
            story()
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\xa0" * 9,
        b"\x81\xa4type\xa2\xff\xff",
        b"\x81\xa1x" + b"\x91" * 10**6,
    ],
    ids=["nothing", "reserved byte", "no fields", "too much", "no text", "deep"],
)
def test_the_error_for_noise_has_its_size(frame):
    with pytest.raises(IncompatibleError, match=f"{len(frame)} bytes"):
        envelopes.decode_engine_message(frame)


async def test_a_registration_with_fields_of_another_version_is_refused_with_a_reason():
    """It has a field that this version does not know, as a later version may have."""
    async with cluster(prefill=0, real_sockets=True) as made:
        hello = envelopes.encode(envelopes.unnumbered(_PROTOTYPE.hello()))
        *head, fields = msgspec.msgpack.decode(hello)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(made.service.scheduler.server.address)
        await socket.send(msgspec.msgpack.encode([*head, {**fields, "colour": "red"}]))
        refused = envelopes.decode_router_message(await socket.recv()).message
        context.destroy(linger=0)
        assert isinstance(refused, control.Refused)
        assert "unknown field `colour`" in refused.reason
        assert "run the same dualpath version on router and engines" in refused.reason


async def test_a_message_of_several_frames_is_malformed():
    """Valid messages have one frame."""
    async with cluster(prefill=0, real_sockets=True) as made:
        stranger = Stranger("stranger", Role.PREFILL, set())
        hello = envelopes.encode(
            envelopes.unnumbered(FakeEngine("two", Role.PREFILL, set()).hello())
        )
        await stranger.noise(made, [[b"", hello], [hello, hello], [hello] * 1000])
        assert "two" not in {engine.engine_id for engine in made.service.registry.alive()}
        assert made.service.server.refusals()[ControlRefusal.MALFORMED] == 3
        await stranger.kill()


async def test_fuzzing_the_whole_router_has_no_findings():
    result = await Campaign("control", ControlSubject(), seed=1, count=2000).run()
    assert result.findings == []
    assert sum(result.outcomes.values()) == 2000
    assert set(result.outcomes) > {"malformed", "Register", "Report", "Deregister"}
