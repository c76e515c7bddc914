"""One run: a cluster, its agents, the faults of a seed, and the invariants that are checked.

* Every request ends exactly once, within its deadline, with the right tokens; or because its client
  disconnected, or the router died, which the client notices.  ``max_attempts`` is above the number
  of faults, so a request may end with an error in two cases only: a transfer hangs longer than all
  time-outs and there is no other pair of engines; or the router has lost its leadership.  Both
  errors name this reason.
* A scheduler that starts or places requests is the only leader, both by the clocks of all
  schedulers and by the store of leases.
* No byte arrives in memory of another owner.
* No token, no stored block and no block cached in a buffer is wrong.
* The invariants of ``ThirdEngines`` hold.
* The invariants of ``janitor_checks`` and ``storage_problems`` hold.
* Tenants share no block, not even for equal prompts, and only a tenant that has stored much is
  limited by its quota.
* After the faults the cluster becomes idle: no request, slot, block of HBM, transfer or call is
  held; slots of cached blocks are free.
"""

import functools
import gc
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from unittest import mock

import msgspec

from dualpath.core.blocks import BlockKey, BlockOrigin, tenant_tag
from dualpath.core.cluster import HostProcess
from dualpath.core.errors import EngineLostError
from dualpath.engine.control import link
from dualpath.engine.io import storage_maintenance
from dualpath.engine.passes import pump
from dualpath.engine.ranks import follower
from dualpath.launch import local_cluster
from dualpath.node.host_process import file_owner_host
from dualpath.router import two_legs
from dualpath.router.scheduler import front_end_server
from dualpath.storage import janitor
from dualpath.storage.block_file import HEADER_BYTES, FileOrder, defect_of_file
from dualpath.storage.janitor import LEASE_S, STALE_S, Janitor, pin_name, remove_stale_temporaries
from dualpath.storage.maintenance import StorageMaintenance
from dualpath.storage.objects import PosixObjects
from dualpath.storage.posix import PosixStorage, key_of, namespace_name
from dualpath.storage.quotas import Refusal, StorageLimits
from dualpath.storage.sealed_blocks import block_codec
from dualpath_lab.emulated.checkable_kv import KvFunction
from dualpath_lab.faults.simulation.adversary import (
    FAULT_KINDS,
    LEASE_FAULT_KINDS,
    Adversary,
    ClusterFeature,
    FaultKind,
)
from dualpath_lab.faults.simulation.clients import Clients, SimRequest
from dualpath_lab.faults.simulation.cluster import Cluster, RoleChanges
from dualpath_lab.faults.simulation.disk import NODE_DRAM_ROOT, ROOT, Disk, DiskCalls
from dualpath_lab.faults.simulation.engine import SimEngine
from dualpath_lab.faults.simulation.planted_bugs import planted
from dualpath_lab.faults.simulation.settings import (
    FAULT_COUNTS,
    ONE_RANK,
    SLOW_COSTS,
    drawn_settings,
)
from dualpath_lab.faults.simulation.tables import HISTORIES, QUARANTINES, naming
from dualpath_lab.faults.simulation.world import World

# ---------------------------------------------------------------------------------------- operator
# Actions of a human operator on the storage of a simulated cluster, without faults.


def fault_free_calls(cluster: Cluster, host: str, disk: Disk | None = None) -> DiskCalls:
    """Return system calls without faults on a machine; by default for the storage's disk."""
    known, shared = HostProcess(host=host, pid=0, start_ticks=0), cluster.shared
    runs = functools.partial(shared.runs, host)
    return DiskCalls(disk or shared.disk, shared.world, known, runs)


def pin_stored_block(cluster: Cluster) -> None:
    """Pin the chain of a random stored block, if there is one."""
    shared = cluster.shared
    stored = [path for path, _ in shared.disk.blocks()]
    if not stored:
        return
    path = shared.world.chance.choice(stored)
    key = key_of(path)
    assert key is not None
    name = pin_name("chain", path.split("/")[2], key.hex())
    PosixObjects(ROOT, fault_free_calls(cluster, "elsewhere")).create(name, b"")
    shared.janitor_checker.pin(key)
    shared.world.note("operator", f"pins the chain of block {key.hex()[:8]}")


