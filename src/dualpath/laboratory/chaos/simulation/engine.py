"""An emulated engine in a simulated cluster: the real code on simulated time."""

import functools
import itertools
from collections.abc import Callable, Iterator

from dualpath.core.blocks import BlockKey
from dualpath.core.cluster import GroupRank, Role
from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.engine.buffer import BUFFER_REGION, STAGING_REGION
from dualpath.engine.router_connection import RouterConnection
from dualpath.engine.settings import EngineSettings
from dualpath.engine.surroundings import Surroundings
from dualpath.engine.threads import TimeLimit
from dualpath.laboratory.chaos.simulation.api import Call
from dualpath.laboratory.chaos.simulation.cluster_parts import ClusterResources
from dualpath.laboratory.chaos.simulation.control import EngineConnection
from dualpath.laboratory.chaos.simulation.data import SimTransport
from dualpath.laboratory.chaos.simulation.engine_files import EngineFiles
from dualpath.laboratory.chaos.simulation.ranks import SimFollower
from dualpath.laboratory.chaos.simulation.threads import SimThreads
from dualpath.laboratory.emulated.admission import Admission
from dualpath.laboratory.emulated.data_plane import DataPlane
from dualpath.laboratory.emulated.decode import DecodeEngine
from dualpath.laboratory.emulated.prefill import PrefillEngine
from dualpath.laboratory.emulated.rank_connections import ConnectedLeader
from dualpath.laboratory.emulated.requests import Sampling
from dualpath.laboratory.emulated.settings import EmulatedSettings
from dualpath.router.token_api.wire import GenerateRequest, decode_body
from dualpath.transport.contract import Transport
from dualpath.transport.memory import address_of

#: Idle ranks end within this time, or are killed.
_RANKS_END_S = 10.0
_LOOK_S = 0.05


