"""One process of a simulated front end, with its link to the scheduler."""

import asyncio
import functools
from collections.abc import Callable

import msgspec

from dualpath.core.envelopes import decode_with
from dualpath.laboratory.chaos.simulation.api import SimTokenApi
from dualpath.laboratory.chaos.simulation.cluster_parts import ClusterResources
from dualpath.laboratory.chaos.simulation.entrance import ClientEndpoint
from dualpath.laboratory.chaos.simulation.loop import ProcessLoop
from dualpath.laboratory.chaos.simulation.wires import ADDRESS, Connection, Network
from dualpath.laboratory.emulated.engine_client import EngineClient
from dualpath.router.links.messages import FromFrontEnd, FromScheduler
from dualpath.router.links.service import LinkedFrontEnd
from dualpath.router.links.settings import LinkSettings
from dualpath.router.requests.lifecycle import Attempt
from dualpath.router.settings import RouterSettings

_TO_SCHEDULER = msgspec.msgpack.Decoder(FromFrontEnd)
_FROM_SCHEDULER = msgspec.msgpack.Decoder(FromScheduler)


class SimLink(Connection):
    """A front end's end of its connection: ``router.links.remote.LinkConnection``."""

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
        """Nothing to do: the session notices by itself."""

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
            LinkSettings(scheduler=ADDRESS, front_end_name=name),
            EngineClient(api),
            self.loop.time,
            connection=SimLink(shared.links, self.loop),
            epoch=self.name,
        )
        self._watch_streams()
        self._run(self._serve)

    @property
    def service(self) -> LinkedFrontEnd:
        """The front end."""
        return self._service

    def _watch_streams(self) -> None:
        """Check that decoding streams, whose tokens come from an engine, outlive the scheduler."""
        link = self.service.link
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
        """Return descriptions of what it still holds without requests."""
        link, (waiting, running) = self.service.link, self.service.front_end.counts()
        found = {
            "waiting requests": waiting,
            "running requests": running,
            "attempts": len(link._attempts),
            "calls": len(link._calls),
            "attempts without a session": len(link._strays._due_s),
            "clients": self.clients,
        }
        missing = [] if self.serves and link.session else [f"{self.name} has no session"]
        return missing + [f"{self.name}: {what} {count}" for what, count in found.items() if count]
