"""One run: a cluster, its agents, the faults of a seed, and what must be true afterwards.

* Every request ends exactly once, within its deadline, with the right tokens; or because its client
  left, or the router died, which the client notices.  With ``max_attempts`` above the faults of the
  run no request may end with an error, but where a transfer hangs for longer than anybody waits:
  without another pair of engines requests then fail, with an error that says so; and at a router
  whose turn is over, which says so, too.
* A scheduler that begins or places has the turn alone, by the clocks of all and the store's word.
* No byte arrives in memory that belongs to somebody else.
* No token is wrong, no stored block, and none that a buffer keeps.
* The storage is as ``storage_watch`` and ``afterwards`` say.
* Once the faults are over everything comes to rest: no request, slot, block of HBM, transfer or
  call is left; slots that keep blocks are free.
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
from dualpath.laboratory.chaos.simulation.adversary import KINDS, Adversary, Kind, Part
from dualpath.laboratory.chaos.simulation.afterwards import storage_problems
from dualpath.laboratory.chaos.simulation.clients import Asked, Clients
from dualpath.laboratory.chaos.simulation.cluster import Cluster
from dualpath.laboratory.chaos.simulation.cluster_settings import ONE_RANK
from dualpath.laboratory.chaos.simulation.drawn_cluster import drawn_settings
from dualpath.laboratory.chaos.simulation.lease_kinds import LEASE_KINDS
from dualpath.laboratory.chaos.simulation.operator import pin_some
from dualpath.laboratory.chaos.simulation.role_keeper import RoleKeeper
from dualpath.laboratory.chaos.simulation.world import World
from dualpath.laboratory.emulated.kv_bytes import KvFunction
from dualpath.ops.launch import role_wishes
from dualpath.router.links import door
from dualpath.storage import janitor, lease, survey

#: A pump that polls a thousand times a second has a whole core to itself, but not here, where it is
#: woken when a transfer ends.
_POLL_S = 1.0
#: How often a control link looks whether something is due, of which nobody tells it, as a rank that
#: follows does, and says that its engine lives: some times within ``engine_timeout_s``.
_TICK_S = 0.15
_HEARTBEAT_S = 0.75
#: How soon a front end learns that it was heard.
_ACKNOWLEDGE_S = 0.3
#: How often the supervisor of engines asks for wishes about their roles.
_WISHES_S = 0.2
#: Of the storage's janitor: how often it looks, how long one that says nothing stays it, how often
#: it saves its index.  A run is over before the times of live ones have passed.
_KEEPER_S = 0.25
_LEASE_S = 1.5
_SAVE_S = 1.0
#: When a chain is pinned, if it is.
_PINNED_S = (0.5, 3.0)
#: An agent's turns can take long one after the other.
_AGENTS_LIMIT_S = 900.0
#: After the last fault and the last request everything comes to rest within this time.
_REST_S = 90.0
_REQUEST_DEADLINE_S = 150.0
_ALL = (*KINDS, *LEASE_KINDS)


class Outcome(msgspec.Struct, frozen=True):
    """What came of a seed; ``digest`` names its story."""

    seed: int
    digest: str
    problems: tuple[str, ...]
    requests: int
    answered: int
    faults: int
    virtual_s: float
    events: int
    story: tuple[str, ...] = ()


def play(seed: int, *, story: bool = False, kinds: Sequence[Kind] = _ALL) -> Outcome:
    """Play the run of a seed, with faults of these kinds."""
    with _collected():
        return _play(seed, story, kinds)


def _play(seed: int, story: bool, kinds: Sequence[Kind]) -> Outcome:
    world = World(seed, telling=story)
    with _logged(world), _slow_polls():
        try:
            return _Run(world, kinds).play(story)
        finally:
            world.end()


@contextmanager
def _slow_polls() -> Iterator[None]:
    with (
        mock.patch.multiple(pump, _FIRST_WAIT_S=_POLL_S, _LONGEST_WAIT_S=_POLL_S),
        mock.patch.object(link, "TICK_S", _TICK_S),
        mock.patch.object(router_session, "HEARTBEAT_S", _HEARTBEAT_S),
        mock.patch.object(door, "ACKNOWLEDGE_S", _ACKNOWLEDGE_S),
        mock.patch.object(role_wishes, "INTERVAL_S", _WISHES_S),
        mock.patch.object(follower, "_LOOK_S", _TICK_S),
        mock.patch.multiple(storage_keeping, BEAT_S=_KEEPER_S, LEASE_S=_LEASE_S),
        mock.patch.object(lease, "BEAT_S", _KEEPER_S),
        mock.patch.object(janitor, "SAVE_S", _SAVE_S),
        mock.patch.object(survey, "SETTLED_S", _SAVE_S),
    ):
        yield


@contextmanager
def _collected() -> Iterator[None]:
    """Give back all that a run leaves; what is thrown away with its world says nothing."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    gc.disable()
    try:
        yield
    finally:
        # All of the world is young, as nothing was collected meanwhile, and nobody holds it any
        # more: what survives here would stay for ever.
        gc.collect(0)
        gc.enable()
        sys.unraisablehook = hook


