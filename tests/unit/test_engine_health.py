"""Health of a data plane, by the progress of its threads."""

import itertools
import queue
import threading

import pytest
from tests.engine_harness import GEOMETRY, ToyCluster, memory_storage, prompt_keys
from tests.guard import GUARD_S
from tests.passed_waits import PassedWaits

from dualpath.core.cluster import Role
from dualpath.core.control import Read, Reserved
from dualpath.core.runs import BlockRun, HitRun
from dualpath.engine.passes.pump import Completion, TransferPump
from dualpath.engine.threads import Health, TimeLimit
from dualpath.transport.contract import TransferState

READERS = 2  # those of the harness


class Moving:
    """A transfer that ends when the test calls for it, or cannot be polled."""

    bytes = 1

    def __init__(self) -> None:
        self.state = TransferState.MOVING
        self.defect: Exception | None = None
        self.released = False

    def poll(self) -> TransferState:
        if self.defect is not None:
            raise self.defect
        return self.state

    def error(self) -> str | None:
        return None

    def release(self) -> None:
        self.released = True


def test_a_thread_that_ends_breaks_the_engine_for_good() -> None:
    health = Health()
    assert health.problem() is None
    health.start("returns", lambda: None).join()
    assert health.broken == health.problem() == "thread returns ended"
    health.start("raises", lambda: [][0]).join()
    assert health.broken == "thread returns ended"  # the first cause


def test_threads_may_end_when_the_engine_closes() -> None:
    health = Health()
    health.close()
    health.start("returns", lambda: None).join()
    assert health.problem() is None


def test_work_without_progress_is_a_problem_until_it_progresses() -> None:
    threads = PassedWaits()
    health = Health(threads)
    watchdog = health.watchdog("nothing was carried", limit_s=10)
    threads.late_s = 100  # nothing has to move
    assert health.problem() is None
    watchdog.started()
    threads.late_s += 9
    assert health.problem() is None
    watchdog.started()
    threads.late_s += 2
    assert health.problem() == "nothing was carried for 11 s"
    assert health.broken is None
    watchdog.progressed()
    assert health.problem() is None
    watchdog.idle()
    threads.late_s += 100
    assert health.problem() is None


@pytest.mark.parametrize("error", [ValueError("a defect"), KeyError("x")])
def test_a_transfer_that_cannot_be_polled_fails_alone_and_is_never_settled(
    error: Exception,
) -> None:
    threads = PassedWaits()
    health = Health(threads)
    pump = TransferPump("pe-0", health)
    ends: queue.SimpleQueue[Completion] = queue.SimpleQueue()
    whole, broken = Moving(), Moving()
    broken.defect = error
    pump.watch(broken, ends.put)
    failed = ends.get(timeout=GUARD_S)
    assert "poll of a transfer failed" in str(failed.error)
    assert not failed.settled
    assert not broken.released
    pump.watch(whole, ends.put)
    whole.state = TransferState.DONE
    good = ends.get(timeout=GUARD_S)
    assert (good.error, good.settled, whole.released) == (None, True, True)
    assert health.problem() is None
    health.close()
    pump.close(TimeLimit(threads, GUARD_S))


def test_the_pump_polls_while_a_transfer_is_under_way() -> None:
    health = Health(PassedWaits())
    pump = TransferPump("pe-0", health)
    turned = threading.Event()
    pump.each_poll(turned.set)
    moving, over = Moving(), threading.Event()
    pump.watch(moving, lambda _: over.set())
    for _ in range(3):
        turned.clear()
        assert turned.wait(GUARD_S)
    moving.state = TransferState.DONE
    assert over.wait(GUARD_S)
    health.close()
    pump.close(TimeLimit(PassedWaits(), GUARD_S))


