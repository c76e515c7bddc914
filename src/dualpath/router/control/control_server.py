"""The router's end of the control plane: one session per engine, over a ``control_socket``.

It executes the state machine ``core.sessions.ROUTER_TABLE``.  The end of a session is one event for
the listener, ``on_lost``; the proof that its process has ended is another, ``on_dead``, which may
come at once, later or never.  An engine whose session has ended though it lives is asked to
register again, and begins without requests.
"""

import itertools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence

from dualpath.core import control
from dualpath.core import control as envelopes
from dualpath.core.cluster import HostProcess, Writer
from dualpath.core.errors import EngineRefusedError, IncompatibleError
from dualpath.core.names import in_one_line
from dualpath.core.sessions import HEARTBEAT_S, Action, Event
from dualpath.node.cluster_secret import ClusterSecret
from dualpath.node.host_process import has_exited
from dualpath.router.control.control_listener import ControlListener
from dualpath.router.control.control_socket import ControlSocket, ZmqControlSocket
from dualpath.router.control.endings import LEFT, Endings
from dualpath.router.control.engine_state import EngineState
from dualpath.router.control.registry import Registry
from dualpath.router.control.session_loops import (
    ACKNOWLEDGE_S,
    LOOKS_IN_A_TIMEOUT,
    OwnStalls,
    SessionLoops,
)
from dualpath.router.control.witnesses import Witnesses
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusal, ControlRefusals

logger = logging.getLogger(__name__)