class _Teller(logging.Handler):
    """Makes what the system logs part of the story; a traceback is a problem."""

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
    """Tell what is logged."""
    logger, teller = logging.getLogger("dualpath"), _Teller(world)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(teller)
    try:
        yield
    finally:
        logger.removeHandler(teller)
        logger.propagate = propagate


class _Run:
    def __init__(self, world: World, kinds: Sequence[Kind]) -> None:
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
            world.note("world", f"{settings.role_switches} times another role is asked for")
        if settings.front_ends:
            world.note("world", f"{settings.front_ends} front ends")
        if settings.standby.leased:
            world.note("world", f"turns by {settings.standby}")
        if settings.quota_blocks:
            world.note("world", f"a quota of {settings.quota_blocks} blocks")
        if settings.node_dram_blocks:
            world.note("world", f"{settings.node_dram_blocks} blocks of DRAM for each machine")
        self.world = world
        self.cluster = Cluster(world, settings)
        if settings.quota_blocks and world.seed % 2:
            world.after(chance.uniform(*_PINNED_S), functools.partial(pin_some, self.cluster))
        self.role_keeper = RoleKeeper(self.cluster, settings.role_switches)
        self.clients = Clients(
            world, self.cluster, chance.choice(settings.agents), chance.choice(settings.turns)
        )
        there = {Part.RANKS} if settings.tensor_parallel != ONE_RANK else set()
        there |= {Part.FRONT_ENDS} if settings.front_ends else set()
        there |= {Part.LEASE} if settings.standby.leased else set()
        possible = [kind for kind in kinds if kind.needs in (None, *there)]
        self.adversary = Adversary(world, self.cluster, self.clients, self.faults, possible)

    def play(self, story: bool) -> Outcome:
        world, clients = self.world, self.clients
        world.run(self._is_over, _AGENTS_LIMIT_S)
        for asked in clients.under_way():
            world.problem(f"{asked.name} never ended")
        self._rest()
        for asked in clients.asked:
            self._check(asked)
        if self.faults == 0:
            self._check_nothing_failed()
        self._check_blocks()
        return Outcome(
            seed=world.seed,
            digest=world.digest(),
            problems=tuple(world.problems),
            requests=len(clients.asked),
            answered=sum(a.outcome == "answered" for a in clients.asked),
            faults=self.faults,
            virtual_s=world.elapsed_s,
            events=world.events,
            story=tuple(world.lines()) if story or world.problems else (),
        )

    def _is_over(self) -> bool:
        return self.clients.over and self.adversary.calm and self.role_keeper.over

    def _rest(self) -> None:
        """Wait until nothing is held any more."""
        world = self.world
        end_s = world.now_s + _REST_S
        left_over = self.cluster.left_over()
        while left_over and world.now_s < end_s:
            world.run(lambda: False, 0.25)
            left_over = self.cluster.left_over()
        for what in left_over:
            world.problem(f"left over: {what}")

    def _check_nothing_failed(self) -> None:
        """Where nothing is at fault no attempt fails, and roles change as was asked for."""
        for entrance in self.cluster.entrances:
            for record in entrance.service.records:
                for failure in record.failures:
                    self.world.problem(f"an attempt at {record.request_id} failed: {failure}")
        for what in self.role_keeper.failed():
            self.world.problem(f"a switch of roles failed: {what}")

    def _check_blocks(self) -> None:
        """Compare stored and kept blocks with what they have to be; some may rot visibly."""
        right: dict[BlockKey, bytes] = {}
        settings = self.cluster.settings
        kv = KvFunction(settings.geometry, settings.tensor_parallel.kv_heads)
        for asked in self.clients.asked:
            right.update(asked.blocks(kv))
        for what in storage_problems(self.cluster, right):
            self.world.problem(what)
        for engine in self.cluster.engines.values():
            for key, payload in engine.kept():
                if right.get(key) != payload:
                    self.world.problem(f"{engine.name} keeps a wrong block {key.hex()[:8]}")

    def _check(self, asked: Asked) -> None:
        took_s = (asked.ended_s or self.world.now_s) - asked.asked_s
        if took_s > _REQUEST_DEADLINE_S + 1.0 and self.faults == 0:
            self.world.problem(f"{asked.name} took {took_s:.1f} s")
        explained = asked.is_to_ask_again or (
            self.adversary.hung and isinstance(asked.error, EngineLostError)
        )
        if asked.outcome not in ("answered", "left", "reset", None) and not explained:
            self.world.problem(f"{asked.name} ended badly: {asked.outcome}")
