"""A simulated GPU, network and threads that execute one step at a time.

``World`` holds everything that may happen next: the front of the compute stream, the front of the
copy stream, one more piece of any transfer, the pump's next call, an event that is waited for.
Whenever somebody on the host waits it picks the next step, and ``drift`` lets some steps pass in
between.  So chance decides how far the device lags behind the host and in which order bytes
arrive; a run is the same whenever the seed is.

Transfers move one piece per step, in any order, and are over a step after their last piece.  What
reads a destination early or overwrites a source too soon is seen.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from dualpath.engine.passes.device import DeviceCopier, DeviceEvent
from dualpath.engine.passes.hbm_copy import HbmCopier
from dualpath.engine.passes.layer_stream import LayerStream
from dualpath.engine.passes.pump import Completion, EventWaiter, TransferPump
from dualpath.engine.threads import Event, TimeLimit
from dualpath.transport.contract import (
    AgentInfo,
    Direction,
    PieceIndices,
    RegionInfo,
    Transfer,
    TransferState,
)
from dualpath.transport.regions import check_pair, find_region, named_regions, piece_addresses

Step = Callable[[], None]


class World:
    """Chooses the next step; half of the time from the first of ``sources`` that has one.

    Their order changes now and then, so that in turn everyone is starved for a while.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.sources: list[Callable[[], list[Step]]] = []

    def step(self) -> bool:
        """Execute one step; False if there is none."""
        if self._random.random() < 0.1:
            self._random.shuffle(self.sources)
        possible = [steps for source in self.sources if (steps := source())]
        if not possible:
            return False
        steps = possible[0] if self._random.random() < 0.5 else self._random.choice(possible)
        self._random.choice(steps)()
        return True

    def drift(self, most: int) -> None:
        """Execute up to ``most`` steps while the host does something else."""
        for _ in range(self._random.randint(0, most)):
            self.step()

    def until(self, over: Callable[[], bool]) -> None:
        """The host waits."""
        while not over():
            assert self.step(), "everybody waits for somebody else"


class WorldEvent:
    """Passes when its stream reaches it."""

    def __init__(self, world: World) -> None:
        self.has_passed = False
        self._world = world

    def passed(self) -> bool:
        """Whether it has."""
        return self.has_passed

    def wait(self) -> None:
        """Execute steps of the world until it has passed."""
        self._world.until(self.passed)


class Stream:
    """Work in order; ``queue`` adds, the world takes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._queue: deque[tuple[Callable[[], bool], Step]] = deque()
        world.sources.append(self._next)

    def queue(self, work: Step, ready: Callable[[], bool] = lambda: True) -> None:
        """Queue work that can run once it is ``ready`` and first in the queue."""
        self._queue.append((ready, work))

    def record(self) -> WorldEvent:
        """Return the event at which everything queued so far is over."""
        event = WorldEvent(self._world)
        self.queue(lambda: setattr(event, "has_passed", True))
        return event

    def wait(self, event: DeviceEvent) -> None:
        """Start nothing queued from now on before ``event``."""
        self.queue(lambda: None, event.passed)

    def _next(self) -> list[Step]:
        return [self._run] if self._queue and self._queue[0][0]() else []

    def _run(self) -> None:
        self._queue.popleft()[1]()


class WorldTransfer:
    """Piece by piece in any order, then over."""

    def __init__(self, pairs: Sequence[tuple[int, int]], piece_bytes: int) -> None:
        self.bytes = len(pairs) * piece_bytes
        self._left = list(pairs)
        self._piece_bytes = piece_bytes
        self._state = TransferState.MOVING

    def steps(self) -> list[Step]:
        """The steps that can be executed next."""
        if self._state is not TransferState.MOVING:
            return []
        if not self._left:
            return [lambda: setattr(self, "_state", TransferState.DONE)]
        return [lambda pair=pair: self._move(pair) for pair in self._left]  # type: ignore[misc]

    def _move(self, pair: tuple[int, int]) -> None:
        self._left.remove(pair)
        ctypes.memmove(pair[1], pair[0], self._piece_bytes)

    def poll(self) -> TransferState:
        """The state; polling moves nothing, as with RDMA."""
        return self._state

    def error(self) -> str | None:
        """It never fails."""
        return None

    def release(self) -> None:
        """Nothing to give back."""
        assert self._state is not TransferState.MOVING


class WorldTransport:
    """Agents in one process, of which ``agents`` lists all regions.

    With the agents in ``stalled`` nothing moves until they are taken out again.
    """

    def __init__(self, world: World, agent: str, agents: dict[str, list[RegionInfo]]) -> None:
        self._agent = agent
        self._agents = agents
        self.stalled: set[str] = set()
        self._moving: list[tuple[str, WorldTransfer]] = []
        world.sources.append(self._next)

    def post(
        self,
        direction: Direction,
        local_region: str,
        local_pieces: PieceIndices,
        agent: str,
        remote_region: str,
        remote_pieces: PieceIndices,
        *,
        traffic_class: str = "kv",
    ) -> WorldTransfer:
        """Post one transfer; its bytes move in a step of the world."""
        here = self._ends(self._agent, local_region, local_pieces)
        there = self._ends(agent, remote_region, remote_pieces)
        pairs = _pairs(here, there) if direction is Direction.WRITE else _pairs(there, here)
        transfer = WorldTransfer(*pairs)
        self._moving.append((agent, transfer))
        return transfer

    @property
    def posts(self) -> int:
        """How many transfers were posted."""
        return len(self._moving)

    @property
    def moving_bytes(self) -> int:
        """Bytes of posted transfers that are not over."""
        moving = (transfer for _, transfer in self._moving)
        return sum(one.bytes for one in moving if one.poll() is TransferState.MOVING)

    def _next(self) -> list[Step]:
        moving = [transfer for agent, transfer in self._moving if agent not in self.stalled]
        return [step for transfer in moving for step in transfer.steps()]

    def _ends(
        self, agent: str, region: str, pieces: PieceIndices
    ) -> tuple[RegionInfo, PieceIndices]:
        return find_region(named_regions(self._agents[agent], ()), region, agent), pieces

    def info(self) -> AgentInfo:
        """This agent's regions."""
        return AgentInfo(self._agent, b"", tuple(self._agents[self._agent]))

    def register(self, region: RegionInfo, keep_alive: object) -> None:
        """Regions are known."""

    def view(self, view: RegionInfo) -> None:
        """Views are."""

    def connect(self, peer: AgentInfo, views: Sequence[RegionInfo] = ()) -> None:
        """All agents are."""

    def disconnect(self, agent: str) -> None:
        """Do nothing: agents are never disconnected."""

    def close(self) -> None:
        """Nothing was taken."""


