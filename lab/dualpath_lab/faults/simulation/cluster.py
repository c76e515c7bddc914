"""A simulated cluster: its processes, and the supervisor that restarts them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dualpath.core.cluster import GroupRank, Role, UnitShape, rank_name
from dualpath.core.errors import BadRequestError
from dualpath.launch.commands import engine_id
from dualpath.launch.local_cluster import RequestedRoles
from dualpath.router.scheduler.roles import SwitchState
from dualpath.storage.janitor import STATUS, Status
from dualpath.storage.quotas import StorageLimits
from dualpath_lab.faults.simulation.cluster_resources import ClusterResources
from dualpath_lab.faults.simulation.disk import object_path
from dualpath_lab.faults.simulation.engine import SimEngine
from dualpath_lab.faults.simulation.ranks import SimFollower
from dualpath_lab.faults.simulation.router import ClientEndpoint, FrontEnds, SimRouter
from dualpath_lab.faults.simulation.settings import (
    PROTECT_S,
    ClusterSettings,
    engine_settings,
    stored_bytes,
)
from dualpath_lab.faults.simulation.two_legs import Proxies
from dualpath_lab.faults.simulation.world import World

#: Share of requests in clusters with proxies that are sent to those.
_BEHIND_PROXIES = 3 / 4
#: The engines of the second unit are numbered from here.
_UNIT_NUMBERS = 10
#: Delay until a rank notices that another one of its group has ended.
_SIBLING_ENDS_S = (0.01, 0.2, 1.0, 4.0)
#: Delay until the older of two engines with the same name is killed.
_DUPLICATE_ENGINE_S = 3.0
#: Without faults the janitor writes the storage's status at least this often.
_STATUS_S = 1.0
#: Delay until a router that has ended by itself, or an engine that cannot start, is restarted.
_PAUSES_S = (0.05, 0.3, 1.0, 2.5)
#: An engine ends within this time after it has lost a rank: longer than it may be stopped.
_ENDS_WITHIN_S = 10.0


class _Group(msgspec.Struct):
    """Engines that end together and start together; ``ranks`` are their current names.

    ``unit`` is the number of their scheduler.
    """

    name: str
    unit: int = 0
    ranks: tuple[str, ...] = ()
    starts: int = 0
    restarting: bool = False


class Cluster:
    """``engines`` are the current processes, distributed over ``hosts`` machines."""

    def __init__(self, world: World, settings: ClusterSettings, faults: int = 0) -> None:
        self.world = world
        self.settings = settings
        self.shared = ClusterResources(
            world,
            links=settings.links,
            protect_s=PROTECT_S,
            election=settings.standby,
            views={"host-0": settings.proc},
            units=settings.units,
        )
        self.shared.thirds.waits_for_pe = self._waits_for_pe
        self.engines: dict[str, SimEngine] = {}
        self._starts: dict[str, int] = {}
        self._hosts: dict[str, str] = {}
        self._followers: list[SimFollower] = []
        self._groups: dict[str, _Group] = {}
        self._units: dict[str, str] = {}
        self._shapes: dict[str, UnitShape] = {}
        #: The schedulers of each unit: one, and the standby of the first unit, if it has one.
        counts = (settings.standby.schedulers, *[1] * (settings.units - 1))
        self._routers = [
            [self._start_router(unit) for _ in range(count)] for unit, count in enumerate(counts)
        ]
        self.front_ends = FrontEnds(self.shared, settings.router, settings.front_ends, self._host)
        self.proxies = Proxies(
            *(self.shared, settings.proxies, self._host, self._serving, self._all_joined, faults),
            moves=settings.moves,
        )
        for role, count in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
            for index in range(count):
                group = _Group(engine_id(role, index))
                self._shapes[group.name] = UnitShape(role, settings.usual_ranks(role))
                self._start_group(group)
        for unit in range(1, settings.units):
            for role in Role:
                group = _Group(engine_id(role, unit * _UNIT_NUMBERS), unit)
                self._shapes[group.name] = UnitShape(role, 1)
                self._start_group(group)

    @property
    def router(self) -> SimRouter:
        """The router of the first unit."""
        return self.router_of(0)

    def router_of(self, unit: int) -> SimRouter:
        """Return the router that serves, or else one that is alive, or else a dead one."""
        routers = self._routers[unit]
        alive = [router for router in routers if router.process.alive]
        serving = [router for router in alive if router.serves]
        return (serving or alive or routers)[0]

    @property
    def routers(self) -> Sequence[SimRouter]:
        """The router of each unit."""
        return [self.router_of(unit) for unit in range(self.settings.units)]

    @property
    def endpoints(self) -> Sequence[ClientEndpoint]:
        """The current processes that can serve clients."""
        return [*self.routers, *self.front_ends.alive, *self.proxies.alive]

    def engines_of(self, unit: int) -> Sequence[str]:
        """Return the engines of a unit."""
        return [name for name in sorted(self.engines) if self._groups[name].unit == unit]

    def endpoint(self) -> ClientEndpoint:
        """Return the process to which a client connects now: router, front end or proxy."""
        if (proxies := self.proxies.alive) and self.world.chance.random() < _BEHIND_PROXIES:
            return self.world.chance.choice(proxies)
        serving: list[ClientEndpoint] = [*self.front_ends.serving]
        if not serving:
            return self.router
        return self.world.chance.choice([*serving, self.router] if self.router.serves else serving)

    def restart_engine(self, engine_id: str, after_s: float) -> None:
        """Kill an engine's process if it is alive, and start the next one a while later.

        The other ranks of its group end by themselves; then all are started at once.
        """
        self.engines[engine_id].kill()
        group = self._groups[engine_id]
        if group.restarting:
            return
        group.restarting = len(group.ranks) > 1
        self.world.after(
            self._siblings_end(engine_id) + after_s, functools.partial(self._start_group, group)
        )

    @property
    def units(self) -> Mapping[str, str]:
        """The current unit, which starts and ends as one, of each engine; a live view."""
        return self._units

    @property
    def shapes(self) -> Mapping[str, UnitShape]:
        """Requested roles and sizes of units."""
        return self._shapes

    def change(self, unit: str, shape: UnitShape) -> None:
        """Drain a unit and restart it in another shape under its old name."""
        self.world.note(unit, f"is to be {shape}")
        self._shapes[unit] = shape
        group = next(group for group in self._groups.values() if group.name == unit)
        ranks = [self.engines[engine_id] for engine_id in group.ranks]
        for rank in ranks:
            rank.terminate()
        self._once_ended(ranks, lambda: self._start_group(group))

    def kill_follower(self, follower: SimFollower, after_s: float) -> None:
        """Kill a follower rank; restart its engine once that has ended."""
        engine = follower.engine

        def ended() -> None:
            if engine.process.alive:
                self.world.problem(f"{engine.name} survives the end of {follower.name}")

        follower.kill()
        self.world.after(_ENDS_WITHIN_S, ended)
        self.replace_ended_engine(engine.engine_id, after_s)

    def lose_engine(self, engine_id: str) -> bool:
        """Kill an engine's group without a restart, if its role and its machine have others.

        Another process of each machine must be able to confirm the death.  Not while roles
        change: the engine could be the last one that has not left its role yet.
        """
        if self.settings.role_switches:
            return False
        engine, group = self.engines[engine_id], self._groups[engine_id]
        ranks = [self.engines[rank] for rank in group.ranks]
        unit = [self.engines[name] for name in self.engines_of(group.unit)]
        others = [e for e in unit if e not in ranks and e.process.alive]
        role = self._shapes[group.name].role
        spare = any(e.settings.engine.role is role for e in others)
        hosts = {e.host for e in others} | {self._host("router")}
        seen = all(rank.host in hosts for rank in ranks)
        if not engine.process.alive or group.restarting or not spare or not seen:
            return False
        engine.kill()
        self._siblings_end(engine_id)
        for rank in group.ranks:
            del self.engines[rank]
        return True

    def has_spare(self, engine_id: str) -> bool:
        """Whether engines outside its group can take over, and no role changes."""
        if self.settings.role_switches:
            return False
        group, role = self._groups[engine_id], self.engines[engine_id].settings.engine.role
        others = [e for n in self.engines_of(group.unit) if (e := self.engines[n]).process.alive]
        return any(
            e.settings.engine.role is role and e.engine_id not in group.ranks for e in others
        )

    def _siblings_end(self, engine_id: str) -> float:
        """End the other ranks of a group; return the time until all have ended."""
        longest_s = 0.0
        for sibling in self._groups[engine_id].ranks:
            if sibling != engine_id:
                delay_s = self.world.chance.choice(_SIBLING_ENDS_S)
                self.world.after(delay_s, self.engines[sibling].kill)
                longest_s = max(longest_s, delay_s)
        return longest_s

    def replace_ended_engine(self, engine_id: str, after_s: float) -> None:
        """Start the next process of an engine once the current one has ended."""
        engine = self.engines[engine_id]
        self._once_ended([engine], lambda: self.restart_engine(engine_id, after_s))

    def _once_ended(self, engines: Sequence[SimEngine], then: Callable[[], None]) -> None:
        """Call ``then`` once these have ended, unless they have been replaced by then."""

        def poll() -> None:
            if any(engine.process.alive for engine in engines):
                self.world.after(0.1, poll)
            elif all(self.engines.get(engine.engine_id) is engine for engine in engines):
                then()

        poll()

    def restart_router(self, after_s: float, unit: int = 0) -> None:
        """Kill a router and start the next one a while later; a standby takes over at once."""
        self.router_of(unit).kill()
        self.world.after(after_s, functools.partial(self._next_router, unit))

    def held_when_idle(self) -> list[str]:
        """Return descriptions of what the cluster still holds without requests."""
        found = [what for router in self.routers for what in router.held_when_idle()]
        for routers in self._routers:
            serving = [router.name for router in routers if router.serves]
            if len(serving) > 1:
                found.append(f"{' and '.join(serving)} both serve")
        for engine in self.engines.values():
            found += engine.held_when_idle()
        for follower in self._followers:
            if follower.process.alive != follower.engine.process.alive:
                found.append(f"only one of {follower.engine.name} and {follower.name} has ended")
        found += self.front_ends.held_when_idle()
        found += self.proxies.held_when_idle()
        if all(router.serves for router in self.routers):
            registries = [router.service.registry for router in self.routers]
            alive = [info for registry in registries for info in registry.alive()]
            found += self.front_ends.knowing_others(alive)
        if self.shared.http.calls:
            found.append(f"{len(self.shared.http.calls)} calls to engines are open")
        return found + self._janitor_failures()

    @property
    def limits(self) -> StorageLimits:
        """The storage's limits."""
        return next(iter(self.engines.values())).settings.engine.limits

    def _janitor_failures(self) -> list[str]:
        """Return what the janitor has failed to do."""
        if not self.settings.has_quota:
            return []
        file = self.shared.disk.files.get(object_path(STATUS))
        if file is None:
            return ["the storage has had no janitor"]
        janitors = [(e.name, e.janitor) for e in self.engines.values() if e.process.alive]
        holders = [(name, janitor) for name, janitor in janitors if janitor is not None]
        if len(holders) != 1:
            return [f"the storage has {len(holders)} janitors: {', '.join(n for n, _ in holders)}"]
        ((name, janitor),) = holders
        assert janitor.index is not None
        if unknown := self.shared.janitor_checker.unknown_to(janitor.index):
            found = f"{len(unknown)} blocks of the journal, such as {unknown[0].hex()[:8]}"
            return [f"{name}, the storage's janitor, does not know {found}"]
        status = msgspec.json.decode(file.content, type=Status)
        if self.world.now_s - status.time_s > _STATUS_S:
            return [f"the storage has had no janitor since {status}"]
        pinned_bytes = len(self.shared.janitor_checker.possibly_pinned) * stored_bytes(
            self.settings.geometry
        )
        over_bytes = status.used_bytes - self.limits.high * self.limits.quota_bytes
        if self.limits.quota_bytes and over_bytes > pinned_bytes:
            return [f"the storage is above its quota: {status}"]
        most_bytes = self.limits.high * self.limits.tenant_quota_bytes
        over = {tag: used for tag, used in status.fullest_tenants.items() if used > most_bytes}
        return [f"tenants are above their quotas: {over}"] if over else []

    def _waits_for_pe(self, attempt_id: str) -> bool:
        """Whether a live scheduler waits until the PE of an attempt writes and loads no more."""
        alive = [router for router in self.routers if router.process.alive]
        slots = [router.service.scheduler.releases._slots.get(attempt_id) for router in alive]
        return any(one is not None and one.quarantined_s is None for one in slots)

    def _next_router(self, unit: int) -> None:
        alive = [router for router in self._routers[unit] if router.process.alive]
        self._routers[unit] = [*alive, self._start_router(unit)]

    def _router_ended(self, unit: int) -> None:
        self.world.after(self.world.pick(_PAUSES_S), functools.partial(self._next_router, unit))

    def _start_router(self, unit: int) -> SimRouter:
        name = f"router-{unit}" if unit else "router"
        return SimRouter(
            *(self.shared, self.shared.units[unit], self.settings.router),
            *(f"{name}#{self._start(name)}", self._host(name)),
            functools.partial(self._router_ended, unit),
        )

    def _start_group(self, group: _Group) -> None:
        shape, former = self._shapes[group.name], group.ranks
        group.starts += 1
        group.restarting = False
        group.ranks = tuple(rank_name(group.name, n, shape.ranks) for n in range(shape.ranks))
        for name in former:
            if name not in group.ranks:
                del self._groups[name], self._units[name]
                self.engines.pop(name).kill()
        for rank, name in enumerate(group.ranks):
            self._groups[name], self._units[name] = group, group.name
            dp = GroupRank(group.name, f"{group.name}#{group.starts}", rank, shape.ranks)
            self._start_engine(shape.role, name, dp if shape.ranks > 1 else None)

    def _start_engine(self, role: Role, engine_id: str, dp: GroupRank | None) -> None:
        former, start = self.engines.get(engine_id), self._start(engine_id)
        api_url = f"http://{engine_id}"
        if former is not None and former.process.alive:
            # After two faults the old process may still run: for a while two processes, each with
            # its own server, have the same name.
            api_url += f"-{start}"
            self.world.after(_DUPLICATE_ENGINE_S, former.kill)
        settings = engine_settings(self.settings, role, engine_id, api_url)
        failed = functools.partial(self._start_failed, engine_id)
        unit = self.shared.units[self._groups[engine_id].unit]
        engine = SimEngine(self.shared, unit, settings, start, self._host(engine_id), dp, failed)
        self.engines[engine_id] = engine
        self._followers += engine.followers
        self.shared.http.servers[settings.engine.api_url] = engine

    def _serving(self, role: Role) -> Mapping[str, str]:
        """Return the URLs of the engines of a role that serve, by name."""
        serving = [engine for engine in self.engines.values() if engine.serves]
        own = [engine.settings.engine for engine in serving]
        return {engine.engine_id: engine.api_url for engine in own if engine.role is role}

    def _all_joined(self) -> bool:
        """Whether the router has all engines."""
        registry = self.router.service.registry
        return all(registry.live(name) is not None for name in self.engines)

    def _start_failed(self, engine_id: str) -> None:
        self.restart_engine(engine_id, self.world.pick(_PAUSES_S))

    def _host(self, name: str) -> str:
        return self._hosts.setdefault(name, f"host-{len(self._hosts) % self.settings.hosts}")

    def _start(self, name: str) -> int:
        self._starts[name] = self._starts.get(name, 0) + 1
        return self._starts[name]


