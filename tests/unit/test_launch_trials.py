"""A unit that cannot start in a requested shape returns to its former one."""

import pytest

from dualpath.core.cluster import Role, UnitShape
from dualpath.launch.local_cluster import INTERVAL_S, MAX_STARTS, Trials
from dualpath.launch.process import Restarts

TWO, FOUR = UnitShape(Role.PREFILL, 2), UnitShape(Role.PREFILL, 4)


class Engine:
    """A fake process without signals."""

    name = "pe-1"
    alive = True

    def exit_report(self) -> str:
        return "pe-1 exited with code 1"

    def send_signal(self, number: int) -> None:
        raise AssertionError(number)

    def kill(self) -> None:
        raise AssertionError("it must not be killed")


class Story:
    """A supervisor of one unit, which cannot start in the shapes ``impossible``."""

    def __init__(self, *impossible: UnitShape) -> None:
        self.shapes = {"pe-1": TWO}
        self.started: list[UnitShape] = []
        self._impossible = impossible
        self._engine = Engine()
        self._now_s = 0.0
        self.trials = Trials(self.shapes)
        self._restarts = Restarts(self._start)

    def _start(self, unit: str) -> None:
        self.trials.note_start(unit)
        self.started.append(self.shapes[unit])
        self._engine.alive = self.shapes[unit] not in self._impossible

    def asks(self, shape: UnitShape) -> None:
        self.trials.begin("pe-1", shape)
        self._restarts.expect_exit("pe-1", self._now_s)
        self._look()  # it drains, and serves as what it was
        self._engine.alive = False

    def dies(self) -> None:
        self._engine.alive = False

    def goes_on(self, turns: int = 200) -> None:
        for _ in range(turns):
            self._restarts.poll([self._engine], self._now_s)
            self._look()
            self._now_s += INTERVAL_S

    def _look(self) -> None:
        self.trials.poll(self._now_s, lambda unit, shape: self._engine.alive)


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.name == "dualpath.launch.local_cluster"
    ]


def test_a_shape_that_never_starts_is_reverted_after_a_few_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story(FOUR)
    story.asks(FOUR)
    story.goes_on()
    assert story.started == [FOUR] * MAX_STARTS + [TWO]
    assert story.shapes == {"pe-1": TWO}
    (message,) = given_up(caplog)
    assert "pe-1 did not serve as prefill with 4 ranks after 3 starts" in message
    assert "it is started as prefill with 2 ranks again" in message


def test_a_shape_that_has_served_stays_after_any_number_of_exits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story()
    story.asks(FOUR)
    story.goes_on()
    for _ in range(MAX_STARTS + 1):
        story.dies()
        story.goes_on()
    assert set(story.started) == {FOUR}
    assert not given_up(caplog)


def test_a_second_change_during_a_trial_reverts_to_the_shape_that_served() -> None:
    one = UnitShape(Role.DECODE)
    story = Story(FOUR, one)
    story.asks(FOUR)
    story.goes_on(turns=2)
    story.asks(one)
    story.goes_on()
    assert story.started[-MAX_STARTS - 1 :] == [one] * MAX_STARTS + [TWO]


def test_an_unchanged_unit_is_restarted_without_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story(TWO)
    story.dies()
    story.goes_on()
    assert len(story.started) > MAX_STARTS
    assert not given_up(caplog)
