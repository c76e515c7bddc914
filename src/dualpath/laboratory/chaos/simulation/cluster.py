"""A simulated cluster: its processes, and the supervisor that starts them again."""

import functools
from collections.abc import Callable

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import GroupRank, Role
from dualpath.core.modes import Mode
from dualpath.core.parts import slices_of
from dualpath.engine.settings import EngineSettings
from dualpath.laboratory.chaos.simulation.cluster_parts import Shared
from dualpath.laboratory.chaos.simulation.engine import SimEngine
from dualpath.laboratory.chaos.simulation.ranks import SimFollower
from dualpath.laboratory.chaos.simulation.router import SimRouter
from dualpath.laboratory.chaos.simulation.world import World
from dualpath.laboratory.emulated.settings import EmulatedSettings, Verify, part_geometry
from dualpath.model.sim.settings import DecodeCosts, ModelCosts, PrefillCosts
from dualpath.router.settings import RouterSettings
from dualpath.router.turn import Turn

LAYERS = 3
BLOCK_TOKENS = 4
COSTS = ModelCosts(
    name="small",
    layers=LAYERS,
    kv_bytes_per_token=LAYERS * 8.0,
    prefill=PrefillCosts(batch_s=1e-2, attention_token_s=2e-4, pair_s=1e-6),
    decode=DecodeCosts(step_s=1e-2),
    prefill_tokens_per_s=1e4,
)
#: By KV heads: equal layers, layers of two parts, and layers of which each is another, one a window
#: layer.
_LAYER_PARTS = {
    1: ("8*3", "16+8*3", "24,8+8@6,8"),
    2: ("16*3", "32+16*3", "48,16+16@6,16"),
}
GEOMETRIES = {
    heads: tuple(part_geometry(parts, BLOCK_TOKENS) for parts in layers)
    for heads, layers in _LAYER_PARTS.items()
}
VOCABULARY = 1000

#: Until a rank notices that another one of its group has ended.
_SIBLING_ENDS_S = (0.01, 0.2, 1.0, 4.0)
#: Until somebody notices that an engine was started while it still ran.
_TWO_OF_A_NAME_S = 3.0
#: An engine that has lost a rank has ended within it: longer than it may stand still.
_ENDS_WITHIN_S = 10.0


