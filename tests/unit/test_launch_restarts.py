"""When a process that has exited is restarted."""

import signal

import pytest

from dualpath.launch.process import (
    DRAIN_GUARD_S,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LONG_LIFE_S,
    OTHERS_END_S,
    Restarts,
)


class Process:
    """A fake process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.got: list[int] = []

    def exit_report(self) -> str:
        return f"{self.name} ended"

    def send_signal(self, number: int) -> None:
        self.got.append(number)

    def kill(self) -> None:
        self.alive = False


class Story:
    """One process, its restarts, and time."""

    def __init__(self) -> None:
        self.process = Process("pe-0")
        self.started_s: list[float] = []
        self.now_s = 0.0
        self.restarts = Restarts(self._start)

    def _start(self, name: str) -> None:
        assert name == "pe-0"
        self.started_s.append(self.now_s)
        self.process.alive = True

    def dies_after(self, lived_s: float) -> float:
        """Return the pause before its next start."""
        self.restarts.poll([self.process], self.now_s)
        self.now_s += lived_s
        self.process.alive = False
        died_s = self.now_s
        while not self.process.alive:
            self.restarts.poll([self.process], self.now_s)
            self.now_s += 0.25
        return self.started_s[-1] - died_s


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.levelname}: {record.message}" for record in caplog.records]


def test_a_process_that_ran_for_long_is_restarted_immediately_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story()
    assert story.dies_after(LONG_LIFE_S) == 0
    assert logged(caplog) == ["WARNING: pe-0 ended", "INFO: pe-0 is restarted now"]


def test_a_process_that_exits_soon_is_restarted_with_backoff(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story()
    pauses = [story.dies_after(2.0) for _ in range(9)]
    assert pauses[:7] == [FIRST_PAUSE_S * 2**n for n in range(7)]
    assert pauses[7:] == [LAST_PAUSE_S] * 2
    assert caplog.messages[-1] == "pe-0 is restarted in 30 s"
    assert story.dies_after(LONG_LIFE_S) == 0
    assert story.dies_after(2.0) == FIRST_PAUSE_S


def test_ranks_of_a_group_stop_together_and_restart_after_the_last_exit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = [Process("pe-0-dp0"), Process("pe-0-dp1"), Process("de-0")]
    started: list[str] = []
    restarts = Restarts(started.append, {"pe-0-dp0": "pe-0", "pe-0-dp1": "pe-0"})
    restarts.poll(ranks, 0.0)
    ranks[1].alive = False
    restarts.poll(ranks, LONG_LIFE_S)
    assert ranks[0].got == [signal.SIGINT]
    assert not ranks[2].got
    assert caplog.messages == ["pe-0-dp1 ended", "pe-0 is restarted now"]
    restarts.poll(ranks, LONG_LIFE_S + 1.0)
    assert started == []
    ranks[0].alive = False
    restarts.poll(ranks, LONG_LIFE_S + 2.0)
    assert started == ["pe-0"]
    assert len(ranks[0].got) == 1


def test_a_rank_that_does_not_exit_with_the_others_is_killed() -> None:
    ranks = [Process("pe-0-dp0"), Process("pe-0-dp1")]
    started: list[str] = []
    restarts = Restarts(started.append, {rank.name: "pe-0" for rank in ranks})
    restarts.poll(ranks, 0.0)
    ranks[1].alive = False
    restarts.poll(ranks, LONG_LIFE_S)
    restarts.poll(ranks, LONG_LIFE_S + OTHERS_END_S)
    assert not ranks[0].alive
    restarts.poll(ranks, LONG_LIFE_S + OTHERS_END_S + 1.0)
    assert started[-1] == "pe-0"


def test_an_expected_exit_is_restarted_immediately_and_is_not_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story()
    story.restarts.expect_exit("pe-0", 0.0)
    assert story.dies_after(2.0) == 0
    assert logged(caplog) == ["INFO: pe-0 has exited as requested and is restarted"]
    assert story.dies_after(2.0) == FIRST_PAUSE_S


def test_an_expected_exit_that_does_not_happen_is_forced() -> None:
    story = Story()
    story.restarts.expect_exit("pe-0", 0.0)
    story.restarts.poll([story.process], DRAIN_GUARD_S - 1)
    assert story.process.alive
    story.restarts.poll([story.process], DRAIN_GUARD_S)
    assert not story.process.alive
