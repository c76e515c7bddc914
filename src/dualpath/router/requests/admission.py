"""The requests of one front end between their arrival and their admission.

A request is *admitted* when its first attempt may ask the scheduler for engines.  Admitted requests
that have no engines yet wait at the scheduler, in the order of their arrival there.  They are as
many as it places in a short time (``policy.admission.PlacementWindow``); all others wait here, in
the order of ``policy.admission.FairQueue``, and can be overtaken.

A request whose attempt has failed stays admitted: it waits at the scheduler again, and no other
request is admitted in its place.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from dualpath.core.cluster import Role
from dualpath.core.errors import OverloadedError
from dualpath.policy.admission import DrainRate, FairQueue, Place, PlacementWindow, retry_after_s
from dualpath.router.engine_calls import Job
from dualpath.router.engines import KnownEngines
from dualpath.router.observe.metrics import NO_TENANT, RouterMetrics
from dualpath.router.refusals import QueueRefusal
from dualpath.router.settings import RouterSettings

#: Tenants that ``report`` names.
_NAMED_TENANTS = 16


class Ticket:
    """One request's place, from ``AdmissionQueue.enter`` to ``AdmissionQueue.leave``."""

    def __init__(self, request_id: str, tenant: str, arrived_s: float) -> None:
        self.request_id, self.tenant, self.arrived_s = request_id, tenant, arrived_s
        loop = asyncio.get_running_loop()
        #: Done when the request is admitted or refused after all.
        self.decided: asyncio.Future[None] = loop.create_future()
        #: Ends in the error for which it is refused.
        self.refused: asyncio.Future[None] = loop.create_future()
        #: Its place in the queue, None once it has left it.
        self.place: Place[Ticket] | None = None
        self.admitted = False
        #: Whether it had to wait, and is counted among those that do.
        self.counted = False
        #: Admitted and without engines.
        self.unplaced = False
        #: The round of the window in which it was admitted, -1 once its wait has been counted.
        self.round = -1

    def may_begin(self) -> bool:
        """Return whether the request is admitted.

        Raises ``OverloadedError`` if it had to give way to one of another tenant.
        """
        if self.refused.done():
            self.refused.result()
        return self.decided.done()


