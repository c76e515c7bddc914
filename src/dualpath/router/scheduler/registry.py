"""The engines of a cluster: which may join, which are live, what each last reported.

No I/O, and time is an argument; ``ControlServer`` feeds it from the network.  An engine is known by
``engine_id``; its *epoch* names one process start, so that a restarted engine is never confused
with its former process, and its *session* one connection with this router, from registration to
its end.

*Data-parallel groups.*  The ranks of one *start* of a group name the same group and epoch.  Which
start is the newest need not be known: a group is complete when all ranks of one start have
registered, and a rank that is left from a former start waits in vain until the next process takes
its ``engine_id``.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import EngineAddress, Role, Writer, is_earlier_data_plane
from dualpath.core.control import PROTOCOL_VERSION, EngineMessage, Register, Report, RouterMessage
from dualpath.core.errors import EngineLostError, EngineRefusedError
from dualpath.core.modes import Handover, Mode
from dualpath.core.names import in_one_line
from dualpath.core.rates import MAX_COMPUTED_WEIGHT
from dualpath.core.sessions import ROUTER_TABLE, Channel, Event, RouterSideState, StateMachine
from dualpath.core.weights import WeightsVersion, shown_version
from dualpath.router.engines import EngineInfo, LiveEngines
from dualpath.router.refusals import ControlRefusal
from dualpath.router.served_adapters import ServedAdapters

K = TypeVar("K")

#: Former processes of an engine that are remembered; an older one that still runs would count as a
#: new one, and its successor as dead.
_EPOCHS_KEPT = 1024


class Pause(StrEnum):
    """Why a live engine gets no new requests."""

    DRAINING = "draining"
    ASKED = "asked"
    WEIGHTS = "weights"
    SUSPECT = "suspect"


class EngineState:
    """An engine that has registered: its info, its session and its last report.

    ``address`` is for its peers.  ``left`` if it deregistered, itself or with its drained group;
    ``pauses`` are the reasons why it gets no new requests; ``drained`` if it was notified that its
    group has no requests left.
    ``step_s`` is when a report first had the present number of steps of its core.
    ``changed`` is called when the state of its session has changed.
    """

    def __init__(
        self,
        info: EngineInfo,
        address: EngineAddress,
        changed: "Callable[[EngineState], None]",
    ) -> None:
        self.info = info
        self.address = address
        self.identity = b""
        self.talk: Channel[RouterMessage, EngineMessage] = Channel("")
        self.machine = StateMachine(ROUTER_TABLE, RouterSideState.UNKNOWN, lambda: changed(self))
        self.registration = 0
        self.last_session = ""
        #: Assignments of this session that were to be sent with calls.
        self.call_assignments = 0
        self.heard_s = self.spoken_s = self.step_s = float("-inf")
        self.left = self.drained = False
        self.group_left_s = float("-inf")
        self.former_epochs: deque[str] = deque(maxlen=_EPOCHS_KEPT)
        #: Former processes that are not proven dead.
        self.unproven: dict[str, Writer] = {}
        self.report: Report | None = None
        self.pauses: set[Pause] = set()
        self._former_totals: dict[str, float] = {}

    @property
    def alive(self) -> bool:
        """Whether it has a session and takes part."""
        return self.machine.state is RouterSideState.LIVE

    @property
    def has_session(self) -> bool:
        """Whether it has a session, even if only to leave with its group."""
        return self.machine.state in (RouterSideState.LIVE, RouterSideState.LEAVING)

    @property
    def present(self) -> bool:
        """Whether it has a session, or waits for one with its group."""
        return self.has_session or self.machine.state is RouterSideState.REGISTERING

    def open(self, session: str, identity: bytes, now_s: float) -> None:
        """Begin a session."""
        self.talk, self.last_session = Channel(session), session
        self.call_assignments = 0
        self.identity, self.heard_s, self.step_s = identity, now_s, now_s
        self.left = self.drained = False
        self.pauses &= {Pause.ASKED, Pause.WEIGHTS}

    def reports(self, report: Report, now_s: float) -> None:
        """Take a report of this process."""
        if self.report is None or report.steps != self.report.steps:
            self.step_s = now_s
        if self.report is not None and not report.counters:
            report = msgspec.structs.replace(report, counters=self.report.counters)
        self.report = report

    def registers(self, identity: bytes, now_s: float) -> None:
        """It registers on a connection; while it waits for its group this shows that it lives."""
        self.identity = identity
        if not self.has_session:
            # Messages of a former session, or of a former process, no longer count.
            self.talk, self.heard_s = Channel(""), now_s

    def leaves_with_group(self, now_s: float) -> None:
        """A rank of its drained group has deregistered; it must do so as well."""
        self.left, self.group_left_s = True, now_s

    def totals(self) -> dict[str, float]:
        """Return the engine's counters, monotonic over its restarts."""
        totals = dict(self._former_totals)
        for name, value in (self.report.counters if self.report else {}).items():
            totals[name] = totals.get(name, 0) + value
        return totals

    def had_process(self, epoch: str) -> bool:
        """Whether another process has replaced the one of this epoch."""
        if is_earlier_data_plane(self.info.epoch, epoch):
            return False
        return any(one == epoch or is_earlier_data_plane(one, epoch) for one in self.former_epochs)

    def confirms_dead(self, writer: Writer) -> bool:
        """A former process is confirmed dead; return whether this was not known before."""
        return self.unproven.pop(writer.epoch, None) is not None

    def restart(self, info: EngineInfo, *, exclusive: bool) -> None:
        """Take the info of another process; the counters of the former one stay in the totals.

        ``exclusive``: see ``Registry``.  A process that had been replaced before proves nothing.
        The next data plane of the same process proves that its former ones have ended.
        """
        dead = self.machine.state is RouterSideState.DEAD
        returns = info.epoch in self.former_epochs
        proves = exclusive and not returns and _elsewhere(self.info.writer, info.writer)
        proves = proves or is_earlier_data_plane(self.info.epoch, info.epoch)
        if not dead and not proves:
            self.unproven[self.info.epoch] = self.info.writer
        if returns:
            self.former_epochs.remove(info.epoch)
            self.unproven.pop(info.epoch, None)
        for earlier in [e for e in self.unproven if is_earlier_data_plane(e, info.epoch)]:
            del self.unproven[earlier]
        self._former_totals = self.totals()
        self.report = None
        self.pauses.clear()
        self.former_epochs.append(self.info.epoch)
        if len(self.unproven) > _EPOCHS_KEPT:
            # A process that is no longer remembered does not count as dead.
            known = set(self.former_epochs)
            self.unproven = {e: w for e, w in self.unproven.items() if e in known}
        self.info = info


