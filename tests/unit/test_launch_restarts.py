"""When a process that has ended is started again."""

from dualpath.ops.launch.restarts import FIRST_PAUSE_S, LAST_PAUSE_S, LONG_LIFE_S, Restarts


class Process:
    """A process of a story."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True

    def ending(self) -> str:
        return f"{self.name} ended"


class Story:
    """One process, its restarts, and time."""

    def __init__(self) -> None:
        self.process = Process("pe-0")
        self.started_s: list[float] = []
        self.said: list[str] = []
        self.now_s = 0.0
        self.restarts = Restarts(self._start, self.said.append)

    def _start(self, name: str) -> None:
        assert name == "pe-0"
        self.started_s.append(self.now_s)
        self.process.alive = True

    def dies_after(self, lived_s: float) -> float:
        """Return how long its next start takes."""
        self.restarts.turn([self.process], self.now_s)
        self.now_s += lived_s
        self.process.alive = False
        died_s = self.now_s
        while not self.process.alive:
            self.restarts.turn([self.process], self.now_s)
            self.now_s += 0.25
        return self.started_s[-1] - died_s


def test_what_ended_after_a_long_life_is_started_at_once_and_it_is_said() -> None:
    story = Story()
    assert story.dies_after(LONG_LIFE_S) == 0
    assert story.said == ["pe-0 ended\npe-0 is started again at once"]


def test_what_ends_soon_after_every_start_is_tried_less_and_less_often() -> None:
    story = Story()
    pauses = [story.dies_after(2.0) for _ in range(7)]
    assert pauses[:5] == [FIRST_PAUSE_S * 2**n for n in range(5)]
    assert pauses[5:] == [LAST_PAUSE_S] * 2
    assert story.said[-1].endswith("pe-0 is started again in 30 s")
    assert story.dies_after(LONG_LIFE_S) == 0
    assert story.dies_after(2.0) == FIRST_PAUSE_S
