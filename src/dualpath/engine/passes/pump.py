"""One thread that polls posted transfers until they end, without spinning a core."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

import msgspec

from dualpath.core.errors import DualPathError
from dualpath.engine.counters import Counters
from dualpath.engine.passes.device import Device, DeviceEvent
from dualpath.engine.passes.hbm_layout import HbmLayout, PartViews
from dualpath.engine.passes.step_transfers import ONLY, Replica, StepTransfers
from dualpath.engine.settings import EngineSettings
from dualpath.engine.threads import OS_THREADS, Health, Thread, Threads, TimeLimit
from dualpath.engine.trace import TraceRecorder
from dualpath.transport.contract import RegionInfo, Transfer, TransferState, Transport
from dualpath.transport.regions import span_bytes

# ------------------------------------------------------------------------------------ event waiter
# A thread that waits for events of the device, so that the engine and the pump do not block.

#: Longer than the computation of any layer of a forward pass.
_EVENT_LIMIT_S = 120.0

#: Called with None, or with the error of the device.
Work = Callable[[str | None], None]


class EventWaiter:
    """Runs callbacks after events, in the order of the calls.

    Events of one stream pass in order, so one thread that blocks on the oldest event is enough.  A
    callback runs at once on the calling thread if its event has passed and no older one waits: on
    a CPU the thread is never started.
    """

    def __init__(self, device: Device, name: str, health: Health | None = None) -> None:
        self._health = health or Health()
        self._device = device
        self._name = f"{name}-events"
        self._change = self._health.threads.condition()
        self._waiting: deque[tuple[DeviceEvent, Work]] = deque()
        self._closing = False
        self._watchdog = self._health.watchdog(
            "the device has not reached an event", _EVENT_LIMIT_S
        )
        self._thread: Thread | None = None

    def call(self, event: DeviceEvent, work: Work) -> None:
        """Run ``work`` once ``event`` has passed, or with the error if the device failed."""
        with self._change:
            idle = not self._waiting
            if not idle or not _has_passed(event):
                self._waiting.append((event, work))
                self._start()
                self._change.notify()
                return
        work(None)

    def close(self, limit: TimeLimit) -> bool:
        """Run the waiting callbacks and stop, within the limit; return whether it has stopped."""
        with self._change:
            self._closing = True
            self._change.notify()
            thread = self._thread
        return thread is None or limit.join([thread])

    def _start(self) -> None:
        if self._thread is None:
            self._thread = self._health.start(self._name, self._run)

    def _run(self) -> None:
        self._device.enter_thread()
        while True:
            with self._change:
                while not self._waiting and not self._closing:
                    self._watchdog.idle()
                    self._change.wait()
                if not self._waiting:
                    return
                event, work = self._waiting[0]
                self._watchdog.progressed()
            try:
                work(_wait(event))
            except Exception:  # a defect must not end the thread that posts all sends
                log.exception("work after an event of the device failed")
            with self._change:
                # Only now: until it has run, later work must not overtake it.
                self._waiting.popleft()


def _has_passed(event: DeviceEvent) -> bool:
    try:
        return event.passed()
    except DualPathError:
        return False  # the thread reports the error


def _wait(event: DeviceEvent) -> str | None:
    try:
        event.wait()
    except DualPathError as error:
        return str(error)
    return None


log = logging.getLogger(__name__)

#: Waits between two polls: short after a transfer has begun or ended, then growing with the
#: elapsed time, so that an end is noticed late by a few per cent of the transfer's duration.
_FIRST_WAIT_S = 0.0001
_LONGEST_WAIT_S = 0.001
_GROWTH = 1.15
#: Limit of one iteration, which posts and polls and copies megabytes at most.
_ITERATION_LIMIT_S = 10.0


class Completion:
    """One transfer under way; ``wait`` blocks until it is over, ``error`` is None if it succeeded.

    ``settled`` is False if it is unknown whether it still writes: its memory is never reused.
    """

    def __init__(
        self,
        transfer: Transfer,
        then: Callable[["Completion"], None] | None,
        threads: Threads = OS_THREADS,
    ) -> None:
        self.transfer = transfer
        self.error: str | None = None
        self.settled = True
        self._then = then
        self._over = threads.event()

    def is_over(self) -> bool:
        """Poll the transfer; if that raises, it is over and not settled."""
        try:
            return self.transfer.poll() is not TransferState.MOVING
        except Exception as error:  # a defect of a transport must not end the pump
            log.exception("poll of a transfer failed")
            self.error = f"poll of a transfer failed: {error}"
            self.settled = False
            return True

    def finish(self) -> None:
        """Run the callback; called by the pump exactly once."""
        assert not self._over.is_set(), "a transfer is finished twice"
        try:
            if self.settled:
                self.error = self.transfer.error()
                self.transfer.release()
            if self._then is not None:
                self._then(self)
        except Exception as error:  # a defect in a callback must not end the pump
            log.exception("work after a transfer failed")
            self.error = self.error or str(error)
        finally:
            self._over.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the transfer and its callback are over; False after the timeout."""
        return self._over.wait(timeout_s)