def _elsewhere(one: Writer, other: Writer) -> bool:
    """Whether two processes are known to be on two machines, or in two containers."""
    hosts = one.process.host, other.process.host
    return all(hosts) and hosts[0] != hosts[1]


_MOST_NAMED = 16
#: An unchecked number must not take the router's time: the missing ranks of a group are listed.
MAX_RANKS = 4096


def check_rank(name: str, hello: Register, ranks: "Iterable[EngineState]") -> None:
    """Raise ``EngineRefusedError`` if no group can have this rank beside ``ranks`` of its start."""
    if (dp := hello.dp) is None:
        return
    if not 0 <= dp.rank < dp.size <= MAX_RANKS or (dp.at_server or 0) < 0:
        raise EngineRefusedError(
            ControlRefusal.SETTINGS,
            f"{name} is rank {dp.rank} of {dp.size} of the data-parallel group {dp.group!r}, "
            f"number {dp.at_server} of its server; ranks count from 0 on, at most {MAX_RANKS}; "
            "correct its settings",
        )
    role = hello.address.role
    for engine in ranks:
        other, info = engine.info.dp, engine.info
        if info.engine_id == hello.address.engine_id or not engine.present:
            continue
        if other and (other.rank == dp.rank or (other.size, info.role) != (dp.size, role)):
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} is rank {dp.rank} of {dp.size}, {role.value}, of the data-parallel group "
                f"{dp.group!r}, where {info.engine_id!r} is rank {other.rank} of {other.size}, "
                f"{info.role.value}; give each rank a number of its own, and all one size and role",
            )


