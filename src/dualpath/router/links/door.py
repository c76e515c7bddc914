"""Where front ends that are processes of their own come in at the scheduler.

One session for each, by the table of engines' sessions (``core.sessions.ROUTER_TABLE``).  When one
ends, all its attempts are over: what they have at engines is released, as if clients had left.
"""

import itertools
import logging
import uuid
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.control import (
    Ack,
    Deregister,
    Envelope,
    Refused,
    Registered,
    decode_with,
    unnumbered,
)
from dualpath.core.errors import IncompatibleError
from dualpath.core.sessions import (
    HEARTBEAT_S,
    ROUTER_TABLE,
    Action,
    Channel,
    Event,
    RouterSideState,
    StateMachine,
)
from dualpath.node.cluster_secret import ClusterSecret
from dualpath.router.control.control_socket import ControlSocket
from dualpath.router.control.session_loops import (
    ACKNOWLEDGE_S,
    LOOKS_IN_A_TIMEOUT,
    OwnStalls,
    SessionLoops,
)
from dualpath.router.links import messages as m
from dualpath.router.links.frames import Frames, frames_of
from dualpath.router.links.guest import Guest
from dualpath.router.refusals import ControlRefusal, ControlRefusals
from dualpath.router.scheduler import Scheduler

logger = logging.getLogger(__name__)

_DECODER: msgspec.msgpack.Decoder[m.FromFrontEnd] = msgspec.msgpack.Decoder(m.FromFrontEnd)
#: Known by name at a time.
MOST_FRONT_ENDS = 1024


class _FrontEnd:
    """What is known of one front end: its process, its session and what it has under way.

    ``post`` sends a frame to a connection.
    """

    def __init__(self, name: str, post: Callable[[bytes, bytes], None]) -> None:
        self.name = name
        self.epoch, self.registration, self.identity = "", 0, b""
        self.heard_s = self.spoken_s = float("-inf")
        self.machine = StateMachine(ROUTER_TABLE, RouterSideState.UNKNOWN)
        self.talk: Channel[m.SchedulerMessage, m.FrontEndMessage] = Channel("")
        self.guest: Guest | None = None
        self.frames: Frames[m.SchedulerMessage] = Frames(lambda frame: post(self.identity, frame))

    @property
    def live(self) -> bool:
        return self.machine.state is RouterSideState.LIVE

    def greeted(self, hello: m.FrontEndHello) -> Event | None:
        """Take down a registration; return what it means, None if it is older than the last one."""
        if not self.epoch:
            event = Event.REGISTERS
        elif hello.epoch != self.epoch:
            event = Event.RESTARTED
        elif hello.registration == self.registration:
            event = Event.REGISTER_RESENT
        elif hello.registration > self.registration:
            event = Event.REREGISTERS
        else:
            return None
        self.epoch, self.registration = hello.epoch, hello.registration
        return event