def test_a_transfer_that_has_ended_is_finished_before_the_next_one_is_polled() -> None:
    """A poll may copy a whole layer: what waits for the layer before must not wait for it, too."""
    order: list[str] = []

    class Named(Moving):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.state = TransferState.DONE
            self._name = name

        def poll(self) -> TransferState:
            order.append(f"poll {self._name}")
            return super().poll()

        def release(self) -> None:
            order.append(f"finish {self._name}")

    health, over = Health(), threading.Event()
    pump = TransferPump("pe-0", health)

    def post() -> None:
        pump.watch(Named("first"))
        pump.watch(Named("second"), lambda _: over.set())

    pump.call(post)
    assert over.wait(GUARD_S)
    assert order == ["poll first", "finish first", "poll second", "finish second"]
    health.close()
    pump.close(TimeLimit(PassedWaits(), GUARD_S))


def test_callbacks_of_transfers_may_raise_without_ending_the_pump() -> None:
    threads = PassedWaits()
    health = Health(threads)
    pump = TransferPump("pe-0", health)
    first, second = Moving(), Moving()
    first.state = second.state = TransferState.DONE
    failed = pump.watch(first, lambda completion: [][0])
    assert failed.wait(GUARD_S)
    assert "index out of range" in str(failed.error)
    assert pump.watch(second).wait(GUARD_S)
    assert health.problem() is None
    health.close()
    pump.close(TimeLimit(threads, GUARD_S))


def test_a_pump_without_progress_is_a_problem() -> None:
    threads = PassedWaits()
    health = Health(threads)
    pump = TransferPump("pe-0", health)
    hangs, gate = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        gate.wait(GUARD_S)

    pump.call(hang)
    assert hangs.wait(GUARD_S)
    assert health.problem() is None
    threads.late_s = 60
    assert "the thread that moves KV has not finished an iteration" in str(health.problem())
    gate.set()
    health.close()
    pump.close(TimeLimit(threads, GUARD_S))


class HangingReads:
    """A DE of two readers; its storage answers no read before ``gate`` is open."""

    def __init__(self) -> None:
        self.threads, self.numbers = PassedWaits(), itertools.count()
        self.gate, self.entered = threading.Event(), threading.Semaphore(0)
        storage = memory_storage()
        self.cluster = ToyCluster(storage, threads=self.threads)
        self.keys = prompt_keys(4 * GEOMETRY.block_tokens)
        self.cluster.store(self.keys)
        storage.before_read = self._hang

    def _hang(self, key: bytes) -> None:
        self.entered.release()
        self.gate.wait(GUARD_S)

    def read(self, blocks: int) -> None:
        de, name = self.cluster.de, f"r{next(self.numbers)}"
        de.assign(name, 4 * GEOMETRY.block_tokens, 4, self.keys)
        slots = de.answer(Reserved).slots
        run = HitRun(Role.DECODE, BlockRun(0, blocks), slots[:blocks])
        de.command(Read(name, run, 0, GUARD_S))
        for _ in range(blocks):
            assert self.entered.acquire(timeout=GUARD_S)


def test_one_hanging_read_has_its_deadline_all_hanging_readers_make_the_engine_unhealthy() -> None:
    hanging = HangingReads()
    manager = hanging.cluster.de.manager
    hanging.read(1)
    hanging.threads.late_s = 100
    assert manager.health() is None
    hanging.read(READERS - 1)
    assert manager.health() is None
    hanging.threads.late_s += 100
    assert str(manager.health()).startswith("no read from storage has ended for 1")
    hanging.gate.set()
    hanging.cluster.close()
    assert manager.health() is None


def test_an_engine_closes_in_one_limit_though_all_reads_hang() -> None:
    hanging = HangingReads()
    hanging.read(READERS)
    hanging.cluster.de.manager.close(TimeLimit(hanging.threads, 0.2))
    assert sum(hanging.threads.passed_s) <= 0.2
    hanging.gate.set()
    hanging.cluster.pe.manager.close(TimeLimit(hanging.threads, GUARD_S))


def test_problems_are_in_the_report() -> None:
    cluster = ToyCluster()
    assert cluster.pe.report().unhealthy is None
    cluster.pe.manager._rank.health.fail("its pump has ended")
    assert cluster.pe.report().unhealthy == "its pump has ended"
    cluster.close()
