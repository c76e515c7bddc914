"""The processes of the simulated router: scheduler and front ends, and clients' connections."""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.control import decode_with
from dualpath.core.errors import DualPathError
from dualpath.router.engine_calls import Job, TokenEvent
from dualpath.router.engines import EngineInfo
from dualpath.router.linked_front_end import LinkedFrontEnd
from dualpath.router.requests.request import Attempt
from dualpath.router.scheduler.leadership import FileLeadership, bound, stop_when_lost
from dualpath.router.scheduler.leases import LeasedLeadership
from dualpath.router.scheduler.link_messages import FromFrontEnd, FromScheduler
from dualpath.router.scheduler.remote import RemoteScheduling
from dualpath.router.service import RouterService
from dualpath.router.settings import LinkSettings, RouterSettings
from dualpath.router.stages import RequestRecord
from dualpath_lab.emulated.router_server import EngineClient
from dualpath_lab.faults.simulation.cluster_resources import ClusterResources, UnitNetworks
from dualpath_lab.faults.simulation.connections import FRONT_END_ADDRESSES, Connection, Network
from dualpath_lab.faults.simulation.event_loop import ProcessLoop
from dualpath_lab.faults.simulation.http import SimTokenApi
from dualpath_lab.faults.simulation.world import TRUE_CLOCK, Clock

# --------------------------------------------------------------------------------- client endpoint
# A process that serves clients (a router or a front end), and the clients' connections to it.

_DELAYS_S = (0.0001, 0.0005, 0.002)

#: What a client receives: tokens, an error, None at a regular end, "reset" for a lost connection.
Reply = TokenEvent | DualPathError | str | None


class Service(Protocol):
    """What serves the requests of clients."""

    @property
    def records(self) -> Collection[RequestRecord]:
        """The requests that have ended."""
        ...

    def submit(self, job: Job) -> AsyncGenerator[TokenEvent, None]:
        """Yield the tokens of a request."""
        ...

    async def drain(self) -> None:
        """Take no new requests; return when those that run have ended."""
        ...


class ClientEndpoint(ABC):
    """A process that serves clients, until it ends; ``serves``: whether clients can connect."""

    def __init__(
        self, shared: ClusterResources, name: str, host: str, clock: Clock = TRUE_CLOCK
    ) -> None:
        self.serves = False
        #: Whether another process leads or may lead, so that its clients must retry elsewhere.
        self.lost_leadership = False
        self.name = name
        self._shared = shared
        self.process, _ = shared.process(name, host)
        self.loop = ProcessLoop(self.process, clock)  # type: ignore[abstract]
        self._ending = self._over = False
        self._exchanges: dict[Exchange, None] = {}
        shared.world.note(name, "starts")

    @property
    @abstractmethod
    def service(self) -> Service:
        """What serves the requests of clients."""

    @abstractmethod
    def held_when_idle(self) -> list[str]:
        """Return descriptions of what the process still holds without requests."""

    @abstractmethod
    def _died(self) -> None:
        """Make the other processes notice the death of this one."""

    def request(self, job: Job, reply: Callable[[Reply], None]) -> "Exchange":
        """Send a client's request; ``reply`` is called with what the client receives."""
        exchange = Exchange(self, job, reply)
        self._exchanges[exchange] = None
        return exchange

    @property
    def clients(self) -> int:
        """Number of open client requests."""
        return len(self._exchanges)

    def on_ended(self, exchange: "Exchange") -> None:
        """An exchange has ended."""
        self._exchanges.pop(exchange, None)

    def terminate(self) -> None:
        """End as after SIGTERM: drain, then end; idempotent."""
        if not self._ending:
            self._ending = True
            self._shared.world.note(self.name, "is asked to end")
            self._run(self._drain)

    async def _drain(self) -> None:
        await self.service.drain()
        await self._end("has drained")

    async def _end(self, why: str) -> None:
        """End the process from within; only the first call has an effect."""
        if self._over:
            return
        self._over = True
        self._shared.world.note(self.name, why)
        await self._stop()
        self._shared.world.after(0.0, self.kill)

    @abstractmethod
    async def _stop(self) -> None:
        """Stop the service."""

    def kill(self) -> None:
        """End as after SIGKILL."""
        if not self.process.alive:
            return
        self._shared.world.note(self.name, "is dead")
        self.serves = False
        self.process.kill()
        self._died()
        self._shared.http.caller_died(self.loop)
        for exchange in list(self._exchanges):
            exchange.send("reset")

    def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self.loop.call_soon(lambda: self.loop.create_task(work()))