class SimEngine:
    """An engine from the start of its process to its end; ``name`` has the number of the start.

    Its first rank runs in ``process``; the other ranks are ``followers``.
    """

    def __init__(
        self,
        shared: ClusterResources,
        settings: EmulatedSettings,
        start: int,
        host: str,
        dp: GroupRank | None = None,
    ) -> None:
        self.settings = settings
        self._dp = dp
        self.shared = shared
        self.engine_id = settings.engine.engine_id
        self.name = f"{self.engine_id}#{start}"
        self.host = host
        self.process, self._known = shared.process(self.name, host)
        self.threads = SimThreads(self.process)
        self.transport: SimTransport | None = None
        self.plane: DataPlane | None = None
        self._engine: PrefillEngine | DecodeEngine | None = None
        self._admission: Admission | None = None
        self._ending = False
        self._leaving = False
        self._hbm_owners: dict[int, str] = {}
        self._files = EngineFiles(shared, self.threads, self._known, self._check_read)
        shared.world.note(self.name, "starts")
        others = range(1, settings.tensor_parallel_size)
        self.followers = tuple(SimFollower(self, rank) for rank in others)
        self.threads.start("main", self._main)

    # ------------------------------------------------------------------ start and end

    def _main(self) -> None:
        surroundings = Surroundings(
            threads=self.threads,
            open_storage=self._files.open_storage,
            open_tree=self._files.open_tree,
            open_node_dram=self._files.open_node_dram,
            now_s=lambda: self.shared.world.now_s,
            open_transport=self._open_transport,
            connect=self._connect,
            listens=lambda url: self.serves,
            new_epoch=lambda: self.name,
            this_process=lambda: self._known,
            has_exited=functools.partial(self.shared.has_exited, self.host),
            end_process=self._exit,
        )
        try:
            plane = DataPlane(self.settings, surroundings, self._lead())
        except EngineLostError as error:
            self.shared.world.note(self.name, f"ends: {error}")
            self.kill()
            return
        self._watch_hbm(plane)
        self.plane = plane
        prefills = self.settings.engine.role is Role.PREFILL
        self._engine = PrefillEngine(plane) if prefills else DecodeEngine(plane)
        self._engine.start()
        self._admission = Admission(plane, self._engine)
        plane.membership.join(self.settings.engine.api_url, dp=self._dp)

    def _lead(self) -> ConnectedLeader | None:
        """Return the connection to the other ranks; None if there are none."""
        if not self.followers:
            return None
        return ConnectedLeader([follower.tie() for follower in self.followers], self.threads)

    def terminate(self) -> None:
        """End as after SIGTERM: drain, then end HTTP, then the engine, then the process.

        An engine that has not started ends at once.
        """
        if self._ending:
            return
        if self._engine is None:
            self.kill()
            return
        self._ending = True
        self.shared.world.note(self.name, "is asked to end")
        self._on_thread("sigterm", self._end)

    def _end(self) -> None:
        assert self._engine is not None
        assert self.plane is not None
        drained = self.threads.event()
        self.plane.membership.drain("its process got SIGTERM", drained.set)
        drained.wait(self.settings.engine.drain_timeout_s)
        self.shared.world.note(self.name, "has drained" if drained.is_set() else "ends undrained")
        self._leaving = True
        self.shared.http.server_died(self)
        self._engine.close()
        self.plane.close()
        limit = TimeLimit(self.threads, _RANKS_END_S)
        while any(f.process.alive for f in self.followers) and limit.left_s():
            self.threads.sleep(_LOOK_S)
        self.shared.world.note(self.name, "ends")
        self.shared.world.after(0.0, self.kill)

    def _exit(self) -> None:
        """End the process at once; does not return."""
        self.kill()
        self.threads.sleep(0.0)

    def kill(self) -> None:
        """End as after SIGKILL; the other ranks end a while later."""
        if not self.process.alive:
            return
        self.shared.world.note(self.name, "is dead")
        self.process.kill()
        self.shared.http.server_died(self)
        if self.transport is not None:
            self.shared.fabric.kill(self.transport.agent)
        for follower in self.followers:
            follower.leader_died()

    # ------------------------------------------------------------------ its HTTP server

    @property
    def serves(self) -> bool:
        """Whether its server accepts connections."""
        return self.process.alive and self._admission is not None and not self._leaving

    def serve(self, body: bytes, call: Call) -> None:
        """Accept a request on a thread of its own."""
        self._on_thread("api", lambda: self._accept(body, call))

    def aborted(self, abort: Callable[[], None]) -> None:
        """The client has disconnected."""
        self._on_thread("abort", abort)

    def _on_thread(self, name: str, work: Callable[[], None]) -> None:
        self.process.step(lambda: self.threads.start(name, work))

    def _accept(self, body: bytes, call: Call) -> None:
        assert self._admission is not None
        try:
            request = decode_body(body, GenerateRequest[Sampling])
            transfer = self._admission.transfer(request)
            prefix = self._admission.prefix(request, transfer)
        except DualPathError as error:
            self.shared.world.note(self.name, f"refuses {request.request_id}: {error}")
            call.deliver(error)
            return
        call.begun(self._admission.submit(request, transfer, prefix, call.deliver))

    # ------------------------------------------------------------------ its surroundings

    def _open_transport(self, agent: str, settings: EngineSettings) -> Transport:
        shared = self.shared
        self.transport = SimTransport(
            *(agent, shared.fabric, self.process, shared.transfer_faults, shared.owner_of),
            self._poll_transfers,
        )
        shared.agents[agent] = self
        return self.transport

    def _poll_transfers(self) -> None:
        """Poll transfers when one has ended, instead of all the time."""
        if self.plane is not None:
            self.plane.manager.wake_pump()

    def _connect(self, settings: EngineSettings) -> RouterConnection:
        return EngineConnection(self.shared.control, self.threads)

    # ------------------------------------------------------------------ owners of memory

    def owner_of(self, region: str, piece: int) -> str | None:
        """Return who owns a piece of a region, None if nobody."""
        if self.plane is None:
            return None
        manager = self.plane.manager
        memory = region.partition(".")[0]
        if memory == BUFFER_REGION:
            return manager.buffer.owner(piece)
        if memory == STAGING_REGION:
            return "staging" if manager.staging.is_leased(piece) else None
        free = piece in self.plane.hbm._free
        return None if free else self._hbm_owners.get(piece)

    def _check_read(self, destination: memoryview) -> None:
        """A block is about to arrive from storage: its slot must be somebody's, or pinned."""
        if self.plane is None or not self.process.alive:
            return
        buffer = self.plane.manager.buffer
        slot = buffer.slot_at(address_of(destination))
        if not buffer.is_pinned(slot):
            self.shared.world.problem(f"{self.name}: a read ends in slot {slot}, pinned by nobody")

    def _watch_hbm(self, plane: DataPlane) -> None:
        allocate, numbers = plane.hbm.allocate, itertools.count()

        def noted_allocate(blocks: int) -> tuple[int, ...] | None:
            taken = allocate(blocks)
            lease = f"hbm lease {next(numbers)}"
            self._hbm_owners.update(dict.fromkeys(taken or (), lease))
            return taken

        plane.hbm.allocate = noted_allocate  # type: ignore[method-assign]

    def kept(self) -> Iterator[tuple[BlockKey, bytes]]:
        """Yield what its buffer keeps for requests to come."""
        if self.plane is not None and self.process.alive:
            buffer = self.plane.manager.buffer
            for slot, key in buffer.cached_blocks():
                yield key, bytes(buffer.view(slot))

    def held_when_idle(self) -> list[str]:
        """Return what it still holds though nobody is served."""
        if self.plane is None:
            return [f"{self.name} has not come up"]
        manager = self.plane.manager
        report = manager.report()
        transports = (self.transport, *(follower.transport for follower in self.followers))
        counts = {
            "requests": (report.unfinished_requests, 0),
            "tokens to read": (report.read_queue_tokens, 0),
            "free buffer": (report.free_buffer_tokens, manager.buffer_tokens),
            "free HBM": (self.plane.hbm.free_tokens, manager.hbm_tokens),
            "free staging": (manager.staging.free, manager.staging.capacity),
            "transfers": (sum(t.unfinished for t in transports if t is not None), 0),
            "open files": (self._files.open, 0),
            "half-written files": (len(self._files.half_written(self.name)), 0),
            "retained blocks": (manager.buffer.retained, 0),
        }
        return [
            f"{self.name}: {what} {found}, not {right}"
            for what, (found, right) in counts.items()
            if found != right
        ]
