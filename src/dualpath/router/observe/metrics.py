"""Prometheus metrics of the router, named as the ecosystem does.

The router's own figures are counters and histograms, most of them written once, when a
request ends; what engines report is read at every scrape (``engine_metrics``).
"""

import asyncio
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from dualpath.core.cluster import Role
from dualpath.core.kv_hints import FETCH, HintStatus
from dualpath.policy.events import Assignment
from dualpath.policy.session_warmth import REASONS
from dualpath.policy.units import UNIT_REASONS, UnitChoice
from dualpath.router.hit_account import LOOKUP_FAILURES, HitAccount, HitPlace
from dualpath.router.observe.engine_metrics import EngineCollector, text_format
from dualpath.router.refusals import ControlRefusal, HttpRefusal, QueueRefusal, http_refusal
from dualpath.router.scheduler.registry import Registry
from dualpath.router.scheduler.roles import ASKED, SWITCH_ENDS, Switch, SwitchState
from dualpath.router.scheduler.weights import Action
from dualpath.router.stages import OUTCOMES, RequestRecord, Stage

_STAGE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_DECISION_BUCKETS_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.05, 0.1)

#: What became of an operation of a trainer, by whether it succeeded.
WEIGHT_OUTCOMES = {True: "done", False: "failed"}

_READ_PATHS = {Role.PREFILL: "pe", Role.DECODE: "de"}

#: The Prometheus client's: the folder in which processes that share a port keep their metrics.
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"


def shared_metrics() -> bool:
    """Whether any process of several at one port answers with the metrics of all."""
    return SHARED_METRICS in os.environ


def share_metrics(front_end: str) -> None:
    """Let a front end continue the counters of the former process of its name.

    So restarts add no files, all of which every scrape reads.  Does nothing where metrics are not
    shared, or without a name.  Must be called before any metric is defined.
    """
    if shared_metrics() and front_end:
        writer = metrics_writer(front_end)
        values.ValueClass = values.MultiProcessValue(lambda: writer)  # type: ignore[no-untyped-call]


def metrics_writer(front_end: str) -> str:
    """Return the name of a front end in file names, where the Prometheus client has a PID."""
    return hashlib.sha256(front_end.encode()).hexdigest()[:16]


#: The tenant of requests without a ``cache_salt``, in labels and settings.
NO_TENANT = "none"


