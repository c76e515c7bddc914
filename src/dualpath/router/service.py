"""The router as a library, front end and scheduler in one process: submit a job, get tokens.

HTTP servers are built on it.  Further front ends may be processes of their own
(``linked_front_end``).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from dualpath.core.cluster import HostProcess
from dualpath.node.host_process import has_exited
from dualpath.router.engine_calls import EngineCalls
from dualpath.router.requests.front_end import FrontEnd
from dualpath.router.scheduler.control_socket import ControlSocket
from dualpath.router.scheduler.scheduler import Scheduler
from dualpath.router.settings import RouterSettings


class RouterService(FrontEnd):
    """Engines register with its ``scheduler``, clients submit jobs; lives in one event loop.

    ``clock`` gives seconds and must be monotonic; time limits follow the event loop's own time,
    which is the same outside of tests.  ``control_socket`` is where engines register,
    ``front_ends_socket`` where front ends connect that are processes of their own; by default they
    are ZMQ's.  ``epoch`` names this process of the router, by default it is random; ``has_exited``
    returns whether a process of this machine has ended.  ``adapter_paths`` are the LoRA adapters
    that clients may name, which every engine must have.
    """

    def __init__(
        self,
        settings: RouterSettings,
        engine_calls: EngineCalls,
        clock: Callable[[], float] = time.monotonic,
        control_socket: ControlSocket | None = None,
        epoch: str = "",
        has_exited: Callable[[HostProcess], bool] = has_exited,
        adapter_paths: Mapping[str, str] | None = None,
        front_ends_socket: ControlSocket | None = None,
    ) -> None:
        self.scheduler = scheduler = Scheduler(
            settings,
            engine_calls,
            clock,
            control_socket,
            epoch,
            has_exited,
            adapter_paths,
            own=lambda: self,
            front_ends_socket=front_ends_socket,
        )
        self.registry, self.server = scheduler.registry, scheduler.server
        super().__init__(
            *(settings, scheduler, scheduler.metrics, engine_calls, clock),
            scheduler.dashboard.ended,
        )

    async def start(self) -> None:
        """Open the traces, if they are exported, and all that ``Scheduler.start`` opens.

        Raises ``ConfigError`` as it does, and if OpenTelemetry is not installed.
        """
        self.open_traces()
        await self.scheduler.start()

    async def stop(self) -> None:
        """End all requests (their streams raise ``EngineLostError``) and close; idempotent."""
        await self.end_requests()
        await self.scheduler.stop()
        await self.close_traces()

    def status(self) -> dict[str, Any]:
        """Return the body of ``GET /dualpath/v1/status``."""
        return {**self.scheduler.status(), "queue": self.admission.report()}
