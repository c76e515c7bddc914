"""Whatever arrives on the control connection: the router survives, other engines notice nothing."""

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import FakeEngine, expected, job

from dualpath.core import control
from dualpath.core.cluster import Role
from dualpath.core.errors import IncompatibleError

EXAMPLES = settings(max_examples=60, suppress_health_check=list(HealthCheck))

_PROTOTYPE = FakeEngine("p0", Role.PREFILL, set())
_PROTOTYPE.generation = 1

#: Stands for the session of who sends a frame, and is as long.
SESSION = "s" * 41

#: One of each message that an engine may send.
VALID: list[control.EngineMessage] = [
    _PROTOTYPE.hello(),
    control.Gone(control.Writer("p9", "1")),
    control.Report(1, 0, 0, 0, 0, 100, 100, {"storage_read_bytes": 3.0}),
    control.LookupDone(call_id=1, hit_blocks=2),
    control.Synced(call_id=1),
    control.Reserved(request_id="a", slots=(0, 1), wait_s=0.0),
    control.ReadDone("a", 1, None, 64, 0.0, 0.0, (0, 1)),
    control.PrefillDone(request_id="a"),
    control.KvInHbm(request_id="a", h2d_s=0.0),
    control.Released(request_id="a"),
    control.Failed(request_id="a", reason="no"),
    control.Goodbye(reason="bye"),
]

values: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.integers(), max_size=3),
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Noise, or an honest message cut off, with bytes turned over, or with a field replaced."""
    kind = draw(st.sampled_from(["noise", "cut", "flipped", "field", "honest"]))
    if kind == "noise":
        return draw(st.binary(max_size=64))
    message = draw(st.sampled_from(VALID))
    number = draw(st.integers(0, 3))
    frame = bytearray(control.encode(control.Envelope(SESSION, number, 0, message)))
    if kind == "cut":
        return bytes(frame[: draw(st.integers(0, len(frame) - 1))])
    if kind == "flipped":
        for _ in range(draw(st.integers(1, 4))):
            frame[draw(st.integers(0, len(frame) - 1))] ^= draw(st.integers(1, 255))
    if kind == "field":
        envelope: list[Any] = msgspec.msgpack.decode(frame)
        *_, fields = envelope
        if draw(st.booleans()):
            fields[draw(st.sampled_from(sorted(fields)))] = draw(values)
        else:
            envelope[draw(st.integers(0, 3))] = draw(values)
        try:
            return msgspec.msgpack.encode(envelope)
        except OverflowError:
            return bytes(frame)  # msgpack has no such number
    return bytes(frame)


@settings(max_examples=300)
@given(frames())
def test_a_frame_is_a_message_or_refused_as_incompatible(frame):
    for decode in (control.decode_engine_message, control.decode_router_message):
        try:
            envelope = decode(frame)
        except IncompatibleError:
            continue
        assert isinstance(envelope.message, control.Message)


class Stranger(FakeEngine):
    """A process with a connection of its own that never plays by the rules."""

    async def noise(self, made: Cluster, sent: list[list[bytes]]) -> None:
        await self.start(made.network)
        for parts in sent:
            self.send_raw(*parts)
        # Messages are taken in order: after this answer all of them have been.
        self.version = 99
        self.send_raw(control.encode(control.outside(self.hello())))
        await self.saw(control.Refused, lambda refused: "protocol 99" in refused.reason)


async def served_as_before(made: Cluster) -> None:
    """Forget who joined under a name made of noise; those who belong here serve a request."""
    names = {engine.engine_id for engine in made.service.engines()}
    assert set(made.engines) <= names
    for name in names - set(made.engines):
        made.service.server.declare_lost(name, "test", certain=True)
    request = job(f"a{len(made.calls.transfers)}", range(9))
    assert await made.run(request) == expected(range(9), 6)


def test_strangers_frames_harm_nobody():
    """Not even without a secret, as long as nobody takes another engine's name."""

    @EXAMPLES
    @given(st.lists(st.lists(frames(), min_size=1, max_size=3), min_size=1, max_size=8))
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


def test_an_engines_own_nonsense_harms_only_itself():
    """A registered engine sends noise; the requests of the other ones end as they should."""

    @EXAMPLES
    @given(st.lists(frames(), min_size=1, max_size=8))
    def story(sent: list[bytes]) -> None:
        runner.run(one_story(sent))

    async def one_story(sent: list[bytes]) -> None:
        mad = made.engines["p1"]
        await mad.join(made.network)
        for frame in sent:
            session = made.service.registry.get("p1").talk.session
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
def test_noise_is_named_by_its_size(frame):
    with pytest.raises(IncompatibleError, match=f"{len(frame)} bytes"):
        control.decode_engine_message(frame)


async def test_a_greeting_of_another_versions_shape_is_refused_in_words():
    """A field more than this version knows, as a later one may have."""
    async with cluster(prefill=0, real_sockets=True) as made:
        hello = control.encode(control.outside(_PROTOTYPE.hello()))
        *head, fields = msgspec.msgpack.decode(hello)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(made.service.control_address)
        await socket.send(msgspec.msgpack.encode([*head, {**fields, "colour": "red"}]))
        refused = control.decode_router_message(await socket.recv()).message
        context.destroy(linger=0)
        assert isinstance(refused, control.Refused)
        assert "unknown field `colour`" in refused.reason
        assert "run the same dualpath version on router and engines" in refused.reason