class RouterMetrics:
    """All metrics of one router; ``exposition`` is the body of ``/metrics``.

    ``control_refusals`` returns the control server's counts of refusals; ``registry`` records by
    ``clock`` when a message of an engine was last received.  ``tenants`` are counted by name while
    their requests wait, all others together.
    """

    def __init__(
        self,
        registry: Registry,
        control_refusals: Callable[[], Mapping[ControlRefusal, int]],
        clock: Callable[[], float] = time.monotonic,
        tenants: Iterable[str] = (),
    ) -> None:
        self.registry = CollectorRegistry()
        self.hit_tokens = 0
        self.recomputed_tokens = 0
        self.prompt_tokens = 0
        self.retries = 0
        self._scheduler_s = 0.0
        self._define_requests()
        self._define_queue(tenants)
        self._define_tokens()
        self._define_scheduling()
        self.registry.register(_ControlRefusals(control_refusals))
        self.registry.register(_SchedulerTime(lambda: self._scheduler_s))
        self._engines = EngineCollector(registry, clock)

    def _define_requests(self) -> None:
        self._requests = self._counter("requests", "Finished requests by outcome.", "outcome")
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._http_refusals = self._counter(
            "http_refusals", "HTTP requests answered with a 4xx status, by reason.", "reason"
        )
        for reason in HttpRefusal:
            self._http_refusals.labels(reason)
        self._retries = self._counter("retries", "Attempts at requests repeated after a fault.")
        self._silent_calls = self._counter(
            "silent_calls", "Calls to engines that were broken off because they were silent."
        )
        self._engine_losses = self._counter(
            "engine_losses", "Engines that were lost, goodbyes not counted.", "role"
        )
        for role in Role:
            self._engine_losses.labels(role.value)
        self._role_switches = self._counter(
            "role_switches",
            "Engines and groups that were to change their role or size, by what became of it.",
            "to_role",
            "reason",
            "outcome",
        )
        for role in Role:
            for end in SWITCH_ENDS:
                self._role_switches.labels(role.value, ASKED, end.value)
        self._role_switch = self._histogram(
            "role_switch_seconds",
            "Time from the request for another role until the engine serves in it.",
            _STAGE_BUCKETS_S,
        )
        self._weights = self._counter(
            "weight_operations",
            "Updates, sleeps, wake-ups and resumptions for trainers, by what became of them.",
            "action",
            "outcome",
        )
        for action in Action:
            for outcome in WEIGHT_OUTCOMES.values():
                self._weights.labels(action.value, outcome)
        stages = self._histogram(
            "stage_seconds", "Time of requests in each stage.", _STAGE_BUCKETS_S, "stage"
        )
        self._stages = {stage: stages.labels(stage.value) for stage in Stage}
        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token (TTFT).",
            _STAGE_BUCKETS_S,
        )
        self._ttst = self._histogram(
            "time_to_second_token_seconds",
            "Time from the first token to the second, the hand-over to the DE (TTST).",
            _STAGE_BUCKETS_S,
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean gap between a request's tokens after the second (TPOT).",
            _TOKEN_GAP_BUCKETS_S,
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to its end.",
            _STAGE_BUCKETS_S,
        )
        self._waiting = self._gauge("requests_waiting", "Requests without an assignment.")
        self._running = self._gauge("requests_running", "Requests with an assignment.")

    def _define_queue(self, tenants: Iterable[str]) -> None:
        queued = self._gauge(
            "queued_requests",
            "Requests that wait in the front end's queue: without a cache_salt (none), of tenants "
            "with a weight, and of all others (other).",
            "tenant",
        )
        self._queued = {name: queued.labels(name) for name in (NO_TENANT, *tenants)}
        self._queued_others = queued.labels("other")
        self._queue_wait = self._histogram(
            "queue_wait_seconds",
            "Time of admitted requests in the front end's queue.",
            _STAGE_BUCKETS_S,
        )
        self._queue_refusals = self._counter(
            "queue_refusals", "Requests that the front end's queue refused, by reason.", "reason"
        )
        for reason in QueueRefusal:
            self._queue_refusals.labels(reason)

        self._loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "Time by which this process's event loop is late, sampled every 50 ms.",
            _LAG_BUCKETS_S,
        )

    def _define_tokens(self) -> None:
        self._prompt = self._counter("prompt_tokens", "Prompt tokens prefilled.")
        self._hit = self._counter("hit_tokens", "Prompt tokens with KV-cache that was loaded.")
        self._hit_by_source = self._counter(
            "hit_tokens_by_source",
            "Prompt tokens with KV-cache that was loaded, by source: the DRAM buffer of the PE "
            "or DE, or storage that this engine read.",
            "source",
        )
        for source in HitPlace:
            self._hit_by_source.labels(source)
        self._ideal_hit = self._counter(
            "ideal_hit_tokens",
            "Prompt tokens with KV-cache that had been computed before: the hits of a storage that "
            "evicts nothing and a data path that never fails.",
        )
        self._missed = self._counter(
            "missed_tokens", "Prompt tokens that were computed, by reason.", "reason"
        )
        self._recomputed = self._counter(
            "recomputed_tokens",
            "Stored prompt tokens that were recomputed, by reason.",
            "reason",
        )
        self._saved_lookups = self._counter(
            "saved_lookups",
            "Prompts of which the scheduler knew how much is stored without asking an engine.",
        )
        self._short_lookups = self._counter(
            "short_lookups",
            "Saved look-ups that would have found more: it was computed again.",
        )
        self._lookup_failures = self._counter(
            "lookup_failures",
            "Look-ups not finished in time; blocks not found by then count as not stored.",
            "reason",
        )
        for reason in LOOKUP_FAILURES:
            self._lookup_failures.labels(reason)
        self._generated = self._counter("generation_tokens", "Tokens streamed to clients.")
        self._kv_hints = self._counter(
            "kv_hint_actions",
            "Actions of orchestrators' KV hints, by what became of them.",
            "action",
            "status",
        )
        for action in (FETCH, "other"):
            for status in HintStatus:
                self._kv_hints.labels(action, status)
        self._session_blocks = self._counter(
            "session_blocks",
            "Blocks that decode engines were ordered to retain, prefetch or release for agents' "
            "sessions, by reason.",
            "reason",
        )
        for reason in REASONS:
            self._session_blocks.labels(reason)

    def _define_scheduling(self) -> None:
        self._assignments = self._counter(
            "assignments", "Scheduler decisions by reason.", "pe_reason", "de_reason", "read_reason"
        )
        read_tokens = self._counter(
            "assigned_read_tokens", "Hit tokens by the read path they were assigned to.", "path"
        )
        self._read_tokens = {role: read_tokens.labels(_READ_PATHS[role]) for role in Role}
        self._decision = self._histogram(
            "scheduler_decision_seconds",
            "Time of the scheduler's round that decided, divided by its decisions.",
            _DECISION_BUCKETS_S,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dualpath:{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        # Of processes that share a port, the sum over those that live.
        return Gauge(
            f"dualpath:{name}", text, labels, registry=self.registry, multiprocess_mode="livesum"
        )

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return Histogram(
            f"dualpath:{name}", text, labels, buckets=tuple(buckets), registry=self.registry
        )

    def define_units(self, units: Iterable[str]) -> None:
        """Define the metrics of a front end that knows several units."""
        names = tuple(units)
        self._unit_attempts = self._counter(
            "unit_attempts", "Attempts at requests by unit, and why in this one.", "unit", "reason"
        )
        for unit, reason in itertools.product(names, UNIT_REASONS):
            self._unit_attempts.labels(unit, reason)
        self._unit_serves = Gauge(
            "dualpath:unit_serves",
            "Whether the unit has a session with this front end and engines of both roles.",
            ("unit",),
            registry=self.registry,
            multiprocess_mode="livemin",
        )
        for unit in names:
            self._unit_serves.labels(unit).set(0)

    def unit_chosen(self, choice: UnitChoice) -> None:
        """Count an attempt in a unit."""
        self._unit_attempts.labels(choice.unit, choice.reason).inc()

    def unit_serves(self, unit: str, *, serves: bool) -> None:
        """Note whether a unit serves at present."""
        self._unit_serves.labels(unit).set(int(serves))

    def assigned(self, assignment: Assignment) -> None:
        """Count a decision."""
        self._assignments.labels(
            assignment.pe_reason, assignment.de_reason, assignment.read_reason
        ).inc()
        for role in assignment.sides:
            self._read_tokens[role].inc(assignment.at(role).read_tokens)

    def reads_replanned(self, old: Assignment, new: Assignment) -> None:
        """Count what either side has to read more than it was assigned; third DEs are DEs."""
        for role in new.sides:
            more = new.at(role).read_tokens - old.at(role).read_tokens
            if role is Role.DECODE:
                more += sum(third.read_tokens for third in new.thirds)
                more -= sum(third.read_tokens for third in old.thirds)
            self._read_tokens[role].inc(max(more, 0))

    def scheduled(self, spent_s: float, decisions: int) -> None:
        """Count one round of the scheduler."""
        self._scheduler_s += spent_s
        for _ in range(decisions):
            self._decision.observe(spent_s / decisions)

    def prefilled(self, account: HitAccount) -> None:
        """Count a request's prompt, once per request."""
        self.prompt_tokens += account.prompt_tokens
        self.hit_tokens += account.hit_tokens
        self._prompt.inc(account.prompt_tokens)
        self._hit.inc(account.hit_tokens)
        for source, tokens in account.sources.items():
            self._hit_by_source.labels(source).inc(tokens)
        self._ideal_hit.inc(account.ideal_hit_tokens)
        for reason, tokens in account.missed.items():
            self._missed.labels(_short(reason)).inc(tokens)

    def kv_hint(self, action_type: str, status: HintStatus) -> None:
        """Count an action of an orchestrator's KV hints."""
        # Clients choose names: only the known one is a label.
        action = action_type if action_type == FETCH else "other"
        self._kv_hints.labels(action, status).inc()

    def recomputed(self, tokens: int, reason: str) -> None:
        """Count stored tokens that have to be computed again."""
        self.recomputed_tokens += tokens
        self._recomputed.labels(_short(reason)).inc(tokens)

    def lookup_failed(self, reason: str) -> None:
        """Count a look-up that failed."""
        self._lookup_failures.labels(reason).inc()

    def lookup_saved(self) -> None:
        """Count a prompt that was not looked up."""
        self._saved_lookups.inc()

    def lookup_was_short(self) -> None:
        """Count a prompt that should have been looked up."""
        self._short_lookups.inc()

    def session_ordered(self, reason: str, blocks: int) -> None:
        """Count an order for an agent's session."""
        self._session_blocks.labels(reason).inc(blocks)

    def retried(self) -> None:
        """Count a repeated attempt."""
        self.retries += 1
        self._retries.inc()

    def silent_call(self) -> None:
        """A call to an engine was broken off because it was silent."""
        self._silent_calls.inc()

    def engine_lost(self, role: Role) -> None:
        """Count an engine that did not leave on purpose."""
        self._engine_losses.labels(role.value).inc()

    def kv_in_hbm(self, h2d_s: float) -> None:
        """A DE has reported its copy of a prompt's KV to HBM."""
        self._stages[Stage.H2D].observe(h2d_s)

    def finished(self, record: RequestRecord) -> None:
        """Count a finished request, its stages and its times to tokens."""
        self._requests.labels(record.outcome).inc()
        self._generated.inc(record.generated_tokens)
        for stage in record.stages:
            if stage.stage is not Stage.H2D:  # The DE's report may come after the last token.
                self._stages[stage.stage].observe(stage.end_s - stage.start_s)
        for histogram, seconds in (
            (self._ttft, record.ttft_s),
            (self._ttst, record.ttst_s),
            (self._tpot, record.tpot_s),
            (self._latency, record.latency_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def role_switched(self, switch: Switch) -> None:
        """Count a change of role that is over."""
        self._role_switches.labels(switch.to_role.value, switch.reason, switch.state.value).inc()
        if switch.state is SwitchState.JOINED and switch.took_s is not None:
            self._role_switch.observe(switch.took_s)

    def weights_changed(self, action: str, ok: bool) -> None:
        """Count an operation of a trainer that is over."""
        self._weights.labels(action, WEIGHT_OUTCOMES[ok]).inc()

    def answered(self, status: int, body: bytes) -> None:
        """Count an HTTP request if this answer, or the part of it in ``body``, refuses it."""
        if (reason := http_refusal(status, body)) is not None:
            self._http_refusals.labels(reason).inc()

    def queued(self, tenant: str, more: int) -> None:
        """Count ``more`` waiting requests of a tenant, by its tag."""
        self._queued.get(tenant or NO_TENANT, self._queued_others).inc(more)

    def admitted(self, waited_s: float) -> None:
        """Count a request that has left the queue for the scheduler."""
        self._queue_wait.observe(waited_s)

    def queue_refused(self, reason: QueueRefusal) -> None:
        """Count a request that the queue refuses."""
        self._queue_refusals.labels(reason).inc()

    def loop_lagged(self, late_s: float) -> None:
        """Observe by how much the event loop is late."""
        self._loop_lag.observe(late_s)

    def began(self) -> None:
        """Count a request that waits."""
        self._waiting.inc()

    def placed(self) -> None:
        """Count a waiting request as running: it has its engines."""
        self._waiting.dec()
        self._running.inc()

    def given_back(self) -> None:
        """Count a running request as waiting: it is over, or tried again."""
        self._running.dec()
        self._waiting.inc()

    def ended(self) -> None:
        """Count a request no more that had given its engines back, or had none."""
        self._waiting.dec()

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format.

        Where metrics are shared, all that any of the processes has, vLLM's own among them.
        """
        return self._own_exposition() + text_format(self._engines.collect())

    async def scrape(self) -> bytes:
        """Return what ``exposition`` does, without stopping the event loop for long.

        With 1,152 engines it takes 0.2 s of CPU time.  So other work goes on between the families
        of engines, and while the files of other processes are read.
        """
        shared = shared_metrics()
        own = await asyncio.to_thread(self._own_exposition) if shared else self._own_exposition()
        parts = [own]
        for family in self._engines.collect():
            parts.append(text_format([family]))
            await asyncio.sleep(0)
        return b"".join(parts)

    def _own_exposition(self) -> bytes:
        registry = self.registry
        if shared_metrics():
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def families(self) -> Iterator[Metric]:
        """Yield all metrics with their present samples."""
        yield from self.registry.collect()
        yield from self._engines.collect()


class _ControlRefusals(Collector):
    """Refusals at the control address, counted by its server."""

    def __init__(self, counted: Callable[[], Mapping[ControlRefusal, int]]) -> None:
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "dualpath:control_refusals",
            "Connections, greetings and other frames refused at the control address, by reason.",
            labels=["reason"],
        )
        for reason, times in self._counted().items():
            family.add_metric([reason], times)
        yield family


class _SchedulerTime(Collector):
    """Time of the scheduler, added up without a counter's lock in every round."""

    def __init__(self, spent_s: Callable[[], float]) -> None:
        self._spent_s = spent_s

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "dualpath:scheduler_seconds",
            "Time spent in rounds of the scheduler, whether they decided anything or not.",
            value=self._spent_s(),
        )


def _short(reason: str) -> str:
    """Return a reason's stable head: details after a colon would make endless label values."""
    return reason.split(":", 1)[0]
