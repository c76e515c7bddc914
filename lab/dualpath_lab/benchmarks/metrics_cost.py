"""Cost of metrics and traces in the router: CPU time per request, per token and per scrape.

The cost of a request is that of counting one of 1,000 blocks with all its stages; tracing adds its
spans, without their export, which happens on another thread.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.cluster import AgentAddress, EngineAddress, Role
from dualpath.core.control import PROTOCOL_VERSION, Load, Register, Report
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.sessions import Event
from dualpath.core.settings import Setting, Settings
from dualpath.engine.counters import Counter
from dualpath.policy.events import Assignment
from dualpath.router.engine_calls import Job
from dualpath.router.hit_account import SeenBlocks
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.observe.tracing import Tracing
from dualpath.router.scheduler.registry import Registry
from dualpath.router.stages import RequestRecord
from dualpath.router.stages import Stage as RequestStage
from dualpath_sim.harness.experiment import Experiment, Progress, Stage, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, numbers_page

BLOCKS, BLOCK_TOKENS, NEW_BLOCKS = 1000, 64, 20
ENGINES = 100
#: Fetch rounds per request: submit, read done, prefill done, finished, and reports of engines.
ROUNDS = 12

ASSIGNMENT = Assignment(
    request_id="a",
    prefill_engine="p",
    decode_engine="d",
    reads=(HitRun(Role.PREFILL, BlockRun(0, 1)),),
    prefill_read_tokens=64,
    pe_reason="short-queue",
    de_reason="low-token min-seq",
    read_reason="shorter-queue",
)


class MetricsSettings(Settings, frozen=True, kw_only=True):
    """Number of calls."""

    requests: Annotated[int, Setting("requests in each of 5 rounds", ge=1)] = 2000


def _stages(settings: MetricsSettings, progress: Progress) -> list[Stage[Any, Numbers]]:
    repeats, registry = settings.requests, registered()
    metrics, record = RouterMetrics(registry, dict), finished_record()
    costs: dict[str, Callable[[], float]] = {
        "request: counters and histograms": lambda: per_call_us(
            repeats, lambda: count(metrics, record)
        ),
        f"request: statistics of {BLOCKS} blocks, {NEW_BLOCKS} new": lambda: account_us(repeats),
        "token: times recorded for TTFT, TTST, TPOT": lambda: token_us(repeats * 10),
        f"scrape with {ENGINES} engines": lambda: per_call_us(20, metrics.exposition),
        "request: spans, if traced": lambda: spans_us(repeats),
    }
    return one_stage(costs, lambda measure, number: {"cpu_us": measure()})


def per_call_us(repeats: int, call: Callable[[], object]) -> float:
    """Return the CPU time of this thread per call, best of 5 rounds, in microseconds."""
    best_ns = min(_round_ns(repeats, call) for _ in range(5))
    return best_ns / repeats / 1000


def _round_ns(repeats: int, call: Callable[[], object]) -> int:
    start_ns = time.thread_time_ns()
    for _ in range(repeats):
        call()
    return time.thread_time_ns() - start_ns


def count(metrics: RouterMetrics, record: RequestRecord) -> None:
    """Count one request as the router does."""
    for _ in range(ROUNDS):
        metrics.scheduled(1e-5, 0)
    metrics.scheduled(1e-5, 1)
    metrics.assigned(ASSIGNMENT)
    metrics.prefilled(ACCOUNT)
    metrics.finished(record)


def account_us(repeats: int) -> float:
    seen, turn = SeenBlocks(), iter(range(1 << 40))
    stored = BLOCKS - NEW_BLOCKS
    old = [number.to_bytes(32, "big") for number in range(stored)]

    def account() -> None:
        first = stored + next(turn) * NEW_BLOCKS
        new = [number.to_bytes(32, "big") for number in range(first, first + NEW_BLOCKS)]
        seen.account([*old, *new], BLOCKS * BLOCK_TOKENS + 1, BLOCK_TOKENS, stored, stored)

    return per_call_us(repeats, account)


def token_us(repeats: int) -> float:
    record = RequestRecord("a", 1, time.monotonic)
    return per_call_us(repeats, lambda: record.streamed(1))


def spans_us(repeats: int) -> float:
    tracing = Tracing(Nowhere(), time.monotonic)
    job = Job("a", (1,), 1, (), lambda tokens: ())

    def trace() -> None:
        record = finished_record()
        spans = tracing.begin(job, record)
        spans.call(RequestStage.PREFILL, "p")
        spans.call(RequestStage.DECODE, "d")
        spans.end()

    return per_call_us(repeats, trace)


class Nowhere:
    """An exporter that discards spans."""

    def export(self, spans: object) -> None:
        """Discard them."""

    def shutdown(self) -> None:
        """Nothing to close."""


def finished_record() -> RequestRecord:
    record = RequestRecord("a", BLOCKS * BLOCK_TOKENS, time.monotonic)
    record.attempts = 1
    for stage in RequestStage:
        record.add(stage, record.start_s, "p" if stage is RequestStage.PREFILL else "d")
    for _ in range(3):
        record.streamed(1)
    record.close("finished")
    return record


def registered() -> Registry:
    registry = Registry()
    for number in range(ENGINES):
        role = Role.PREFILL if number % 2 else Role.DECODE
        hello = Register(
            version=PROTOCOL_VERSION,
            address=EngineAddress(f"e{number}", "1", role, (AgentAddress("a", b"", ()),)),
            namespace=StoreNamespace("m", "bf16", "l", BlockGeometry.uniform(2, BLOCK_TOKENS, 64)),
            api_url="",
            node=f"n{number}",
            group=role.value,
            mode="dualpath",
            hbm_tokens=1000,
            buffer_tokens=1000,
        )
        admission = registry.admit(hello)
        assert admission is not None
        state = admission.engine
        for event in (admission.event, Event.GROUP_COMPLETE):
            state.machine.on(event)
        state.report = Report(1, Load(0, 0, 0, 1000, 1000), dict.fromkeys(Counter, 1.0))
    return registry


ACCOUNT = SeenBlocks().account([bytes([number]) for number in range(10)], 641, BLOCK_TOKENS, 5, 5)

METRICS = Experiment(
    name="metrics",
    title="Cost of metrics and traces in the router",
    settings=MetricsSettings(),
    result=Numbers,
    stages=_stages,
    draw=numbers_page("CPU time, best of 5 rounds", [Column("µs", "cpu_us", tolerance=0.15)]),
)