class FrontEndDoor:
    """Sessions with front ends over a ``ControlSocket``; ``timeout_s`` of silence ends one."""

    def __init__(
        self,
        scheduler: Scheduler,
        socket: ControlSocket,
        clock: Callable[[], float],
        timeout_s: float,
        epoch: str = "",
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._timeout_s = timeout_s
        self._epoch = epoch or uuid.uuid4().hex
        self._sessions = itertools.count(1)
        self._front_ends: dict[str, _FrontEnd] = {}
        self._look_gap_s = timeout_s / LOOKS_IN_A_TIMEOUT
        self._stalls = OwnStalls(clock(), self._look_gap_s)
        self._loops = SessionLoops(socket, self._received)
        self.refusals = ControlRefusals()
        self.address = ""

    async def start(self, host: str, port: int, secret: ClusterSecret | None = None) -> None:
        """Bind and serve, unless it does; raises ``ConfigError`` as ``ControlServer.start``."""
        if self._loops.tasks:
            return
        looks = {self._look: self._look_gap_s, self._acknowledge: ACKNOWLEDGE_S}
        self.address = await self._loops.start(host, port, secret, self.refusals, looks)
        self._scheduler.context.presence.listeners.append(self._engines_changed)

    async def stop(self) -> None:
        """End all sessions, then close; idempotent, also while it does."""
        if not self._loops.tasks:
            return
        self._scheduler.context.presence.listeners.remove(self._engines_changed)
        # What they say from now on is for the next scheduler.  They hear of it before the engines
        # do, else what breaks off there would be tried again in a session that is over.
        for front_end in self._front_ends.values():
            front_end.frames.flush()
            if front_end.live:
                self._send_away(front_end.identity, front_end.talk.session)
        await self._loops.stop()
        for front_end in self._front_ends.values():
            self._lose(front_end, "the scheduler ends")

    def counts(self) -> tuple[int, int]:
        """Return how many requests of all front ends wait, and how many have their engines."""
        each = [f.guest.counts() for f in self._front_ends.values() if f.guest is not None]
        return sum(waiting for waiting, _ in each), sum(running for _, running in each)

    def _engines_changed(self) -> None:
        now = self._engines_now()
        for front_end in self._front_ends.values():
            self._say(front_end, now)

    def _engines_now(self) -> m.EnginesNow:
        registry = self._scheduler.registry
        return m.EnginesNow(
            registry.mode,
            registry.namespace,
            tuple(registry.alive()),
            self._scheduler.keeps_answers,
            registry.adapters.known(),
        )

    def _say(self, front_end: _FrontEnd, message: m.SchedulerMessage) -> None:
        if front_end.live:
            self._post(front_end, front_end.talk.send(message, self._clock()))

    def _post(self, front_end: _FrontEnd, envelope: Envelope[m.SchedulerMessage]) -> None:
        front_end.spoken_s = self._clock()
        front_end.frames.add([envelope])

    def _outside(self, identity: bytes, message: m.SchedulerMessage, session: str = "") -> None:
        for frame in frames_of([unnumbered(message, session)]):
            self._loops.post(identity, frame)

    def _look(self) -> None:
        """End sessions of front ends that were silent too long."""
        now_s = self._clock()
        late_s = self._stalls.late_s(now_s)
        for front_end in self._front_ends.values():
            front_end.heard_s = min(front_end.heard_s + late_s, now_s)
            if front_end.live and now_s - front_end.heard_s > self._timeout_s:
                self._on(front_end, Event.SILENT, f"silent for {self._timeout_s:g} s")

    def _acknowledge(self) -> None:
        now_s = self._clock()
        for front_end in self._front_ends.values():
            quiet = now_s - front_end.spoken_s >= HEARTBEAT_S
            if front_end.live and (front_end.talk.ack_pending or quiet):
                self._post(front_end, front_end.talk.send_lossy(Ack()))

    def _received(self, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            envelopes = decode_with(_DECODER, frames[-1] if frames else b"")
        except IncompatibleError as error:
            self._malformed(identity, error)
        else:
            for envelope in envelopes:
                self._handle(identity, envelope)

    def _malformed(self, identity: bytes, error: IncompatibleError) -> None:
        self.refusals.count(ControlRefusal.MALFORMED)
        if self.refusals.complain(identity, self._clock()):
            logger.warning("refused, further times are only counted: %s", error)
        self._outside(identity, Refused(str(error)))

    def _handle(self, identity: bytes, envelope: Envelope[m.FrontEndMessage]) -> None:
        message = envelope.message
        if isinstance(message, m.FrontEndHello):
            self._hello(identity, message)
            return
        known = (f for f in self._front_ends.values() if f.talk.session == envelope.session)
        front_end = next(known, None) if envelope.session else None
        if front_end is None:
            self._send_away(identity, envelope.session)
            return
        front_end.identity = identity
        if Action.DELIVER in self._on(front_end, Event.MESSAGE):
            front_end.heard_s = self._clock()
            taken, repeated = front_end.talk.receive(envelope, front_end.heard_s)
            for one in repeated:
                self._post(front_end, one)
            if isinstance(taken, Deregister):
                self._on(front_end, Event.DEREGISTERED, f"left: {taken.reason}")
            elif taken is not None and front_end.guest is not None:
                front_end.guest.take(taken)

    def _hello(self, identity: bytes, hello: m.FrontEndHello) -> None:
        if (reason := self._unwelcome(hello)) is not None:
            self._outside(identity, Refused(reason))
            return
        front_end = self._front_ends.get(hello.name)
        if front_end is None:
            front_end = _FrontEnd(hello.name, self._loops.post)
            self._front_ends[hello.name] = front_end
        if (event := front_end.greeted(hello)) is not None:
            front_end.identity = identity
            self._on(front_end, event, "it has begun anew")

    def _unwelcome(self, hello: m.FrontEndHello) -> str | None:
        if hello.version != m.LINK_VERSION:
            return (
                f"front end {hello.name!r} speaks version {hello.version}, this scheduler "
                f"{m.LINK_VERSION}; run the same dualpath version on both"
            )
        if hello.name in self._front_ends or len(self._front_ends) < MOST_FRONT_ENDS:
            return None
        # Names cost who makes them up nothing: those that are gone are forgotten.
        self._front_ends = {n: f for n, f in self._front_ends.items() if f.live}
        if len(self._front_ends) < MOST_FRONT_ENDS:
            return None
        return (
            f"front end {hello.name!r} would be one more than {MOST_FRONT_ENDS}; stop some, or "
            "start another scheduler for them"
        )

    def _on(self, front_end: _FrontEnd, event: Event, reason: str = "") -> tuple[Action, ...]:
        actions = front_end.machine.on(event)
        for action in actions:
            match action:
                case Action.REMOVE_ENGINE:
                    self._lose(front_end, reason)
                case Action.CHECK_GROUP:
                    self._on(front_end, Event.GROUP_COMPLETE)
                case Action.OPEN_SESSION:
                    front_end.talk = Channel(f"{self._epoch}-{next(self._sessions):08}")
                    front_end.heard_s = self._clock()
                    self._welcome(front_end)
                case Action.RESEND_REGISTERED:
                    self._welcome(front_end)
                case Action.ADD_ENGINE:
                    self._join(front_end)
                case Action.REQUEST_REREGISTER:
                    self._send_away(front_end.identity, front_end.talk.session)
        return actions

    def _send_away(self, identity: bytes, session: str) -> None:
        self._outside(identity, Refused("no such session", reregister=True), session)

    def _welcome(self, front_end: _FrontEnd) -> None:
        self._post(front_end, front_end.talk.send_lossy(Registered((), front_end.registration)))

    def _join(self, front_end: _FrontEnd) -> None:
        logger.info("front end %s joined (epoch %s)", front_end.name, front_end.epoch)
        front_end.guest = Guest(self._scheduler, lambda message: self._say(front_end, message))
        self._say(front_end, self._engines_now())

    def _lose(self, front_end: _FrontEnd, reason: str) -> None:
        guest, front_end.guest = front_end.guest, None
        if guest is not None:
            logger.warning("front end %s is lost: %s", front_end.name, reason)
            guest.leave(reason)
