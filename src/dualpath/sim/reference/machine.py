"""Links and buffers of all nodes, charged with the steps of a request's plan (§4.1, §4.2)."""

from dualpath.core.cluster import Role
from dualpath.datapath.plan import Link
from dualpath.sim.costs import to_ns
from dualpath.sim.derived import Limits, step_links
from dualpath.sim.reference.buffers import NodeBuffer
from dualpath.sim.reference.events import EventQueue
from dualpath.sim.reference.links import EqualSnic, FifoSnic, Server
from dualpath.sim.reference.usage import WindowedBytes
from dualpath.sim.settings import Setup


class Machine:
    """Everything that carries or holds KV; engines and nodes by index."""

    def __init__(self, setup: Setup, limits: Limits, events: EventQueue, window_ns: int) -> None:
        cluster = setup.cluster
        self._events = events
        self._block_bytes = limits.block_bytes
        self._gpus_per_node = cluster.gpus_per_node
        self._links = step_links()
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
        self.buffers = [
            NodeBuffer(
                cluster.prefill_buffer_bytes
                if node < cluster.prefill_nodes
                else cluster.decode_buffer_bytes
            )
            for node in nodes
        ]

    def node(self, engine: int) -> int:
        """Return the node of an engine."""
        return engine // self._gpus_per_node

    def snic(self, engine: int) -> FifoSnic | EqualSnic:
        """Return the storage NIC of an engine's node."""
        return self._snics[self.node(engine)]

    def charge_read(self, engine: int, side: Role, blocks: int) -> None:
        """Charge what a storage read loads besides its SNIC."""
        links = self._links.read_pe if side is Role.PREFILL else self._links.read_de
        self._charge(links, engine, engine, blocks, self._events.now_ns)

    def load_from_tier(self, engine: int, blocks: int) -> int:
        """Bring blocks of the DRAM tier into a node's buffer; return when they are there."""
        return self._cnic_write[engine].charge(self._events.now_ns, blocks * self._block_bytes)

    def load(self, pe: int, de: int, pe_blocks: int, de_blocks: int, computed: int) -> int:
        """Bring KV before a chunk into the PE's HBM; return when the last of it is there.

        ``pe_blocks`` from the PE buffer, ``de_blocks`` from the DE buffer, ``computed`` blocks of
        earlier chunks from the DE buffer.
        """
        now_ns, links = self._events.now_ns, self._links
        return max(
            self._charge(links.load_pe, pe, de, pe_blocks, now_ns),
            self._charge(links.load_de, pe, de, de_blocks, now_ns),
            self._charge(links.reload, pe, de, computed, now_ns),
        )

    def send(self, pe: int, de: int, blocks: int) -> int:
        """Bring blocks from the PE's HBM to the DE buffer; return when they are there."""
        return self._charge(self._links.send, pe, de, blocks, self._events.now_ns)

    def fill(self, de: int, blocks: int) -> int:
        """Bring a prompt's KV from the DE buffer to HBM; return when it is there."""
        return self._charge(self._links.fill, de, de, blocks, self._events.now_ns)

    def persist(self, de: int, blocks: int) -> int:
        """Write new blocks; return when they are stored."""
        return self._charge(self._links.persist, de, de, blocks, self._events.now_ns)

    def _charge(self, links: tuple[Link, ...], pe: int, de: int, blocks: int, now_ns: int) -> int:
        if blocks <= 0:
            return now_ns
        end_ns = now_ns
        for link in links:
            server = self._server(link, pe, de)
            if server is not None:
                end_ns = max(end_ns, server.charge(now_ns, blocks * self._block_bytes))
        return end_ns

    def _server(self, link: Link, pe: int, de: int) -> Server | None:
        """Return what serves a link; storage reads have their own queue."""
        match link:
            case Link.PE_CNIC_READ:
                return self._cnic_read[pe]
            case Link.PE_CNIC_WRITE:
                return self._cnic_write[pe]
            case Link.DE_CNIC_READ:
                return self._cnic_read[de]
            case Link.DE_CNIC_WRITE:
                return self._cnic_write[de]
            case Link.PE_DRAM:
                return self._dram[self.node(pe)]
            case Link.DE_DRAM:
                return self._dram[self.node(de)]
            case Link.DE_SNIC_WRITE:
                return self._snic_write[self.node(de)]
        return None

    def _cnic(self, setup: Setup, engine: int) -> Server:
        return Server(setup.cluster.cnic_bytes_per_s, self.cnic_use, self.node(engine))

    def _snic(self, setup: Setup, node: int) -> FifoSnic | EqualSnic:
        cluster = setup.cluster
        latency_ns = to_ns(cluster.read_latency_s)
        if cluster.snic_sharing == "equal":
            return EqualSnic(
                self._events, cluster.snic_bytes_per_s, latency_ns, self.snic_read_use, node
            )
        server = Server(cluster.snic_bytes_per_s, self.snic_read_use, node)
        return FifoSnic(self._events, server, latency_ns)
