"""Simulated threads and clusters: random order of events, and equal runs of equal seeds."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fault_stories import finds

from dualpath.core.errors import ConfigError
from dualpath_lab.faults.simulation.adversary import FAULT_KINDS, LOSE_ROLE, Adversary
from dualpath_lab.faults.simulation.planted_bugs import PLANTED_BUGS, planted
from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.threads import SimThreads
from dualpath_lab.faults.simulation.world import Process, World

PAGE = Path(__file__).parents[2] / "docs/reference/simulated-faults.md"


class Machine:
    """A process with simulated threads."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.process = Process(self.world, "process")
        self.threads = SimThreads(self.process)
        self.seen: list[str] = []

    def run(self, limit_s: float = 10.0) -> list[str]:
        self.world.run(lambda: False, limit_s)
        return self.seen


def test_a_thread_that_waits_for_an_event_continues_when_it_is_set() -> None:
    machine = Machine()
    event = machine.threads.event()

    def waits() -> None:
        assert event.wait(5.0)
        machine.seen.append("woken")

    def sets() -> None:
        machine.threads.sleep(1.0)
        machine.seen.append("sets")
        event.set()

    machine.threads.start("waits", waits)
    machine.threads.start("sets", sets)
    assert machine.run() == ["sets", "woken"]


def test_a_wait_ends_after_its_time_out() -> None:
    machine = Machine()
    condition = machine.threads.condition()

    def waits() -> None:
        with condition:
            machine.seen.append(str(condition.wait(1.0)))
            machine.seen.append(str(condition.wait_for(lambda: False, 1.0)))

    machine.threads.start("waits", waits)
    assert machine.run() == ["False", "False"]


def test_a_lock_excludes_other_threads() -> None:
    machine = Machine()
    lock = machine.threads.lock()

    def works(name: str) -> None:
        for _ in range(20):
            with lock:
                machine.seen.append(f"{name} in")
                machine.threads.sleep(0.001)
                machine.seen.append(f"{name} out")

    for name in "abc":
        machine.threads.start(name, lambda name=name: works(name))  # type: ignore[misc]
    seen = machine.run()
    assert len(seen) == 120
    assert all(a.replace("in", "out") == b for a, b in zip(seen[::2], seen[1::2], strict=True))


def test_the_seed_decides_the_order_of_threads() -> None:
    def order(seed: int) -> list[str]:
        machine = Machine(seed)
        for name in "abcdef":
            machine.threads.start(name, lambda name=name: machine.seen.append(name))  # type: ignore[misc]
        return machine.run()

    assert len({tuple(order(seed)) for seed in range(20)}) > 5
    assert order(3) == order(3)


def test_a_stopped_process_continues_where_it_was_and_a_dead_one_never() -> None:
    for dies in (False, True):
        machine = Machine()

        def ticks(machine: Machine = machine) -> None:
            while True:
                machine.threads.sleep(1.0)
                machine.seen.append(f"{machine.world.elapsed_s:.1f}")

        machine.threads.start("ticks", ticks)
        machine.world.after(2.5, machine.process.stop)
        machine.world.after(7.5, machine.process.kill if dies else machine.process.resume)
        assert machine.run(9.1) == (["1.0", "2.0"] if dies else ["1.0", "2.0", "7.5", "8.5"])
        machine.world.end()


def test_a_thread_that_raises_is_a_problem() -> None:
    machine = Machine()
    machine.threads.start("fails", lambda: [][0])
    machine.run()
    assert "thread fails of process died: IndexError" in machine.world.problems[0]