# ------------------------------------------------------------------------------ storage invariants
# Checked when the simulated cluster is idle, and for a janitor that starts a day later.

#: Threads of an engine that may add a block to the shared DRAM: two that read, one that writes.
_ADDERS = 3


#: The right content of blocks, by the version of the weights and by key.
RightBlocks = Mapping[str, Mapping[BlockKey, bytes]]


def storage_problems(
    cluster: Cluster, right: RightBlocks, owners: Mapping[BlockKey, str]
) -> Iterator[str]:
    """Yield problems of the storage of an idle cluster.

    ``right`` has the payload of each block, ``owners`` its tenant's tag.
    """
    for disk in (cluster.shared.disk, *cluster.shared.node_dram.values()):
        yield from _wrong_blocks(cluster, disk, right)
    yield from _oversized_shared_dram(cluster)
    yield from _after_next_starts(cluster)
    yield from _a_day_later(cluster, owners)


def _wrong_blocks(cluster: Cluster, disk: Disk, every: RightBlocks) -> Iterator[str]:
    """Every block is complete and right, unless a fault has corrupted it."""
    for namespace in cluster.shared.namespaces:
        form, order = block_codec(namespace), FileOrder(namespace.geometry)
        right = every[namespace.weights or ""]
        for path, file in disk.blocks():
            key, content = key_of(path), bytes(file.content)
            if f"/{namespace_name(namespace)}/" not in path:
                continue
            assert key is not None
            if len(content) != HEADER_BYTES + namespace.geometry.full_block_bytes:
                yield f"stored block {key.hex()[:8]} is half-written: {len(content)} bytes"
            elif reason := defect_of_file(form, key, content):
                if not file.corrupted:
                    yield f"stored block {key.hex()[:8]} is bad: {reason}"
            elif key not in right:
                yield f"stored block {key.hex()[:8]} belongs to no prompt"
            elif b"".join(order.of(memoryview(right[key])).buffers) != content[HEADER_BYTES:]:
                yield f"stored block {key.hex()[:8]} is wrong"


def _oversized_shared_dram(cluster: Cluster) -> Iterator[str]:
    """Shared DRAM exceeds its size by at most one block per thread that adds blocks."""
    bound = cluster.settings.node_dram_blocks + _ADDERS * len(cluster.engines)
    for host, disk in cluster.shared.node_dram.items():
        if (blocks := sum(1 for _ in disk.blocks())) > bound:
            yield f"engines of {host} share {blocks} blocks of {cluster.settings.node_dram_blocks}"


def _after_next_starts(cluster: Cluster) -> Iterator[str]:
    """A starting engine removes temporary files of processes of its machine that have exited."""
    shared = cluster.shared
    for host in sorted({engine.host for engine in cluster.engines.values()}):
        for root, disk in ((ROOT, shared.disk), (NODE_DRAM_ROOT, shared.node_dram[host])):
            calls = fault_free_calls(cluster, host, disk)
            for namespace in shared.namespaces:
                PosixStorage(root, namespace, direct_io=False, calls=calls)
            for path, _ in disk.half_written():
                writer, _, _ = path.rpartition("/")[2].rpartition("-")
                pid = writer.rpartition("-")[2]
                if writer == f"{file_owner_host(calls)}-{pid}" and not calls.runs(int(pid)):
                    yield f"{path} was not removed although its writer has exited"


