"""Links and buffers of all nodes, charged with the steps of a request's plan (§4.1, §4.2)."""

from typing import NamedTuple

from dualpath.core.cluster import Role
from dualpath.model.sim.derived import (
    CHARGED,
    READ_DE_PATH,
    READ_PE_PATH,
    Limits,
    buffer_bytes,
    copies,
    keeps,
)
from dualpath.model.sim.layout import node_of
from dualpath.model.sim.reference.events import EventQueue
from dualpath.model.sim.reference.links import EqualSnic, FifoSnic, Server, WindowedBytes
from dualpath.model.sim.reference.memories import NodeBuffer
from dualpath.model.sim.rules import to_ns
from dualpath.model.sim.settings import Setup
from dualpath.plan.movements import Link


class _Path(NamedTuple):
    """Servers that a kind of step loads, by PE and by DE."""

    at_pe: list[tuple[Server, ...]]
    at_de: list[tuple[Server, ...]]


class SimulatedMachine:
    """Everything that carries or holds KV; engines and nodes by index."""

    def __init__(self, setup: Setup, limits: Limits, events: EventQueue, window_ns: int) -> None:
        cluster = setup.cluster
        self._events = events
        self._block_bytes = limits.block_bytes
        self._cluster = cluster
        self._copies = copies(setup)
        nodes, engines = range(cluster.nodes), range(cluster.engines)
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
        self._keeps = keeps(setup)
        self.buffers = [
            self._buffer(Role.PREFILL if node < cluster.prefill_nodes else Role.DECODE)
            for node in nodes
        ]

    def change_role(self, node: int, role: Role) -> None:
        """Give a node without work the buffer of another role; its links stay what they are."""
        self.buffers[node] = self._buffer(role)

    def buffer(self, engine: int) -> NodeBuffer:
        """Return the buffer of an engine's node."""
        return self.buffers[self.node(engine)]

    def kept_blocks(self, agent: int) -> dict[int, int]:
        """Return how many blocks at the head of an agent's context each engine's node keeps."""
        if not self._keeps:
            return {}
        engines = range(self._cluster.engines)
        return {engine: kept for engine in engines if (kept := self.buffer(engine).kept.of(agent))}

    def node(self, engine: int) -> int:
        """Return the node of an engine."""
        return node_of(self._cluster, engine)

    def snic(self, engine: int) -> FifoSnic | EqualSnic:
        """Return the storage NIC of an engine's node."""
        return self._snics[self.node(engine)]

    def charge_read(self, engine: int, side: Role, read_bytes: float) -> None:
        """Charge what a storage read loads besides its SNIC."""
        path = READ_PE_PATH if side is Role.PREFILL else READ_DE_PATH
        self.charge(path, engine, engine, read_bytes)

    def charge(self, path: int, pe: int, de: int, step_bytes: float) -> int:
        """Let a step of this kind (``derived.CHARGED``) begin now; return when it is over."""
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
        return NodeBuffer(self._buffer_bytes[role], self._block_bytes, keeps=self._keeps)

    def _path(self, links: tuple[Link, ...]) -> _Path:
        """Look up the servers of a kind of step; storage reads have a queue of their own."""
        servers = self._servers_of_link()
        at_pe = [servers[link] for link in links if link in servers and link.startswith("pe")]
        at_de = [servers[link] for link in links if link in servers and link.startswith("de")]
        engines = range(len(self._cnic_read))
        return _Path(
            at_pe=[tuple(of_engine[engine] for of_engine in at_pe) for engine in engines],
            at_de=[tuple(of_engine[engine] for of_engine in at_de) for engine in engines],
        )

    def _servers_of_link(self) -> dict[Link, list[Server]]:
        """Return, per link, the server of every engine."""
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
        """Return one direction of an engine's NICs, those of its GPUs together."""
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
