"""One thread that polls posted transfers until they end, without spinning a core."""

import logging
from collections import deque
from collections.abc import Callable

from dualpath.engine.health import Health
from dualpath.engine.threads import OS_THREADS, Threads, TimeLimit
from dualpath.transport.contract import Transfer, TransferState

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
        self._moving: list[Completion] = []
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
            self._moving.append(completion)
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

    def close(self, limit: TimeLimit) -> None:
        """Stop after the transfers under way are over, within the limit; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        limit.join([self._thread])

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
        over = {completion for completion in moving if completion.is_over()}
        if not over:
            return False
        with self._wake:
            self._moving = [c for c in self._moving if c not in over]
        for completion in moving:
            if completion in over:
                completion.finish()
                if not completion.settled:
                    self._unsettled()
        return True