class Exchange:
    """One request of a client on its own connection."""

    def __init__(
        self, endpoint: "ClientEndpoint", job: Job, reply: Callable[[Reply], None]
    ) -> None:
        self.endpoint = endpoint
        self._world = endpoint.process.world
        self._reply = reply
        self._free_s = 0.0
        self._left = False
        self._task: asyncio.Task[None] | None = None
        self._later(functools.partial(self._begin, job))

    def leave(self) -> None:
        """Close the connection from the client's side."""
        self._left = True
        self._later(self._cancel)

    def send(self, reply: Reply) -> None:
        """Send a reply to the client; replies arrive in order."""
        delay_s = self._world.pick(_DELAYS_S)
        self._free_s = max(self._free_s, self._world.now_s + delay_s)
        self._world.at(self._free_s, lambda: self._left or self._reply(reply))

    def _later(self, call: Callable[[], None]) -> None:
        loop = self.endpoint.loop
        delay_s = self._world.pick(_DELAYS_S)
        self._world.after(delay_s, lambda: loop.call_soon(call))

    def _begin(self, job: Job) -> None:
        if self._left:
            self.endpoint.on_ended(self)
        else:
            self._task = self.endpoint.loop.create_task(self._serve(job))

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, job: Job) -> None:
        stream = self.endpoint.service.submit(job)
        try:
            async for event in stream:
                self.send(event)
            self.send(None)
        except DualPathError as error:
            self.send(error)
        finally:
            await stream.aclose()
            self.endpoint.on_ended(self)


# --------------------------------------------------------------------------------------- front end
# One process of a simulated front end, with its link to the scheduler.

_TO_SCHEDULER = msgspec.msgpack.Decoder(FromFrontEnd)
_FROM_SCHEDULER = msgspec.msgpack.Decoder(FromScheduler)


class SimLink(Connection):
    """A front end's end of its connection: ``router.scheduler.remote.LinkConnection``."""

    def __init__(self, network: Network, loop: ProcessLoop) -> None:
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        super().__init__(network, loop.process)

    def send(self, frame: bytes) -> None:
        """Send a frame, once connected."""
        self._send(frame)

    async def receive(self) -> bytes:
        """Return the next frame."""
        return await self._inbox.get()

    def _on_frame(self, frame: bytes) -> None:
        self.process.step(functools.partial(self._inbox.put_nowait, frame))

    def _connected(self) -> None:
        """Nothing to do: the session notices a new connection."""

    def _decoded(self, frame: bytes, *, to_router: bool) -> object:
        if to_router:
            return decode_with(_TO_SCHEDULER, frame)
        return decode_with(_FROM_SCHEDULER, frame)


