"""Which engines there are: who may join, who lives, what each last reported.

Pure bookkeeping with time as an argument; ``ControlServer`` feeds it from the network.  An engine
is known by ``engine_id``; its *epoch* names one process start, so a restarted engine is never
mistaken for its former self, and its *session* one conversation with this router.
"""

import itertools

import msgspec

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role, Writer
from dualpath.core.control import Register
from dualpath.core.errors import EngineRefusedError
from dualpath.core.modes import Mode
from dualpath.core.sessions import Event, RouterSideState
from dualpath.router.control.engine_state import EngineState, same_machine
from dualpath.router.control.greeting_checks import check_greeting
from dualpath.router.control.groups import started_with, waits_for
from dualpath.router.control.served_adapters import ServedAdapters
from dualpath.router.engines import EngineInfo
from dualpath.router.refusals import ControlRefusal

#: Engines with a session, or waiting for one, at a time.
MOST_ENGINES = 4096
#: So many others are remembered; of one that is forgotten nothing is taken for dead.
MOST_FORMER_ENGINES = 1024


class Admission(msgspec.Struct, frozen=True):
    """What a ``Register`` that may be answered means; ``former`` is what was known before it."""

    engine: EngineState
    event: Event
    former: EngineInfo


class Registry:
    """All engines known; the first one fixes namespace, mode and adapters' weights."""

    def __init__(self, mode: Mode | None = None, adapters: ServedAdapters | None = None) -> None:
        self.mode = mode
        self.adapters = adapters or ServedAdapters({})
        self.namespace: StoreNamespace | None = None
        self._engines: dict[str, EngineState] = {}
        #: Where ``by_session`` found them last.
        self._in_session: dict[str, EngineState] = {}
        #: What ``alive`` has found since the last change.
        self._alive: dict[Role | None, tuple[EngineInfo, ...]] = {}
        self._arrivals = itertools.count()

    def admit(self, hello: Register) -> Admission | None:
        """Take down what a registration says; None if it is older than the last one.

        Raises ``EngineRefusedError`` if the engine may not join.
        """
        self.changed()
        check_greeting(hello, self.namespace, self.mode, self.adapters, self._engines.values())
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
        """Names cost who makes them up nothing: those that were gone first are forgotten."""
        here = sum(engine.here for engine in self._engines.values())
        if here >= MOST_ENGINES:
            raise EngineRefusedError(
                ControlRefusal.FLOOD,
                f"engine {engine_id!r} would be one more than {MOST_ENGINES} engines; stop some, "
                "or start another router for them",
            )
        gone = [engine for engine in self._engines.values() if not engine.here]
        gone.sort(key=lambda engine: engine.heard_s)
        for engine in gone[: max(len(gone) - MOST_FORMER_ENGINES, 0)]:
            del self._engines[engine.info.engine_id]

    def _known(self, engine: EngineState, hello: Register) -> Admission | None:
        former, info = engine.info, _info(hello, engine.info.order)
        # Two processes of one name would else take the place from each other again and again; but
        # once the later one is lost, the earlier one is what there is.
        if info.epoch in engine.former_epochs and engine.here:
            raise EngineRefusedError(
                ControlRefusal.REPLACED,
                f"engine {info.engine_id!r} in epoch {info.epoch} has been replaced by epoch "
                f"{former.epoch}, one process at a time may use an engine_id; stop one of the "
                "two or give it an engine_id of its own",
            )
        if former.epoch != info.epoch:
            engine.restart(info)
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
        """Return the engine that speaks on a connection."""
        return next((e for e in self._engines.values() if e.identity == identity), None)

    def by_session(self, session: str) -> EngineState | None:
        """Return the engine whose last session this is."""
        if not session:
            return None
        found = self._in_session.get(session)
        if found is None or found.talk.session != session:
            each = self._engines.values()
            found = next((e for e in each if e.talk.session == session), None)
            self._in_session = {e.talk.session: e for e in each}
        return found

    def is_dead(self, writer: Writer) -> bool:
        """Whether a process is known to be gone.

        One process at a time has an ``engine_id``, so another one's registration suggests that the
        former has ended.  But two may be started by mistake: where the machine can be asked, it is.
        """
        engine = self._engines.get(writer.engine_id)
        if engine is None:
            return False
        if writer.epoch == engine.info.epoch:
            return engine.machine.state is RouterSideState.DEAD
        if writer.epoch in engine.former_epochs:
            return writer.epoch not in engine.unproven
        return not same_machine(writer, engine.info.writer)

    def unproven(self) -> list[Writer]:
        """Return former processes whose machine can be asked whether they have ended."""
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
        """Return engines that live, or wait for their group, not heard of for ``timeout_s``."""
        return [e for e in self._engines.values() if e.here and now_s - e.heard_s > timeout_s]

    def staying(self, now_s: float, timeout_s: float) -> list[EngineState]:
        """Return engines whose drained group left ``timeout_s`` ago, and that do not drain."""
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
        """Return for whom an engine's group waits, None if it is complete or there is none."""
        return waits_for(info.dp, self._engines.values()) if info.dp is not None else None

    def waiting(self, engine: EngineState) -> str | None:
        """Return for whom an engine that has greeted waits, None if it takes part or is lost."""
        greeted = engine.machine.state is RouterSideState.REGISTERING
        return self.waits_for(engine.info) if greeted else None

    def waits(self) -> list[str]:
        """Say what those wait for that are not live, once for each group."""
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
