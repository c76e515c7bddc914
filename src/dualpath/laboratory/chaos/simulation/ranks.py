"""Follower ranks of a simulated engine: each is a process with its own agent."""

from typing import TYPE_CHECKING

from dualpath.core.errors import DualPathError
from dualpath.engine.settings import EngineSettings
from dualpath.engine.surroundings import Surroundings
from dualpath.laboratory.chaos.simulation.data import SimTransport
from dualpath.laboratory.chaos.simulation.rank_pipes import RankPipe
from dualpath.laboratory.chaos.simulation.threads import SimThreads
from dualpath.laboratory.emulated.follow import run_follower
from dualpath.laboratory.emulated.rank_connections import ConnectedFollower, FollowerConnection
from dualpath.laboratory.emulated.rank_plane import FollowerPlane
from dualpath.transport.contract import Transport

if TYPE_CHECKING:
    from dualpath.laboratory.chaos.simulation.engine import SimEngine

#: Delay until a rank whose leader has died, and with it its parent process, is killed.
_ORPHAN_S = (0.0, 0.01, 0.2, 1.0, 4.0)


class SimFollower:
    """Rank ``rank`` of an engine, from the start of its process to its end."""

    def __init__(self, engine: "SimEngine", rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.name = f"{engine.name}.{rank}"
        self.transport: SimTransport | None = None
        self._shared = engine.shared
        self.process, self._known = self._shared.process(self.name, engine.host)
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
        """The engine's first rank has died: this one is notified, and killed a while later."""
        self._leaders.cut()
        self._shared.world.after(self._shared.world.pick(_ORPHAN_S), self.kill)

    def _main(self) -> None:
        engine = self.engine
        surroundings = Surroundings(
            threads=self._threads,
            open_transport=self._open_transport,
            new_epoch=lambda: engine.name,
            this_process=lambda: self._known,
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

    def _open_transport(self, agent: str, settings: EngineSettings) -> Transport:
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
