"""An emulated engine in a simulated cluster: the real code on simulated time."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, StoreNamespace
from dualpath.core.cluster import GroupRank, HostProcess, Role
from dualpath.core.control import (
    Release,
    ReserveThird,
    decode_engine_message,
    decode_router_message,
)
from dualpath.core.errors import ConfigError, DualPathError, EngineLostError, StorageError
from dualpath.core.transfers import CallAssignment
from dualpath.engine.buffer.block_buffer import BUFFER_REGION, STAGING_REGION, BlockBuffer
from dualpath.engine.control.fetches import _Fetching
from dualpath.engine.control.link import RouterConnection
from dualpath.engine.control.surroundings import Surroundings, open_node_dram
from dualpath.engine.passes.device import Device
from dualpath.engine.passes.hbm_layout import HbmBlock
from dualpath.engine.passes.layer_stream import LayerSettings, LayerStream
from dualpath.engine.passes.step_transfers import PrefillChunk
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import TimeLimit
from dualpath.plan.steps import Step
from dualpath.router.token_api.wire import GenerateRequest, decode_body
from dualpath.storage.block_file import HEADER_BYTES
from dualpath.storage.contract import BlockStorage, ReadOutcome, WriteOutcome, run_origins
from dualpath.storage.janitor import Janitor
from dualpath.storage.node_dram import NodeDram
from dualpath.storage.objects import ObjectInfo, ObjectTree, PosixObjects
from dualpath.storage.posix import PosixStorage
from dualpath.transport.contract import Transport
from dualpath.transport.memory import address_of
from dualpath_lab.emulated.checkable_kv import CheckedAt, Seeds
from dualpath_lab.emulated.data_plane import DataPlane
from dualpath_lab.emulated.decode import DecodeEngine
from dualpath_lab.emulated.engine_server import RequestSubmitter
from dualpath_lab.emulated.prefill import PrefillEngine
from dualpath_lab.emulated.rank_processes import ConnectedLeader
from dualpath_lab.emulated.requests import Answer, Sampling
from dualpath_lab.emulated.settings import EmulatedSettings
from dualpath_lab.faults.simulation.cluster_resources import ClusterResources, UnitNetworks
from dualpath_lab.faults.simulation.connections import ADDRESS, Connection, Network
from dualpath_lab.faults.simulation.disk import ROOT, Disk, SimCalls, StorageFaults
from dualpath_lab.faults.simulation.http import Call
from dualpath_lab.faults.simulation.janitor_checks import CheckedCalls
from dualpath_lab.faults.simulation.ranks import SimFollower
from dualpath_lab.faults.simulation.threads import SimThreads, Waiting
from dualpath_lab.faults.simulation.transfers import SimTransport
from dualpath_lab.faults.simulation.two_legs import PATH, SimLegs

# ----------------------------------------------------------------------------------------- storage
# The storage of a simulated cluster: the real file storage on a simulated, unreliable disk.

_DELAYS_S = (0.0002, 0.0005, 0.001, 0.003)
#: Probability that a slow read fails after it has written part of its destination.
_SLOW_FAIL = 0.5


class Pace:
    """Delays of one process's operations on the storage."""

    def __init__(self, threads: SimThreads, faults: StorageFaults) -> None:
        self.world = threads.world
        self.faults = faults
        self._threads = threads

    def take_time(self, what: str) -> bool:
        """Wait; return whether the operation was slow."""
        self.world.maybe_fault()
        delay_s = self.world.pick(_DELAYS_S)
        if self.faults.slow and self.world.chance.random() < self.faults.slow:
            delay_s = self.world.chance.uniform(*self.faults.slow_s)
            self.faults.injected += 1
            self.world.note(self._threads.process.name, f"{what} takes {delay_s:.3f} s")
        self._threads.sleep(delay_s)
        return delay_s >= self.faults.slow_s[0]

    def happens(self, how_often: float, what: str) -> bool:
        """Whether a fault with this probability occurs now."""
        if not how_often or self.world.chance.random() >= how_often:
            return False
        self.faults.injected += 1
        self.world.note(self._threads.process.name, what)
        return True