class SimFrontEnd(ClientEndpoint):
    """A front end from the start of its process to its end, after which ``ended`` is called.

    ``name`` is its name at the scheduler, ``process`` that of its process.
    """

    def __init__(
        self,
        shared: ClusterResources,
        settings: RouterSettings,
        name: str,
        process: str,
        host: str,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(shared, process, host)
        self._ended = ended
        api = SimTokenApi(shared.http, self.loop, lambda engine: None)
        self._service = LinkedFrontEnd(
            settings,
            LinkSettings(scheduler=_addresses(shared), front_end_name=name),
            EngineClient(api),
            self.loop.time,
            connections=[SimLink(unit.links, self.loop) for unit in shared.units],
            epoch=self.name,
        )
        self._watch_streams()
        self._run(self._serve)

    @property
    def service(self) -> LinkedFrontEnd:
        """The front end."""
        return self._service

    def _watch_streams(self) -> None:
        """Check that decoding streams outlive the scheduler: their tokens come from an engine."""
        for link in self.service.links.values():
            self._watch_streams_of(link)

    def _watch_streams_of(self, link: RemoteScheduling) -> None:
        ended = link._session._end

        def watched(reason: str) -> None:
            decoding = [
                attempt
                for attempt in link._attempts.values()
                if isinstance(attempt.listener, Attempt)
                and attempt.listener._decoding_s is not None
                and not attempt.broken.done()
            ]
            ended(reason)
            for attempt in decoding:
                if attempt.broken.done():
                    name = attempt.order.attempt_id
                    self._shared.world.problem(f"{name} ended with its scheduler while decoding")

        link._session._end = watched

    async def _serve(self) -> None:
        await self.service.start()
        self.serves = True

    async def _stop(self) -> None:
        await self.service.stop()

    def _died(self) -> None:
        # The scheduler is not notified: a lost connection sends no message.
        self._ended()

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what the process still holds without requests."""
        links, (waiting, running) = self.service.links.values(), self.service.counts()
        found = {
            "waiting requests": waiting,
            "running requests": running,
            "attempts": sum(link.pending[0] for link in links),
            "calls": sum(link.pending[1] for link in links),
            "attempts without a session": sum(len(link.orphans) for link in links),
            "clients": self.clients,
        }
        joined = self.serves and all(link.session for link in links)
        missing = [] if joined else [f"{self.name} has no session"]
        return missing + [f"{self.name}: {what} {count}" for what, count in found.items() if count]


def _addresses(shared: ClusterResources) -> str:
    """Return the addresses of all schedulers."""
    return ",".join(FRONT_END_ADDRESSES[: len(shared.units)])


# -------------------------------------------------------------------------------------- front ends
# The front ends of a simulated cluster, and the supervisor that restarts them.

#: Delay until the next process of a front end is started.
_PAUSES_S = (0.05, 0.3, 1.0, 2.5)


class FrontEnds:
    """``count`` front ends; ``host`` returns the machine of each by its name.

    In half of the clusters with front ends a restarted process has the same front-end name; in the
    others each process has its own, as by default.
    """

    def __init__(
        self,
        shared: ClusterResources,
        settings: RouterSettings,
        count: int,
        host: Callable[[str], str],
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._host = host
        self._keep_names = count > 0 and shared.world.chance.random() < 0.5
        self._starts: dict[str, int] = {}
        self._now: dict[str, SimFrontEnd] = {}
        for number in range(count):
            self._start(f"fe-{number}")

    @property
    def alive(self) -> Sequence[SimFrontEnd]:
        """Front ends with a live process."""
        return [one for one in self._now.values() if one.process.alive]

    @property
    def serving(self) -> Sequence[SimFrontEnd]:
        """Front ends to which clients can connect."""
        return [one for one in self._now.values() if one.serves]

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what front ends still hold without requests."""
        return [what for one in self._now.values() for what in one.held_when_idle()]

    def knowing_others(self, engines: Iterable[EngineInfo]) -> list[str]:
        """Return descriptions of front ends that do not know exactly the schedulers' engines."""
        there = {info.writer.id for info in engines}
        found = []
        for one in self.serving:
            links = one.service.links.values()
            known = {info.writer.id for link in links for info in link.engines.alive()}
            if known != there:
                found.append(
                    f"{one.name} knows lost engines {known - there} and lacks {there - known}"
                )
        return found

    def _start(self, name: str) -> None:
        self._starts[name] = start = self._starts.get(name, 0) + 1
        process = f"{name}#{start}"
        self._now[name] = SimFrontEnd(
            *(self._shared, self._settings, name if self._keep_names else process, process),
            self._host(name),
            functools.partial(self._ended, name),
        )

    def _ended(self, name: str) -> None:
        world = self._shared.world
        world.after(world.pick(_PAUSES_S), functools.partial(self._start, name))


#: Time that clients' connections take to close before the service stops.
_CLOSES_S = (0.0, 0.05, 1.0)


class SimRouter(ClientEndpoint):
    """A router from the start of its process to its end; it serves clients once it is the leader.

    ``unit`` has its networks.  ``ended`` is called when the process has ended without being killed.
    """

    def __init__(
        self,
        shared: ClusterResources,
        unit: UnitNetworks,
        settings: RouterSettings,
        name: str,
        host: str,
        ended: Callable[[], None],
    ) -> None:
        super().__init__(shared, name, host, unit.leadership.clock())
        self._ended, self._unit = ended, unit
        self._leadership = unit.leadership.leadership(self.process, self.loop.time)
        self._sockets = tuple(
            (network, network.listen(self.loop)) for network in (unit.control, unit.links)
        )
        (_, engines), (_, front_ends) = self._sockets
        self._service = RouterService(
            settings,
            EngineClient(SimTokenApi(shared.http, self.loop, self._called)),
            self.loop.time,
            engines,
            epoch=self.name,
            has_exited=functools.partial(shared.has_exited, host),
            front_ends_socket=front_ends,
        )
        self._watch_known_ends()
        self._run(self._serve_as_leader)
        shared.world.on_end(self._release_leadership)

    @property
    def service(self) -> RouterService:
        """Scheduler and front end."""
        return self._service

    def _watch_known_ends(self) -> None:
        """Check what the scheduler knows of stored chains without asking an engine."""
        scheduler, world = self.service.scheduler, self._shared.world
        stored_end = scheduler.stored_end

        def checked(keys: Sequence[BlockKey]) -> int | None:
            end, namespace = stored_end(keys), scheduler.registry.namespace
            if end is not None and namespace is not None:
                world.note(self.name, f"knows that {end} of {len(keys)} blocks are stored")
                if (wrong := self._shared.check_known_end(namespace, keys, end)) is not None:
                    world.problem(f"{self.name} is wrong on what is stored: {wrong}")
            return end

        scheduler.stored_end = checked  # type: ignore[method-assign]

    def _release_leadership(self) -> None:
        if isinstance(self._leadership, FileLeadership):
            self._leadership.free()

    async def _serve_as_leader(self) -> None:
        await self._leadership.acquired()
        self._unit.leadership.check(self.process)
        self.service.scheduler.is_leader = self._may_act
        if isinstance(self._leadership, LeasedLeadership):  # others last as long as the process
            await stop_when_lost(
                self._leadership, AsyncExitStack(), self._step_down, self._interrupted
            )
        await bound(self._leadership, self.service.start)
        if not self.lost_leadership:
            self.serves = True
            self._shared.world.note(self.name, "serves")

    def _may_act(self) -> bool:
        """Return whether this router still leads; called before each placement."""
        if not self._leadership.held:
            self.lost_leadership = True
            return False
        self._unit.leadership.check(self.process)
        return True

    async def _step_down(self) -> None:
        self.lost_leadership = True
        await self.service.stop()

    def _interrupted(self) -> None:
        """SIGINT."""
        self._run(functools.partial(self._end, "ends at once"))

    def _called(self, engine: EngineInfo) -> None:
        """Check that no engine of a group is called after a rank was lost: all its ranks end."""
        if engine.dp is None:
            return
        for other in self.service.registry.all():
            dp = other.info.dp
            if dp is not None and dp.start == engine.dp.start and not other.alive:
                self._shared.world.problem(
                    f"{self.name} calls {engine.engine_id} although {other.info.engine_id} is lost"
                )

    async def _stop(self) -> None:
        self.serves = False
        await asyncio.sleep(self._shared.world.pick(_CLOSES_S))
        await self.service.stop()
        await self._leadership.release()
        self._ended()

    def _died(self) -> None:
        self._release_leadership()
        for network, socket in self._sockets:
            network.router_died(socket)

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what the router still holds without requests of any client."""
        if not self.serves:
            return [f"{self.name} does not serve"]
        scheduler = self.service.scheduler
        status = self.service.status()
        found = {
            "waiting requests": status["waiting"],
            "running requests": status["running"],
            "releases held": 0 if self._shared.unproven else scheduler.releases.held,
            "loads recorded by the scheduler": int(not scheduler.idle),
            "attempts": len(scheduler.exchange),
            "attempts between their legs": len(scheduler.handovers),
            "clients": self.clients,
            "blocks cached for sessions": scheduler.sessions.cached_blocks,
            "role switches": int(scheduler.roles.current is not None),
            "engines without their group": sum(bool(e["waits_for"]) for e in status["engines"]),
        }
        return [f"{self.name}: {what} {count}" for what, count in found.items() if count]