class AdmissionQueue:
    """Owns the queue of a front end, in its event loop.  ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        settings: RouterSettings,
        engines: Callable[[], KnownEngines],
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._metrics = metrics
        self._clock = clock
        weights = settings.tenant_weights
        self._queue: FairQueue[Ticket] = FairQueue(
            {"" if name == NO_TENANT else name: weight for name, weight in weights.items()}
        )
        #: Those in the queue, in the order of arrival.
        self._waiting: dict[Ticket, None] = {}
        self._window = PlacementWindow()
        self._rate = DrainRate(clock())
        self._admitted = self._unplaced = 0
        self._refused: Counter[QueueRefusal] = Counter()

    @property
    def placed(self) -> int:
        """Admitted requests that have their engines."""
        return self._admitted - self._unplaced

    def full(self) -> OverloadedError | None:
        """Return why any request is refused, and count it; None if one may be taken."""
        if self._has_room() or not self._queue.uniform:
            return None
        return self._refusal(QueueRefusal.FULL)

    def enter(self, job: Job) -> Ticket:
        """Let a request wait, or admit it at once.  Raises ``OverloadedError`` in a full queue."""
        if not self._has_room():
            last = self._queue.displaced_by(job.tenant, job.priority)
            if last is None:
                raise self._refusal(QueueRefusal.FULL)
            self._displace(last)
        ticket = Ticket(job.request_id, job.tenant, self._clock())
        cost = max(job.prompt_tokens, 1)
        ticket.place = self._queue.add(ticket, job.tenant, job.priority, cost)
        self._waiting[ticket] = None
        self._admit()
        if not ticket.admitted:
            ticket.counted = True
            self._metrics.queued(job.tenant, 1)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """A request has ended, admitted or not; idempotent."""
        if ticket.place is not None:
            self._queue.remove(ticket.place)
            self._left_queue(ticket)
        if ticket.admitted:
            self._admitted -= 1
            self._unplaced -= ticket.unplaced
            ticket.admitted = ticket.unplaced = False
        self._admit()

    def has_engines(self, ticket: Ticket, queue_s: float, lag_s: float) -> None:
        """The scheduler has placed the request; the waits are those of ``PlacementWindow``."""
        if not ticket.unplaced:
            return
        self._window.placed(
            *(ticket.round, queue_s, lag_s),
            used=self._unplaced,
            short=bool(self._queue),
            least=self._least(),
        )
        ticket.unplaced = False
        self._unplaced -= 1
        ticket.round = -1
        self._admit()

    def has_no_engines(self, ticket: Ticket) -> None:
        """The request's attempt is over: if it is tried again, it waits at the scheduler."""
        if ticket.admitted and not ticket.unplaced:
            ticket.unplaced = True
            self._unplaced += 1

    def scheduler_lost(self) -> None:
        """The next scheduler gets few requests first."""
        self._window.reset()

    def retry_after_s(self) -> int:
        """Return after how many seconds a refused client should try again."""
        rate = self._rate.per_s(self._clock())
        return retry_after_s(len(self._queue), rate, self._settings.request_deadline_s)

    def report(self) -> dict[str, Any]:
        """Return the part of the status that describes the queue, JSON-safe."""
        now_s = self._clock()
        oldest = next(iter(self._waiting), None)
        return {
            "waiting": len(self._queue),
            "oldest_s": round(now_s - oldest.arrived_s, 3) if oldest is not None else 0.0,
            "at_scheduler": self._unplaced,
            "at_scheduler_limit": self._window.limit(self._least()),
            "admitted_per_s": round(self._rate.per_s(now_s), 3),
            "tenants": [
                {"tenant": tenant or NO_TENANT, "waiting": waiting}
                for tenant, waiting in self._queue.longest(_NAMED_TENANTS).items()
            ],
            "refused": {reason.value: self._refused[reason] for reason in QueueRefusal},
        }

    # ------------------------------------------------------------------ inside

    def _has_room(self) -> bool:
        settings = self._settings
        most = settings.max_concurrent_requests + settings.max_waiting_requests
        return self._admitted + len(self._queue) < most

    def _least(self) -> int:
        """Any prefill engine may take a request at any moment."""
        return len(self._engines().alive(Role.PREFILL))

    def _admit(self) -> None:
        """Admit requests while there is room for them; called whenever some may have appeared."""
        most, least = self._settings.max_concurrent_requests, self._least()
        while self._queue and self._admitted < most and self._unplaced < self._window.limit(least):
            ticket, now_s = self._queue.pop().item, self._clock()
            if ticket.counted:
                self._rate.admitted(now_s)
            self._left_queue(ticket)
            self._metrics.admitted(now_s - ticket.arrived_s)
            ticket.admitted = ticket.unplaced = True
            ticket.round = self._window.round
            self._admitted += 1
            self._unplaced += 1
            ticket.decided.set_result(None)

    def _left_queue(self, ticket: Ticket) -> None:
        ticket.place = None
        del self._waiting[ticket]
        if ticket.counted:
            ticket.counted = False
            self._metrics.queued(ticket.tenant, -1)

    def _displace(self, last: Place[Ticket]) -> None:
        ticket = last.item
        error = self._refusal(QueueRefusal.DISPLACED)
        self.leave(ticket)
        ticket.refused.set_exception(error)
        ticket.refused.exception()  # Marks it as seen: its client may have left already.
        ticket.decided.set_result(None)

    def _refusal(self, reason: QueueRefusal) -> OverloadedError:
        self._refused[reason] += 1
        self._metrics.queue_refused(reason)
        settings, after_s = self._settings, self.retry_after_s()
        running, waiting = settings.max_concurrent_requests, settings.max_waiting_requests
        under_way = self._admitted + len(self._queue)
        how = (
            f"{under_way} requests are under way, at most {running} run and {waiting} wait; "
            if reason is QueueRefusal.FULL
            else f"{under_way} requests are under way, and this one, the last of the tenant with "
            "most waiting requests, gave way to one of another tenant or of lower priority; "
        )
        return OverloadedError(
            f"{how}{len(self._queue)} wait now, of which {self._rate.per_s(self._clock()):.3g} per "
            f"second are admitted: send it again after {after_s} s, or raise "
            "--max-concurrent-requests or --max-waiting-requests",
            after_s,
        )