class SimStorage:
    """One engine's access to the shared storage: ``storage.contract.BlockStorage``."""

    def __init__(
        self,
        inner: PosixStorage,
        disk: Disk,
        pace: Pace,
        reading: Callable[[memoryview], AbstractContextManager[None]],
    ) -> None:
        self.geometry = inner.geometry
        self.parallel_lookups = 2
        self._inner = inner
        self._disk = disk
        self._pace = pace
        self._reading = reading

    def is_stored(self, key: BlockKey) -> bool:
        """Look up a block after a delay."""
        self._pace.take_time("look-up")
        return self._inner.is_stored(key)

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read a block after a delay; the read may fail or the block may be corrupted."""
        with self._reading(destination):
            slow = self._pace.take_time("read")
            if slow and self._pace.happens(_SLOW_FAIL, "read fails"):
                destination[: len(destination) // 2] = bytes(len(destination) // 2)
                return ReadOutcome(0, "read error: injected")
            corrupted = f"block {key.hex()[:8]} is corrupted"
            if self._pace.happens(self._pace.faults.corrupting, corrupted):
                self._corrupt(key)
            return self._inner.read(key, destination, whole=whole)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        """Write one block after the other, each after a delay."""
        outcome = WriteOutcome()
        for key, source, own in zip(keys, sources, run_origins(keys, origin), strict=True):
            self._pace.take_time("write")
            outcome = outcome.plus(self._inner.write([key], [source], own))
        return outcome

    def used(self, key: BlockKey) -> None:
        """See ``BlockStorage``; nothing to record here."""

    def close(self) -> None:
        """Close the files."""
        self._inner.close()

    def _corrupt(self, key: BlockKey) -> None:
        file = self._disk.files.get(str(self._inner.block_path(key)))
        if file is not None:
            file.corrupted = True
            file.content[self._pace.world.chance.randrange(HEADER_BYTES, len(file.content))] ^= 1


class SimTree:
    """One engine's access to other objects: ``storage.objects.ObjectTree`` with delays."""

    def __init__(self, inner: ObjectTree, pace: Pace) -> None:
        self._inner = inner
        self._pace = pace

    def create(self, name: str, content: bytes) -> bool:
        """Create an object after a delay."""
        self._pace.take_time("creating an object")
        return self._inner.create(name, content)

    def replace(self, name: str, content: bytes) -> None:
        """Replace an object after a delay."""
        self._pace.take_time("replacing an object")
        self._inner.replace(name, content)

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Return an object without a delay."""
        return self._inner.get(name, max_bytes)

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects one after the other, each after a delay."""
        removed = 0
        for name in names:
            self._pace.take_time("removing an object")
            removed += self._inner.remove([name])
        return removed

    def folders(self, prefix: str) -> list[str]:
        """List folders."""
        return self._inner.folders(prefix)

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """List objects."""
        return self._inner.objects(prefix)


# ----------------------------------------------------------------------------------------- control
# The engines' ends of simulated control connections.


