"""The simulated machine: event queue, links and buffers of all nodes (§2.3, §4.1, §4.2)."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.plan.movements import Link
from dualpath.policy.reuse import ReuseForecast
from dualpath_sim.simulator.derived import (
    CHARGED,
    READ_DE_PATH,
    READ_PE_PATH,
    Limits,
    buffer_bytes,
    copies,
    has_dram_tier,
    node_of,
)
from dualpath_sim.simulator.rules import (
    REUSE_WINDOW,
    adopted_blocks,
    cached_after_eviction,
    count_use,
    equal_served_bytes,
    equal_wait_ns,
    extended_blocks,
    last_window,
    room_blocks,
    serve,
    to_ns,
)
from dualpath_sim.simulator.settings import Setup

Action = Callable[..., None]


class EventQueue:
    """Pending actions by virtual time; running one moves ``now_ns`` to its time."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.handled = 0
        self._pushed = 0
        self._pending: list[tuple[int, int, Action, tuple[Any, ...]]] = []

    def at(self, time_ns: int, action: Action, *arguments: Any) -> None:  # noqa: ANN401
        """Let an action run at ``time_ns`` ≥ now, after all pushed earlier for that time."""
        heapq.heappush(self._pending, (time_ns, self._pushed, action, arguments))
        self._pushed += 1

    def next_ns(self) -> int | None:
        """Return when the next action runs, None without one."""
        return self._pending[0][0] if self._pending else None

    def run(self, until_ns: int | None, most: int) -> bool:
        """Run up to ``most`` actions; return False once the next one is after ``until_ns``."""
        pending, pop = self._pending, heapq.heappop
        for _ in range(most):
            if not pending:
                break
            if until_ns is not None and pending[0][0] > until_ns:
                return False
            self.now_ns, _, action, arguments = pop(pending)
            self.handled += 1
            action(*arguments)
        return True


# Links: servers that carry bytes first come, first served, and storage NICs.

Done = Callable[[], None]


class WindowedBytes:
    """Bytes per window of time and node; each transfer is spread evenly over the time it took."""

    def __init__(self, window_ns: int, nodes: int) -> None:
        self._window_ns = window_ns
        self._nodes = nodes
        self._rows: list[list[float]] = []

    def add(self, node: int, start_ns: int, end_ns: int, transfer_bytes: float) -> None:
        """Count a transfer that lasted from ``start_ns`` to ``end_ns``."""
        rows, window = self._rows, start_ns // self._window_ns
        if end_ns <= (window + 1) * self._window_ns and window < len(rows):
            # The usual case, faster than the general one: a transfer within one window.
            rows[window][node] += transfer_bytes
            return
        last = last_window(start_ns, end_ns, self._window_ns)
        while len(rows) <= last:
            rows.append([0.0] * self._nodes)
        count_use(rows, node, start_ns, end_ns, last, transfer_bytes, self._window_ns)

    def table(self, windows: int) -> NDArray[np.float64]:
        """Return bytes as windows × nodes, with at least ``windows`` rows."""
        table = np.zeros((max(windows, len(self._rows)), self._nodes))
        if self._rows:
            table[: len(self._rows)] = self._rows
        return table