# ------------------------------------------------------------------------------------ role changes
# Changes of roles and group sizes in a simulated cluster: the requests and their execution.

#: How often the supervisor polls.
_POLL_S = 0.1
#: One of this many reports about roles is an earlier one, as after a long delay.
_STALE_ONE_IN = 5
#: Numbers of ranks that are requested for a group.
_RANKS = (1, 2, 3)
#: Range of the times at which another role or size is requested.
_REQUESTED_S = (0.05, 0.9)


class RoleChanges:
    """Requests ``switches`` role changes from the router, and restarts engines in new roles."""

    def __init__(self, cluster: Cluster, switches: int) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        self._report: Mapping[str, Any] | None = None
        self._left = switches
        if switches:
            self._requested_roles = RequestedRoles(
                *(self._answer, cluster.units, cluster.shapes),
                *(cluster.settings.usual_ranks, cluster.change),
            )
            self._tick()
        for _ in range(switches):
            world.after(world.chance.uniform(*_REQUESTED_S), self._request)

    @property
    def done(self) -> bool:
        """Whether all changes have been requested."""
        return self._left == 0

    def failed(self) -> list[str]:
        """Return descriptions of switches that did not complete."""
        past = (
            self._cluster.router.service.scheduler.roles.past if self._cluster.router.serves else ()
        )
        return [
            f"{', '.join(switch.engines)} to {switch.to_role.value}: {switch.state}: {switch.note}"
            for switch in past
            if switch.state is not SwitchState.JOINED
        ]

    def _request(self) -> None:
        self._left -= 1
        router, chance = self._cluster.router, self._world.chance
        # A request with a unit's name is for another size, in the unit's role or in the other one.
        name = chance.choice((None, *self._cluster.shapes))
        role = chance.choice(tuple(Role)) if name is None else self._other_or_own(name)
        ranks = None if name is None else chance.choice(_RANKS)
        if not (router.serves and router.process.runs):
            return
        change = f"{name or 'any'} to {role or 'its own'} role with {ranks or 'usual'} ranks"
        try:
            switch = router.service.scheduler.roles.request(role, name, ranks=ranks)
        except BadRequestError as error:
            self._world.note("operator", f"requests {change}, refused: {error}")
        else:
            self._world.note("operator", f"requests {change}: {', '.join(switch.engines)}")

    def _other_or_own(self, name: str) -> Role | None:
        now = self._cluster.shapes[name].role
        other = Role.DECODE if now is Role.PREFILL else Role.PREFILL
        return self._world.chance.choice((None, None, other))

    def _tick(self) -> None:
        self._requested_roles.poll(self._world.now_s)
        self._world.after(_POLL_S, self._tick)

    def _answer(self) -> Mapping[str, Any] | None:
        """Return the router's report on roles, or an earlier one; None if it does not answer."""
        router, before = self._cluster.router, self._report
        if not (router.serves and router.process.runs):
            return None
        self._report = router.service.scheduler.roles.report()
        old = before is not None and self._world.chance.random() * _STALE_ONE_IN < 1
        return before if old else self._report