def check_registration(
    hello: Register,
    namespace: StoreNamespace | None,
    mode: Mode | None,
    adapters: ServedAdapters,
    ranks: "Collection[EngineState]",
    neighbours: Iterable[EngineInfo],
) -> None:
    """Raise ``EngineRefusedError`` for an engine that may not join.

    ``namespace`` and ``mode`` are those of the cluster, None before the first engine; ``ranks`` are
    the engines of its start of a data-parallel group, ``neighbours`` the live ones of its group.
    """
    name = f"engine {hello.address.engine_id!r}"
    _check_settings(name, hello)
    check_rank(name, hello, ranks)
    _check_role(name, hello, neighbours)
    if hello.version != PROTOCOL_VERSION:
        raise EngineRefusedError(
            ControlRefusal.VERSION,
            f"{name} speaks control protocol {hello.version}, this router "
            f"{PROTOCOL_VERSION}; run the same dualpath version on router and engines",
        )
    modes = [known.value for known in Mode]
    if hello.mode not in modes:
        raise EngineRefusedError(
            ControlRefusal.MODE,
            f"{name} runs in mode {hello.mode!r}, known are {', '.join(modes)}; choose one",
        )
    if mode is not None and hello.mode != mode:
        raise EngineRefusedError(
            ControlRefusal.MODE,
            f"{name} runs in mode {hello.mode!r}, this router in {mode.value!r}; "
            "start the engine in the router's mode, or another router",
        )
    if namespace is not None and hello.namespace != namespace:
        if hello.namespace.with_weights(namespace.weights) == namespace:
            raise EngineRefusedError(
                ControlRefusal.WEIGHTS,
                f"{name} has {shown_version(hello.namespace.weights)}, this cluster has "
                f"{shown_version(namespace.weights)}; update its weights with `dualpath weights "
                "update`, or the weights of the others",
            )
        raise EngineRefusedError(
            ControlRefusal.NAMESPACE,
            f"{name} differs in {_differences(hello.namespace, namespace)}; start it with "
            "the model, dtype, layout, block size and --speculative-config of the others, or "
            "use another router",
        )
    if lacking := adapters.differences(hello.adapters):
        raise EngineRefusedError(ControlRefusal.ADAPTERS, f"{name} {'; it '.join(lacking)}")


def _check_handover(handover: Handover, hello: Register) -> None:
    """Raise ``EngineRefusedError`` for an engine that cannot hand KV over as this router asks."""
    hands_over = Mode(hello.mode) in (Mode.DUALPATH, Mode.SPLIT)
    if handover is Handover.BUFFER or not hands_over or hello.namespace.geometry.layer_windows:
        return
    if hello.hbm_refusal:
        raise EngineRefusedError(
            ControlRefusal.SETTINGS,
            f"engine {hello.address.engine_id!r} takes no part in hand-overs in HBM: "
            f"{in_one_line(hello.hbm_refusal)}; or start the router with --handover buffer, it has "
            f"{handover}",
        )


def node_group(hello: Register) -> str:
    """Return the group with which an engine fetches as in §6.1: a node's engines of one role.

    A data-parallel group is one: its ranks may be on several nodes.  A group that the engine was
    given counts before both.
    """
    role = hello.address.role.value
    if hello.group != role:
        return hello.group
    return f"{role}@{hello.dp.group if hello.dp is not None else hello.node}"


def _check_settings(name: str, hello: Register) -> None:
    if hello.hbm_tokens < 1 or hello.buffer_tokens < 0 or (hello.snic_bytes_per_s or 1) <= 0:
        raise EngineRefusedError(
            ControlRefusal.SETTINGS,
            f"{name} has hbm_tokens {hello.hbm_tokens} (at least 1), buffer_tokens "
            f"{hello.buffer_tokens} (at least 0), snic_bytes_per_s {hello.snic_bytes_per_s} "
            "(above 0); correct its settings",
        )
    for rate in (hello.rates.read_bytes, hello.rates.prefill_tokens):
        if rate is not None and not 0 < rate.per_s < math.inf:
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} has a {rate.origin} rate of {rate.per_s} per s; it must be above 0 "
                "and finite; start it with another {profile}",
            )
    weight = hello.rates.computed_weight
    if weight is not None and not 1 <= weight <= MAX_COMPUTED_WEIGHT:
        raise EngineRefusedError(
            ControlRefusal.SETTINGS,
            f"{name} has a computed_weight of {weight}; it must be between 1 and "
            f"{MAX_COMPUTED_WEIGHT:g}; start it with another {{profile}}",
        )
    recompute = hello.rates.recompute_weight
    if recompute is not None and not recompute.is_valid:
        raise EngineRefusedError(
            ControlRefusal.SETTINGS,
            f"{name} has a {recompute}; its numbers must be at least 0 and finite; start it with "
            "another {profile}",
        )
    for limit, value in hello.limits.items():
        if isinstance(value, int) and value < 1:
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} has the limit {limit} {value}; it must be at least 1; correct its "
                "settings",
            )