def _a_day_later(cluster: Cluster, owners: Mapping[BlockKey, str]) -> Iterator[str]:
    """A janitor removes temporary files, knows every block, and evicts all but pinned blocks."""
    disk, now_s = cluster.shared.disk, cluster.world.now_s + STALE_S + LEASE_S
    tree = PosixObjects(ROOT, fault_free_calls(cluster, "elsewhere"))
    remove_stale_temporaries(tree, now_s)
    yield from (f"{path} is never removed" for path, _ in disk.half_written())
    if not cluster.settings.has_quota:
        return
    pinned = cluster.shared.janitor_checker.pinned
    pinned_paths = {path for path, _ in disk.blocks() if key_of(path) in pinned}
    janitor = _janitor_of_the_next_day(tree, now_s)
    if janitor.index is None or janitor.survey is None:
        yield "no engine replaces a janitor that has exited"
        return
    janitor.survey.run_to_end()
    if janitor.index.blocks != (blocks := sum(1 for _ in disk.blocks())):
        yield f"the janitor knows {janitor.index.blocks} blocks of {blocks}"
    if (known := janitor.index.used_by_tenant()) != (used := _used_by_tenant(disk, owners)):
        yield f"the janitor charges {known} bytes to tenants, which have {used}"
    janitor.step()
    left = {path for path, _ in disk.blocks()}
    yield from (f"{path} was evicted although it is pinned" for path in pinned_paths - left)
    if not pinned:
        yield from (f"{path} was not evicted" for path in left)


def _used_by_tenant(disk: Disk, owners: Mapping[BlockKey, str]) -> dict[str, int]:
    """Return the bytes of all stored blocks by the tag of their tenant."""
    used: dict[str, int] = {}
    for path, file in disk.blocks():
        key = key_of(path)
        assert key is not None
        tag = owners.get(key, "")
        used[tag] = used.get(tag, 0) + len(file.content)
    return used


def _janitor_of_the_next_day(tree: PosixObjects, now_s: float) -> Janitor:
    """Return a janitor that has just acquired the lease, with a quota of one byte."""
    steady_s = now_s
    limits = StorageLimits(quota_bytes=1)
    janitor = Janitor(tree, "next-day", limits, lambda: now_s, lambda: steady_s)
    janitor.lease.acquire(steady_s)
    steady_s += 2 * LEASE_S
    janitor.step()
    return janitor


# ----------------------------------------------------------------------------------------- tenants


class Tenants:
    """What the requests of each tenant, named by its tag, may store, and what the quotas refuse."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.owners: dict[BlockKey, str] = {}
        #: How many times a write of each tenant was declined because of a quota.
        self.declined: Counter[str] = Counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count refused writes within ``with``."""
        admitted = StorageMaintenance.admitted

        def counted(
            maintenance: StorageMaintenance,
            keys: Sequence[BlockKey],
            origin: BlockOrigin,
            block_bytes: int,
        ) -> tuple[int, Refusal | None]:
            count, refusal = admitted(maintenance, keys, origin, block_bytes)
            if refusal is Refusal.QUOTA:
                self.declined[origin.tenant] += 1
            return count, refusal

        with mock.patch.object(StorageMaintenance, "admitted", counted):
            yield

    def problems(self, requests: Sequence[SimRequest]) -> Iterator[str]:
        """Yield violations after a run with these requests."""
        for request in requests:
            tag = tenant_tag(request.salt)
            for key in request.keys:
                if self.owners.setdefault(key, tag) != tag:
                    yield f"tenants share block {key.hex()[:8]} of {request.name}"
        yield from self._harmed()

    def _harmed(self) -> Iterator[str]:
        """A tenant with blocks of half its quota is neither refused nor evicted."""
        if not (quota := self._cluster.settings.tenant_quota_blocks):
            return
        # Engines count a block twice until the janitor knows that two of them have stored it.
        owned = Counter(self.owners.values())
        modest = {tag for tag, blocks in owned.items() if 2 * blocks <= quota}
        for tag in sorted(modest & self.declined.keys()):
            yield f"tenant {tag} has {owned[tag]} of {quota} blocks, but is refused"
        for key in self._cluster.shared.janitor_checker.evicted:
            if (tag := self.owners.get(key, "")) in modest:
                yield f"tenant {tag} has {owned[tag]} of {quota} blocks, but loses {key.hex()[:8]}"


# ----------------------------------------------------------------------------------------- trainer