class Server:
    """One direction of a link, or a memory: it carries transfers one after the other."""

    def __init__(
        self, bytes_per_s: float, usage: WindowedBytes | None = None, node: int = 0
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._usage = usage
        self._node = node
        self.busy_until_ns = 0

    def charge(self, now_ns: int, transfer_bytes: float) -> int:
        """Queue a transfer and return when it is over."""
        start_ns, self.busy_until_ns = serve(
            now_ns, self.busy_until_ns, transfer_bytes, self._bytes_per_s
        )
        if self._usage is not None:
            self._usage.add(self._node, start_ns, self.busy_until_ns, transfer_bytes)
        return self.busy_until_ns


class FifoSnic:
    """A storage NIC that serves one read after the other at full rate."""

    def __init__(self, events: EventQueue, server: Server, latency_ns: int) -> None:
        self._events = events
        self._server = server
        self._latency_ns = latency_ns

    def read(self, read_bytes: float, done: Done) -> None:
        """Queue a read now; ``done`` runs when its last byte is in DRAM."""
        end_ns = self._server.charge(self._events.now_ns, read_bytes)
        self._events.at(end_ns + self._latency_ns, done)


class EqualSnic:
    """A storage NIC that serves all reads at once, each at an equal part of its rate.

    ``_served_bytes`` is how much a read would have got that was there from the beginning.  A read
    ends when this number has grown by the read's bytes (processor sharing in virtual time).
    """

    def __init__(
        self,
        events: EventQueue,
        bytes_per_s: float,
        latency_ns: int,
        usage: WindowedBytes,
        node: int,
    ) -> None:
        self._events = events
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns
        self._usage = usage
        self._node = node
        self._served_bytes = 0.0
        self._since_ns = 0
        self._reads: list[tuple[float, int, Done]] = []
        self._count = 0
        self._version = 0

    def read(self, read_bytes: float, done: Done) -> None:
        """Begin a read now; ``done`` runs when its last byte is in DRAM."""
        self._advance()
        heapq.heappush(self._reads, (self._served_bytes + read_bytes, self._count, done))
        self._count += 1
        self._expect_next()

    def _advance(self) -> None:
        now_ns = self._events.now_ns
        if self._reads:
            carried = equal_served_bytes(now_ns - self._since_ns, self._bytes_per_s)
            self._served_bytes += carried / len(self._reads)
            self._usage.add(self._node, self._since_ns, now_ns, carried)
        self._since_ns = now_ns

    def _expect_next(self) -> None:
        self._version += 1
        left = self._reads[0][0] - self._served_bytes
        wait_ns = equal_wait_ns(left, len(self._reads), self._bytes_per_s)
        self._events.at(self._events.now_ns + wait_ns, self._end_next, self._version)

    def _end_next(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        end_bytes, _, done = heapq.heappop(self._reads)
        self._served_bytes = max(self._served_bytes, end_bytes)
        self._events.at(self._events.now_ns + self._latency_ns, done)
        if self._reads:
            self._expect_next()


# Buffers: granted first come, first served (§4.1); what they cache is the DRAM tier.

Granted = Callable[[int], None]
"""Called with the number of cached blocks that the request takes over."""


class Reservation(NamedTuple):
    """Room for ``blocks`` blocks of an agent's context from block ``first`` on.

    The scheduler expects the first ``cached`` of them to be in the buffer already.
    """

    agent: int
    first: int
    blocks: int
    cached: int


class CachedContexts:
    """The blocks that a buffer caches: the head of each agent's context, in order of last use."""

    def __init__(self) -> None:
        self.total_blocks = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._reuse = ReuseForecast(REUSE_WINDOW)
        self._uses = 0
        self._used: dict[int, int] = {}
        self._interval: dict[int, int] = {}

    def of(self, agent: int) -> int:
        """Return how many blocks at the head of an agent's context are cached."""
        return self._blocks.get(agent, 0)

    def adopt(self, reservation: Reservation) -> int:
        """Move the cached blocks of a reservation to its request; return how many they are."""
        adopted = adopted_blocks(self.of(reservation.agent), reservation.first, reservation.cached)
        if adopted:
            self._set(reservation.agent, reservation.first)
        return adopted

    def use(self, agent: int) -> None:
        """Record that an agent's next request has arrived, with cached blocks or without."""
        self._uses += 1
        if agent in self._used:
            interval = self._uses - self._used[agent]
            self._reuse.learn(interval, self._interval.get(agent, 0))
            self._interval[agent] = interval
        self._used[agent] = self._uses

    def cache(self, agent: int, first: int, end: int) -> None:
        """Cache blocks [first, end) if the context before them is cached as well."""
        blocks = extended_blocks(self.of(agent), first, end)
        if blocks:
            self._set(agent, blocks)
            self._blocks.move_to_end(agent)

    def shrink(self, most_blocks: int) -> None:
        """Evict down to ``most_blocks``, of each context the tail first (``policy.reuse``)."""
        while self.total_blocks > most_blocks:
            agent = self._next_evicted()
            excess = self.total_blocks - most_blocks
            self._set(agent, cached_after_eviction(self.of(agent), excess))

    def _next_evicted(self) -> int:
        oldest, reuse = next(iter(self._blocks)), self._reuse
        age = self._uses - self._used[oldest]
        if not reuse.believed or reuse.given_up(age, self._interval.get(oldest, 0)):
            return oldest
        used, interval, unknown = self._used, self._interval, reuse.expected(0)
        return max(reversed(self._blocks), key=lambda a: used[a] + (interval.get(a) or unknown))

    def _set(self, agent: int, blocks: int) -> None:
        self.total_blocks += blocks - self.of(agent)
        if blocks:
            self._blocks[agent] = blocks
        else:
            self._blocks.pop(agent, None)


class NodeBuffer:
    """The buffer of one node in one role; with ``has_dram_tier`` its unused part caches KV."""

    def __init__(self, capacity_bytes: float, block_bytes: float, *, has_dram_tier: bool) -> None:
        self.cached = CachedContexts()
        self._has_dram_tier = has_dram_tier
        self._free_bytes = capacity_bytes
        self._block_bytes = block_bytes
        self._waiting: deque[tuple[Reservation, Granted]] = deque()

    def reserve(self, reservation: Reservation, granted: Granted) -> None:
        """Call ``granted`` when there is room and all earlier reservations are granted.

        A reservation of no blocks waits for nothing.
        """
        if reservation.blocks:
            self._waiting.append((reservation, granted))
            self._grant()
            return
        if self._has_dram_tier:
            self.cached.use(reservation.agent)
        granted(0)

    def reserve_at_third(self, reservation: Reservation, prompt_blocks: int) -> bool:
        """Reserve room of a third DE; return False, and do nothing, if that is not possible.

        It waits for nothing, overtakes no reservation that waits, evicts no block, leaves room for
        a prompt of ``prompt_blocks`` of the DE's own, and finds all expected blocks cached.
        """
        cached = adopted_blocks(
            self.cached.of(reservation.agent), reservation.first, reservation.cached
        )
        free = room_blocks(self._free_bytes, self._block_bytes)
        evicts = reservation.blocks - cached > free - self.cached.total_blocks
        crowds = free - reservation.blocks < prompt_blocks
        if self._waiting or evicts or crowds or cached < reservation.cached:
            return False
        self._free_bytes -= reservation.blocks * self._block_bytes
        self.cached.adopt(reservation)
        if self._has_dram_tier:
            self.cached.use(reservation.agent)
            self._shrink()
        return True

    def release(self, agent: int, first: int, blocks: int, whole: int) -> None:
        """Free ``blocks`` from block ``first`` on; the first ``whole`` of them can be cached."""
        self._free_bytes += blocks * self._block_bytes
        if self._has_dram_tier:
            self.cached.cache(agent, first, first + whole)
        self._grant()

    def cache(self, agent: int, first: int, end: int) -> None:
        """Cache blocks that no reservation covers: generated ones."""
        if self._has_dram_tier:
            self.cached.cache(agent, first, end)
            self._shrink()

    def _grant(self) -> None:
        while self._waiting:
            reservation, granted = self._waiting[0]
            need_bytes = reservation.blocks * self._block_bytes
            if need_bytes > self._free_bytes:
                return
            self._waiting.popleft()
            self._free_bytes -= need_bytes
            adopted = self.cached.adopt(reservation)
            if self._has_dram_tier:
                self.cached.use(reservation.agent)
                self._shrink()
            granted(adopted)

    def _shrink(self) -> None:
        self.cached.shrink(room_blocks(self._free_bytes, self._block_bytes))


# The machine: links and buffers, charged with the steps of a request's plan (§4.1, §4.2).


class _Path(NamedTuple):
    """The servers that a kind of step uses, by PE and by DE."""

    at_pe: list[tuple[Server, ...]]
    at_de: list[tuple[Server, ...]]


class SimulatedMachine:
    """All links and buffers of the cluster; engines and nodes are given by number."""

    def __init__(self, setup: Setup, limits: Limits, events: EventQueue, window_ns: int) -> None:
        cluster = setup.cluster
        self._events = events
        self._block_bytes = limits.block_bytes
        self._copies = copies(setup)
        nodes, engines = range(cluster.nodes), range(cluster.engines)
        self._node_of = [node_of(cluster, engine) for engine in engines]
        self._engines_of = [[e for e in engines if self._node_of[e] == node] for node in nodes]
        self.snic_read_use = WindowedBytes(window_ns, cluster.nodes)
        self.snic_write_use = WindowedBytes(window_ns, cluster.nodes)
        self.cnic_use = WindowedBytes(window_ns, cluster.nodes)
        self._cnic_read = [self._cnic(setup, e) for e in engines]
        self._cnic_write = [self._cnic(setup, e) for e in engines]
        self._dram = [Server(cluster.dram_bytes_per_s) for _ in nodes]
        self._snic_write = [
            Server(cluster.snic_write_bytes_per_s, self.snic_write_use, node) for node in nodes
        ]
        self._snics = [self._snic(setup, node) for node in nodes]
        self._paths = [self._path(movement.links) for movement in CHARGED]
        at_prefill, at_decode = buffer_bytes(setup)
        self._buffer_bytes = {Role.PREFILL: at_prefill, Role.DECODE: at_decode}
        self.has_dram_tier = has_dram_tier(setup)
        self.buffers = [
            self._buffer(Role.PREFILL if node < cluster.prefill_nodes else Role.DECODE)
            for node in nodes
        ]

    def change_role(self, node: int, role: Role) -> None:
        """Give an idle node the empty buffer of another role; its links stay as they are."""
        self.buffers[node] = self._buffer(role)

    def buffer(self, engine: int) -> NodeBuffer:
        """Return the buffer of an engine's node."""
        return self.buffers[self._node_of[engine]]

    def cached_blocks(self, agent: int) -> dict[int, int]:
        """Return, by engine, how many blocks at the head of an agent's context its node caches."""
        if not self.has_dram_tier:
            return {}
        return {
            engine: cached
            for buffer, engines in zip(self.buffers, self._engines_of, strict=True)
            if (cached := buffer.cached.of(agent))
            for engine in engines
        }

    def node(self, engine: int) -> int:
        """Return the node of an engine."""
        return self._node_of[engine]

    def snic(self, engine: int) -> FifoSnic | EqualSnic:
        """Return the storage NIC of an engine's node."""
        return self._snics[self._node_of[engine]]

    def charge_read(self, engine: int, side: Role, read_bytes: float) -> None:
        """Charge the links that a storage read uses besides its SNIC."""
        path = READ_PE_PATH if side is Role.PREFILL else READ_DE_PATH
        self.charge(path, engine, engine, read_bytes)

    def charge(self, path: int, pe: int, de: int, step_bytes: float) -> int:
        """Start a step of this kind (a place in ``derived.CHARGED``) now; return when it ends."""
        end_ns = now_ns = self._events.now_ns
        if step_bytes <= 0:
            return now_ns
        step_bytes *= self._copies[path]
        servers = self._paths[path]
        for server in (*servers.at_pe[pe], *servers.at_de[de]):
            over_ns = server.charge(now_ns, step_bytes)
            if over_ns > end_ns:
                end_ns = over_ns
        return end_ns

    def _buffer(self, role: Role) -> NodeBuffer:
        return NodeBuffer(
            self._buffer_bytes[role], self._block_bytes, has_dram_tier=self.has_dram_tier
        )

    def _path(self, links: tuple[Link, ...]) -> _Path:
        """Return the servers of a kind of step, without the SNICs, which have their own queues."""
        servers = self._servers_of_link()
        at_pe = [servers[link] for link in links if link in servers and link.startswith("pe")]
        at_de = [servers[link] for link in links if link in servers and link.startswith("de")]
        engines = range(len(self._cnic_read))
        return _Path(
            at_pe=[tuple(of_engine[engine] for of_engine in at_pe) for engine in engines],
            at_de=[tuple(of_engine[engine] for of_engine in at_de) for engine in engines],
        )

    def _servers_of_link(self) -> dict[Link, list[Server]]:
        """Return the servers of each kind of link, by engine."""
        nodes = [self.node(engine) for engine in range(len(self._cnic_read))]
        dram = [self._dram[node] for node in nodes]
        return {
            Link.PE_CNIC_READ: self._cnic_read,
            Link.PE_CNIC_WRITE: self._cnic_write,
            Link.DE_CNIC_READ: self._cnic_read,
            Link.DE_CNIC_WRITE: self._cnic_write,
            Link.PE_DRAM: dram,
            Link.DE_DRAM: dram,
            Link.DE_SNIC_WRITE: [self._snic_write[node] for node in nodes],
        }

    def _cnic(self, setup: Setup, engine: int) -> Server:
        """Return one direction of the compute NICs of an engine's GPUs, as one server."""
        cluster, node = setup.cluster, self.node(engine)
        role = Role.PREFILL if node < cluster.prefill_nodes else Role.DECODE
        bytes_per_s = cluster.cnic_bytes_per_s * cluster.gpus_per_engine(role)
        return Server(bytes_per_s, self.cnic_use, node)

    def _snic(self, setup: Setup, node: int) -> FifoSnic | EqualSnic:
        cluster = setup.cluster
        latency_ns = to_ns(cluster.read_latency_s)
        if cluster.snic_sharing == "equal":
            return EqualSnic(
                self._events, cluster.snic_bytes_per_s, latency_ns, self.snic_read_use, node
            )
        server = Server(cluster.snic_bytes_per_s, self.snic_read_use, node)
        return FifoSnic(self._events, server, latency_ns)