def _check_role(name: str, hello: Register, neighbours: Iterable[EngineInfo]) -> None:
    for other in neighbours:
        if other.engine_id != hello.address.engine_id and other.role is not hello.address.role:
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} is a {hello.address.role.value} engine, group {hello.group!r} holds "
                f"the {other.role.value} engine {other.engine_id!r}; put it into a group of its "
                "own role",
            )


def _differences(theirs: StoreNamespace, ours: StoreNamespace) -> str:
    """Return the fields that differ, a geometry with hundreds of layers in a few words."""
    found = list(_unequal("", theirs, ours))
    more = f" and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
    return ", ".join(found[:MOST_DIFFERENCES]) + more


def _unequal(name: str, theirs: object, ours: object) -> Iterator[str]:
    """Yield the fields of two values that differ; of two sequences their first different item."""
    if theirs == ours:
        return
    if isinstance(theirs, msgspec.Struct) and type(theirs) is type(ours):
        for field in theirs.__struct_fields__:
            own = f"{name}.{field}" if name else field
            yield from _unequal(own, getattr(theirs, field), getattr(ours, field))
        return
    if isinstance(theirs, tuple) and isinstance(ours, tuple) and theirs and ours:
        if len(theirs) != len(ours):
            theirs, ours = f"{len(theirs)} items", f"{len(ours)}"
        else:
            pairs = zip(theirs, ours, strict=True)
            index = next(i for i, (one, other) in enumerate(pairs) if one != other)
            yield from _unequal(f"{name}[{index}]", theirs[index], ours[index])
            return
    shown = [in_one_line(str(value), 80) if value != "" else "empty" for value in (theirs, ours)]
    yield f"{name} = {shown[0]} where this router has {shown[1]}"


#: Differences of a refused engine that are named.
MOST_DIFFERENCES = 4
#: Engines with a session, or waiting for one, at a time.
MOST_ENGINES = 4096
#: Other engines that are remembered; no process of a removed engine counts as dead.
MOST_FORMER_ENGINES = 1024


class Admission(msgspec.Struct, frozen=True):
    """A registration that is accepted, as an event; ``former`` is the engine's info before."""

    engine: EngineState
    event: Event
    former: EngineInfo


def _is_late(engine: EngineState, hello: Register) -> bool:
    """Whether the engine has registered again since this registration was sent."""
    if is_earlier_data_plane(hello.address.epoch, engine.info.epoch):
        return True
    resent = hello.address.epoch == engine.info.epoch
    return resent and hello.registration < engine.registration


def _check_not_replaced(engine: EngineState, hello: Register) -> None:
    """Raise ``EngineRefusedError`` if another process of the same name is present.

    Two such processes would otherwise replace each other again and again; but once the later one is
    lost, the earlier one may register.
    """
    epoch = hello.address.epoch
    if engine.had_process(epoch) and engine.present:
        raise EngineRefusedError(
            ControlRefusal.REPLACED,
            f"engine {engine.info.engine_id!r} in epoch {epoch} has been replaced by epoch "
            f"{engine.info.epoch}, one process at a time may use an engine_id; stop one of the "
            "two or give it an engine_id of its own",
        )


class _Index(Generic[K]):
    """Engines by a key that several of them share."""

    def __init__(self) -> None:
        self._found: dict[K, dict[str, EngineState]] = {}
        self._key_of: dict[str, K] = {}

    def put(self, engine: EngineState, key: K | None) -> None:
        """Enter an engine under a key in place of its former one; None removes it."""
        engine_id = engine.info.engine_id
        former = self._key_of.get(engine_id)
        if former is not None and former != key:
            del self._key_of[engine_id]
            others = self._found[former]
            del others[engine_id]
            if not others:
                del self._found[former]
        if key is not None:
            self._key_of[engine_id] = key
            self._found.setdefault(key, {})[engine_id] = engine

    def of(self, key: K) -> Collection[EngineState]:
        """Return the engines with a key."""
        return self._found.get(key, {}).values()


