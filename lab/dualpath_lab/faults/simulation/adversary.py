"""The adversary: injects a few faults at times that the seed decides, and ends them."""

import enum
import functools
from collections.abc import Callable, Sequence

import msgspec

from dualpath.core.cluster import Role
from dualpath_lab.faults.simulation.clients import Clients
from dualpath_lab.faults.simulation.cluster import Cluster
from dualpath_lab.faults.simulation.connections import Connection
from dualpath_lab.faults.simulation.engine import SimEngine
from dualpath_lab.faults.simulation.http import Direction
from dualpath_lab.faults.simulation.leadership import LeaseFaults
from dualpath_lab.faults.simulation.ranks import SimFollower
from dualpath_lab.faults.simulation.router import SimFrontEnd
from dualpath_lab.faults.simulation.world import Process, World

#: Faults begin within this time.
FAULTS_WITHIN_S = 1.2
#: Probability that a fault begins at a call of ``World.maybe_fault``.
_FAULT_SHARE = 0.008
#: Delays of stalling transfers, shorter or longer than time-outs, and of hanging ones, longer than
#: all time-outs.
_STALL_S = (0.5, 8.0)
_HANG_S = (32.0, 50.0)
#: Longer than the deadline of requests.
_OUTLASTS_S = 170.0
#: Share of resets of control connections that lose frames in one direction only.
_ONE_WAY = 1 / 3
#: How long others are stopped while a DE restarts, less than an engine may be silent, and the delay
#: until the DE is started.
_UNNOTICED_S = (0.2, 0.5, 1.0, 1.5)
_RESTARTED_EARLY_S = 0.02
#: How often, and at most how many times, the adversary looks for a call to a PE.
_CALL_POLL_S = 0.001
_CALL_POLLS = 1000
#: When a third DE dies after it was found to hold slots: before its read, or while a PE loads.
_THIRD_ENDS_S = (0.0, 0.0005, 0.002, 0.01, 0.03)


#: Probability that the faults of a run are in a few components only.
_FOCUSED = 1 / 2
_FOCUSED_ON = 2


class Component(enum.Enum):
    """What a fault is in."""

    ENGINES = enum.auto()
    ROUTERS = enum.auto()
    NETWORK = enum.auto()
    STORAGE = enum.auto()
    TRANSFERS = enum.auto()
    LEASES = enum.auto()


class ClusterFeature(enum.Enum):
    """Features that only some clusters have."""

    RANKS = enum.auto()
    FRONT_ENDS = enum.auto()
    UNITS = enum.auto()
    LEASE = enum.auto()
    PROXIES = enum.auto()
    MOVES = enum.auto()
    THIRDS = enum.auto()


class FaultKind(msgspec.Struct, frozen=True):
    """One kind of fault; ``begin`` returns the function that ends it, if there is one.

    It is injected only in clusters with the feature that it ``needs``.
    """

    name: str
    component: Component
    begin: Callable[["Adversary"], Callable[[], None] | None]
    needs: ClusterFeature | None = None


