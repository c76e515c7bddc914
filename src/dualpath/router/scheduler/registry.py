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
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import GroupRank, Role, Writer
from dualpath.core.control import PROTOCOL_VERSION, EngineMessage, Register, Report, RouterMessage
from dualpath.core.errors import EngineRefusedError
from dualpath.core.modes import Mode
from dualpath.core.names import in_one_line
from dualpath.core.rates import MAX_COMPUTED_WEIGHT
from dualpath.core.sessions import ROUTER_TABLE, Channel, Event, RouterSideState, StateMachine
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusal
from dualpath.router.served_adapters import ServedAdapters

#: Former processes of an engine that are remembered; an older one that still runs would count as a
#: new one, and its successor as dead.
_EPOCHS_KEPT = 1024


class Pause(StrEnum):
    """Why a live engine gets no new requests."""

    DRAINING = "draining"
    ASKED = "asked"
    SUSPECT = "suspect"


class EngineState:
    """An engine that has registered: its info, its session and its last report.

    ``left`` if it deregistered, itself or with its drained group; ``pauses`` are the reasons why it
    gets no new requests; ``drained`` if it was notified that its group has no requests left.
    ``step_s`` is when a report first had the present number of steps of its core.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.identity = b""
        self.talk: Channel[RouterMessage, EngineMessage] = Channel("")
        self.machine = StateMachine(ROUTER_TABLE, RouterSideState.UNKNOWN)
        self.registration = 0
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
        self.talk = Channel(session)
        self.identity, self.heard_s, self.step_s = identity, now_s, now_s
        self.left = self.drained = False
        self.pauses &= {Pause.ASKED}

    def reports(self, report: Report, now_s: float) -> None:
        """Take a report of this process."""
        if self.report is None or report.steps != self.report.steps:
            self.step_s = now_s
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

    def confirms_dead(self, writer: Writer) -> bool:
        """A former process is confirmed dead; return whether this was not known before."""
        return self.unproven.pop(writer.epoch, None) is not None

    def restart(self, info: EngineInfo, *, exclusive: bool) -> None:
        """Take the info of another process; the counters of the former one stay in the totals.

        ``exclusive``: see ``Registry``.  A process that had been replaced before proves nothing.
        """
        dead = self.machine.state is RouterSideState.DEAD
        returns = info.epoch in self.former_epochs
        proves = exclusive and not returns and _elsewhere(self.info.writer, info.writer)
        if not dead and not proves:
            self.unproven[self.info.epoch] = self.info.writer
        if returns:
            self.former_epochs.remove(info.epoch)
            self.unproven.pop(info.epoch, None)
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
#: Ranks are searched one by one: an unchecked number must not take the router's time.
MAX_RANKS = 4096


def started_with(dp: GroupRank, engines: "Iterable[EngineState]") -> "list[EngineState]":
    """Return the engines of one start of a group, by rank."""
    found = [(e.info.dp.rank, e) for e in engines if e.info.dp and e.info.dp.start == dp.start]
    return [engine for _, engine in sorted(found, key=lambda each: each[0])]


def waits_for(dp: GroupRank, engines: "Iterable[EngineState]") -> str | None:
    """Return which ranks of a start of a group have not registered, None if all have."""
    registered = {
        e.info.dp.rank
        for e in started_with(dp, engines)
        if e.info.dp and e.machine.state is RouterSideState.REGISTERING
    }
    missing = [str(rank) for rank in range(dp.size) if rank not in registered]
    if not missing:
        return None
    return (
        f"the data-parallel group {dp.group!r} waits for {len(missing)} of its {dp.size} ranks: "
        f"{', '.join(missing[:_MOST_NAMED])}; start them, and all of them again if one has ended, "
        "since ranks start together"
    )


def check_rank(name: str, hello: Register, engines: "Iterable[EngineState]") -> None:
    """Raise ``EngineRefusedError`` if no group can have this rank."""
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
    for engine in started_with(dp, engines):
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
    engines: "Collection[EngineState]",
) -> None:
    """Raise ``EngineRefusedError`` for an engine that may not join ``engines``.

    ``namespace`` and ``mode`` are those of the cluster, None before the first engine.
    """
    name = f"engine {hello.address.engine_id!r}"
    _check_settings(name, hello)
    _check_place(name, hello, engines)
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
        raise EngineRefusedError(
            ControlRefusal.NAMESPACE,
            f"{name} differs in {_differences(hello.namespace, namespace)}; start it with "
            "the model, dtype, layout, block size and --speculative-config of the others, or "
            "use another router",
        )
    if lacking := adapters.differences(hello.adapters):
        raise EngineRefusedError(ControlRefusal.ADAPTERS, f"{name} {'; it '.join(lacking)}")


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
    for limit, value in hello.limits.items():
        if isinstance(value, int) and value < 1:
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} has the limit {limit} {value}; it must be at least 1; correct its "
                "settings",
            )


def _check_place(name: str, hello: Register, engines: "Collection[EngineState]") -> None:
    check_rank(name, hello, engines)
    for other in (engine.info for engine in engines if engine.alive):
        engine_id, role = other.engine_id, other.role
        if engine_id == hello.address.engine_id:
            continue
        if other.group == hello.group and role is not hello.address.role:
            raise EngineRefusedError(
                ControlRefusal.SETTINGS,
                f"{name} is a {hello.address.role.value} engine, group {hello.group!r} holds "
                f"the {role.value} engine {engine_id!r}; put it into a group of its own role",
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


class Registry:
    """All engines known; the first one fixes namespace, mode and adapters' weights.

    ``exclusive_ids``: an orchestrator ends a process before it starts another one of the same
    ``engine_id``, so that a registration from another machine proves the former process's death.
    """

    def __init__(
        self,
        mode: Mode | None = None,
        adapters: ServedAdapters | None = None,
        *,
        exclusive_ids: bool = False,
    ) -> None:
        self._exclusive_ids = exclusive_ids
        self.mode = mode
        self.adapters = adapters or ServedAdapters({})
        self.namespace: StoreNamespace | None = None
        self._engines: dict[str, EngineState] = {}
        #: Where ``by_session`` found them last.
        self._in_session: dict[str, EngineState] = {}
        #: Results of ``alive`` since the last change.
        self._alive: dict[Role | None, tuple[EngineInfo, ...]] = {}
        self._arrivals = itertools.count()

    def admit(self, hello: Register) -> Admission | None:
        """Take a registration; None if it is older than the last one.

        Raises ``EngineRefusedError`` if the engine may not join.
        """
        self.changed()
        check_registration(hello, self.namespace, self.mode, self.adapters, self._engines.values())
        self.namespace = hello.namespace
        self.mode = Mode(hello.mode)
        self.adapters.learn(hello.adapters)
        engine_id = hello.address.engine_id
        engine = self._engines.get(engine_id)
        if engine is None:
            self._make_room(engine_id)
            engine = self._engines[engine_id] = EngineState(_info(hello, next(self._arrivals)))
            engine.registration = hello.registration
            return Admission(engine, Event.REGISTERS, engine.info)
        return self._known(engine, hello)

    def _make_room(self, engine_id: str) -> None:
        """Anyone can invent names: engines that have been gone the longest are removed."""
        here = sum(engine.present for engine in self._engines.values())
        if here >= MOST_ENGINES:
            raise EngineRefusedError(
                ControlRefusal.FLOOD,
                f"engine {engine_id!r} would be one more than {MOST_ENGINES} engines; stop some, "
                "or start another router for them",
            )
        gone = [engine for engine in self._engines.values() if not engine.present]
        gone.sort(key=lambda engine: engine.heard_s)
        for engine in gone[: max(len(gone) - MOST_FORMER_ENGINES, 0)]:
            del self._engines[engine.info.engine_id]

    def _known(self, engine: EngineState, hello: Register) -> Admission | None:
        former, info = engine.info, _info(hello, engine.info.order)
        # Two processes of one name would otherwise replace each other again and again; but once the
        # later one is lost, the earlier one may register.
        if info.epoch in engine.former_epochs and engine.present:
            raise EngineRefusedError(
                ControlRefusal.REPLACED,
                f"engine {info.engine_id!r} in epoch {info.epoch} has been replaced by epoch "
                f"{former.epoch}, one process at a time may use an engine_id; stop one of the "
                "two or give it an engine_id of its own",
            )
        if former.epoch != info.epoch:
            engine.restart(info, exclusive=self._exclusive_ids)
            event = Event.REPLACED if former.epoch in engine.unproven else Event.RESTARTED
        elif hello.registration > engine.registration:
            engine.info = info
            event = Event.REREGISTERS
        elif hello.registration == engine.registration:
            event = Event.REGISTER_RESENT
        else:
            return None
        engine.registration = hello.registration
        return Admission(engine, event, former)

    def changed(self) -> None:
        """An engine's session has another state."""
        self._alive.clear()

    def get(self, engine_id: str) -> EngineState | None:
        """Return an engine by its id, dead or alive."""
        return self._engines.get(engine_id)

    def by_identity(self, identity: bytes) -> EngineState | None:
        """Return the engine that uses a connection."""
        return next((e for e in self._engines.values() if e.identity == identity), None)

    def by_session(self, session: str) -> EngineState | None:
        """Return the engine that has this as its last session."""
        if not session:
            return None
        found = self._in_session.get(session)
        if found is None or found.talk.session != session:
            each = self._engines.values()
            found = next((e for e in each if e.talk.session == session), None)
            self._in_session = {e.talk.session: e for e in each}
        return found

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
        if writer.epoch in engine.former_epochs:
            return writer.epoch not in engine.unproven
        return self._exclusive_ids and _elsewhere(writer, engine.info.writer)

    def unproven(self) -> list[Writer]:
        """Return former processes that are not proven dead."""
        return [w for engine in self._engines.values() for w in engine.unproven.values()]

    def all(self) -> list[EngineState]:
        """Return all engines ever registered, by arrival."""
        return list(self._engines.values())

    def alive(self, role: Role | None = None) -> list[EngineInfo]:
        """Return the live engines (of one role), by arrival."""
        if (known := self._alive.get(role)) is None:
            infos = (e.info for e in self._engines.values() if e.alive)
            known = self._alive[role] = tuple(i for i in infos if role in (None, i.role))
        return list(known)

    def peers(self, info: EngineInfo) -> list[EngineInfo]:
        """Return the live engines of the other role, by arrival."""
        return [peer for peer in self.alive() if peer.role is not info.role]

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
        if info.dp is not None:
            return started_with(info.dp, self._engines.values())
        return [engine for engine in (self._engines.get(info.engine_id),) if engine is not None]

    def waits_for(self, info: EngineInfo) -> str | None:
        """Return the ranks that an engine's group lacks, None for a complete one or none."""
        return waits_for(info.dp, self._engines.values()) if info.dp is not None else None

    def waiting(self, engine: EngineState) -> str | None:
        """Return the ranks that a registered engine waits for, None if it is live or lost."""
        registered = engine.machine.state is RouterSideState.REGISTERING
        return self.waits_for(engine.info) if registered else None

    def waits(self) -> list[str]:
        """Return what registered engines wait for that are not live, once for each group."""
        return list(dict.fromkeys(why for e in self.all() if (why := self.waiting(e)) is not None))

    def limit(self, name: str) -> int | None:
        """Return the smallest value of an integer limit over live engines, None if unstated."""
        values = [e.info.limits.get(name) for e in self._engines.values() if e.alive]
        return min((v for v in values if isinstance(v, int)), default=None)


def _info(hello: Register, order: int) -> EngineInfo:
    return EngineInfo(
        engine_id=hello.address.engine_id,
        epoch=hello.address.epoch,
        role=hello.address.role,
        node=hello.node,
        group=hello.group,
        api_url=hello.api_url,
        address=hello.address,
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