class TensorParallel(msgspec.Struct, frozen=True):
    """How many ranks each engine of a role has; they share out so many KV heads."""

    prefill: int = 1
    decode: int = 1
    kv_heads: int = 1

    def ranks(self, role: Role) -> int:
        """Ranks of an engine of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def __str__(self) -> str:
        return f"{self.prefill} and {self.decode} ranks for {self.kv_heads} KV heads"


#: Engines of one rank.
ONE_RANK = TensorParallel()


class ClusterSettings(msgspec.Struct, frozen=True):
    """Size of the cluster, of its memories in blocks, and the router's limits.

    ``prefill`` and ``decode`` count data-parallel groups, of ``prefill_ranks`` and ``decode_ranks``
    engines each; one of a single rank is a plain engine.  With ``standby`` a second router waits
    for its turn.
    """

    mode: Mode
    prefill: int
    decode: int
    buffer_blocks: int
    hbm_blocks: int
    layer_buffers: int
    router: RouterSettings
    hosts: int
    geometry: BlockGeometry
    prefill_ranks: int = 1
    decode_ranks: int = 1
    standby: bool = False
    tensor_parallel: TensorParallel = ONE_RANK


class _Group(msgspec.Struct):
    """Engines that end together and are started together."""

    name: str
    role: Role
    size: int
    starts: int = 0
    restarting: bool = False

    @property
    def engine_ids(self) -> list[str]:
        """Its ranks."""
        if self.size == 1:
            return [self.name]
        return [f"{self.name}-dp{rank}" for rank in range(self.size)]


class Cluster:
    """``engines`` are the processes of now, on ``hosts`` machines in turn."""

    def __init__(self, world: World, settings: ClusterSettings) -> None:
        self.world = world
        self.settings = settings
        self.shared = Shared(world)
        self.engines: dict[str, SimEngine] = {}
        self._starts: dict[str, int] = {}
        self._hosts: dict[str, str] = {}
        self._followers: list[SimFollower] = []
        self._groups: dict[str, _Group] = {}
        self._routers = [self._start_router() for _ in range(1 + settings.standby)]
        for role, short, count, size in (
            (Role.PREFILL, "pe", settings.prefill, settings.prefill_ranks),
            (Role.DECODE, "de", settings.decode, settings.decode_ranks),
        ):
            for index in range(count):
                group = _Group(f"{short}-{index}", role, size)
                self._groups.update(dict.fromkeys(group.engine_ids, group))
                self._start_group(group)

    @property
    def router(self) -> SimRouter:
        """The router that serves, or will be the next to; a dead one if there is no other."""
        alive = [router for router in self._routers if router.process.alive]
        serving = [router for router in alive if router.serves]
        return (serving or alive or self._routers)[0]

    def restart_engine(self, engine_id: str, after_s: float) -> None:
        """Kill an engine's process if it lives, and start the next one a while later.

        The ranks of its group end by themselves, and all are started at once.
        """
        self.engines[engine_id].kill()
        group = self._groups[engine_id]
        if group.restarting:
            return
        group.restarting = group.size > 1
        self.world.after(
            self._siblings_end(engine_id) + after_s, functools.partial(self._start_group, group)
        )

    def kill_follower(self, follower: SimFollower, after_s: float) -> None:
        """Kill a rank that follows; start the next process of its engine once that has ended."""
        engine = follower.engine

        def ended() -> None:
            if engine.process.alive:
                self.world.problem(f"{engine.name} lives on without {follower.name}")

        follower.kill()
        self.world.after(_ENDS_WITHIN_S, ended)
        self.replace_ended_engine(engine.engine_id, after_s)

    def lose_engine(self, engine_id: str) -> bool:
        """Kill an engine's group for good where another of its role, and a witness, live on."""
        engine, group = self.engines[engine_id], self._groups[engine_id]
        ranks = [self.engines[rank] for rank in group.engine_ids]
        others = [e for e in self.engines.values() if e not in ranks and e.process.alive]
        spare = any(e.settings.engine.role is group.role for e in others)
        hosts = {e.host for e in others} | {self._host("router")}
        seen = all(rank.host in hosts for rank in ranks)
        if not engine.process.alive or group.restarting or not spare or not seen:
            return False
        engine.kill()
        self._siblings_end(engine_id)
        for rank in group.engine_ids:
            del self.engines[rank]
        return True

    def _siblings_end(self, engine_id: str) -> float:
        """Let the other ranks notice that one has ended; return how long until all have."""
        longest_s = 0.0
        for sibling in self._groups[engine_id].engine_ids:
            if sibling != engine_id:
                delay_s = self.world.chance.choice(_SIBLING_ENDS_S)
                self.world.after(delay_s, self.engines[sibling].kill)
                longest_s = max(longest_s, delay_s)
        return longest_s

    def replace_ended_engine(self, engine_id: str, after_s: float) -> None:
        """Start the next process of an engine once the one of now has ended."""
        engine = self.engines[engine_id]

        def look() -> None:
            if engine.process.alive:
                self.world.after(0.1, look)
            elif self.engines.get(engine_id) is engine:
                self.restart_engine(engine_id, after_s)

        look()

    def restart_router(self, after_s: float) -> None:
        """Kill the router, and start the next one a while later; who stands by serves at once."""
        self.router.kill()
        self.world.after(after_s, self._next_router)

    def left_over(self) -> list[str]:
        """Return what the cluster still holds though nobody is served."""
        found = self.router.left_over()
        for engine in self.engines.values():
            found += engine.left_over()
        for follower in self._followers:
            if follower.process.alive != follower.engine.process.alive:
                found.append(
                    f"one of {follower.engine.name} and {follower.name} has outlived the other"
                )
        if self.shared.http.calls:
            found.append(f"{len(self.shared.http.calls)} calls to engines are open")
        return found

    def _next_router(self) -> None:
        alive = [router for router in self._routers if router.process.alive]
        self._routers = [*alive, self._start_router()]

    def _start_router(self) -> SimRouter:
        return SimRouter(
            *(self.shared, self.settings.router, self._start("router"), self._host("router")),
            self.shared.turn() if self.settings.standby else Turn(""),
        )

    def _start_group(self, group: _Group) -> None:
        group.starts += 1
        group.restarting = False
        for rank, engine_id in enumerate(group.engine_ids):
            dp = GroupRank(group.name, f"{group.name}#{group.starts}", rank, group.size)
            self._start_engine(group.role, engine_id, dp if group.size > 1 else None)

    def _start_engine(self, role: Role, engine_id: str, dp: GroupRank | None) -> None:
        former, start = self.engines.get(engine_id), self._start(engine_id)
        api_url = f"http://{engine_id}"
        if former is not None and former.process.alive:
            # Two faults took the one before: for a while two processes have the name, each with
            # a server of its own.
            api_url += f"-{start}"
            self.world.after(_TWO_OF_A_NAME_S, former.kill)
        settings = _engine_settings(self.settings, role, engine_id, api_url)
        engine = SimEngine(self.shared, settings, start, self._host(engine_id), dp)
        self.engines[engine_id] = engine
        self._followers += engine.followers
        self.shared.http.servers[settings.engine.api_url] = engine

    def _host(self, name: str) -> str:
        return self._hosts.setdefault(name, f"host-{len(self._hosts) % self.settings.hosts}")

    def _start(self, name: str) -> int:
        self._starts[name] = self._starts.get(name, 0) + 1
        return self._starts[name]


def _engine_settings(
    cluster: ClusterSettings, role: Role, engine_id: str, api_url: str
) -> EmulatedSettings:
    engine = EngineSettings(
        role=role,
        engine_id=engine_id,
        router="tcp://127.0.0.1:5700",
        api_url=api_url,
        storage="memory://simulated",
        mode=cluster.mode,
        buffer_bytes=cluster.buffer_blocks * cluster.geometry.full_block_bytes,
        staging_blocks=4,
        layer_buffers=cluster.layer_buffers,
        parallel_reads=2,
        drain_timeout_s=30.0,
    )
    ranks, heads = cluster.tensor_parallel.ranks(role), cluster.tensor_parallel.kv_heads
    hbm_bytes = cluster.hbm_blocks * cluster.geometry.full_block_bytes
    return EmulatedSettings(
        engine=engine,
        geometry=cluster.geometry,
        costs=COSTS,
        tensor_parallel_size=ranks,
        kv_heads=heads,
        hbm_bytes=hbm_bytes // slices_of(ranks, heads),
        batch_cap_tokens=16,
        max_model_len=160,
        verify=Verify.FULL,
        vocab_size=VOCABULARY,
    )


#: Something the adversary does to a cluster, at a moment.
Act = Callable[[Cluster], None]