#: Range of the times at which the weights change.
_UPDATED_S = (0.1, 3.0)
#: How often the trainer looks for engines with earlier weights, and how long an engine may be later
#: than the others.
_TRAINER_S = 0.25
_LATE_S = (0.0, 0.0, 0.05, 0.5)
#: An engine whose core does not take the weights within this time is restarted, and when.
_TRAINER_LIMIT_S = 8.0
_RESTARTED_S = 0.5


class Trainer:
    """Changes the weights of all engines at each of ``updates`` times, and those of late ones.

    An engine that was restarted has the weights of its model; it gets the latest ones as well.  One
    whose core hangs keeps its former weights and its session, so that no other engine may join with
    later ones: the trainer restarts it, as it does when a call of vLLM's does not return.
    """

    def __init__(self, world: World, cluster: Cluster, updates: int) -> None:
        self._world = world
        self._cluster = cluster
        self.versions = tuple(f"step-{number}-{number:016x}" for number in range(1, updates + 1))
        self._latest = 0
        #: When the present change of an engine began.
        self._began_s: dict[SimEngine, float] = {}
        for _ in self.versions:
            world.after(world.chance.uniform(*_UPDATED_S), self._update)
        if updates:
            self._tick()

    @property
    def done(self) -> bool:
        """Whether all engines have the last weights."""
        return not self.versions or (
            self._latest == len(self.versions)
            and all(
                engine.settings.weights == self.versions[-1] and engine.serves
                for engine in self._cluster.engines.values()
                if engine.process.alive
            )
        )

    def _update(self) -> None:
        self._latest += 1
        self._world.note("trainer", f"updates the weights to {self.versions[self._latest - 1]}")
        self._push()

    def _tick(self) -> None:
        if self._latest:
            self._restart_hanging()
            self._push()
        self._world.after(_TRAINER_S, self._tick)

    def _restart_hanging(self) -> None:
        self._began_s = {e: at for e, at in self._began_s.items() if e.changes_weights}
        for engine, began_s in list(self._began_s.items()):
            if self._world.now_s - began_s > _TRAINER_LIMIT_S:
                self._world.note("trainer", f"restarts {engine.name}, which takes no weights")
                del self._began_s[engine]
                self._cluster.restart_engine(engine.engine_id, _RESTARTED_S)

    def _push(self) -> None:
        version = self.versions[self._latest - 1]
        for _, engine in sorted(self._cluster.engines.items()):
            if engine.settings.weights != version:
                change = functools.partial(self._change, engine, version)
                self._world.after(self._world.chance.choice(_LATE_S), change)

    def _change(self, engine: SimEngine, version: str) -> None:
        latest = version == self.versions[self._latest - 1]
        if latest and engine.settings.weights != version:
            engine.change_weights(version)
            if engine.changes_weights:
                self._began_s.setdefault(engine, self._world.now_s)


#: Poll interval of the pump.  A real pump polls a thousand times a second; here it is woken when a
#: transfer ends.
_POLL_S = 1.0
#: How often a control link and a follower rank check their timers, and how often a link sends a
#: heartbeat: several times within ``engine_timeout_s``.
_TICK_S = 0.15
_HEARTBEAT_S = 0.75
#: Delay of acknowledgements to a front end.
_ACKNOWLEDGE_S = 0.3
#: What legs reserve HBM for: requests here generate fewer tokens, and memories are small.
_EXPECTED_NEW_TOKENS = 13
#: How often the supervisor of engines polls requested roles.
_ROLE_POLL_S = 0.2
#: The heartbeat interval of the storage janitor, the time after which its lease expires without
#: renewal, and the interval at which it saves its index: shorter than in production, as runs are.
_JANITOR_BEAT_S = 0.25
_LEASE_S = 1.5
_SAVE_S = 1.0
#: Range of the time at which a chain is pinned, in runs with a pin.
_PINNED_S = (0.5, 3.0)
#: Limit of the time that all agents together take.
_AGENTS_LIMIT_S = 900.0
#: After the last fault and the last request the cluster becomes idle within this time.
_REST_S = 90.0
_REQUEST_DEADLINE_S = 150.0
_ALL = (*FAULT_KINDS, *LEASE_FAULT_KINDS)


