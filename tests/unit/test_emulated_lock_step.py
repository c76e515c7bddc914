"""Lock step of emulated data-parallel ranks: passes of a group begin and end together."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tests.guard import GUARD_S
from tests.unit.test_emulated_group import alone_in, ranks

from dualpath.core.errors import ConfigError, EngineLostError
from dualpath_lab.emulated import lock_step, process
from dualpath_lab.emulated.lock_step import Coordinator, LockStep, NoLockStep


class Waiting(Coordinator):
    """Signals when a rank waits for the group's next pass."""

    def __init__(self) -> None:
        super().__init__(GUARD_S)
        self.waits = threading.Semaphore(0)

    def enter(self, rank: int, compute_s: float) -> float:
        if self._computing - {rank}:
            self.waits.release()
        return super().enter(rank, compute_s)


def test_a_pass_begins_when_all_busy_ranks_are_there_and_lasts_as_long_as_the_slowest() -> None:
    group = Waiting()
    with ThreadPoolExecutor(2) as threads:
        # Rank 0 alone has requests: it waits for nobody.
        assert group.enter(0, 0.3) == 0.3
        # Rank 1 gets one during that pass, and begins with rank 0's next pass.
        late: Future[float] = threads.submit(group.enter, 1, 0.9)
        assert group.waits.acquire(timeout=GUARD_S)
        assert group.enter(0, 0.2) == 0.9
        assert late.result(GUARD_S) == 0.9
        # Rank 1 has no more requests: rank 0 does not wait for it again.
        group.idle(1)
        assert group.enter(0, 0.4) == 0.4


def test_a_rank_does_not_wait_for_ever_for_one_that_computes() -> None:
    group = Coordinator(timeout_s=0.01)
    group.enter(1, 0.1)
    with pytest.raises(EngineLostError, match=r"ranks \[1\] .* more than 0.01 s; see their logs"):
        group.enter(0, 0.1)
    # It is not in the group's next pass.
    group.idle(1)
    assert group.enter(1, 0.2) == 0.2


def test_ranks_of_several_processes_compute_in_lock_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Waiting()
    monkeypatch.setattr(lock_step, "Coordinator", lambda timeout_s: group)
    settings = [msgspec.structs.replace(one, dp_lock_step=True) for one in ranks(tmp_path, 3)]
    with ThreadPoolExecutor(3) as threads:
        steps: list[LockStep] = list(threads.map(process.open_lock_step, settings))
        # Rank 0 computes; the other two enter meanwhile, in any order.
        assert steps[0].enter(0.1) == 0.1
        others = [threads.submit(steps[rank].enter, 0.2 * rank) for rank in (1, 2)]
        for _ in others:
            assert group.waits.acquire(timeout=GUARD_S)
        steps[0].idle()
        assert [other.result(GUARD_S) for other in others] == [0.4, 0.4]
        # Rank 1 is idle, which it may report again: rank 2 computes alone.
        steps[1].idle()
        steps[1].idle()
        assert steps[2].enter(0.25) == 0.25
        for step in steps:
            step.close()


def test_a_rank_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    settings = [msgspec.structs.replace(one, dp_lock_step=True) for one in ranks(tmp_path, 2)]
    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(process.open_lock_step, settings)
        assert other.enter(0.5) == 0.5
        waiting = threads.submit(first.enter, 0.1)
        other.close()
        assert waiting.result(GUARD_S) == 0.1
        first.close()
        with pytest.raises(EngineLostError, match="first rank"):
            other.enter(0.1)


def test_only_groups_of_one_device_per_rank_have_a_lock_step(tmp_path: Path) -> None:
    alone = alone_in(tmp_path)
    assert isinstance(process.open_lock_step(alone), NoLockStep)
    assert isinstance(process.open_lock_step(ranks(tmp_path, 2)[0]), NoLockStep)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2 with dp_lock_step"):
        msgspec.structs.replace(alone, dp_lock_step=True, tensor_parallel_size=2, kv_heads=2)
