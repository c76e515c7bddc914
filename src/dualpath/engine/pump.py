"""One thread that drives posted transfers to their end without spinning a core."""

import logging
from collections import deque
from collections.abc import Callable

from dualpath.engine.health import Health
from dualpath.engine.threads import OS_THREADS, Threads, TimeLimit
from dualpath.transport.contract import Transfer, TransferState

log = logging.getLogger(__name__)

#: Waits between two polls: short after a transfer has begun or ended, then growing with the time
#: that passes, so that an end is noticed late by a few per cent of what the transfer took.
_FIRST_WAIT_S = 0.0001
_LONGEST_WAIT_S = 0.001
_GROWTH = 1.15
#: One turn posts and polls: it copies megabytes at most.
_TURN_LIMIT_S = 10.0


class Completion:
    """One transfer under way; ``wait`` blocks until it is over and ``error`` says how it ended.

    ``settled`` is False if nobody knows whether it still writes: its memory is never used again.
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
        """Poll; a transfer that cannot be polled is over, and not settled."""
        try:
            return self.transfer.poll() is not TransferState.MOVING
        except Exception as error:  # a defect of a transport must not end the pump
            log.exception("poll of a transfer failed")
            self.error = f"poll of a transfer failed: {error}"
            self.settled = False
            return True

    def finish(self) -> None:
        """Called by the pump exactly once."""
        try:
            if self.settled:
                self.error = self.transfer.error()
                self.transfer.release()
            if self._then is not None:
                self._then(self)
        except Exception as error:  # a defect in what follows must not end the pump
            log.exception("work after a transfer failed")
            self.error = self.error or str(error)
        finally:
            self._over.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the transfer and what follows it are over; False after the timeout."""
        return self._over.wait(timeout_s)


class TransferPump:
    """Polls transfers in the order they were posted and runs what follows each of them.

    ``then`` callbacks run on the pump's thread; they may post further transfers.  Whatever raises
    is logged and concerns its own transfer only.  ``unsettled`` is called for each of which nobody
    knows whether it still writes.
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
        self._turns: list[Callable[[], None]] = []
        self._closing = False
        self._sign = health.sign("the thread that moves KV has not made a turn", _TURN_LIMIT_S)
        self._thread = health.start(f"{name}-pump", self._run)

    def watch(
        self, transfer: Transfer, then: Callable[[Completion], None] | None = None
    ) -> Completion:
        """Drive a posted transfer to its end."""
        completion = Completion(transfer, then, self._threads)
        with self._wake:
            self._moving.append(completion)
            self._begun = True
            self._wake.notify()
        return completion

    def call(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the pump's thread, in order.

        Posting a transfer may copy its bytes on the spot (UCX over shared memory does): what must
        not wait for that lets the pump post.
        """
        with self._wake:
            self._calls.append(work)
            self._wake.notify()

    def each_turn(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the pump's thread whenever it has looked, while transfers are under way.

        What waits for a transfer no longer than a deadline learns so that time has passed.
        """
        with self._wake:
            self._turns.append(work)

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
                    self._sign.idle()
                    self._wake.wait()
                    wait_s = _FIRST_WAIT_S
                if not self._moving and not self._calls:
                    return
                calls, self._calls = self._calls, deque()
            self._sign.moved()
            for work in calls:
                self._do(work)
            with self._wake:
                moving = list(self._moving)
                begun, self._begun = self._begun, False
                turns = tuple(self._turns)
            for work in turns:
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
        except Exception:  # a defect must not end the thread that moves everybody's KV
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