class Outcome(msgspec.Struct, frozen=True):
    """The result of a seed; ``digest`` is a hash of its log."""

    seed: int
    digest: str
    problems: tuple[str, ...]
    requests: int
    answered: int
    faults: int
    virtual_s: float
    events: int
    story: tuple[str, ...] = ()


def run_seed(seed: int, *, story: bool = False, kinds: Sequence[FaultKind] = _ALL) -> Outcome:
    """Run a seed, with faults of these kinds."""
    with _collected():
        return _run_seed(seed, story, kinds)


def _run_seed(seed: int, story: bool, kinds: Sequence[FaultKind]) -> Outcome:
    world = World(seed, verbose=story)
    with _logged(world), _slow_polls():
        try:
            return _Run(world, kinds).execute(story)
        finally:
            world.end()


@contextmanager
def _slow_polls() -> Iterator[None]:
    with (
        mock.patch.multiple(pump, _FIRST_WAIT_S=_POLL_S, _LONGEST_WAIT_S=_POLL_S),
        mock.patch.multiple(link, TICK_S=_TICK_S, HEARTBEAT_S=_HEARTBEAT_S),
        mock.patch.object(front_end_server, "ACKNOWLEDGE_S", _ACKNOWLEDGE_S),
        mock.patch.object(local_cluster, "INTERVAL_S", _ROLE_POLL_S),
        mock.patch.object(two_legs, "EXPECTED_NEW_TOKENS", _EXPECTED_NEW_TOKENS),
        mock.patch.object(follower, "_POLL_S", _TICK_S),
        mock.patch.multiple(storage_maintenance, BEAT_S=_JANITOR_BEAT_S, LEASE_S=_LEASE_S),
        mock.patch.multiple(janitor, BEAT_S=_JANITOR_BEAT_S, SAVE_S=_SAVE_S, SETTLED_S=_SAVE_S),
    ):
        yield


@contextmanager
def _collected() -> Iterator[None]:
    """Collect all objects of a run; errors in destructors are not reported."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    gc.disable()
    try:
        yield
    finally:
        # All objects of the run are unreachable and in the youngest generation, as nothing was
        # collected meanwhile.  Objects that survived this collection would never be freed.
        gc.collect(0)
        gc.enable()
        sys.unraisablehook = hook


class _LogHandler(logging.Handler):
    """Adds log records of the system to the log of the run; a traceback is a problem."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.name.rpartition('.')[2]}: {record.getMessage()}"
        if record.exc_info:
            self._world.problem(f"{line}: {record.exc_info[1]!r}")
        else:
            self._world.note("log", line)


@contextmanager
def _logged(world: World) -> Iterator[None]:
    """Add log records of the system to the log of the run."""
    logger, handler = logging.getLogger("dualpath"), _LogHandler(world)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