class Registry:
    """All engines known; the first one fixes namespace, mode and adapters' weights.

    What a message of one engine needs (its session, its group, the live engines of its machine) is
    found by an index, without a look at the other engines.

    ``by_node``: the engines of a node fetch together (``node_group``), else those of a role.
    ``exclusive_ids``: an orchestrator ends a process before it starts another one of the same
    ``engine_id``, so that a registration from another machine proves the former process's death.
    ``handover``: where DEs receive KV, which not all engines support.

    *Weights.*  All engines with a session have the same version of the weights, which is part of
    the namespace.  An engine whose weights change leaves; while no other engine is present, the
    next one that registers decides the version of the cluster, unless ``require_weights`` has.
    ``outdated`` are the registrations that were refused for their version, by engine.
    """

    def __init__(
        self,
        mode: Mode | None = None,
        adapters: ServedAdapters | None = None,
        *,
        exclusive_ids: bool = False,
        by_node: bool = False,
        handover: Handover = Handover.BUFFER,
    ) -> None:
        self._handover = handover
        self._exclusive_ids = exclusive_ids
        self._by_node = by_node
        self.mode = mode
        self.adapters = adapters or ServedAdapters({})
        self.namespace: StoreNamespace | None = None
        self.outdated: dict[str, Register] = {}
        self._weights_required = False
        self._engines: dict[str, EngineState] = {}
        self._in_session: dict[str, EngineState] = {}
        #: By the start of a data-parallel group; the live ones by group and by machine.
        self._starts: _Index[tuple[str, str]] = _Index()
        self._groups: _Index[str] = _Index()
        self._hosts: _Index[str] = _Index()
        self._live = LiveEngines()
        self._present: set[str] = set()
        #: Engines that may have former processes which are not proven dead.
        self._restarted: dict[str, EngineState] = {}
        self._arrivals = itertools.count()

    def admit(self, hello: Register) -> Admission | None:
        """Take a registration; None if it is older than the last one.

        Raises ``EngineRefusedError`` if the engine may not join.
        """
        if self._by_node:
            hello = msgspec.structs.replace(hello, group=node_group(hello))
        engine_id = hello.address.engine_id
        engine = self._engines.get(engine_id)
        if engine is not None and _is_late(engine, hello):
            return None
        ranks = self._starts.of(hello.dp.start) if hello.dp is not None else ()
        neighbours = [engine.info for engine in self._groups.of(hello.group)]
        namespace = self._namespace_with(hello)
        try:
            check_registration(hello, namespace, self.mode, self.adapters, ranks, neighbours)
            _check_handover(self._handover, hello)
        except EngineRefusedError as error:
            if error.reason == ControlRefusal.WEIGHTS:
                self._note_outdated(hello)
            raise
        if engine is None:
            self._make_room(engine_id)
        else:
            _check_not_replaced(engine, hello)
        # Nothing has changed so far: a late or refused registration must not decide the weights.
        self.namespace, self.mode = namespace or hello.namespace, Mode(hello.mode)
        self.outdated.pop(engine_id, None)
        self.adapters.learn(hello.adapters)
        if engine is not None:
            return self._known(engine, hello)
        info = _info(hello, next(self._arrivals))
        engine = self._engines[engine_id] = EngineState(info, hello.address, self._changed)
        engine.registration = hello.registration
        self._changed(engine)
        return Admission(engine, Event.REGISTERS, engine.info)

    @property
    def weights(self) -> WeightsVersion | msgspec.UnsetType:
        """The version of the weights of all engines; unset for those that they have loaded."""
        return msgspec.UNSET if self.namespace is None else self.namespace.weights

    def require_weights(self, weights: WeightsVersion | msgspec.UnsetType) -> list[EngineState]:
        """Admit only engines with this version from now on; return those to take out.

        Raises ``EngineLostError`` before an engine has registered.
        """
        if self.namespace is None:
            raise EngineLostError("no engine has registered yet; start the engines")
        stays = self.namespace.weights == weights
        self.namespace = self.namespace.with_weights(weights)
        self._weights_required = True
        return [] if stays else [e for e in self._engines.values() if e.present]

    def allow_any_weights(self) -> None:
        """Let the next engine that registers without others decide the version again."""
        self._weights_required = False

    def _namespace_with(self, hello: Register) -> StoreNamespace | None:
        """Return the cluster's namespace once this engine has joined.

        Its weights are those of the engine if no other one is present.
        """
        if self.namespace is None or self._weights_required:
            return self.namespace
        others = self._present - {hello.address.engine_id}
        same = hello.namespace.with_weights(self.namespace.weights) == self.namespace
        return hello.namespace if same and not others else self.namespace

    def _note_outdated(self, hello: Register) -> None:
        self.outdated.pop(hello.address.engine_id, None)
        self.outdated[hello.address.engine_id] = hello
        while len(self.outdated) > MOST_FORMER_ENGINES:
            del self.outdated[next(iter(self.outdated))]

    def _make_room(self, engine_id: str) -> None:
        """Anyone can invent names: engines that have been gone the longest are removed."""
        here = len(self._present)
        if here >= MOST_ENGINES:
            raise EngineRefusedError(
                ControlRefusal.FLOOD,
                f"engine {engine_id!r} would be one more than {MOST_ENGINES} engines; stop some, "
                "or start another router for them",
            )
        if len(self._engines) - here <= MOST_FORMER_ENGINES:
            return
        gone = [engine for engine in self._engines.values() if not engine.present]
        gone.sort(key=lambda engine: engine.heard_s)
        for engine in gone[: len(gone) - MOST_FORMER_ENGINES]:
            name = engine.info.engine_id
            del self._engines[name]
            self._starts.put(engine, None)
            self._in_session.pop(engine.last_session, None)
            self._restarted.pop(name, None)

    def _known(self, engine: EngineState, hello: Register) -> Admission:
        former, info = engine.info, _info(hello, engine.info.order)
        if former.epoch != info.epoch:
            engine.restart(info, exclusive=self._exclusive_ids)
            event = Event.REPLACED if former.epoch in engine.unproven else Event.RESTARTED
        elif hello.registration > engine.registration:
            engine.info = info
            event = Event.REREGISTERS
        else:
            event = Event.REGISTER_RESENT
        engine.registration, engine.address = hello.registration, hello.address
        self._changed(engine)
        return Admission(engine, event, former)

    def _changed(self, engine: EngineState) -> None:
        """Update the indexes: an engine has another info, or its session another state."""
        info, alive = engine.info, engine.alive
        self._starts.put(engine, info.dp.start if info.dp is not None else None)
        self._groups.put(engine, info.group if alive else None)
        self._hosts.put(engine, (info.process.host or None) if alive else None)
        if engine.present:
            self._present.add(info.engine_id)
        else:
            self._present.discard(info.engine_id)
        if engine.unproven:
            self._restarted[info.engine_id] = engine
        if alive:
            self._live.put(info)
        else:
            self._live.remove(info.engine_id)

    def open(self, engine: EngineState, session: str, now_s: float) -> None:
        """Begin a session of an engine."""
        self._in_session.pop(engine.last_session, None)
        engine.open(session, engine.identity, now_s)
        self._in_session[session] = engine

    def get(self, engine_id: str) -> EngineState | None:
        """Return an engine by its id, dead or alive."""
        return self._engines.get(engine_id)

    def live(self, engine_id: str) -> EngineInfo | None:
        """Return a live engine by its id."""
        return self._live.get(engine_id)

    def by_identity(self, identity: bytes) -> EngineState | None:
        """Return the engine that uses a connection; for rare errors, as it looks at all engines."""
        return next((e for e in self._engines.values() if e.identity == identity), None)

    def by_session(self, session: str) -> EngineState | None:
        """Return the engine that has this as its last session."""
        found = self._in_session.get(session)
        return found if found is not None and found.talk.session == session else None

    def is_dead(self, writer: Writer) -> bool:
        """Whether a process is known to be dead.

        What is unknown does not count as dead: the registration of another process with its
        ``engine_id`` is a proof only where ids are exclusive and the two are on two machines.
        """
        engine = self._engines.get(writer.engine_id)
        if engine is None:
            return False
        if writer.epoch == engine.info.epoch:
            return engine.machine.state is RouterSideState.DEAD
        if is_earlier_data_plane(writer.epoch, engine.info.epoch):
            return True
        if writer.epoch in engine.former_epochs:
            return writer.epoch not in engine.unproven
        return self._exclusive_ids and _elsewhere(writer, engine.info.writer)

    def unproven(self) -> list[Writer]:
        """Return former processes that are not proven dead."""
        self._restarted = {name: e for name, e in self._restarted.items() if e.unproven}
        return [w for engine in self._restarted.values() for w in engine.unproven.values()]

    def all(self) -> list[EngineState]:
        """Return all engines ever registered, by arrival."""
        return list(self._engines.values())

    def alive(self, role: Role | None = None) -> tuple[EngineInfo, ...]:
        """Return the live engines (of one role), by arrival."""
        return self._live.all(role)

    def neighbour(self, host: str) -> EngineInfo | None:
        """Return the live engine on a machine that arrived first, None if there is none."""
        infos = (engine.info for engine in self._hosts.of(host))
        return min(infos, key=lambda info: info.order, default=None)

    def silent(self, now_s: float, timeout_s: float) -> list[EngineState]:
        """Return engines that live, or wait for their group, and are silent for ``timeout_s``."""
        return [e for e in self._engines.values() if e.present and now_s - e.heard_s > timeout_s]

    def staying(self, now_s: float, timeout_s: float) -> list[EngineState]:
        """Return engines that do not drain although their drained group left ``timeout_s`` ago."""
        return [
            e
            for e in self._engines.values()
            if e.machine.state is RouterSideState.LEAVING
            and now_s - e.group_left_s > timeout_s
            and (e.report is None or e.report.draining is None)
        ]

    def group(self, info: EngineInfo) -> list[EngineState]:
        """Return the engines of its start of a group, by rank; itself if it is in none."""
        if info.dp is None:
            return [engine for engine in (self._engines.get(info.engine_id),) if engine is not None]
        found = [(e.info.dp.rank, e) for e in self._starts.of(info.dp.start) if e.info.dp]
        return [engine for _, engine in sorted(found, key=lambda each: each[0])]

    def waits_for(self, info: EngineInfo) -> str | None:
        """Return the ranks that an engine's group lacks, None for a complete one or none."""
        if (dp := info.dp) is None:
            return None
        registered = {
            e.info.dp.rank
            for e in self._starts.of(dp.start)
            if e.info.dp and e.machine.state is RouterSideState.REGISTERING
        }
        missing = [str(rank) for rank in range(dp.size) if rank not in registered]
        if not missing:
            return None
        return (
            f"the data-parallel group {dp.group!r} waits for {len(missing)} of its {dp.size} "
            f"ranks: {', '.join(missing[:_MOST_NAMED])}; start them, and all of them again if one "
            "has ended, since ranks start together"
        )

    def waiting(self, engine: EngineState) -> str | None:
        """Return the ranks that a registered engine waits for, None if it is live or lost."""
        registered = engine.machine.state is RouterSideState.REGISTERING
        return self.waits_for(engine.info) if registered else None

    def waits(self) -> list[str]:
        """Return what registered engines wait for that are not live, once for each group."""
        return list(dict.fromkeys(why for e in self.all() if (why := self.waiting(e)) is not None))

    def limit(self, name: str) -> int | None:
        """Return the smallest value of an integer limit over live engines, None if unstated."""
        return self._live.limit(name)


def _info(hello: Register, order: int) -> EngineInfo:
    return EngineInfo(
        engine_id=hello.address.engine_id,
        epoch=hello.address.epoch,
        role=hello.address.role,
        node=hello.node,
        group=hello.group,
        api_url=hello.api_url,
        process=hello.address.process,
        order=order,
        hbm_tokens=hello.hbm_tokens,
        buffer_tokens=hello.buffer_tokens,
        snic_bytes_per_s=hello.snic_bytes_per_s,
        limits=hello.limits,
        rates=hello.rates,
        unsettled=hello.unsettled,
        quarantined=hello.quarantined,
        writers=hello.writers,
        dp=hello.dp,
        node_dram=hello.node_dram,
    )
