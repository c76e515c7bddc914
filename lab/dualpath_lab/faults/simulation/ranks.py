"""Follower ranks of a simulated engine: each is a process with its own agent."""

import functools
import pickle
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpath.core.errors import DualPathError
from dualpath.engine.control.surroundings import Surroundings
from dualpath.engine.passes.device import Device
from dualpath.engine.settings import EngineSettings
from dualpath.transport.contract import Transport
from dualpath_lab.emulated.data_plane import FollowerPlane
from dualpath_lab.emulated.emulated_gpu import run_follower
from dualpath_lab.emulated.rank_processes import ConnectedFollower, FollowerConnection
from dualpath_lab.faults.simulation.threads import SimThreads, Waiting
from dualpath_lab.faults.simulation.transfers import SimTransport

if TYPE_CHECKING:
    from dualpath_lab.faults.simulation.engine import SimEngine

# -------------------------------------------------------------------------------------- rank pipes
# Simulated connections between the ranks of an engine that behave like pipes.
#
# Values arrive in order, after a random delay.  When the process at one end has exited, the other
# end sees the end of the pipe after all values that were sent.

_DELAYS_S = (0.0, 1e-5, 1e-4, 1e-3, 0.02)


class RankPipe:
    """One end, in a process with these threads; ``emulated.rank_processes.RankConnection``."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._world = threads.world
        self._arrived: deque[bytes] = deque()
        self._over = False
        self._waiting: list[Waiting] = []
        #: Time at which all values in flight to this end have arrived.
        self._free_s = 0.0
        self._other = self

    @staticmethod
    def pair(one: SimThreads, other: SimThreads) -> "tuple[RankPipe, RankPipe]":
        """Return both ends of a new connection."""
        ends = RankPipe(one), RankPipe(other)
        ends[0]._other, ends[1]._other = ends[1], ends[0]
        return ends

    def send(self, value: Any, /) -> None:  # noqa: ANN401 - any message
        """Send a copy; raises ``BrokenPipeError`` once this end has seen the other end's exit."""
        if self._over:
            raise BrokenPipeError("the process at the other end has exited")
        self._other._soon(functools.partial(self._other._arrived.append, pickle.dumps(value)))

    def recv(self) -> Any:  # noqa: ANN401 - any message
        """Wait for the next value; raises ``EOFError`` at the end of the pipe."""
        while not self._arrived:
            if self._over:
                raise EOFError
            self._threads.wait(self._waiting, None)
        return pickle.loads(self._arrived.popleft())

    def cut(self) -> None:
        """Close this end after its process has exited."""
        self._other._soon(self._other._end)

    def _end(self) -> None:
        self._over = True

    def _soon(self, happens: Callable[[], object]) -> None:
        self._free_s = max(self._free_s, self._world.now_s + self._world.pick(_DELAYS_S))
        self._world.at(self._free_s, functools.partial(self._happen, happens))

    def _happen(self, happens: Callable[[], object]) -> None:
        self._world.maybe_fault()
        happens()
        while self._waiting:
            self._waiting.pop(0).wake()


#: Delay until a rank is killed after its leader, which is its parent process, has died.
_ORPHAN_S = (0.0, 0.01, 0.2, 1.0, 4.0)
#: Share of ranks that are in a system call when their leader dies: they end when they are killed.
_HANGS = 1 / 3


class SimFollower:
    """Rank ``rank`` of an engine, from the start of its process to its end."""

    def __init__(self, engine: "SimEngine", rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.name = f"{engine.name}.{rank}"
        self.transport: SimTransport | None = None
        self._shared = engine.shared
        self.process, self._known = self._shared.process(self.name, engine.host, engine.known)
        self._threads = SimThreads(self.process)
        self._plane: FollowerPlane | None = None
        self._own, self._leaders = RankPipe.pair(self._threads, engine.threads)
        self._shared.world.note(self.name, "starts")
        self._threads.start("main", self._main)

    def tie(self) -> FollowerConnection:
        """Return the connection from the engine's first rank to this one."""
        return FollowerConnection(
            self.rank, self._leaders, self._end_description, self.engine.threads
        )

    def kill(self) -> None:
        """End as after SIGKILL."""
        if not self.process.alive:
            return
        self._shared.world.note(self.name, "is dead")
        self.process.kill()
        self._own.cut()
        if self.transport is not None:
            self._shared.fabric.kill(self.transport.agent)

    def leader_died(self) -> None:
        """The engine's first rank has died: this rank is notified, and killed a while later.

        The posted transfers of a rank that hangs continue until then.
        """
        world = self._shared.world
        self._leaders.cut()
        if world.chance.random() < _HANGS:
            self.process.stop()
        world.after(world.pick(_ORPHAN_S), self.kill)

    def _main(self) -> None:
        engine = self.engine
        surroundings = Surroundings(
            threads=self._threads,
            open_transport=self._open_transport,
            new_epoch=lambda: engine.name,
            this_process=lambda: self._shared.identity(self._known),
            end_process=self._exit,
        )
        size = engine.settings.tensor_parallel_size
        end = ConnectedFollower(self.rank, size, self._own, self._threads)
        try:
            self._plane = FollowerPlane(engine.settings, end, surroundings)
            run_follower(self._plane, end)
        except DualPathError as error:
            self._shared.world.note(self.name, f"ends: {error}")
        self.kill()

    def _exit(self) -> None:
        """End the process at once; does not return."""
        self.kill()
        self._threads.sleep(0.0)

    def _open_transport(self, agent: str, settings: EngineSettings, device: Device) -> Transport:
        shared = self._shared
        self.transport = SimTransport(
            *(agent, shared.fabric, self.process, shared.transfer_faults, shared.owner_of),
            self._poll_transfers,
        )
        shared.agents[agent] = self.engine
        return self.transport

    def _poll_transfers(self) -> None:
        if self._plane is not None:
            self._plane.follower.rank.movers.pump.call(lambda: None)

    def _end_description(self) -> str:
        return f"rank {self.rank} (process {self.name}) has ended"