class _Run:
    def __init__(self, world: World, kinds: Sequence[FaultKind]) -> None:
        chance = world.chance
        self.faults = chance.choice(FAULT_COUNTS)
        settings = drawn_settings(world, self.faults, _REQUEST_DEADLINE_S)
        world.note(
            "world",
            f"seed {world.seed}: {settings.mode}, {settings.prefill}x{settings.prefill_ranks} P "
            f"{settings.decode}x{settings.decode_ranks} D",
        )
        if settings.tensor_parallel != ONE_RANK:
            world.note("world", f"engines of {settings.tensor_parallel}")
        if settings.role_switches:
            world.note("world", f"{settings.role_switches} role changes are requested")
        if settings.front_ends:
            world.note("world", f"{settings.front_ends} front ends of {settings.units} units")
        if settings.standby.leased:
            world.note("world", f"the leader is elected by {settings.standby}")
        if settings.costs is SLOW_COSTS:
            world.note("world", "slow engines")
        if settings.quota_blocks:
            world.note("world", f"a quota of {settings.quota_blocks} blocks")
        if len(settings.salts) > 1:
            quota = settings.tenant_quota_blocks
            world.note("world", f"salts {settings.salts}, a quota of {quota} blocks for each")
        if append_tokens := settings.router.append_at_decode_tokens:
            world.note("world", f"decode engines append up to {append_tokens} tokens")
        if thirds := settings.router.third_engine_reads:
            world.note("world", f"up to {thirds} third decode engines serve a hit")
        if settings.proxies:
            world.note("world", f"{settings.proxies} proxies of others")
        if settings.moves:
            world.note("world", "KV is moved between decode engines")
        if settings.node_dram_blocks:
            world.note("world", f"{settings.node_dram_blocks} blocks of DRAM for each machine")
        if settings.weight_updates:
            world.note("world", f"a trainer changes the weights {settings.weight_updates} times")
        self.world = world
        self.cluster = Cluster(world, settings, self.faults)
        self.tenants = Tenants(self.cluster)
        if settings.quota_blocks and world.seed % 2:
            world.after(
                chance.uniform(*_PINNED_S), functools.partial(pin_stored_block, self.cluster)
            )
        self.role_changes = RoleChanges(self.cluster, settings.role_switches)
        self.trainer = Trainer(world, self.cluster, settings.weight_updates)
        self.clients = Clients(
            world, self.cluster, chance.choice(settings.agents), chance.choice(settings.turns)
        )
        features = {ClusterFeature.RANKS} if settings.tensor_parallel != ONE_RANK else set()
        features |= {ClusterFeature.FRONT_ENDS} if settings.front_ends else set()
        features |= {ClusterFeature.UNITS} if settings.units > 1 else set()
        features |= {ClusterFeature.LEASE} if settings.standby.leased else set()
        features |= {ClusterFeature.PROXIES} if settings.proxies else set()
        features |= {ClusterFeature.MOVES} if settings.moves else set()
        features |= {ClusterFeature.THIRDS} if settings.router.third_engine_reads else set()
        possible = [kind for kind in kinds if kind.needs in (None, *features)]
        self.adversary = Adversary(world, self.cluster, self.clients, self.faults, possible)

    def execute(self, story: bool) -> Outcome:
        world, clients = self.world, self.clients
        with self.tenants.watched():
            world.run(self._is_done, _AGENTS_LIMIT_S)
            for request in clients.in_flight():
                world.problem(f"{request.name} never ended")
            self._wait_idle()
        for request in clients.requests:
            self._check(request)
        if self.faults == 0:
            self._check_nothing_failed()
        self._check_blocks()
        return Outcome(
            seed=world.seed,
            digest=world.digest(),
            problems=tuple(world.problems),
            requests=len(clients.requests),
            answered=sum(a.outcome == "answered" for a in clients.requests),
            faults=self.faults,
            virtual_s=world.elapsed_s,
            events=world.events,
            story=tuple(world.lines()) if story or world.problems else (),
        )

    def _is_done(self) -> bool:
        ended = self.clients.done and self.adversary.done
        return ended and self.role_changes.done and self.trainer.done

    def _wait_idle(self) -> None:
        """Wait until the cluster holds nothing."""
        world = self.world
        end_s = world.now_s + _REST_S
        held = self._held()
        while held and world.now_s < end_s:
            world.run(lambda: False, 0.25)
            held = self._held()
        for what in held:
            world.problem(f"held when idle: {what}")

    def _held(self) -> list[str]:
        """Return what the cluster holds, or else which tables of processes name a request.

        The last messages about a request may still be queued when nothing else is held.
        """
        return self.cluster.held_when_idle() or list(self._naming())

    def _naming(self) -> Iterator[str]:
        """Yield the tables of live processes that name a request."""
        names = {request.name for request in self.clients.requests} | self.cluster.shared.leg_names
        engines = [engine for engine in self.cluster.engines.values() if engine.process.alive]
        roots: list[tuple[str, object]] = [
            (e.name, (e.plane, e._engine, e.legs and e.legs.server)) for e in engines
        ]
        roots += [(e.name, e.service) for e in self.cluster.endpoints]
        bounded = QUARANTINES if self.cluster.shared.unproven else frozenset()
        for process, root in roots:
            for what in naming(root, names, HISTORIES | bounded):
                yield f"{process}: {what} after all requests have ended"

    def _check_nothing_failed(self) -> None:
        """Without faults no attempt fails, and requested role changes complete.

        An update of the weights ends attempts.
        """
        if self.trainer.versions:
            return
        for endpoint in self.cluster.endpoints:
            for record in endpoint.service.records:
                for failure in record.failures:
                    self.world.problem(f"an attempt at {record.request_id} failed: {failure}")
        for proxy in self.cluster.proxies.all:
            for failure in proxy.failures:
                self.world.problem(f"a leg failed: {failure}")
        for what in self.role_changes.failed():
            self.world.problem(f"a role switch failed: {what}")

    def _check_blocks(self) -> None:
        """Compare stored and cached blocks with the right ones; corrupted files may be bad."""
        right: dict[str, dict[BlockKey, bytes]] = {}
        settings = self.cluster.settings
        kv = KvFunction(settings.geometry, settings.tensor_parallel.kv_heads)
        for weights in ("", *self.trainer.versions):
            right[weights] = {}
            for request in self.clients.requests:
                right[weights].update(request.blocks(kv, weights))
        for what in self.tenants.problems(self.clients.requests):
            self.world.problem(what)
        for what in storage_problems(self.cluster, right, self.tenants.owners):
            self.world.problem(what)
        for engine in self.cluster.engines.values():
            for key, payload in engine.cached_blocks():
                if right[engine.settings.weights].get(key) != payload:
                    self.world.problem(f"{engine.name} caches a wrong block {key.hex()[:8]}")

    def _check(self, request: SimRequest) -> None:
        took_s = (request.ended_s or self.world.now_s) - request.sent_s
        if took_s > _REQUEST_DEADLINE_S + 1.0 and self.faults == 0:
            self.world.problem(f"{request.name} took {took_s:.1f} s")
        fails = self.adversary.transfer_hangs or self.adversary.role_lost
        explained = request.must_retry or (fails and isinstance(request.error, EngineLostError))
        if request.outcome not in ("answered", "left", "reset", None) and not explained:
            self.world.problem(f"{request.name} failed: {request.outcome}")


