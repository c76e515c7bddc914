"""The router's end of the control plane: one session per engine, over a ``control_socket``.

``core.sessions.ROUTER_TABLE`` defines what each registration, message or silence changes; this
module executes it.  The end of a session is one event for others, ``on_lost``; the proof that a
process is dead is another, ``on_dead``, which may come at once, later or never.  A live engine
is asked to register again after its session has ended, and begins without any request.
"""

import itertools
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from dualpath.core import control
from dualpath.core import control as envelopes
from dualpath.core.cluster import AgentAddress, EngineAddress, HostProcess, Role, Writer
from dualpath.core.control import LivenessProbe, PeerDown, RouterMessage
from dualpath.core.errors import EngineRefusedError, IncompatibleError
from dualpath.core.names import in_one_line
from dualpath.core.sessions import HEARTBEAT_S, Action, Event, heartbeat_s
from dualpath.core.transfers import CallAssignment
from dualpath.node.cluster_secret import ClusterSecret
from dualpath.node.host_process import THIS_MACHINE, has_exited
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusal, ControlRefusals
from dualpath.router.scheduler.control_socket import (
    ACKNOWLEDGE_S,
    CHECKS_PER_TIMEOUT,
    ControlSocket,
    OwnStalls,
    SessionLoops,
    ZmqControlSocket,
)
from dualpath.router.scheduler.registry import MOST_ENGINES, EngineState, Registry


class ControlListener(Protocol):
    """The owner of the server, notified of engines' sessions and messages; must not block."""

    def on_joined(self, info: EngineInfo) -> None:
        """An engine may be used from now on; it has no request."""

    def on_lost(self, lost: Sequence[EngineInfo], reason: str) -> None:
        """Engines' sessions have ended, and with them all that the engines had of any request.

        They are one engine, or the ranks of a data-parallel group: no request may be retried on
        one of them.
        """

    def on_missed(self, missed: Sequence[EngineInfo]) -> None:
        """Engines in ``on_lost`` that should leave with their group are lost instead."""

    def on_dead(self, writer: Writer) -> None:
        """A process is proven to be dead, or to have ended its transfers for good."""

    def on_message(self, info: EngineInfo, message: control.EngineMessage, received: int) -> None:
        """A live engine sent a message other than its registration or deregistration.

        It had received the router's messages up to this number.
        """

    def in_doubt(self) -> Iterable[Writer]:
        """Return the processes that would free slots by their death."""


class LivenessProbes:
    """Finds out whether processes are dead: by this machine, or by an engine on theirs.

    Slots in quarantine wait for the death of a prefill engine's process, or for its own report.  A
    process that is silent gives neither: it may be stopped and write when it continues, and time
    proves nothing.  Without a live engine on its machine, the quarantine lasts until one comes up
    there, or the prefill engine itself registers again under its ``engine_id``.

    ``send`` reaches an engine, which confirms the death or does not answer; ``has_exited`` checks a
    process of the router's own machine.
    """

    def __init__(
        self,
        registry: Registry,
        send: Callable[[str, RouterMessage], None],
        has_exited: Callable[[HostProcess], bool] = has_exited,
    ) -> None:
        self._registry = registry
        self._send = send
        self._has_exited = has_exited

    def ask(self, writers: Iterable[Writer]) -> list[Writer]:
        """Return those that are dead on this machine; send probes for the others to engines."""
        gone = []
        for writer in writers:
            if self._has_exited(writer.process):
                gone.append(writer)
            elif (neighbour := self._neighbour(writer)) is not None:
                self._send(neighbour, LivenessProbe(writer))
        return gone

    def outlook(self, writer: Writer) -> str:
        """Return what will show whether a process is dead, for operators."""
        name, process = f"{writer.engine_id} (epoch {writer.epoch})", writer.process
        if not process.host:
            return (
                f"{name} cannot be identified, as its /proc is that of another PID namespace: this "
                "ends when that process registers again, or when this engine restarts"
            )
        where = f"process {process.pid} on {process.host.split('/')[0]}"
        if (neighbour := self._neighbour(writer)) is not None:
            return f"{name}: this ends when {neighbour} reports that {where} has exited"
        if process.host == THIS_MACHINE.host():
            return f"{name}: this ends when {where} has exited, or when it registers again"
        return (
            f"{name}: no live engine can look at {where}; this ends when an engine registers "
            "there and reports that it has exited, when that process registers again, or when "
            "this engine restarts"
        )

    def _neighbour(self, writer: Writer) -> str | None:
        host = writer.process.host
        found = self._registry.neighbour(host) if host else None
        return found.engine_id if found is not None else None


