"""One run: a cluster, its agents, the faults of a seed, and the invariants that are checked.

* Every request ends exactly once, within its deadline, with the right tokens; or because its client
  disconnected, or the router died, which the client sees.  ``max_attempts`` is above the number of
  faults, so no request may end with an error, with two exceptions: a transfer hangs longer than all
  time-outs and there is no other pair of engines; or the router has lost its leadership.  Both
  errors state this reason.
* A scheduler that starts or places requests is the only leader, by the clocks of all schedulers and
  by the store of leases.
* No byte arrives in memory that belongs to another owner.
* No token, no stored block and no block cached in a buffer is wrong.
* The invariants of ``storage_watch`` and ``afterwards`` hold.
* After the faults the cluster becomes idle: no request, slot, block of HBM, transfer or call is
  held; slots of cached blocks are free.
"""

import functools
import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import msgspec

from dualpath.core.blocks import BlockKey
from dualpath.core.errors import EngineLostError
from dualpath.engine import follower, link, pump, router_session, storage_keeping
from dualpath.laboratory.chaos.simulation.adversary import (
    FAULT_KINDS,
    Adversary,
    ClusterFeature,
    FaultKind,
)
from dualpath.laboratory.chaos.simulation.afterwards import storage_problems
from dualpath.laboratory.chaos.simulation.clients import Clients, SimRequest
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.laboratory.chaos.simulation.cluster_settings import ONE_RANK
from dualpath.laboratory.chaos.simulation.drawn_cluster import drawn_settings
from dualpath.laboratory.chaos.simulation.lease_kinds import LEASE_FAULT_KINDS
from dualpath.laboratory.chaos.simulation.operator import pin_stored_block
from dualpath.laboratory.chaos.simulation.role_keeper import RoleChanges
from dualpath.laboratory.chaos.simulation.world import World
from dualpath.laboratory.emulated.kv_bytes import KvFunction
from dualpath.ops.launch import role_wishes
from dualpath.router.links import door
from dualpath.storage import janitor, lease, survey

#: A real pump polls a thousand times a second; here it is woken when a transfer ends.
_POLL_S = 1.0
#: How often a control link and a follower rank check their timers, and how often a link sends a
#: heartbeat: several times within ``engine_timeout_s``.
_TICK_S = 0.15
_HEARTBEAT_S = 0.75
#: Delay of acknowledgements to a front end.
_ACKNOWLEDGE_S = 0.3
#: How often the supervisor of engines polls requested roles.
_ROLE_POLL_S = 0.2
#: The storage janitor's poll interval, its lease without renewal, and how often it saves its index:
#: shorter than in production, as a run is short.
_KEEPER_S = 0.25
_LEASE_S = 1.5
_SAVE_S = 1.0
#: When a chain is pinned, if one is.
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
        mock.patch.object(link, "TICK_S", _TICK_S),
        mock.patch.object(router_session, "HEARTBEAT_S", _HEARTBEAT_S),
        mock.patch.object(door, "ACKNOWLEDGE_S", _ACKNOWLEDGE_S),
        mock.patch.object(role_wishes, "INTERVAL_S", _ROLE_POLL_S),
        mock.patch.object(follower, "_POLL_S", _TICK_S),
        mock.patch.multiple(storage_keeping, BEAT_S=_KEEPER_S, LEASE_S=_LEASE_S),
        mock.patch.object(lease, "BEAT_S", _KEEPER_S),
        mock.patch.object(janitor, "SAVE_S", _SAVE_S),
        mock.patch.object(survey, "SETTLED_S", _SAVE_S),
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
        # All objects of the run are in the youngest generation, as nothing was collected meanwhile,
        # and are unreachable: what survived this collection would stay for ever.
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
        self.faults = chance.choice((0, 1, 1, 1, 2, 3, 4, 6))
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
            world.note("world", f"{settings.front_ends} front ends")
        if settings.standby.leased:
            world.note("world", f"the leader is elected by {settings.standby}")
        if settings.quota_blocks:
            world.note("world", f"a quota of {settings.quota_blocks} blocks")
        if settings.node_dram_blocks:
            world.note("world", f"{settings.node_dram_blocks} blocks of DRAM for each machine")
        self.world = world
        self.cluster = Cluster(world, settings)
        if settings.quota_blocks and world.seed % 2:
            world.after(
                chance.uniform(*_PINNED_S), functools.partial(pin_stored_block, self.cluster)
            )
        self.role_changes = RoleChanges(self.cluster, settings.role_switches)
        self.clients = Clients(
            world, self.cluster, chance.choice(settings.agents), chance.choice(settings.turns)
        )
        features = {ClusterFeature.RANKS} if settings.tensor_parallel != ONE_RANK else set()
        features |= {ClusterFeature.FRONT_ENDS} if settings.front_ends else set()
        features |= {ClusterFeature.LEASE} if settings.standby.leased else set()
        possible = [kind for kind in kinds if kind.needs in (None, *features)]
        self.adversary = Adversary(world, self.cluster, self.clients, self.faults, possible)

    def execute(self, story: bool) -> Outcome:
        world, clients = self.world, self.clients
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
        return self.clients.done and self.adversary.done and self.role_changes.done

    def _wait_idle(self) -> None:
        """Wait until the cluster holds nothing."""
        world = self.world
        end_s = world.now_s + _REST_S
        held = self.cluster.held_when_idle()
        while held and world.now_s < end_s:
            world.run(lambda: False, 0.25)
            held = self.cluster.held_when_idle()
        for what in held:
            world.problem(f"held when idle: {what}")

    def _check_nothing_failed(self) -> None:
        """Without faults no attempt fails, and requested role changes complete."""
        for endpoint in self.cluster.endpoints:
            for record in endpoint.service.records:
                for failure in record.failures:
                    self.world.problem(f"an attempt at {record.request_id} failed: {failure}")
        for what in self.role_changes.failed():
            self.world.problem(f"a role switch failed: {what}")

    def _check_blocks(self) -> None:
        """Compare stored and cached blocks with the right ones; corrupted files may be bad."""
        right: dict[BlockKey, bytes] = {}
        settings = self.cluster.settings
        kv = KvFunction(settings.geometry, settings.tensor_parallel.kv_heads)
        for request in self.clients.requests:
            right.update(request.blocks(kv))
        for what in storage_problems(self.cluster, right):
            self.world.problem(what)
        for engine in self.cluster.engines.values():
            for key, payload in engine.kept():
                if right.get(key) != payload:
                    self.world.problem(f"{engine.name} caches a wrong block {key.hex()[:8]}")

    def _check(self, request: SimRequest) -> None:
        took_s = (request.ended_s or self.world.now_s) - request.sent_s
        if took_s > _REQUEST_DEADLINE_S + 1.0 and self.faults == 0:
            self.world.problem(f"{request.name} took {took_s:.1f} s")
        explained = request.must_retry or (
            self.adversary.transfer_hangs and isinstance(request.error, EngineLostError)
        )
        if request.outcome not in ("answered", "left", "reset", None) and not explained:
            self.world.problem(f"{request.name} failed: {request.outcome}")