# ---------------------------------------------------------------------------------------- campaign
# Runs of many seeds on several CPU cores.

#: Seeds per task of a worker process.
_CHUNK = 20


class Totals(msgspec.Struct):
    """Totals of the runs of seeds from ``first`` on; ``failing`` are the seeds with problems."""

    first: int = 0
    seeds: int = 0
    faults: int = 0
    requests: int = 0
    answered: int = 0
    virtual_s: float = 0.0
    events: int = 0
    failing: list[int] = []

    def add(self, outcome: Outcome) -> None:
        """Add one run."""
        self.seeds += 1
        self.faults += outcome.faults
        self.requests += outcome.requests
        self.answered += outcome.answered
        self.virtual_s += outcome.virtual_s
        self.events += outcome.events
        if outcome.problems:
            self.failing.append(outcome.seed)


def outcomes(first: int, count: int, jobs: int, bug: str = "") -> Iterator[Outcome]:
    """Run ``count`` seeds in ``jobs`` processes; yield their outcomes in order."""
    chunks = [
        (start, min(_CHUNK, first + count - start), bug)
        for start in range(first, first + count, _CHUNK)
    ]
    if jobs == 1:
        for chunk in chunks:
            yield from _run_chunk(chunk)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            for outcomes in pool.map(_run_chunk, chunks):
                yield from outcomes
        finally:
            pool.shutdown(cancel_futures=True)


def _run_chunk(chunk: tuple[int, int, str]) -> list[Outcome]:
    first, count, bug = chunk
    with planted(bug):
        return [run_seed(seed) for seed in range(first, first + count)]