class EngineConnection(Connection):
    """An engine's end: ``engine.control.link.RouterConnection``."""

    router = ADDRESS

    def __init__(self, network: Network, threads: SimThreads) -> None:
        self._threads = threads
        self._inbox: deque[bytes] = deque()
        self._waiting: list[Waiting] = []
        self._woken = False
        self._reconnected = False
        super().__init__(network, threads.process)

    def send(self, frame: bytes) -> bool:
        """Send a frame, once connected."""
        self._send(frame)
        return True

    def receive(self) -> bytes | None:
        """Return the oldest frame that has arrived, None if there is none."""
        return self._inbox.popleft() if self._inbox else None

    def wait(self, timeout_s: float) -> bool:
        """Wait for a frame, a wake-up or a reconnect; return whether it has reconnected."""
        if not self._inbox and not self._woken:
            self._threads.wait(self._waiting, timeout_s)
        reconnected, self._reconnected = self._reconnected, False
        self._woken = False
        return reconnected

    def wake(self) -> None:
        """Wake the waiting thread."""
        self._woken = True
        while self._waiting:
            self._waiting.pop(0).wake()

    def reconnect(self) -> None:
        """Reset the connection and connect again."""
        self.reset()

    def _on_frame(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self.wake()

    def _connected(self) -> None:
        self._reconnected = True
        self.wake()

    def _decoded(self, frame: bytes, *, to_router: bool) -> object:
        return decode_engine_message(frame) if to_router else decode_router_message(frame)


# ------------------------------------------------------------------------------------ engine files


class EngineFiles:
    """One engine's access to the storage: the real file storage on the simulated disk.

    While a block is read, the context ``reading`` of the memory that it is read into is entered.
    """

    def __init__(
        self,
        shared: ClusterResources,
        threads: SimThreads,
        known: HostProcess,
        reading: Callable[[memoryview], AbstractContextManager[None]],
    ) -> None:
        runs = functools.partial(shared.runs, known.host)
        context = (threads, shared.storage_faults, known, runs)
        self._shared = shared
        self._block_calls = SimCalls(shared.disk, *context)
        self._object_calls = CheckedCalls(shared.janitor_checker, shared.disk, *context)
        self._dram_calls = SimCalls(shared.node_dram[known.host], *context)
        self._pace = Pace(threads, shared.storage_faults)
        self._reading = reading

    @property
    def open(self) -> int:
        """Number of open files."""
        calls = self._block_calls, self._object_calls, self._dram_calls
        return sum(each.descriptors for each in calls)

    def half_written(self, writer: str) -> list[str]:
        """Return one process's temporary files, without those that a fault has left there."""
        return self._shared.disk.temporaries_of(writer) + self._dram_calls.disk.temporaries_of(
            writer
        )

    def open_storage(self, settings: EngineSettings, namespace: StoreNamespace) -> BlockStorage:
        """Open the storage; raises ``ConfigError`` if a system call fails."""
        self._shared.namespaces[namespace] = None
        inner = PosixStorage(ROOT, namespace, direct_io=False, calls=self._block_calls)
        return SimStorage(inner, self._shared.disk, self._pace, self._reading)

    def open_node_dram(
        self, settings: EngineSettings, namespace: StoreNamespace
    ) -> NodeDram | None:
        """Open the DRAM that engines of the machine share; None without shared DRAM."""
        world = self._dram_calls.world
        return open_node_dram(settings, namespace, self._dram_calls, lambda: world.now_s)

    def open_tree(self, settings: EngineSettings) -> ObjectTree:
        """Open the objects that are stored with the blocks."""
        return SimTree(PosixObjects(ROOT, self._object_calls), self._pace)


#: Idle ranks end within this time, or are killed.
_RANKS_END_S = 10.0
_POLL_S = 0.05


class SimEngine:
    """An engine from the start of its process to its end; ``name`` has the number of the start.

    Its first rank runs in ``process``; the other ranks are ``followers``.  ``unit`` has the
    networks of its scheduler.  ``start_failed`` is called if it has ended because it cannot use its
    storage.
    """

    def __init__(
        self,
        shared: ClusterResources,
        unit: UnitNetworks,
        settings: EmulatedSettings,
        start: int,
        host: str,
        dp: GroupRank | None,
        start_failed: Callable[[], None],
    ) -> None:
        self.settings = settings
        self._start_failed = start_failed
        self._dp = dp
        self.shared, self._control = shared, unit.control
        self.engine_id = settings.engine.engine_id
        self.name = f"{self.engine_id}#{start}"
        self.host = host
        self.process, self.known = shared.process(self.name, host)
        self.threads = SimThreads(self.process)
        self.transport: SimTransport | None = None
        self.plane: DataPlane | None = None
        self._engine: PrefillEngine | DecodeEngine | None = None
        #: Takes requests; None before the engine has started.
        self.admission: RequestSubmitter | None = None
        self._ending = False
        self._leaving = False
        #: Data planes of this process so far, each with other weights.
        self._planes = 1
        #: The calls that its HTTP server has, and when it has last sent anything of each.
        self._calls: dict[str, float | None] = {}
        self._hbm_owners: dict[int, str] = {}
        #: Buffers and slots that a read from storage writes to; the buffer may be one of a former
        #: data plane, which a slow read outlives.
        self._read_into: set[tuple[BlockBuffer, int]] = set()
        #: Slots that a fetch writes to: its name, and the slot of the other engine.
        self._fetched_into: dict[int, tuple[str, int]] = {}
        #: Requests of which a fetch has read slots that were not theirs any more.
        self._wrongly_fetched: set[str] = set()
        self._files = EngineFiles(shared, self.threads, self.known, self._reading)
        shared.world.note(self.name, "starts")
        others = range(1, settings.tensor_parallel_size)
        self.followers = tuple(SimFollower(self, rank) for rank in others)
        #: Its server of legs, if a proxy sends them.
        self.legs = SimLegs(self, unit.links) if settings.engine.two_leg_scheduler else None
        self.threads.start("main", self._main)

    # ------------------------------------------------------------------ start and end

    def _main(self) -> None:
        self._serve_weights(None)

    def _serve_weights(self, former_epoch: str | None) -> None:
        """Open a data plane with the present weights, and join."""
        surroundings = Surroundings(
            threads=self.threads,
            open_storage=self._files.open_storage,
            open_tree=self._files.open_tree,
            open_node_dram=self._files.open_node_dram,
            now_s=lambda: self.shared.world.now_s,
            open_transport=self._open_transport,
            connect=self._connect,
            listens=lambda url: self.serves,
            new_epoch=lambda: self.name if self._planes == 1 else f"{self.name}.{self._planes}",
            this_process=lambda: self.shared.identity(self.known),
            has_exited=functools.partial(self.shared.has_exited, self.host),
            end_process=self._exit,
        )
        try:
            plane = DataPlane(self.settings, surroundings, self._lead(), former_epoch)
        except EngineLostError as error:
            self.shared.world.note(self.name, f"ends: {error}")
            self.kill()
            return
        except (ConfigError, StorageError) as error:
            self.shared.world.note(self.name, f"cannot start: {error}")
            self.kill()
            self._start_failed()
            return
        self._watch_hbm(plane)
        self._watch_copies(plane)
        self._watch_fetches(plane)
        self._watch_calls(plane)
        self._watch_thirds(plane)
        self.plane = plane
        prefills = self.settings.engine.role is Role.PREFILL
        self._engine = PrefillEngine(plane) if prefills else DecodeEngine(plane)
        self._engine.start()
        self.admission = RequestSubmitter(plane, self._engine)
        if self.legs is not None:
            self.legs.start()
        plane.membership.join(self.settings.engine.api_url, dp=self._dp)

    def change_weights(self, weights: str) -> None:
        """Take other weights, as a trainer asks: end all requests, leave, and join again."""
        if self.serves and not self._ending:
            self._leaving = True
            self._on_thread("weights", lambda: self._change_weights(weights))

    def _change_weights(self, weights: str) -> None:
        assert self._engine is not None
        assert self.plane is not None
        self.shared.world.note(self.name, f"gets weights {weights}")
        self.shared.http.server_died(self)
        self._engine.close()
        if not self.plane.close("its weights change"):
            self.shared.world.note(self.name, "ends: transfers of its former weights are not over")
            self.kill()
            self._start_failed()
            return
        former_epoch = self.plane.membership.epoch
        self._hbm_owners.clear()
        self.settings = msgspec.structs.replace(self.settings, weights=weights)
        self._planes += 1
        self._serve_weights(former_epoch)
        self._leaving = False

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
        if self._engine is None or self._leaving:
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
        if self.legs is not None:
            self.legs.stop()
        self._engine.close()
        self.plane.close()
        limit = TimeLimit(self.threads, _RANKS_END_S)
        while any(f.process.alive for f in self.followers) and limit.left_s():
            self.threads.sleep(_POLL_S)
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
        if self.legs is not None:
            self.shared.http.caller_died(self.legs.loop)
        if self.transport is not None:
            self.shared.fabric.kill(self.transport.agent)
        for follower in self.followers:
            follower.leader_died()

    # ------------------------------------------------------------------ HTTP server

    @property
    def changes_weights(self) -> bool:
        """Whether it has begun to take other weights and has not joined again."""
        return self.process.alive and self._leaving and not self._ending

    @property
    def serves(self) -> bool:
        """Whether its server accepts connections."""
        return self.process.alive and self.admission is not None and not self._leaving

    def serve(self, body: bytes, call: Call) -> None:
        """Accept a request on a thread of its own, or a leg in the loop of the server of legs."""
        if (legs := self.legs) is not None and call.path == PATH:
            self.process.step(lambda: legs.serve(body, call))
            return
        self._on_thread("api", lambda: self._accept(body, call))

    def ask(self, reply: Callable[[Mapping[str, float | None]], None]) -> None:
        """Reply with the open calls, once the process runs."""

        def answer() -> None:
            now_s = self.shared.world.now_s
            reply({n: None if s is None else now_s - s for n, s in self._calls.items()})

        self.process.step(answer)

    def aborted(self, abort: Callable[[], None]) -> None:
        """The client has disconnected."""
        self._on_thread("abort", abort)

    def _on_thread(self, name: str, work: Callable[[], None]) -> None:
        self.process.step(lambda: self.threads.start(name, work))

    def _accept(self, body: bytes, call: Call) -> None:
        assert self.admission is not None
        try:
            request = decode_body(body, GenerateRequest[Sampling])
            transfer = self.admission.transfer(request)
            prefix = self.admission.prefix(request, transfer)
        except DualPathError as error:
            self.shared.world.note(self.name, f"refuses {request.request_id}: {error}")
            call.deliver(error)
            return
        name = request.request_id
        self._calls[name] = None

        def deliver(answer: Answer) -> None:
            call.deliver(answer)
            if answer.finish_reason is None and answer.error is None:
                self._calls[name] = self.shared.world.now_s
            else:
                self._calls.pop(name, None)

        abort = self.admission.submit(request, transfer, prefix, deliver)

        def aborted() -> None:
            self._calls.pop(name, None)
            abort()

        call.begun(aborted)

    # ------------------------------------------------------------------ surroundings

    def _open_transport(self, agent: str, settings: EngineSettings, device: Device) -> Transport:
        shared = self.shared
        self.transport = SimTransport(
            *(agent, shared.fabric, self.process, shared.transfer_faults, shared.owner_of),
            self._poll_transfers,
        )
        shared.agents[agent] = self
        return self.transport

    def _poll_transfers(self) -> None:
        """Poll transfers when one has ended, instead of at short intervals."""
        if self.plane is not None:
            self.plane.manager.wake_pump()

    def _connect(self, settings: EngineSettings) -> RouterConnection:
        return EngineConnection(self._control, self.threads)

    # ------------------------------------------------------------------ owners of memory

    def owner_of(self, region: str, piece: int) -> str | None:
        """Return the request for which bytes may arrive in a piece of a region, None if for none.

        A slot that a read from storage writes to has no owner.  One that a fetch writes to is the
        fetch's while it is pinned, also after the end of its request.
        """
        if self.plane is None:
            return None
        manager = self.plane.manager
        memory = region.partition(".")[0]
        if memory == BUFFER_REGION:
            fetch, _ = self._fetched_into.get(piece, ("", 0))
            if fetch and manager.buffer.is_pinned(piece):
                return fetch
            reading = (manager.buffer, piece) in self._read_into
            return None if reading else manager.buffer.owner(piece)
        if memory == STAGING_REGION:
            return "staging" if manager.staging.is_leased(piece) else None
        free = piece in self.plane.hbm._free
        return None if free else self._hbm_owners.get(piece)

    @contextmanager
    def _reading(self, destination: memoryview) -> Iterator[None]:
        """A block is read from storage: its slot must be pinned until the read is over."""
        if self.plane is None or not self.process.alive:
            yield
            return
        buffer = self.plane.manager.buffer
        slot = buffer.slot_at(address_of(destination))
        self._read_into.add((buffer, slot))
        try:
            yield
        finally:
            self._read_into.discard((buffer, slot))
            if self.process.alive and not buffer.is_pinned(slot):
                self.shared.world.problem(
                    f"{self.name}: a read writes to slot {slot}, which is not pinned"
                )

    def _watch_hbm(self, plane: DataPlane) -> None:
        allocate, numbers = plane.hbm.allocate, itertools.count()

        def noted_allocate(blocks: int) -> tuple[int, ...] | None:
            taken = allocate(blocks)
            lease = f"hbm lease {next(numbers)}"
            self._hbm_owners.update(dict.fromkeys(taken or (), lease))
            return taken

        plane.hbm.allocate = noted_allocate  # type: ignore[method-assign]
        hand_over = plane.hbm.hand_over

        def noted_hand_over(request_id: str) -> None:
            """The load is over: bytes of the PE that arrive from now on are late."""
            for block in plane.hbm._reserved[request_id]:
                self._hbm_owners[block] += ", all of its prompt loaded"
            hand_over(request_id)

        plane.hbm.hand_over = noted_hand_over  # type: ignore[method-assign]

    def _watch_copies(self, plane: DataPlane) -> None:
        """Check that requests are copied into HBM only from slots that they hold or have pinned."""
        copier, buffer = plane.manager._rank.copier, plane.manager.buffer
        copy = copier.into_hbm
        #: Slots of a request when it has pinned some: a release after that leaves them pinned.
        held_at_pin: dict[str, set[int]] = {}

        def noting(
            pin: Callable[[str, tuple[int, ...]], bool],
        ) -> Callable[[str, tuple[int, ...]], bool]:
            def noted(request_id: str, slots: tuple[int, ...]) -> bool:
                holds = {*buffer._pool.slots_of(request_id)}
                if is_pinned := pin(request_id, slots):
                    held_at_pin[request_id] = holds
                return is_pinned

            return noted

        for name in ("pin_lease", "pin_some"):
            setattr(buffer, name, noting(getattr(buffer, name)))

        def checked(
            request_id: str,
            steps: Sequence[Step],
            hbm_blocks: Sequence[HbmBlock],
            done: Callable[[str | None], None],
        ) -> None:
            held = {*buffer.slots_of(request_id)} | held_at_pin.get(request_id, set())
            if others := {slot for step in steps for slot in step.slots} - held:
                self.shared.world.problem(
                    f"{self.name}: {request_id} is copied from slots {sorted(others)}, which it "
                    "does not hold"
                )
            if early := [s for step in steps for s in step.slots if s in self._fetched_into]:
                self.shared.world.problem(
                    f"{self.name}: {request_id} is copied from slots {early}, into which its KV is "
                    "still fetched"
                )
            if request_id in self._wrongly_fetched:
                self.shared.world.problem(
                    f"{self.name}: {request_id} decodes KV that was fetched from slots of others"
                )
            copy(request_id, steps, hbm_blocks, done)

        copier.into_hbm = checked  # type: ignore[method-assign]

    def _watch_fetches(self, plane: DataPlane) -> None:
        """Note which slots fetches write to, and whether the slots that they read are theirs.

        A fetch may read slots of others if its request is over: then nothing of it is used.
        """
        fetches = plane.manager._fetches
        post, step_over = fetches._post, fetches._step_over

        def posted(fetching: _Fetching, step: Step, source_slot: int) -> None:
            (slot,) = step.slots
            self._fetched_into[slot] = f"fetch of {fetching.grant.request_id}", source_slot
            post(fetching, step, source_slot)

        def ended(
            fetching: _Fetching, step: Step, start_ns: int, error: str | None, *, settled: bool
        ) -> None:
            request_id, (slot,) = fetching.grant.request_id, step.slots
            _, source_slot = self._fetched_into.pop(slot)
            source = self.shared.agents[fetching.agent].plane
            assert source is not None, "an agent belongs to a data plane"
            # A slot that is the request's now was its own all the time.
            if source_slot not in source.manager.buffer._pool.slots_of(request_id):
                self._wrongly_fetched.add(request_id)
            step_over(fetching, step, start_ns, error, settled=settled)

        fetches._post = posted  # type: ignore[method-assign]
        fetches._step_over = ended  # type: ignore[method-assign]

    def _watch_thirds(self, plane: DataPlane) -> None:
        """Report what this engine does as a third DE, or with third DEs, to ``ThirdEngines``.

        It takes no lock, at which another thread could run: other runs go on as before.
        """
        thirds, manager, engine_id = self.shared.thirds, plane.manager, self.engine_id
        verify, reserve, free = plane.verify_hbm, manager._reserve_third, manager._free
        begin = manager.passes.begin

        def noted_reserve(message: ReserveThird) -> None:
            reserve(message)
            if not manager.active.is_released(message.request_id):
                thirds.granted(engine_id, message.request_id)

        def noted_free(release: Release) -> None:
            name = release.request_id
            if manager.settings.role is Role.DECODE and thirds.serve(name):
                holds = bool(manager.buffer._pool.slots_of(name))
                loads = any(engine.has_in_pass(name) for engine in self.shared.agents.values())
                thirds.released(engine_id, name, holds=holds, loads=loads)
            free(release)

        def noted_begin(
            chunks: Sequence[PrefillChunk],
            layers: LayerSettings,
            before: LayerStream | None = None,
        ) -> LayerStream:
            for chunk in chunks:
                for third in chunk.transfer.thirds:
                    thirds.loads(third.engine_id, chunk.transfer.request_id)
            return begin(chunks, layers, before)

        def noted_verify(
            place: CheckedAt,
            request_id: str,
            blocks: Sequence[int],
            seeds: Seeds,
            layers: Iterable[int],
            next_token: int,
        ) -> str | None:
            found = verify(place, request_id, blocks, seeds, layers, next_token)
            return thirds.compared(request_id, place, found)

        manager._reserve_third = noted_reserve  # type: ignore[method-assign]
        manager._free = noted_free  # type: ignore[method-assign, assignment]
        manager.passes.begin = noted_begin  # type: ignore[method-assign]
        plane.verify_hbm = noted_verify  # type: ignore[method-assign]

    def has_in_pass(self, request_id: str) -> bool:
        """Whether it is a PE with a request in a forward pass that was not released."""
        if self.plane is None or not self.process.alive:
            return False
        request = self.plane.manager.active._active.get(request_id)
        prefills = self.settings.engine.role is Role.PREFILL
        return prefills and request is not None and request.streams > 0 and request.release is None

    def _watch_calls(self, plane: DataPlane) -> None:
        """Check that a call is served in the session of its assignment, and not after its release.

        What a PE writes otherwise may reach slots that have other owners by then.
        """
        manager, active = plane.manager, plane.manager.active
        free, add_called, begin = manager._free, active.add_called, active.begin_session
        #: Names are those of this session: the next router may use a name again.
        released: set[str] = set()
        former: set[str] = set()

        def begun(session: str) -> None:
            released.clear()
            former.clear()
            former.update(active.unsettled())
            begin(session)

        def noted_free(release: Release) -> None:
            (former.discard if release.request_id in former else released.add)(release.request_id)
            free(release)

        def checked(request_id: str, assignment: CallAssignment, now_ns: int) -> None:
            add_called(request_id, assignment, now_ns)
            if not active.is_active(request_id):
                return
            if request_id in released:
                self.shared.world.problem(f"{self.name} serves {request_id} after its release")
            if assignment.session != active._session:
                self.shared.world.problem(
                    f"{self.name} serves {request_id}, which was assigned in a former session"
                )

        manager._free = noted_free  # type: ignore[method-assign, assignment]
        active.begin_session = begun  # type: ignore[method-assign]
        active.add_called = checked  # type: ignore[method-assign]

    def cached_blocks(self) -> Iterator[tuple[BlockKey, bytes]]:
        """Yield the keys and contents of the blocks that its buffer caches."""
        if self.plane is not None and self.process.alive:
            buffer = self.plane.manager.buffer
            for slot, key in buffer.cached_blocks():
                yield key, bytes(buffer.view(slot))

    @property
    def janitor(self) -> Janitor | None:
        """The storage's janitor if this engine is it, or believes so."""
        maintenance = None if self.plane is None else self.plane.membership._maintenance
        janitor = None if maintenance is None else maintenance.maintenance._janitor
        return None if janitor is None or janitor.index is None else janitor

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what the engine still holds without requests."""
        if self.plane is None:
            return [f"{self.name} has not come up"]
        manager = self.plane.manager
        report = manager.report()
        # Where a death cannot be proven, slots and HBM stay in quarantine, and these alone.
        unproven = report.load.quarantined_buffer_tokens if self.shared.unproven else 0
        unproven_hbm = report.load.quarantined_hbm_tokens if self.shared.unproven else 0
        transports = (self.transport, *(follower.transport for follower in self.followers))
        counts = {
            "requests": (report.load.unfinished_requests, 0),
            "tokens to read": (report.load.read_queue_tokens, 0),
            "free buffer": (report.load.free_buffer_tokens + unproven, manager.buffer_tokens),
            "free HBM": (self.plane.hbm.free_tokens + unproven_hbm, manager.hbm_tokens),
            "blocks that leave HBM": (manager._generated._left, 0),
            "free staging": (manager.staging.free, manager.staging.capacity),
            "transfers": (sum(t.unfinished for t in transports if t is not None), 0),
            "open files": (self._files.open, 0),
            "half-written files": (len(self._files.half_written(self.name)), 0),
            "retained blocks": (manager.buffer.retained, 0),
        }
        legs = [] if self.legs is None else self.legs.held_when_idle()
        return legs + [
            f"{self.name}: {what} {found}, not {right}"
            for what, (found, right) in counts.items()
            if found != right
        ]