def test_equal_seeds_give_equal_runs() -> None:
    # 15 and 25 have look-ups that time out at the same time.
    for seed in (*range(4), 15, 25):
        assert run_seed(seed).digest == run_seed(seed).digest


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_gives_the_same_run(hash_seed: str) -> None:
    """No order of a set of names decides what happens: it differs between processes."""
    # Engines of these are lost that several others know.
    seeds = 27, 31, 68
    run = "import sys; from dualpath_lab.faults.simulation.run import run_seed\n"
    run += "print([run_seed(int(seed)).digest for seed in sys.argv[1:]])"
    ended = subprocess.run(
        [sys.executable, "-c", run, *map(str, seeds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == str([run_seed(seed).digest for seed in seeds])


def test_a_run_leaves_nothing_in_memory() -> None:
    run_seed(0)
    gc.collect()
    before = len(gc.get_objects())
    for seed in range(1, 4):
        run_seed(seed)
    assert len(gc.get_objects()) - before < 1000  # a run has some thousands


@pytest.mark.parametrize(
    ("name", "fault", "first"),
    [
        ("session-end-keeps", "stall a control connection", None),
        ("no-quarantine", "hanging transfers", None),
        ("peers-named-once", "kill an engine", 0),
        ("checksum-ignored", "rotting storage", None),
        ("call-silence-ignored", "lose a call to an engine", None),
        ("call-silence-ignored", "silence an HTTP server", 14),
        ("core-silence-ignored", "hang a core", 4),
        ("abandoned-read-continues", "slow storage", 68),
    ],
)
def test_planted_bugs_are_found_by_the_faults_they_are_for(
    name: str, fault: str, first: int | None
) -> None:
    assert finds(name, range(120), fault, first=first)


@pytest.mark.parametrize(
    ("name", "first", "faults"),
    [
        ("in-doubt-unreported", 12, {"kill the router", "stop the router", "stalling transfers"}),
        (
            "slots-unchecked",
            205,
            {"kill the router", "stop an engine", "stall a control connection"},
        ),
        ("cached-once-read", 256, {"slow storage", "rotting storage", "kill an engine"}),
    ],
)
def test_planted_bugs_that_need_several_kinds_of_faults_are_found(
    name: str, first: int, faults: set[str]
) -> None:
    assert finds(name, range(680), *faults, first=first)


def test_half_of_the_runs_with_several_faults_have_them_in_two_components() -> None:
    found: list[int] = []
    for seed in range(200):
        adversary = object.__new__(Adversary)
        adversary.world = World(seed)
        kinds = adversary._focused(FAULT_KINDS, faults=2)
        found.append(len({kind.component for kind in kinds}))
        assert list(adversary._focused(FAULT_KINDS, faults=1)) == list(FAULT_KINDS)
    every = len({kind.component for kind in FAULT_KINDS})
    assert set(found) == {2, every}
    assert 60 < found.count(2) < 140


def test_a_router_that_breaks_off_slow_calls_is_found_without_any_fault() -> None:
    with planted("slow-calls-broken-off"):
        assert any(run_seed(seed, kinds=()).problems for seed in range(1, 60, 5))


def test_requests_of_a_cluster_without_a_role_end_long_before_their_deadline() -> None:
    outcomes = [run_seed(seed, kinds=[LOSE_ROLE]) for seed in range(12)]
    assert [outcome.problems for outcome in outcomes] == [()] * len(outcomes)
    assert sum(outcome.answered < outcome.requests for outcome in outcomes) > len(outcomes) // 2


def test_an_unknown_bug_cannot_be_planted() -> None:
    with pytest.raises(ConfigError, match="choose one of"), planted("typo"):
        pass


def test_every_bug_is_in_the_reference_with_its_description_and_a_seed() -> None:
    rows = PAGE.read_text().splitlines()
    starts = {name: f"| `{name}` | {plant.what} | " for name, plant in PLANTED_BUGS.items()}
    found = {name: [r for r in rows if r.startswith(start)] for name, start in starts.items()}
    seeds = [re.fullmatch(r".* \| (\d+)( \*)? \|", row) for (row,) in found.values()]
    assert all(seed is not None and int(seed[1]) < 3000 for seed in seeds)
