"""What goes wrong in a run: a few faults at moments that the seed decides, and their end."""

import enum
import functools
from collections.abc import Callable, Sequence

import msgspec

from dualpath.laboratory.chaos.simulation.clients import Clients
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.laboratory.chaos.simulation.front_end import SimFrontEnd
from dualpath.laboratory.chaos.simulation.ranks import SimFollower
from dualpath.laboratory.chaos.simulation.wires import Connection
from dualpath.laboratory.chaos.simulation.world import Process, World

#: Faults begin within this time.
FAULTS_WITHIN_S = 1.2
#: How often a fault begins at a moment when it hurts.
_MOMENTS = 0.008
#: Transfers take that much longer: less, and more, than any deadline.
_STALL_S = (0.5, 8.0)
_HANG_S = (32.0, 50.0)


class Part(enum.Enum):
    """What not every cluster has."""

    RANKS = enum.auto()
    FRONT_ENDS = enum.auto()
    LEASE = enum.auto()


class Kind(msgspec.Struct, frozen=True):
    """One kind of fault; ``begin`` returns what ends it, if anything has to.

    It is begun only in clusters that have what it ``needs``.
    """

    name: str
    begin: Callable[["Adversary"], Callable[[], None] | None]
    needs: Part | None = None


class Adversary:
    """Begins ``faults`` faults of some kinds, if there are any, and ends each after a while."""

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        clients: Clients,
        faults: int,
        kinds: Sequence[Kind],
    ) -> None:
        self.world = world
        self.cluster = cluster
        self.clients = clients
        #: Whether a transfer takes longer than anybody waits: requests without another way fail.
        self.hung = False
        self._waiting = [world.chance.choice(kinds) for _ in range(faults)] if kinds else []
        self._under_way = len(self._waiting)
        world.moment = self._moment
        for _ in range(faults):
            world.after(world.chance.uniform(0.1, FAULTS_WITHIN_S), self._strike)

    @property
    def calm(self) -> bool:
        """Whether every fault has ended."""
        return self._under_way == 0

    def _moment(self) -> None:
        """Something happens that a fault may hit: half of the faults begin at such a moment."""
        if self._waiting and self.world.chance.random() < _MOMENTS:
            self.world.after(self.world.chance.choice((0.0, 1e-4, 1e-3)), self._strike)

    def _strike(self) -> None:
        if self._waiting:
            self._begin(self._waiting.pop())

    def _begin(self, kind: Kind) -> None:
        self.world.note("adversary", kind.name)
        end = kind.begin(self)
        self.world.after(
            self.world.chance.choice((0.02, 0.2, 1.0, 3.0)), lambda: self._end(kind, end)
        )

    def _end(self, kind: Kind, end: Callable[[], None] | None) -> None:
        if end is not None:
            self.world.note("adversary", f"{kind.name}: over")
            end()
        self._under_way -= 1

    # ------------------------------------------------------------------ processes

    def kill_engine(self) -> None:
        """SIGKILL; the supervisor starts the next process."""
        engine_id = self._some_engine()
        if self.cluster.engines[engine_id].process.alive:
            self.cluster.restart_engine(engine_id, self._pause_s())

    def lose_engine(self) -> None:
        """SIGKILL, and nobody starts the next process."""
        self.cluster.lose_engine(self._some_engine())

    def terminate_engine(self) -> None:
        """SIGTERM; the supervisor starts the next process once this one has ended."""
        engine = self.cluster.engines[self._some_engine()]
        if engine.serves:
            engine.terminate()
            self.cluster.replace_ended_engine(engine.engine_id, self._pause_s())

    def stop_engine(self) -> Callable[[], None]:
        """SIGSTOP, later SIGCONT."""
        return self.stop(self.cluster.engines[self._some_engine()].process)

    def kill_rank(self) -> None:
        """SIGKILL of one that follows: its engine ends, and the supervisor starts the next."""
        if (follower := self._some_follower()) is not None:
            self.cluster.kill_follower(follower, self._pause_s())

    def stop_rank(self) -> Callable[[], None] | None:
        """SIGSTOP of one that follows, later SIGCONT."""
        follower = self._some_follower()
        return None if follower is None else self.stop(follower.process)

    def kill_router(self) -> None:
        """SIGKILL; the supervisor starts the next process."""
        if self.cluster.router.process.alive:
            self.cluster.restart_router(self._pause_s())

    def stop_router(self) -> Callable[[], None]:
        """SIGSTOP, later SIGCONT."""
        return self.stop(self.cluster.router.process)

    def kill_front_end(self) -> None:
        """SIGKILL; the supervisor starts the next process."""
        if (front_end := self._some_front_end()) is not None:
            front_end.kill()

    def kill_both(self) -> None:
        """SIGKILL of the router and a front end at once."""
        self.kill_router()
        self.kill_front_end()

    def terminate_front_end(self) -> None:
        """SIGTERM; the supervisor starts the next process once this one has ended."""
        if (front_end := self._some_front_end()) is not None:
            front_end.terminate()

    def stop_front_end(self) -> Callable[[], None] | None:
        """SIGSTOP, later SIGCONT."""
        front_end = self._some_front_end()
        return None if front_end is None else self.stop(front_end.process)

    def stop(self, process: Process) -> Callable[[], None]:
        """Let a process stand still; return what lets it go on."""
        self.world.note(process.name, "stands still")
        process.stop()

        def go_on() -> None:
            self.world.note(process.name, "goes on")
            process.go_on()

        return go_on

    # ------------------------------------------------------------------ connections

    def reset_control(self) -> None:
        """A control connection is reset."""
        if (connection := self._some_connection()) is not None:
            self.world.note(connection.process.name, "its control connection is reset")
            connection.reset()

    def stall_control(self) -> None:
        """Nothing passes a control connection for a while."""
        if (connection := self._some_connection()) is not None:
            connection.stalled_until_s = self.world.now_s + self._pause_s()
            self.world.note(connection.process.name, "its control connection stalls")

    def duplicate_control(self) -> Callable[[], None]:
        """Some frames come twice."""
        return self.set(self.cluster.shared.wire_faults, "duplicated", 0.3)

    def reset_call(self) -> None:
        """A call of the router to an engine is reset."""
        if calls := list(self.cluster.shared.http.calls):
            self.world.chance.choice(calls).break_off("connection reset by the adversary")

    def client_leaves(self) -> None:
        """A client closes its connection."""
        if under_way := self.clients.under_way():
            self.clients.leave(self.world.chance.choice(under_way))

    # ------------------------------------------------------------------ storage and transfers

    def slow_storage(self) -> Callable[[], None]:
        """Some operations take long."""
        return self.set(self.cluster.shared.storage_faults, "slow", 0.3)

    def failing_storage(self) -> Callable[[], None]:
        """Some operations fail."""
        return self.set(self.cluster.shared.storage_faults, "failing", 0.5)

    def full_storage(self) -> Callable[[], None]:
        """Nothing can be written."""
        return self.set(self.cluster.shared.storage_faults, "full", True)

    def rotting_storage(self) -> Callable[[], None]:
        """Some stored blocks are not what they were."""
        return self.set(self.cluster.shared.storage_faults, "corrupting", 0.5)

    def stalling_transfers(self) -> Callable[[], None]:
        """Some transfers take long."""
        self.cluster.shared.transfer_faults.stall_s = _STALL_S
        return self.set(self.cluster.shared.transfer_faults, "to_stall", self._some())

    def hanging_transfers(self) -> Callable[[], None]:
        """A transfer takes longer than anybody waits."""
        faults = self.cluster.shared.transfer_faults
        faults.stall_s = _HANG_S
        self.hung = True
        return self.set(faults, "to_stall", 1)

    def failing_transfers(self) -> Callable[[], None]:
        """Some transfers fail."""
        return self.set(self.cluster.shared.transfer_faults, "to_fail", self._some())

    def _some(self) -> int:
        """As many as a request survives."""
        return self.world.chance.choice((1, 2))

    def set(self, faults: object, name: str, value: float) -> Callable[[], None]:
        """Give a fault a value; return what takes it back."""
        setattr(faults, name, value)
        return functools.partial(setattr, faults, name, type(value)(0))

    def _some_engine(self) -> str:
        return self.world.chance.choice(sorted(self.cluster.engines))

    def _some_front_end(self) -> SimFrontEnd | None:
        """Return one that lives."""
        alive = self.cluster.front_ends.alive
        return self.world.chance.choice(alive) if alive else None

    def _some_connection(self) -> Connection | None:
        """Return one of an engine or a front end that lives."""
        shared = self.cluster.shared
        both = (*shared.control.connections, *shared.links.connections)
        alive = [connection for connection in both if connection.is_open]
        return self.world.chance.choice(alive) if alive else None

    def _some_follower(self) -> SimFollower | None:
        """Return a rank that lives and follows one that lives."""
        living = [e for _, e in sorted(self.cluster.engines.items()) if e.process.alive]
        alive = [f for engine in living for f in engine.followers if f.process.alive]
        return self.world.chance.choice(alive) if alive else None

    def _pause_s(self) -> float:
        return self.world.chance.choice((0.05, 0.3, 1.0, 2.5))