def _pairs(
    source: tuple[RegionInfo, PieceIndices], destination: tuple[RegionInfo, PieceIndices]
) -> tuple[list[tuple[int, int]], int]:
    from_indices, to_indices = check_pair(*source, *destination)
    sources = piece_addresses(source[0], from_indices).tolist()
    destinations = piece_addresses(destination[0], to_indices).tolist()
    return list(zip(sources, destinations, strict=True)), source[0].piece_bytes


class WorldCopy(WorldTransfer):
    """A copy on the copy stream."""

    def __init__(self, pairs: Sequence[tuple[int, int]], piece_bytes: int, stream: Stream) -> None:
        super().__init__(pairs, piece_bytes)
        for pair in pairs:
            stream.queue(lambda pair=pair: self._move(pair))  # type: ignore[misc]
        self.event: DeviceEvent = stream.record()

    def poll(self) -> TransferState:
        """Over when its event has passed."""
        if self.event.passed():
            self._state = TransferState.DONE
        return self._state


class WorldCopier:
    """A copy engine with a stream of its own; ``queued`` counts the copies queued so far."""

    queued = 0

    def __init__(self, world: World, regions: list[RegionInfo]) -> None:
        self._stream = Stream(world)
        self._regions = regions

    def register(self, region: RegionInfo) -> None:
        """Regions are known."""

    def copy(
        self,
        source: str,
        source_pieces: PieceIndices,
        destination: str,
        destination_pieces: PieceIndices,
        after: DeviceEvent,
    ) -> WorldCopy:
        """Queue a copy."""
        self.queued += 1
        ends = [
            (find_region(named_regions(self._regions, ()), name, "self"), pieces)
            for name, pieces in ((source, source_pieces), (destination, destination_pieces))
        ]
        self._stream.wait(after)
        return WorldCopy(*_pairs(*ends), self._stream)


class WorldDevice:
    """A GPU with one compute stream, and a copy stream if it has a ``copier``."""

    def __init__(self, world: World, copier: WorldCopier | None) -> None:
        self.compute = Stream(world)
        self.copier: DeviceCopier | None = copier

    def enter_thread(self) -> None:
        """There is one thread only."""

    def pin(self, address: int, size_bytes: int, keep_alive: object) -> None:
        """All memory is reachable."""

    def hbm_copies(self) -> None:
        """The transport moves what is between engines."""

    def record(self) -> WorldEvent:
        """See ``Stream.record``."""
        return self.compute.record()

    def wait(self, event: DeviceEvent) -> None:
        """See ``Stream.wait``."""
        self.compute.wait(event)

    def close(self) -> None:
        """Nothing was taken."""


class WorldPump(TransferPump):
    """The pump's thread as steps of the world; it starts no thread."""

    def __init__(self, world: World) -> None:
        self._calls: deque[Step] = deque()
        self._watched: list[Completion] = []
        world.sources.append(self._next)

    def call(self, work: Step) -> None:
        """Run work later, in order."""
        self._calls.append(work)

    def each_poll(self, work: Step) -> None:
        """No time passes here."""

    def watch(
        self, transfer: Transfer, then: Callable[[Completion], None] | None = None
    ) -> Completion:
        """Run ``then`` some time after the transfer is over."""
        completion = Completion(transfer, then)
        self._watched.append(completion)
        return completion

    def _next(self) -> list[Step]:
        over = [c for c in self._watched if c.transfer.poll() is not TransferState.MOVING]
        steps: list[Step] = [lambda c=c: self._finish(c) for c in over]  # type: ignore[misc]
        return steps + ([self._call_first] if self._calls else [])

    def _call_first(self) -> None:
        self._calls.popleft()()

    def _finish(self, completion: Completion) -> None:
        self._watched.remove(completion)
        completion.finish()


class WorldEventWaiter(EventWaiter):
    """The event waiter as steps of the world, without a thread."""

    def __init__(self, world: World) -> None:
        self._line = Stream(world)

    def call(self, event: DeviceEvent, work: Callable[[str | None], None]) -> None:
        """Run work in order once its event has passed."""
        self._line.queue(lambda: work(None), event.passed)


class WorldLayerStream(LayerStream):
    """A layer stream; its waits execute steps of the world, and time out when there are none."""

    world: World
    passed_waits = 0

    def _block(self, event: Event) -> bool:
        while not event.is_set():
            if not self.world.step():
                self.passed_waits += 1
                assert self.passed_waits < 1000, "everybody waits for somebody else"
                return False
        return True


class WorldHbmCopier(HbmCopier):
    """A copier; its waits execute steps of the world."""

    world: World

    def _wait(self, over: Event, limit: TimeLimit) -> bool:
        self.world.until(over.is_set)
        return True