class Adversary:
    """Injects ``faults`` faults of the given ``kinds``, and ends each after a while.

    In half of the runs with several faults these are in two components only: bugs that need two
    faults at once are rare among all pairs of kinds.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        clients: Clients,
        faults: int,
        kinds: Sequence[FaultKind],
    ) -> None:
        self.world = world
        self.cluster = cluster
        self.clients = clients
        #: Whether a transfer lasts longer than all time-outs: requests fail without other engines.
        self.transfer_hangs = False
        #: Whether a role has no engine for longer than all time-outs: requests fail then.
        self.role_lost = False
        kinds = self._focused(kinds, faults)
        self._waiting = [world.chance.choice(kinds) for _ in range(faults)] if kinds else []
        self._unfinished = len(self._waiting)
        self._alone = faults == 1
        world.maybe_fault = self._maybe_begin
        for _ in range(faults):
            world.after(world.chance.uniform(0.1, FAULTS_WITHIN_S), self._begin_next)

    @property
    def done(self) -> bool:
        """Whether every fault has ended."""
        return self._unfinished == 0

    def _focused(self, kinds: Sequence[FaultKind], faults: int) -> Sequence[FaultKind]:
        """Return the kinds of which the faults of this run are drawn."""
        components = [c for c in Component if any(kind.component is c for kind in kinds)]
        chance = self.world.chance
        if faults < 2 or len(components) <= _FOCUSED_ON or chance.random() >= _FOCUSED:
            return kinds
        chosen = chance.sample(components, _FOCUSED_ON)
        return [kind for kind in kinds if kind.component in chosen]

    def _maybe_begin(self) -> None:
        """Begin a fault with some probability, as something begins, arrives or is in flight."""
        if self._waiting and self.world.chance.random() < _FAULT_SHARE:
            self.world.after(self.world.chance.choice((0.0, 1e-4, 1e-3)), self._begin_next)

    def _begin_next(self) -> None:
        if self._waiting:
            self._begin(self._waiting.pop())

    def _begin(self, kind: FaultKind) -> None:
        self.world.note("adversary", kind.name)
        end = kind.begin(self)
        self.world.after(
            self.world.chance.choice((0.02, 0.2, 1.0, 3.0)), lambda: self._end(kind, end)
        )

    def _end(self, kind: FaultKind, end: Callable[[], None] | None) -> None:
        if end is not None:
            self.world.note("adversary", f"{kind.name}: over")
            end()
        self._unfinished -= 1

    # ------------------------------------------------------------------ processes

    def kill_engine(self) -> None:
        """SIGKILL; the supervisor restarts it."""
        engine_id = self._some_engine()
        if self.cluster.engines[engine_id].process.alive:
            self.cluster.restart_engine(engine_id, self._pause_s())

    def lose_engine(self) -> None:
        """SIGKILL without a restart."""
        self.cluster.lose_engine(self._some_engine())

    def lose_role(self) -> None:
        """SIGKILL of all engines of a role; the supervisor restarts them after all deadlines."""
        if self.role_lost or self.cluster.settings.role_switches:
            return
        self.role_lost = True
        self._unfinished += 1
        role = self.world.chance.choice(tuple(Role))
        for engine_id, engine in sorted(self.cluster.engines.items()):
            if engine.settings.engine.role is role:
                self.cluster.restart_engine(engine_id, _OUTLASTS_S)

        def over() -> None:
            self.world.note("adversary", f"{role.value} engines are back")
            self._unfinished -= 1

        self.world.after(_OUTLASTS_S, over)

    def terminate_engine(self) -> None:
        """SIGTERM; the supervisor restarts it once it has ended."""
        engine = self.cluster.engines[self._some_engine()]
        if engine.serves:
            engine.terminate()
            self.cluster.replace_ended_engine(engine.engine_id, self._pause_s())

    def stop_engine(self) -> Callable[[], None]:
        """SIGSTOP, later SIGCONT."""
        return self.stop(self.cluster.engines[self._some_engine()].process)

    def restart_engine_unnoticed(self, polls: int = _CALL_POLLS) -> None:
        """SIGKILL and an early restart of a DE while a front end calls a PE; both are stopped.

        When the PE is resumed, it may serve a request that was placed on the DE's former process,
        as the front end has not ended the request yet.
        """
        engines = [engine for _, engine in sorted(self.cluster.engines.items())]
        decoding = [e for e in engines if e.settings.engine.role is Role.DECODE and e.serves]
        callers = {one.loop: one.process for one in self.cluster.front_ends.alive}
        called = [
            (engine.process, callers[call.caller])
            for call in self.cluster.shared.http.calls
            for engine in engines
            if engine.settings.engine.role is Role.PREFILL
            and call.server is engine
            and call.caller in callers
            and call._abort is None
        ]
        if not (decoding and called):
            if polls:
                again = functools.partial(self.restart_engine_unnoticed, polls - 1)
                self.world.after(_CALL_POLL_S, again)
            return
        for process in self.world.pick(called):
            self.world.after(self.world.pick(_UNNOTICED_S), self.stop(process))
        self.cluster.restart_engine(self.world.pick(decoding).engine_id, _RESTARTED_EARLY_S)

    def kill_rank(self) -> None:
        """SIGKILL of a follower rank: its engine ends, and the supervisor restarts it."""
        if (follower := self._some_follower()) is not None:
            self.cluster.kill_follower(follower, self._pause_s())

    def stop_rank(self) -> Callable[[], None] | None:
        """SIGSTOP of a follower rank, later SIGCONT."""
        follower = self._some_follower()
        return None if follower is None else self.stop(follower.process)

    def kill_router(self) -> None:
        """SIGKILL; the supervisor restarts it."""
        self._kill_router_of(self._some_unit())

    def kill_unit(self) -> None:
        """SIGKILL of a scheduler and all of its engines at once; the supervisor restarts them."""
        unit = self._some_unit()
        self._kill_router_of(unit)
        for engine_id in self.cluster.engines_of(unit):
            if self.cluster.engines[engine_id].process.alive:
                self.cluster.restart_engine(engine_id, self._pause_s())

    def _kill_router_of(self, unit: int) -> None:
        if self.cluster.router_of(unit).process.alive:
            self.cluster.restart_router(self._pause_s(), unit)

    def stop_router(self) -> Callable[[], None]:
        """SIGSTOP, later SIGCONT."""
        return self.stop(self.cluster.router_of(self._some_unit()).process)

    def kill_front_end(self) -> None:
        """SIGKILL; the supervisor restarts it."""
        if (front_end := self._some_front_end()) is not None:
            front_end.kill()

    def kill_proxy(self) -> None:
        """SIGKILL of a proxy of others, perhaps between two legs; the supervisor restarts it."""
        if proxies := self.cluster.proxies.alive:
            self.world.chance.choice(proxies).kill()

    def end_between_legs(self, polls: int = _CALL_POLLS) -> None:
        """SIGKILL of the router or an engine while the KV of a first leg waits for the second."""
        router = self.cluster.router
        if not router.serves or not router.service.scheduler.handovers.offered:
            if polls:
                again = functools.partial(self.end_between_legs, polls - 1)
                self.world.after(_CALL_POLL_S, again)
            return
        decoding = {
            offered.decode_engine.engine_id
            for offered in router.service.scheduler.handovers.offered
        }
        victims = sorted(decoding & self.cluster.engines.keys())
        prefilling = [
            name
            for name, engine in sorted(self.cluster.engines.items())
            if engine.settings.engine.role is Role.PREFILL
        ]
        victim = self.world.chance.choice([*victims, *victims, *prefilling, None])
        if victim is None:
            self.kill_router()
        elif self.cluster.engines[victim].process.alive:
            self.cluster.restart_engine(victim, self._pause_s())

    def strike_move(self, polls: int = _CALL_POLLS) -> None:
        """SIGKILL, or SIGSTOP for a while, of a decode engine from or to which KV is moved."""
        router = self.cluster.router
        moves = router.service.scheduler.handovers.moves if router.serves else []
        if not moves:
            if polls:
                again = functools.partial(self.strike_move, polls - 1)
                self.world.after(_CALL_POLL_S, again)
            return
        victim = self.world.chance.choice(self.world.chance.choice(moves))
        engine = self.cluster.engines.get(victim)
        if engine is None or not engine.process.alive:
            return
        if self.world.chance.random() < 1 / 2:
            self.cluster.restart_engine(victim, self._pause_s())
        else:
            self.world.after(self._pause_s(), self.stop(engine.process))

    def end_third(self, polls: int = _CALL_POLLS) -> None:
        """SIGKILL of a third DE that holds slots: before its read, in it, or while a PE loads."""
        router = self.cluster.router
        attempts = router.service.scheduler.exchange.all() if router.serves else ()
        holding = {name for one in attempts for name in one.thirds}
        victims = sorted(holding & self.cluster.engines.keys())
        if not victims:
            if polls:
                again = functools.partial(self.end_third, polls - 1)
                self.world.after(_CALL_POLL_S, again)
            return
        victim = self.world.chance.choice(victims)
        delay_s = self.world.pick(_THIRD_ENDS_S)

        def end() -> None:
            if self.cluster.engines[victim].process.alive:
                self.cluster.restart_engine(victim, self._pause_s())

        self.world.after(delay_s, end)

    def kill_both(self) -> None:
        """SIGKILL of the router and a front end at once."""
        self.kill_router()
        self.kill_front_end()

    def terminate_front_end(self) -> None:
        """SIGTERM; the supervisor restarts it once it has ended."""
        if (front_end := self._some_front_end()) is not None:
            front_end.terminate()

    def stop_front_end(self) -> Callable[[], None] | None:
        """SIGSTOP, later SIGCONT."""
        front_end = self._some_front_end()
        return None if front_end is None else self.stop(front_end.process)

    def stop(self, process: Process) -> Callable[[], None]:
        """Stop a process; return the function that resumes it."""
        self.world.note(process.name, "is stopped")
        process.stop()

        def resume() -> None:
            self.world.note(process.name, "is resumed")
            process.resume()

        return resume

    # ------------------------------------------------------------------ connections

    def reset_control(self) -> None:
        """Reset a control connection, in some runs in one direction."""
        if self.world.chance.random() < _ONE_WAY:
            self._reset_control_one_way()
            return
        if (connection := self._some_connection()) is not None:
            self.world.note(connection.process.name, "its control connection is reset")
            connection.reset()

    def _reset_control_one_way(self) -> None:
        """Lose what is sent in one direction of a control connection, until its ends notice it."""
        if (connection := self._some_connection()) is not None:
            to_router = self.world.chance.random() < 1 / 2
            connection.reset_one_way(self._pause_s(), to_router=to_router)
            direction = "to" if to_router else "from"
            self.world.note(connection.process.name, f"its frames {direction} the router are lost")

    def stall_control(self) -> None:
        """Delay the frames of a control connection for a while, in both directions or in one."""
        if (connection := self._some_connection()) is not None:
            both = (connection.to_router, connection.from_router)
            wires = self.world.chance.choice((both, both[:1], both[1:]))
            until_s = self.world.now_s + self._pause_s()
            for wire in wires:
                wire.stalled_until_s = until_s
            directions = "" if wires == both else " in one direction"
            self.world.note(connection.process.name, f"its control connection stalls{directions}")

    def duplicate_control(self) -> Callable[[], None]:
        """Make some frames arrive twice."""
        return self.set(self.cluster.shared.wire_faults, "duplicated", 0.3)

    def reset_call(self) -> None:
        """Reset a call of the router to an engine."""
        if calls := list(self.cluster.shared.http.calls):
            self.world.chance.choice(calls).break_off("connection reset by the adversary")

    def lose_call(self) -> None:
        """Drop all further packets of a call to an engine in one direction."""
        if calls := list(self.cluster.shared.http.calls):
            call = self.world.chance.choice(calls)
            direction = self.world.chance.choice(tuple(Direction))
            call.cut.add(direction)
            self.cluster.shared.silenced = True
            self.world.note("network", f"drops a call to an engine, {direction.name}")

    def silence_server(self) -> Callable[[], None] | None:
        """Drop the packets of an engine's HTTP server in one direction or both."""
        engine = self.cluster.engines[self._some_engine()]
        directions = self.world.chance.choice((tuple(Direction), *((d,) for d in Direction)))
        self.cluster.shared.silenced = True
        names = ", ".join(direction.name for direction in directions)
        self.world.note(engine.name, f"packets of its HTTP server are dropped: {names}")
        return self._perhaps_long(engine, self.cluster.shared.http.drop(engine, directions))

    def hang_core(self) -> Callable[[], None] | None:
        """Let the thread that computes hang; control link and HTTP server go on."""
        engine = self.cluster.engines[self._some_engine()]
        self.world.note(engine.name, "its core hangs")
        return self._perhaps_long(engine, engine.threads.hang_core())

    def _perhaps_long(
        self, engine: SimEngine, end: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Let an only fault that others of the role can make up for outlast every deadline."""
        if not (self._alone and self.cluster.has_spare(engine.engine_id)):
            return end
        self._unfinished += 1

        def over() -> None:
            self.world.note("adversary", f"the long fault of {engine.name} is over")
            end()
            self._unfinished -= 1

        self.world.after(_OUTLASTS_S, over)
        return None

    def client_leaves(self) -> None:
        """Close a client's connection."""
        if in_flight := self.clients.in_flight():
            self.clients.leave(self.world.chance.choice(in_flight))

    # ------------------------------------------------------------------ storage and transfers

    def slow_storage(self) -> Callable[[], None]:
        """Make some operations slow."""
        return self.set(self.cluster.shared.storage_faults, "slow", 0.3)

    def failing_storage(self) -> Callable[[], None]:
        """Make some operations fail."""
        return self.set(self.cluster.shared.storage_faults, "failing", 0.5)

    def full_storage(self) -> Callable[[], None]:
        """Make all writes fail."""
        return self.set(self.cluster.shared.storage_faults, "full", True)

    def rotting_storage(self) -> Callable[[], None]:
        """Corrupt some stored blocks."""
        return self.set(self.cluster.shared.storage_faults, "corrupting", 0.5)

    def stalling_transfers(self) -> Callable[[], None]:
        """Make some transfers slow."""
        self.cluster.shared.transfer_faults.stall_s = _STALL_S
        return self.set(self.cluster.shared.transfer_faults, "to_stall", self._some())

    def hanging_transfers(self) -> Callable[[], None]:
        """Make a transfer last longer than all time-outs."""
        faults = self.cluster.shared.transfer_faults
        self.cluster.shared.silenced = True
        faults.stall_s = _HANG_S
        self.transfer_hangs = True
        return self.set(faults, "to_stall", 1)

    def failing_transfers(self) -> Callable[[], None]:
        """Make some transfers fail."""
        return self.set(self.cluster.shared.transfer_faults, "to_fail", self._some())

    def _some(self) -> int:
        """Return a number of failing transfers that a request survives."""
        return self.world.chance.choice((1, 2))

    def set(self, faults: object, name: str, value: float) -> Callable[[], None]:
        """Set a fault; return the function that resets it."""
        setattr(faults, name, value)
        return functools.partial(setattr, faults, name, type(value)(0))

    def _some_engine(self) -> str:
        return self.world.chance.choice(sorted(self.cluster.engines))

    def _some_unit(self) -> int:
        units = len(self.cluster.shared.units)
        return self.world.chance.randrange(units) if units > 1 else 0

    def _some_front_end(self) -> SimFrontEnd | None:
        """Return a live front end."""
        alive = self.cluster.front_ends.alive
        return self.world.chance.choice(alive) if alive else None

    def _some_connection(self) -> Connection | None:
        """Return a connection of a live engine or front end."""
        units = self.cluster.shared.units
        networks = [network for unit in units for network in (unit.control, unit.links)]
        every = [connection for network in networks for connection in network.connections]
        alive = [connection for connection in every if connection.is_open]
        return self.world.chance.choice(alive) if alive else None

    def _some_follower(self) -> SimFollower | None:
        """Return a live follower rank of a live engine."""
        living = [e for _, e in sorted(self.cluster.engines.items()) if e.process.alive]
        alive = [f for engine in living for f in engine.followers if f.process.alive]
        return self.world.chance.choice(alive) if alive else None

    def _pause_s(self) -> float:
        return self.world.chance.choice((0.05, 0.3, 1.0, 2.5))


FAULT_KINDS = (
    FaultKind("kill an engine", Component.ENGINES, Adversary.kill_engine),
    FaultKind("lose an engine", Component.ENGINES, Adversary.lose_engine),
    FaultKind("terminate an engine", Component.ENGINES, Adversary.terminate_engine),
    FaultKind("stop an engine", Component.ENGINES, Adversary.stop_engine),
    FaultKind("kill a rank", Component.ENGINES, Adversary.kill_rank, needs=ClusterFeature.RANKS),
    FaultKind("stop a rank", Component.ENGINES, Adversary.stop_rank, needs=ClusterFeature.RANKS),
    FaultKind("kill the router", Component.ROUTERS, Adversary.kill_router),
    FaultKind("stop the router", Component.ROUTERS, Adversary.stop_router),
    FaultKind("kill a unit", Component.ROUTERS, Adversary.kill_unit, needs=ClusterFeature.UNITS),
    FaultKind(
        "kill a front end",
        Component.ROUTERS,
        Adversary.kill_front_end,
        needs=ClusterFeature.FRONT_ENDS,
    ),
    FaultKind(
        "kill a proxy", Component.NETWORK, Adversary.kill_proxy, needs=ClusterFeature.PROXIES
    ),
    FaultKind(
        "kill an engine or the router between two legs",
        Component.ENGINES,
        Adversary.end_between_legs,
        needs=ClusterFeature.PROXIES,
    ),
    FaultKind(
        "kill or stop a decode engine of a move",
        Component.ENGINES,
        Adversary.strike_move,
        needs=ClusterFeature.MOVES,
    ),
    FaultKind(
        "kill a third engine",
        Component.ENGINES,
        Adversary.end_third,
        needs=ClusterFeature.THIRDS,
    ),
    FaultKind(
        "kill the router and a front end",
        Component.ROUTERS,
        Adversary.kill_both,
        needs=ClusterFeature.FRONT_ENDS,
    ),
    FaultKind(
        "terminate a front end",
        Component.ROUTERS,
        Adversary.terminate_front_end,
        needs=ClusterFeature.FRONT_ENDS,
    ),
    FaultKind(
        "stop a front end",
        Component.ROUTERS,
        Adversary.stop_front_end,
        needs=ClusterFeature.FRONT_ENDS,
    ),
    FaultKind(
        "restart a decode engine unnoticed",
        Component.ENGINES,
        Adversary.restart_engine_unnoticed,
        needs=ClusterFeature.FRONT_ENDS,
    ),
    FaultKind("reset a control connection", Component.NETWORK, Adversary.reset_control),
    FaultKind("stall a control connection", Component.NETWORK, Adversary.stall_control),
    FaultKind("duplicate control messages", Component.NETWORK, Adversary.duplicate_control),
    FaultKind("reset a call to an engine", Component.NETWORK, Adversary.reset_call),
    FaultKind("lose a call to an engine", Component.NETWORK, Adversary.lose_call),
    FaultKind("silence an HTTP server", Component.NETWORK, Adversary.silence_server),
    FaultKind("hang a core", Component.ENGINES, Adversary.hang_core),
    FaultKind("let a client leave", Component.NETWORK, Adversary.client_leaves),
    FaultKind("slow storage", Component.STORAGE, Adversary.slow_storage),
    FaultKind("failing storage", Component.STORAGE, Adversary.failing_storage),
    FaultKind("full storage", Component.STORAGE, Adversary.full_storage),
    FaultKind("rotting storage", Component.STORAGE, Adversary.rotting_storage),
    FaultKind("stalling transfers", Component.TRANSFERS, Adversary.stalling_transfers),
    FaultKind("hanging transfers", Component.TRANSFERS, Adversary.hanging_transfers),
    FaultKind("failing transfers", Component.TRANSFERS, Adversary.failing_transfers),
)


#: Requests fail, so campaigns do not draw it.
LOSE_ROLE = FaultKind("lose a role", Component.ENGINES, Adversary.lose_role)

# ------------------------------------------------------------------------------------- lease kinds
# Faults of schedulers that are elected by a lease, and of the store of leases.

#: Probability that a call to the store is slow, doubled or unanswered during such a fault.
_OFTEN = 0.5
#: How long the lease's holder is stopped: long enough for another to acquire the lease.
_OUTLIVES_S = (1.5, 2.0, 3.0)


def _leases(adversary: Adversary) -> LeaseFaults:
    return adversary.cluster.shared.units[0].leadership.faults


def _terminate_router(adversary: Adversary) -> None:
    """SIGTERM: it drains and releases the lease."""
    router = adversary.cluster.router
    if router.serves:
        router.terminate()


def _outlive_lease(adversary: Adversary) -> None:
    """SIGSTOP, and SIGCONT after another router has acquired the lease."""
    resume = adversary.stop(adversary.cluster.router.process)
    adversary.world.after(adversary.world.pick(_OUTLIVES_S), resume)


def _cut_router(adversary: Adversary) -> Callable[[], None]:
    """Cut the lease's holder off from the store."""
    cut, name = _leases(adversary).cut, adversary.cluster.router.name
    adversary.world.note(name, "does not reach the store of leases")
    cut.add(name)
    return lambda: cut.discard(name)


def _store(name: str, value: float) -> Callable[[Adversary], Callable[[], None]]:
    return lambda adversary: adversary.set(_leases(adversary), name, value)


def _kind(name: str, begin: Callable[[Adversary], Callable[[], None] | None]) -> FaultKind:
    return FaultKind(name, Component.LEASES, begin, needs=ClusterFeature.LEASE)


LEASE_FAULT_KINDS = (
    _kind("terminate the router", _terminate_router),
    _kind("stop the router for longer than its lease", _outlive_lease),
    _kind("cut the router from the store of leases", _cut_router),
    _kind("unreachable store of leases", _store("unreachable", True)),
    _kind("slow store of leases", _store("slow", _OFTEN)),
    _kind("lost answers of the store of leases", _store("unanswered", _OFTEN)),
    _kind("doubled calls of the store of leases", _store("doubled", _OFTEN)),
)