class TransferPump:
    """Polls transfers in the order in which they were posted and runs their callbacks.

    ``then`` callbacks run on the pump's thread; they may post further transfers.  An exception is
    logged and affects only its own transfer.  ``unsettled`` is called for each transfer that may
    still write though it cannot be polled.
    """

    def __init__(
        self,
        name: str,
        health: Health | None = None,
        unsettled: Callable[[], None] = lambda: None,
    ) -> None:
        health = health or Health()
        self._unsettled = unsettled
        self._threads = health.threads
        self._wake = self._threads.condition()
        #: In the order in which they were posted.
        self._moving: dict[Completion, None] = {}
        self._begun = False
        self._calls: deque[Callable[[], None]] = deque()
        self._each_poll: list[Callable[[], None]] = []
        self._closing = False
        self._watchdog = health.watchdog(
            "the thread that moves KV has not finished an iteration", _ITERATION_LIMIT_S
        )
        self._thread = health.start(f"{name}-pump", self._run)

    def watch(
        self, transfer: Transfer, then: Callable[[Completion], None] | None = None
    ) -> Completion:
        """Poll a posted transfer until it ends."""
        completion = Completion(transfer, then, self._threads)
        with self._wake:
            self._moving[completion] = None
            self._begun = True
            self._wake.notify()
        return completion

    def call(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the pump's thread, in order.

        Posting a transfer may copy its bytes synchronously (UCX over shared memory does): threads
        that must not wait for it let the pump post.
        """
        with self._wake:
            self._calls.append(work)
            self._wake.notify()

    def each_poll(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the pump's thread with each poll, while transfers are under way.

        It lets code with a deadline for a transfer notice that time has passed.
        """
        with self._wake:
            self._each_poll.append(work)

    def close(self, limit: TimeLimit) -> bool:
        """Stop after the transfers under way are over, within the limit.

        Return whether they are over.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        return limit.join([self._thread])

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            with self._wake:
                while not self._moving and not self._calls and not self._closing:
                    self._watchdog.idle()
                    self._wake.wait()
                    wait_s = _FIRST_WAIT_S
                if not self._moving and not self._calls:
                    return
                calls, self._calls = self._calls, deque()
            self._watchdog.progressed()
            for work in calls:
                self._do(work)
            with self._wake:
                moving = list(self._moving)
                begun, self._begun = self._begun, False
                each_poll = tuple(self._each_poll)
            for work in each_poll:
                self._do(work)
            if self._finish_those_over(moving):
                wait_s = _FIRST_WAIT_S
                continue
            wait_s = _FIRST_WAIT_S if begun else min(wait_s * _GROWTH, _LONGEST_WAIT_S)
            with self._wake:
                if not self._begun and not self._calls:
                    self._wake.wait(wait_s)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a defect must not end the thread that moves all KV
            log.exception("work of the transfer pump failed")

    def _finish_those_over(self, moving: list[Completion]) -> bool:
        """Finish each transfer that is over before the next one is polled, which may copy bytes."""
        found = False
        for completion in moving:
            if not completion.is_over():
                continue
            found = True
            with self._wake:
                del self._moving[completion]
            completion.finish()
            if not completion.settled:
                self._unsettled()
        return found


# ------------------------------------------------------------------------------------------ stalls
# Stalled agents, and the time that a forward pass waits for transfers before it abandons them.
#
# A transfer that neither ends nor fails (a peer that hangs, a link that drops all packets) must not
# block the engine.  Four ways to limit the wait were considered:
#
# * *A limit for each wait* adds up, as a pass waits 4L-1 times.
# * *A limit for the whole pass* cannot be chosen well: a prompt of 64K tokens over a slow but
#   working link takes minutes, and a dead link would be noticed only after that time.
# * *A limit without progress* suits a dead link, but a very slow link could block the pass forever
#   with one transfer after the other just in time.
# * *A budget that progress refills*, which is ``WaitBudget``.  A pass has ``deadline_s`` for each
#   agent.  Waiting for transfers of the agent uses it up; a transfer that ends refills it by the
#   time of its bytes at ``SLOWEST_BYTES_PER_S``, up to the initial budget.  A dead link costs one
#   deadline, a link faster than that rate is never abandoned, and any other link costs at most the
#   deadline and the time of its bytes at that rate.
#
# Bytes under way extend the limit by their time at that rate, as all bytes that share a link may
# end late, to at most ``MAX_DEADLINES`` deadlines in total.  Only waiting counts, neither
# computation nor the time in which this process is suspended.
#
# A transfer that never ends does not prove that its agent is dead.  So passes try an agent that has
# stalled from time to time, and wait only ``TRIAL_S``; any transfer that ends clears the agent.

#: A link slower than this is useless: 64K tokens of KV of 70 KB take 460 s.
SLOWEST_BYTES_PER_S = 10e6
#: Maximum wait in deadlines, whatever is under way: with 30 s it stays below the router's limit of
#: 600 s for a request.
MAX_DEADLINES = 8.0


#: How long a pass waits for an agent that has stalled before, and the interval between such trials:
#: a tenth of the engine's time.
TRIAL_S = 0.5
TRIAL_GAP_S = 5.0
_NS_PER_S = 1_000_000_000


class StalledAgents:
    """Agents with abandoned transfers under way, until one of their transfers ends.

    Passes do not wait for them and start no new transfers with them, except for occasional trials.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._threads = threads
        self._lock = threads.lock()
        self._moving: Counter[str] = Counter()
        self._next_trial_ns: dict[str, int] = {}

    def __contains__(self, agent: str) -> bool:
        with self._lock:
            return agent in self._next_trial_ns

    def posted(self, agent: str) -> None:
        """A transfer with the agent is under way."""
        with self._lock:
            self._moving[agent] += 1

    def ended(self, agent: str) -> None:
        """A transfer has ended or failed: the agent responds."""
        with self._lock:
            self._moving[agent] -= 1
            if not self._moving[agent]:
                del self._moving[agent]
            self._next_trial_ns.pop(agent, None)

    def add(self, agent: str) -> None:
        """A wait for the agent was abandoned; no effect without a transfer that could clear it."""
        with self._lock:
            if agent in self._moving:
                self._next_trial_ns.setdefault(agent, 0)

    def discard(self, agent: str) -> None:
        """The agent has joined again: clear it."""
        with self._lock:
            self._next_trial_ns.pop(agent, None)

    def is_avoided(self, agent: str) -> bool:
        """Whether the agent has stalled and no trial is due."""
        with self._lock:
            return self._threads.now_ns() < self._next_trial_ns.get(agent, 0)

    def tried(self, agent: str) -> None:
        """A pass tries the agent: the next trial is due after ``TRIAL_GAP_S``."""
        with self._lock:
            if agent in self._next_trial_ns:
                gap_ns = int(TRIAL_GAP_S * _NS_PER_S)
                self._next_trial_ns[agent] = self._threads.now_ns() + gap_ns


class WaitBudget:
    """The remaining wait of one pass for each agent; used by the engine's thread and the pump."""

    def __init__(
        self, deadline_s: float, stalled: StalledAgents, threads: Threads = OS_THREADS
    ) -> None:
        self.deadline_s = deadline_s
        self.stalled = stalled
        self._lock = threads.lock()
        self._waited_s: dict[str, float] = {}
        self._moving_bytes: dict[str, int] = {}

    def posted(self, agent: str, size_bytes: int) -> None:
        """A transfer is under way."""
        self.stalled.posted(agent)
        with self._lock:
            self._moving_bytes[agent] = self._moving_bytes.get(agent, 0) + size_bytes

    def ended(self, agent: str, size_bytes: int) -> None:
        """A transfer has ended or failed."""
        with self._lock:
            self._moving_bytes[agent] -= size_bytes
            left_s = self._waited_s.get(agent, 0.0) - size_bytes / SLOWEST_BYTES_PER_S
            self._waited_s[agent] = max(left_s, 0.0)
        self.stalled.ended(agent)

    def waited(self, agents: Collection[str], seconds: float) -> list[str]:
        """Charge a wait to agents; return those for which the budget is used up."""
        with self._lock:
            for agent in agents:
                self._waited_s[agent] = self._waited_s.get(agent, 0.0) + seconds
            return [agent for agent in agents if self._waited_s[agent] >= self._limit_s(agent)]

    def _limit_s(self, agent: str) -> float:
        moving_s = self._moving_bytes.get(agent, 0) / SLOWEST_BYTES_PER_S
        deadline_s = self.deadline_s
        if agent in self.stalled:
            deadline_s = min(TRIAL_S, deadline_s)
        return min(deadline_s + moving_s, MAX_DEADLINES * deadline_s)


# -------------------------------------------------------------------------------------- load times
# How long loads of KV into a PE's HBM take, observed in its passes.

#: After each so many seconds of loading, all loads before count half.
LOAD_WINDOW_S = 5.0


class LoadTimes:
    """Bytes loaded by passes, and the time for which loads were under way; thread-safe.

    A load is that of one layer for a whole pass.  While several are under way, of layers or of
    passes that overlap, their time counts once.
    """

    def __init__(self, threads: Threads = OS_THREADS) -> None:
        self._threads = threads
        self._lock = threads.lock()
        self._under_way = 0
        self._counted_until_ns = 0
        self._bytes = self._busy_s = 0.0

    def began(self) -> None:
        """A load begins; ``ended`` follows."""
        with self._lock:
            if not self._under_way:
                self._counted_until_ns = self._threads.now_ns()
            self._under_way += 1

    def ended(self, loaded_bytes: int) -> None:
        """A load is over; the time before the end of one that failed (0 bytes) does not count."""
        with self._lock:
            self._under_way -= 1
            since_ns, self._counted_until_ns = self._counted_until_ns, self._threads.now_ns()
            if not loaded_bytes:
                return
            self._bytes += loaded_bytes
            self._busy_s += (self._counted_until_ns - since_ns) / _NS_PER_S
            if self._busy_s >= 2 * LOAD_WINDOW_S:
                self._bytes /= 2
                self._busy_s /= 2

    def seconds(self, size_bytes: float) -> float:
        """Return how long the load of so many bytes takes; 0 before the first load."""
        with self._lock:
            return size_bytes * self._busy_s / self._bytes if self._bytes else 0.0


# ------------------------------------------------------------------------------------------ movers
# The objects that move KV between memories of engines, shared by an engine's passes and copies.


class Movers(msgspec.Struct, frozen=True):
    """``transfer_deadline_s`` limits a wait for transfers that stall.

    ``announced`` are the layers for which the engine has called ``wait_loaded`` in any pass,
    ``load_times`` has the time of the loads of all passes.
    """

    transfers: StepTransfers
    pump: TransferPump
    device: Device
    after: EventWaiter
    stalled: StalledAgents
    transfer_deadline_s: float
    trace: TraceRecorder
    health: Health
    announced: set[int] = msgspec.field(default_factory=set)
    load_times: LoadTimes = msgspec.field(default_factory=LoadTimes)

    def wait_budget(self) -> WaitBudget:
        """Return the wait budget of a new pass."""
        return WaitBudget(self.transfer_deadline_s, self.stalled, self.health.threads)


def open_movers(
    settings: EngineSettings,
    transport: Transport,
    device: Device,
    buffers: Sequence[tuple[RegionInfo, object]],
    hbm: HbmLayout,
    views: PartViews,
    counters: Counters,
    trace: TraceRecorder,
    health: Health,
    replica: Replica = ONLY,
    unsettled: Callable[[], None] = lambda: None,
    *,
    shares_loads: bool = False,
) -> Movers:
    """Register an engine's memories and start the threads.

    ``buffers`` are regions of Full Blocks, each with the object that owns its memory;
    ``views`` defines the views of their parts.  Raises ``ConfigError`` if the device or the network
    cannot register memory.
    """
    for region, memory in (*buffers, *((region, hbm.owner or hbm) for region in hbm.memories)):
        if region.memory == "DRAM":
            device.pin(region.base_address, span_bytes(region), memory)
        transport.register(region, memory)
        if device.copier is not None:
            device.copier.register(region)
    for view in (*hbm.views(), *(view for region, _ in buffers for view in views.of(region))):
        transport.view(view)
        if device.copier is not None:
            device.copier.register(view)
    agent = transport.info().agent
    pump = TransferPump(settings.engine_id, health, unsettled)
    pump.call(device.enter_thread)
    return Movers(
        StepTransfers(
            *(settings.role, transport, device, counters, agent, hbm, replica),
            shares_loads=shares_loads,
        ),
        pump,
        device,
        EventWaiter(device, settings.engine_id, health),
        StalledAgents(health.threads),
        settings.transfer_deadline_s,
        trace,
        health,
        load_times=LoadTimes(health.threads),
    )