logger = logging.getLogger(__name__)

#: Prefix of the reason of an engine that deregistered.
LEFT = "left: "

_DEREGISTERED = (Event.DEREGISTERED, Event.DEREGISTERED_UNSETTLED)
#: After these a process may still be alive.
_UNCERTAIN = (
    Event.SILENT,
    Event.FAILED,
    Event.REREGISTERS,
    Event.REPLACED,
    Event.DEREGISTERED_UNSETTLED,
)


#: Bound of the table of processes that were named, and of the engines that know one of them.
_MOST_KNOWN = 4 * MOST_ENGINES


class NamedPeers:
    """Which engines were named to which, by ``PeerUp``: only these need to know of a loss."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        #: By process: the engines that it was named to, until it is known to be dead.
        self._knowing: dict[tuple[str, str], set[str]] = {}
        #: By engine: the processes that were named to it in its present session, and the number of
        #: the message.
        self._named: dict[str, dict[tuple[str, str], int]] = {}

    def number(self, engine_id: str, process: Writer) -> int | None:
        """Return the number of the message that named a process to an engine, None if none has."""
        return self._named.get(engine_id, {}).get(process.id)

    def named(self, engine_id: str, process: Writer, number: int) -> None:
        """Note that a process was named to an engine by the message of this number."""
        self._named.setdefault(engine_id, {})[process.id] = number
        self._knowing.setdefault(process.id, set()).add(engine_id)
        self._bound(process.id)

    def session_ends(self, info: EngineInfo, *, certain: bool) -> None:
        """An engine's session has ended: everything is named again in its next one.

        A DE knows the processes that may write to its buffer beyond its session.
        """
        for process_id in self._named.pop(info.engine_id, ()):
            if certain or info.role is Role.PREFILL:
                self._knowing.get(process_id, set()).discard(info.engine_id)

    def lost(self, process: Writer, *, certain: bool) -> Sequence[str]:
        """Return the engines to notify of a loss, in order of their names.

        The process is named again if it comes back.
        """
        knowing = self._knowing.get(process.id, set())
        for engine_id in knowing:
            self._named.get(engine_id, {}).pop(process.id, None)
        if certain:
            self._knowing.pop(process.id, None)
        return sorted(knowing)  # The order of a set differs between runs of the router.

    def _bound(self, process_id: tuple[str, str]) -> None:
        """Remove unregistered engines, and processes that are not live, from full tables."""
        knowing = self._knowing[process_id]
        if len(knowing) > _MOST_KNOWN:
            knowing.intersection_update([e for e in knowing if self._registry.get(e) is not None])
        if len(self._knowing) > _MOST_KNOWN:
            self._knowing = {
                (engine_id, epoch): knowing
                for (engine_id, epoch), knowing in self._knowing.items()
                if (info := self._registry.live(engine_id)) is not None and info.epoch == epoch
            }


class Teardown:
    """Takes engines out: they are lost, have left, or are dead.  Notifies the listener and peers.

    With one rank of a group its whole group ends, before others are notified.  A group that has
    drained *leaves*: the first deregistration takes all of it out, and each rank still deregisters
    itself, in any order.  A rank that then ends in another way is lost after all, and with it those
    that were still about to leave.
    """

    def __init__(
        self,
        registry: Registry,
        listener: ControlListener,
        send: Callable[[str, RouterMessage], None],
        clock: Callable[[], float],
        named: NamedPeers,
    ) -> None:
        self._registry = registry
        self._listener = listener
        self._named = named
        self._send = send
        self._clock = clock

    def lost(self, info: EngineInfo, reason: str, event: Event) -> None:
        """An engine is out, and so is every rank of its group."""
        group = self._registry.group(info)
        left = event in _DEREGISTERED and any(rank.drained for rank in group)
        others = self._others(
            info, Event.OTHER_RANK_LEFT if left else Event.OTHER_RANK_LOST, Action.REMOVE_ENGINE
        )
        for rank in others if left else ():
            rank.leaves_with_group(self._clock())
        ended = (info, *(rank.info for rank in others))
        _log(ended, reason, left=left or (event in _DEREGISTERED and not others))
        for one in ended:
            certain = one is info and event not in _UNCERTAIN
            self._notify_peers(one.writer, certain=certain)
            self._named.session_ends(one, certain=certain)
        notified = f"{info.engine_id}, of the same group: {reason}" if others else reason
        self._listener.on_lost(ended, notified)

    def missed(self, engine: EngineState, info: EngineInfo, reason: str) -> None:
        """An engine that should leave with its group is lost; ``info`` is that of its process."""
        others = self._others(info, Event.OTHER_RANK_LOST, Action.REPORT_LOST)
        for rank in (engine, *others):
            rank.left = False
        lost = (info, *(rank.info for rank in others))
        _log(lost, reason, left=False)
        self._listener.on_missed(lost)

    def confirm_dead(self, writer: Writer) -> None:
        """A process of an engine, the present or a former one, is dead."""
        self._notify_peers(writer, certain=True)
        self._listener.on_dead(writer)

    def _others(self, info: EngineInfo, event: Event, action: Action) -> list[EngineState]:
        """Apply an event to the other ranks; return those for which ``action`` follows."""
        group = self._registry.group(info) if info.dp else []
        return [rank for rank in group if action in rank.machine.on(event)]

    def _notify_peers(self, writer: Writer, *, certain: bool) -> None:
        for engine_id in self._named.lost(writer, certain=certain):
            self._send(engine_id, PeerDown(writer.engine_id, writer.epoch, certain))


def _log(ended: Sequence[EngineInfo], reason: str, *, left: bool) -> None:
    """Log that an engine, and the ranks that end with it, have left or are lost."""
    first, *others = ended
    how, verb = ("leaves", "has left") if left else ("lost", "is lost")
    # A deregistration is intended, and no reason to alert operators.
    level = logging.INFO if left else logging.WARNING
    reason = reason.removeprefix(LEFT)
    logger.log(level, "%s engine %s %s: %s", first.role.value, first.engine_id, how, reason)
    for one in others:
        logger.log(
            level,
            "%s engine %s %s: rank %s of its group %s: %s",
            *(one.role.value, one.engine_id, how, first.engine_id, verb, reason),
        )


class ControlServer:
    """Owns the socket and the sessions; the ``Registry`` holds the state of engines.

    Without ``socket`` it is ZMQ's.  ``epoch`` names this process of the router; by default it is
    random.  ``has_exited`` returns whether a process of this machine has ended.
    ``enable_caching``: whether engines cache blocks in their buffers.
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
        self._check_gap_s = engine_timeout_s / CHECKS_PER_TIMEOUT
        self._stalls = OwnStalls(clock(), self._check_gap_s)
        self.loops = SessionLoops(socket or ZmqControlSocket(), self._handle)
        self._epoch = epoch or uuid.uuid4().hex
        self._sessions = itertools.count(1)
        #: Engines with messages that are not acknowledged yet, and all in the order in which they
        #: were last sent a message: a timer looks only at those that need one.
        self._unacknowledged: dict[str, EngineState] = {}
        self._spoken: OrderedDict[str, EngineState] = OrderedDict()
        self.probes = LivenessProbes(registry, self.send, has_exited)
        self._named = NamedPeers(registry)
        self._teardown = Teardown(registry, listener, self.send, clock, self._named)
        self.address = ""

    async def start(self, host: str, port: int, secret: ClusterSecret | None = None) -> None:
        """Bind and serve; ``address`` is then the endpoint engines connect to.

        Raises ``ConfigError`` if the address cannot be bound, or other machines could reach it
        and there is no secret.
        """
        timers = {self.check_liveness: self._check_gap_s, self._acknowledge: ACKNOWLEDGE_S}
        self.address = await self.loops.start(host, port, secret, self._refusals, timers)

    def refusals(self) -> Mapping[ControlRefusal, int]:
        """Return the counts of refusals, by reason."""
        return self._refusals.totals()

    async def stop(self) -> None:
        """Stop receiving, then close; idempotent."""
        await self.loops.stop()

    def send(self, engine_id: str, message: control.RouterMessage) -> None:
        """Send in an engine's session: in order, exactly once, while the session lasts.

        A message to an engine without a session is dropped: the engine drops all its requests when
        it registers again.
        """
        self.send_numbered(engine_id, message)

    def send_numbered(self, engine_id: str, message: control.RouterMessage) -> int | None:
        """Send as ``send``; return the message's number in the session, None without a session."""
        engine = self._registry.get(engine_id)
        if engine is None or not engine.has_session:
            return None
        envelope = engine.talk.send(message, self._clock())
        self._post(engine, envelope)
        return envelope.number

    def name_peer(self, engine_id: str, peer_id: str, call_id: int = 0) -> bool:
        """Name a peer to an engine that is about to get a request with it.

        False if it was named before; ``call_id`` is as in ``PeerUp``.
        """
        if (address := self.unnamed_peer(engine_id, peer_id)) is None:
            return False
        number = self.send_numbered(engine_id, control.PeerUp(address, call_id))
        assert number is not None, "an engine with a session is sent everything"
        self.peer_named(engine_id, address, number)
        return True

    def unnamed_peer(self, engine_id: str, peer_id: str) -> EngineAddress | None:
        """Return the address by which a peer has to be named to an engine; None if it was named."""
        peer, engine = self._registry.get(peer_id), self._registry.get(engine_id)
        if peer is None or engine is None or not engine.has_session:
            return None
        if self._named.number(engine_id, peer.info.writer) is not None:
            return None
        if peer.info.role is Role.DECODE:
            return peer.address
        # Nothing connects to a PE.
        agents = tuple(AgentAddress(one.agent, b"", ()) for one in peer.address.agents)
        return msgspec.structs.replace(peer.address, agents=agents)

    def peer_named(self, engine_id: str, address: EngineAddress, number: int) -> None:
        """Note that the message of this number has named a peer to an engine."""
        self._named.named(engine_id, address.writer, number)

    def knows_peer(self, engine_id: str, peer_id: str) -> bool:
        """Whether an engine is known to have received which process a peer is.

        Then a call with an assignment may reach it: its session has begun as well.
        """
        peer, engine = self._registry.get(peer_id), self._registry.get(engine_id)
        if peer is None or engine is None or not engine.has_session:
            return False
        number = self._named.number(engine_id, peer.info.writer)
        return number is not None and engine.talk.has_received(number)

    def call_assignment(self, engine_id: str, tokens: int) -> CallAssignment:
        """Return an assignment for an engine with a session, to be sent with a call."""
        engine = self._registry.get(engine_id)
        assert engine is not None
        assert engine.has_session, f"engine {engine_id} has no session"
        engine.call_assignments += 1
        return CallAssignment(engine.talk.session, engine.call_assignments, tokens)

    def declare_lost(self, engine_id: str, reason: str, certain: bool) -> None:
        """End an engine's session, if it has one."""
        engine = self._registry.get(engine_id)
        if engine is not None and engine.has_session:
            self._on(engine, Event.CONFIRMED_DEAD if certain else Event.FAILED, reason)

    def declare_dead(self, writer: Writer) -> None:
        """Take the proof that a process is dead."""
        engine = self._registry.get(writer.engine_id)
        if engine is not None and engine.info.epoch == writer.epoch:
            self._on(engine, Event.CONFIRMED_DEAD, "its process has ended")
        elif engine is not None and engine.confirms_dead(writer):
            self._teardown.confirm_dead(writer)
        else:
            self._listener.on_dead(writer)

    def check_liveness(self) -> None:
        """Declare engines lost that were silent too long."""
        now_s = self._clock()
        if late_s := self._stalls.late_s(now_s):
            for engine in self._registry.all():
                engine.heard_s = min(engine.heard_s + late_s, now_s)
                engine.step_s = min(engine.step_s + late_s, now_s)
        for silent in self._registry.silent(now_s, self._timeout_s):
            self._on(silent, Event.SILENT, f"silent for more than {self._timeout_s:g} s")
        for late in self._registry.staying(now_s, self._timeout_s):
            why = f"its group has left, and it does not drain within {self._timeout_s:g} s"
            self._on(late, Event.DRAIN_TIMED_OUT, f"{why}; end its process, ranks start together")
        self._probe_in_doubt()

    def _probe_in_doubt(self) -> None:
        in_doubt = {w.id: w for w in (*self._listener.in_doubt(), *self._registry.unproven())}
        for writer in self.probes.ask(in_doubt.values()):
            self.declare_dead(writer)

    def _acknowledge(self) -> None:
        """Acknowledge what is not acknowledged yet; send heartbeats to engines that need one."""
        for engine in list(self._unacknowledged.values()):
            self._send_ack(engine)
        self._unacknowledged.clear()
        now_s, gap_s = self._clock(), self._heartbeat_s()
        while self._spoken:
            engine_id, engine = next(iter(self._spoken.items()))
            if now_s - engine.spoken_s < gap_s:
                break
            del self._spoken[engine_id]
            self._send_ack(engine)

    def _heartbeat_s(self) -> float:
        return heartbeat_s(len(self._registry.alive()), self._timeout_s)

    def _send_ack(self, engine: EngineState) -> None:
        if engine.has_session:
            gap_s = self._heartbeat_s()
            ack = control.Ack(gap_s if gap_s > HEARTBEAT_S else None)
            self._post(engine, engine.talk.send_lossy(ack))

    def _handle(self, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            envelope = envelopes.decode_engine_message(frames[-1] if frames else b"")
        except IncompatibleError as error:
            self._malformed(identity, error)
            return
        if isinstance(envelope.message, control.Register):
            self._register(identity, envelope.message)
        elif (engine := self._registry.by_session(envelope.session)) is None:
            self._request_reregister(identity, envelope.session)
        else:
            self._receive(engine, identity, envelope)

    def _register(self, identity: bytes, hello: control.Register) -> None:
        try:
            admission = self._registry.admit(hello)
        except EngineRefusedError as error:
            self._refusals.count(ControlRefusal(error.reason))
            # By its name: it retries several times a second, perhaps on another connection.
            if self._refusals.complain(hello.address.engine_id.encode(), self._clock()):
                logger.warning("engine refused, further times are only counted: %s", error)
            self._send_unnumbered(identity, control.Refused(reason=str(error)))
            return
        if admission is not None:
            engine, epoch = admission.engine, admission.engine.info.epoch
            engine.registers(identity, self._clock())
            restarted = admission.event in (Event.RESTARTED, Event.REPLACED)
            reason = f"restarted as epoch {epoch}" if restarted else "it has registered again"
            self._on(engine, admission.event, reason, admission.former)
            if admission.event is Event.REPLACED:
                self._probe_in_doubt()

    def _receive(
        self, engine: EngineState, identity: bytes, envelope: envelopes.FromEngine
    ) -> None:
        # After a reset the engine uses another connection; the session goes on.
        engine.identity = identity
        if not engine.has_session and isinstance(envelope.message, control.Deregister):
            self._deregister(engine, envelope.message)
        elif Action.DELIVER in self._on(engine, Event.MESSAGE):
            engine.heard_s = self._clock()
            message, again = engine.talk.receive(envelope, engine.heard_s)
            if engine.talk.ack_pending:
                self._unacknowledged[engine.info.engine_id] = engine
            for resent in again:
                self._post(engine, resent)
            if message is not None:
                self._take(engine, message, envelope.received)

    def _take(self, engine: EngineState, message: control.EngineMessage, received: int) -> None:
        if isinstance(message, control.Deregister):
            self._deregister(engine, message)
            return
        if isinstance(message, control.ConfirmedDead):
            self.declare_dead(message.writer)
            return
        if isinstance(message, control.Report):
            for part in (*message.events, *message.stored):
                self._listener.on_message(engine.info, part, received)
            if engine.report is not None and message.report_seq < engine.report.report_seq:
                return  # A later report has overtaken it on another connection.
            if message.unhealthy is not None:
                self._on(engine, Event.FAILED, in_one_line(message.unhealthy))
                return
            engine.reports(message, self._clock())
        self._listener.on_message(engine.info, message, received)

    def _deregister(self, engine: EngineState, goodbye: control.Deregister) -> None:
        engine.left = True
        event = Event.DEREGISTERED if goodbye.settled else Event.DEREGISTERED_UNSETTLED
        self._on(engine, event, f"{LEFT}{in_one_line(goodbye.reason)}")

    def _on(
        self, engine: EngineState, event: Event, reason: str = "", former: EngineInfo | None = None
    ) -> tuple[Action, ...]:
        """Execute the table's actions; ``former`` is the engine's info before the event."""
        lost = former or engine.info
        actions = engine.machine.on(event)
        for action in actions:
            match action:
                case Action.REMOVE_ENGINE:
                    self._teardown.lost(lost, reason, event)
                case Action.REPORT_LOST:
                    self._teardown.missed(engine, lost, reason)
                case Action.CHECK_GROUP:
                    self._check_group(engine)
                case Action.CONFIRM_DEAD:
                    self._teardown.confirm_dead(lost.writer)
                case Action.OPEN_SESSION:
                    session = f"{self._epoch}-{next(self._sessions):08}"
                    self._registry.open(engine, session, self._clock())
                    self._send_registered(engine)
                case Action.RESEND_REGISTERED:
                    self._send_registered(engine)
                case Action.ADD_ENGINE:
                    self._join(engine.info)
                case Action.REQUEST_REREGISTER:
                    self._request_reregister(engine.identity, engine.talk.session)
        return actions

    def _send_registered(self, engine: EngineState) -> None:
        session = engine.talk.session
        registered = control.Registered(engine.registration, self._keep_blocks, session)
        self._post(engine, engine.talk.send_lossy(registered))

    def _join(self, info: EngineInfo) -> None:
        logger.info("%s engine %s joined (epoch %s)", info.role.value, info.engine_id, info.epoch)
        self._listener.on_joined(info)

    def _check_group(self, engine: EngineState) -> None:
        """Open the sessions of a whole group at once, or answer which ranks are missing."""
        if (missing := self._registry.waits_for(engine.info)) is not None:
            self._send_unnumbered(engine.identity, control.Refused(reason=missing))
            return
        for rank in self._registry.group(engine.info):
            self._on(rank, Event.GROUP_COMPLETE)

    def _request_reregister(self, identity: bytes, session: str) -> None:
        self._refusals.count(ControlRefusal.UNKNOWN_ENGINE)
        reason = (
            f"the session {session!r} has ended or was never opened here, perhaps because the "
            "router has restarted; register again"
        )
        self._send_unnumbered(identity, control.Refused(reason=reason, reregister=True), session)

    def _malformed(self, identity: bytes, error: IncompatibleError) -> None:
        self._refusals.count(ControlRefusal.MALFORMED)
        if not self._refusals.complain(identity, self._clock()):
            return
        engine = self._registry.by_identity(identity)
        name = engine.info.engine_id if engine else f"unregistered peer {identity.hex()}"
        logger.warning("%s sent a malformed frame, further ones are only counted: %s", name, error)
        if engine is None:
            self._send_unnumbered(identity, control.Refused(reason=str(error)))

    def _send_unnumbered(
        self, identity: bytes, message: control.RouterMessage, session: str = ""
    ) -> None:
        envelope = envelopes.unnumbered(message, session)
        self.loops.post(identity, envelopes.encode(envelope))

    def _post(self, engine: EngineState, envelope: envelopes.FromRouter) -> None:
        engine.spoken_s, engine_id = self._clock(), engine.info.engine_id
        self._unacknowledged.pop(engine_id, None)
        self._spoken[engine_id] = engine
        self._spoken.move_to_end(engine_id)
        self.loops.post(engine.identity, envelopes.encode(envelope))
