"""A registry with engines that report what a test sets, its dashboard and a clock set by hand."""

from types import SimpleNamespace
from typing import Any

from tests.unit.router_fakes import NAMESPACE

from dualpath.core import control
from dualpath.core.cluster import AgentAddress, EngineAddress, GroupRank, Role
from dualpath.core.control import PROTOCOL_VERSION, Register, Report
from dualpath.core.request import Request
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.sessions import Event
from dualpath.policy.events import Assignment
from dualpath.router.observe.dashboard.board import Dashboard, Load
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.scheduler.registry import EngineState, Registry
from dualpath.router.settings import RouterSettings
from dualpath.router.stages import RequestRecord

BUFFER_TOKENS, HBM_TOKENS = 1000, 4000


class ReportedCluster:
    """Engines with counters that a test moves; ``service`` is what an HTTP server needs of it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.registry = Registry()
        self.metrics = RouterMetrics(self.registry, dict, self.clock)
        self.open: list[RequestRecord] = []
        self.placements: list[Any] = []
        self.dashboard = Dashboard(self.registry, self.metrics, self.clock, self.load)
        self.service: Any = SimpleNamespace(
            registry=self.registry,
            scheduler=SimpleNamespace(dashboard=self.dashboard),
            metrics=self.metrics,
            settings=RouterSettings(),
        )

    def clock(self) -> float:
        return self.now_s

    def load(self) -> Load:
        return Load(self.open, waiting=2, running=len(self.open), placements=self.placements)

    def join(
        self,
        engine_id: str,
        role: Role,
        node: str = "",
        epoch: str = "first",
        dp: GroupRank | None = None,
    ) -> EngineState:
        address = EngineAddress(engine_id, epoch, role, (AgentAddress("agent", b"", ()),))
        hello = Register(
            version=PROTOCOL_VERSION,
            address=address,
            namespace=NAMESPACE,
            api_url="http://127.0.0.1:1",
            node=node or f"node of {engine_id}",
            group=f"{role.value} group",
            mode="dualpath",
            hbm_tokens=HBM_TOKENS,
            buffer_tokens=BUFFER_TOKENS,
            snic_bytes_per_s=1e6,
            dp=dp,
        )
        admission = self.registry.admit(hello)
        assert admission is not None
        admission.engine.machine.on(admission.event)
        admission.engine.machine.on(Event.GROUP_COMPLETE)
        admission.engine.open(engine_id, b"", self.now_s)
        return admission.engine

    def report(
        self,
        engine_id: str,
        *,
        read_queue_tokens: int = 0,
        free_buffer_tokens: int = 750,
        **counted,
    ) -> None:
        """The engine's latest report; ``counted`` are its totals."""
        state = self.registry.get(engine_id)
        assert state is not None
        state.heard_s = self.now_s
        state.report = Report(
            report_seq=1,
            load=control.Load(
                unfinished_requests=3,
                unfinished_tokens=600,
                read_queue_tokens=read_queue_tokens,
                free_hbm_tokens=3000,
                free_buffer_tokens=free_buffer_tokens,
            ),
            counters={name: float(value) for name, value in counted.items()},
        )

    def after(self, seconds: float) -> None:
        """Let time pass and take a sample."""
        self.now_s += seconds
        self.dashboard.sample()

    def request(self, request_id: str) -> RequestRecord:
        """An open request that arrives now."""
        record = RequestRecord(request_id, 100, self.clock)
        self.open.append(record)
        return record

    def end(self, record: RequestRecord) -> None:
        self.open.remove(record)
        self.dashboard.ended(record)

    def assign(self, request_id: str, prefill: str, decode: str) -> None:
        assignment = Assignment(
            request_id=request_id,
            prefill_engine=prefill,
            decode_engine=decode,
            reads=(HitRun(Role.DECODE, BlockRun(0, 5)),),
            pe_reason="short-queue",
            de_reason="low-token min-seq",
            read_reason="shorter-queue",
        )
        request = Request(request_id, prompt_tokens=100, hit_tokens=80, max_new_tokens=1)
        self.placements.append(SimpleNamespace(request=request, assignment=assignment))


def large_cluster(nodes: int, engines_per_node: int) -> ReportedCluster:
    """Half of the nodes prefill, half decode; all have read for 5 s, then one engine was lost."""
    cluster = ReportedCluster()
    for step in range(6):
        for node in range(nodes):
            role = Role.PREFILL if node < nodes // 2 else Role.DECODE
            for index in range(engines_per_node):
                name = f"{role.value}-{node:02}-{index}"
                if step == 0:
                    cluster.join(name, role, node=f"rack-{node // 8}-node-{node:02}")
                cluster.report(
                    name,
                    read_queue_tokens=37 * node,
                    free_buffer_tokens=(node * 53) % BUFFER_TOKENS,
                    storage_read_bytes=step * 1e6 * (node + 1) / nodes,
                    pe_to_de_bytes=step * 3e5,
                    de_to_pe_bytes=step * 1e5,
                    pe_hit_bytes=step * 2e5,
                    miss_bytes=step * 1e5,
                    de_hit_bytes=step * 1e5,
                    h2d_bytes=step * 4e5,
                )
        cluster.after(1.0)
    lost = cluster.registry.all()[0]
    lost.machine.on(Event.SILENT)
    return cluster