KINDS = (
    Kind("kill an engine", Adversary.kill_engine),
    Kind("lose an engine", Adversary.lose_engine),
    Kind("terminate an engine", Adversary.terminate_engine),
    Kind("stop an engine", Adversary.stop_engine),
    Kind("kill a rank", Adversary.kill_rank, needs=Part.RANKS),
    Kind("stop a rank", Adversary.stop_rank, needs=Part.RANKS),
    Kind("kill the router", Adversary.kill_router),
    Kind("stop the router", Adversary.stop_router),
    Kind("kill a front end", Adversary.kill_front_end, needs=Part.FRONT_ENDS),
    Kind("kill the router and a front end", Adversary.kill_both, needs=Part.FRONT_ENDS),
    Kind("terminate a front end", Adversary.terminate_front_end, needs=Part.FRONT_ENDS),
    Kind("stop a front end", Adversary.stop_front_end, needs=Part.FRONT_ENDS),
    Kind("reset a control connection", Adversary.reset_control),
    Kind("stall a control connection", Adversary.stall_control),
    Kind("duplicate control messages", Adversary.duplicate_control),
    Kind("reset a call to an engine", Adversary.reset_call),
    Kind("let a client leave", Adversary.client_leaves),
    Kind("slow storage", Adversary.slow_storage),
    Kind("failing storage", Adversary.failing_storage),
    Kind("full storage", Adversary.full_storage),
    Kind("rotting storage", Adversary.rotting_storage),
    Kind("stalling transfers", Adversary.stalling_transfers),
    Kind("hanging transfers", Adversary.hanging_transfers),
    Kind("failing transfers", Adversary.failing_transfers),
)