class ControlServer:
    """Owns the socket and the sessions; the ``Registry`` holds what it learns of engines.

    Without ``socket`` it is ZMQ's.  ``epoch`` names this process of the router; by default it is
    drawn.  ``has_exited`` returns whether a process of this machine has ended.  ``enable_caching``:
    whether engines cache blocks in their buffers.
    """

    def __init__(
        self,
        registry: Registry,
        listener: ControlListener,
        clock: Callable[[], float],
        engine_timeout_s: float,
        socket: ControlSocket | None = None,
        epoch: str = "",
        has_exited: Callable[[HostProcess], bool] = has_exited,
        *,
        enable_caching: bool = True,
    ) -> None:
        self._keep_blocks = enable_caching
        self._registry = registry
        self._listener = listener
        self._clock = clock
        self._timeout_s = engine_timeout_s
        self._refusals = ControlRefusals()
        self._look_gap_s = engine_timeout_s / LOOKS_IN_A_TIMEOUT
        self._stalls = OwnStalls(clock(), self._look_gap_s)
        self.loops = SessionLoops(socket or ZmqControlSocket(), self._handle)
        self._epoch = epoch or uuid.uuid4().hex
        self._sessions = itertools.count(1)
        self._witnesses = Witnesses(registry, self.send, has_exited)
        self._endings = Endings(registry, listener, self.send, clock)
        self.address = ""

    async def start(self, host: str, port: int, secret: ClusterSecret | None = None) -> None:
        """Bind and serve; ``address`` is then the endpoint engines connect to.

        Raises ``ConfigError`` if the address cannot be bound, or other machines could reach it
        and there is no secret.
        """
        looks = {self.check_liveness: self._look_gap_s, self._acknowledge: ACKNOWLEDGE_S}
        self.address = await self.loops.start(host, port, secret, self._refusals, looks)

    def refusals(self) -> Mapping[ControlRefusal, int]:
        """Return how often what came here was refused, by reason."""
        return self._refusals.totals()

    async def stop(self) -> None:
        """Take up nothing more, then close; idempotent."""
        await self.loops.stop()

    def send(self, engine_id: str, message: control.RouterMessage) -> None:
        """Say a message in an engine's session; it is taken up once, in order, while that lasts.

        Nothing is sent to an engine without a session: it drops all it has at the next one.
        """
        engine = self._registry.get(engine_id)
        if engine is not None and engine.talks:
            self._post(engine, engine.talk.send(message, self._clock()))

    def declare_lost(self, engine_id: str, reason: str, certain: bool) -> None:
        """End an engine's session; does nothing for one without."""
        engine = self._registry.get(engine_id)
        if engine is not None and engine.talks:
            self._on(engine, Event.CONFIRMED_DEAD if certain else Event.FAILED, reason)

    def declare_dead(self, writer: Writer) -> None:
        """Take note of the proof that a process is gone."""
        engine = self._registry.get(writer.engine_id)
        if engine is not None and engine.info.epoch == writer.epoch:
            self._on(engine, Event.CONFIRMED_DEAD, "its process has ended")
        elif engine is not None and engine.forgets(writer):
            self._endings.bury(engine.info, writer)
        else:
            self._listener.on_dead(writer)

    def check_liveness(self) -> None:
        """Declare engines lost that were silent too long."""
        now_s = self._clock()
        if late_s := self._stalls.late_s(now_s):
            for engine in self._registry.all():
                engine.heard_s = min(engine.heard_s + late_s, now_s)
        for silent in self._registry.silent(now_s, self._timeout_s):
            self._on(silent, Event.SILENT, f"silent for more than {self._timeout_s:g} s")
        for late in self._registry.staying(now_s, self._timeout_s):
            why = f"its group has left, and it does not drain within {self._timeout_s:g} s"
            self._on(late, Event.DRAIN_TIMED_OUT, f"{why}; end its process, ranks start together")
        self._ask_witnesses()

    def _ask_witnesses(self) -> None:
        doubted = {w.id: w for w in (*self._listener.doubted(), *self._registry.unproven())}
        for writer in self._witnesses.ask(doubted.values()):
            self.declare_dead(writer)

    def _acknowledge(self) -> None:
        now_s = self._clock()
        for engine in self._registry.all():
            silent_s = now_s - engine.spoken_s
            if engine.talks and (engine.talk.ack_pending or silent_s >= HEARTBEAT_S):
                self._post(engine, engine.talk.send_lossy(control.Ack()))

    def _handle(self, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            envelope = envelopes.decode_engine_message(frames[-1] if frames else b"")
        except IncompatibleError as error:
            self._malformed(identity, error)
            return
        if isinstance(envelope.message, control.Register):
            self._hello(identity, envelope.message)
        elif (engine := self._registry.by_session(envelope.session)) is None:
            self._send_away(identity, envelope.session)
        else:
            self._heard(engine, identity, envelope)

    def _hello(self, identity: bytes, hello: control.Register) -> None:
        try:
            admission = self._registry.admit(hello)
        except EngineRefusedError as error:
            self._refusals.count(ControlRefusal(error.reason))
            # By its name: it comes again several times in a second, perhaps as another connection.
            if self._refusals.complain(hello.address.engine_id.encode(), self._clock()):
                logger.warning("engine refused, further times are only counted: %s", error)
            self._outside(identity, control.Refused(reason=str(error)))
            return
        if admission is not None:
            engine, epoch = admission.engine, admission.engine.info.epoch
            engine.greeted(identity, self._clock())
            restarted = admission.event in (Event.RESTARTED, Event.REPLACED)
            reason = f"restarted as epoch {epoch}" if restarted else "it has begun anew"
            self._on(engine, admission.event, reason, admission.former)
            if admission.event is Event.REPLACED:
                self._ask_witnesses()

    def _heard(self, engine: EngineState, identity: bytes, envelope: envelopes.FromEngine) -> None:
        # A connection that was reset comes back as another one; the session goes on.
        engine.identity = identity
        if not engine.talks and isinstance(envelope.message, control.Deregister):
            self._goodbye(engine, envelope.message)
        elif Action.DELIVER in self._on(engine, Event.MESSAGE):
            engine.heard_s = self._clock()
            message, again = engine.talk.receive(envelope, engine.heard_s)
            for repeated in again:
                self._post(engine, repeated)
            if message is not None:
                self._take(engine, message)

    def _take(self, engine: EngineState, message: control.EngineMessage) -> None:
        if isinstance(message, control.Deregister):
            self._goodbye(engine, message)
            return
        if isinstance(message, control.ConfirmedDead):
            self.declare_dead(message.writer)
            return
        if isinstance(message, control.Report):
            if message.unhealthy is not None:
                self._on(engine, Event.FAILED, in_one_line(message.unhealthy))
                return
            engine.report = message
        self._listener.on_message(engine.info, message)

    def _goodbye(self, engine: EngineState, goodbye: control.Deregister) -> None:
        engine.left = True
        event = Event.DEREGISTERED if goodbye.settled else Event.DEREGISTERED_UNSETTLED
        self._on(engine, event, f"{LEFT}{in_one_line(goodbye.reason)}")

    def _on(
        self, engine: EngineState, event: Event, reason: str = "", former: EngineInfo | None = None
    ) -> tuple[Action, ...]:
        """Do what the table says; ``former`` is what was known of the engine before."""
        lost = former or engine.info
        before = engine.machine.state
        actions = engine.machine.on(event)
        if engine.machine.state is not before:
            self._registry.changed()
        for action in actions:
            match action:
                case Action.REMOVE_ENGINE:
                    self._endings.lost(lost, reason, event)
                case Action.REPORT_LOST:
                    self._endings.missed(engine, lost, reason)
                case Action.CHECK_GROUP:
                    self._gather(engine)
                case Action.CONFIRM_DEAD:
                    self._endings.bury(lost, lost.writer)
                case Action.OPEN_SESSION:
                    session = f"{self._epoch}-{next(self._sessions):08}"
                    engine.open(session, engine.identity, self._clock())
                    self._welcome(engine)
                case Action.RESEND_REGISTERED:
                    self._welcome(engine)
                case Action.ADD_ENGINE:
                    self._join(engine.info)
                case Action.REQUEST_REREGISTER:
                    self._send_away(engine.identity, engine.talk.session)
        return actions

    def _welcome(self, engine: EngineState) -> None:
        peers = tuple(peer.address for peer in self._registry.peers(engine.info))
        welcome = control.Registered(peers, engine.registration, self._keep_blocks)
        self._post(engine, engine.talk.send_lossy(welcome))

    def _join(self, info: EngineInfo) -> None:
        logger.info("%s engine %s joined (epoch %s)", info.role.value, info.engine_id, info.epoch)
        for peer in self._registry.peers(info):
            self.send(peer.engine_id, control.PeerUp(address=info.address))
        self._listener.on_joined(info)

    def _gather(self, engine: EngineState) -> None:
        """Open the sessions of a whole group at once, or say for whom it waits."""
        if (missing := self._registry.waits_for(engine.info)) is not None:
            self._outside(engine.identity, control.Refused(reason=missing))
            return
        for rank in self._registry.group(engine.info):
            self._on(rank, Event.GROUP_COMPLETE)

    def _send_away(self, identity: bytes, session: str) -> None:
        self._refusals.count(ControlRefusal.UNKNOWN_ENGINE)
        reason = (
            f"the session {session!r} is over or was never opened here, perhaps because the router "
            "has restarted; greet anew"
        )
        self._outside(identity, control.Refused(reason=reason, reregister=True), session)

    def _malformed(self, identity: bytes, error: IncompatibleError) -> None:
        self._refusals.count(ControlRefusal.MALFORMED)
        if not self._refusals.complain(identity, self._clock()):
            return
        engine = self._registry.by_identity(identity)
        name = engine.info.engine_id if engine else f"unregistered peer {identity.hex()}"
        logger.warning("%s sent a malformed frame, more are counted only: %s", name, error)
        if engine is None:
            self._outside(identity, control.Refused(reason=str(error)))

    def _outside(self, identity: bytes, message: control.RouterMessage, session: str = "") -> None:
        envelope = envelopes.unnumbered(message, session)
        self.loops.post(identity, envelopes.encode(envelope))

    def _post(self, engine: EngineState, envelope: envelopes.FromRouter) -> None:
        engine.spoken_s = self._clock()
        self.loops.post(engine.identity, envelopes.encode(envelope))
