"""Simulated engines of several ranks: all end together; and the pipes between them."""

import pytest
from tests.fault_stories import Stories, finds

from dualpath.core.cluster import HostProcess
from dualpath_lab.faults.simulation.cluster_resources import ClusterResources
from dualpath_lab.faults.simulation.ranks import RankPipe
from dualpath_lab.faults.simulation.run import run_seed
from dualpath_lab.faults.simulation.threads import SimThreads
from dualpath_lab.faults.simulation.world import Process, World

#: Every fourth cluster has engines of two ranks.
SEEDS = range(2, 122, 4)


@pytest.fixture(scope="module")
def rank_kills() -> Stories:
    """Runs in which only ranks are killed."""
    return Stories(SEEDS, "kill a rank")


@pytest.mark.parametrize("role", ["pe", "de"])
def test_an_engine_that_loses_a_rank_logs_it_and_ends_with_all_ranks(
    rank_kills: Stories, role: str
) -> None:
    ends = rf"engine ({role}\S*) ends itself: rank 1 \(process \1#\d+\.1\) has ended"
    assert rank_kills.more_than(5, ends)


def test_ranks_are_killed_and_stopped_before_their_engine_has_started_and_while_it_works() -> None:
    kinds = "kill a rank", "stop a rank", "kill an engine", "lose an engine", "kill the router"
    runs = Stories(SEEDS, *kinds, least=20)
    for what in (r"#\d+\.1 +is stopped", r"#\d+\.1 +ends: the engine's first rank has ended"):
        assert runs.more_than(0, what), what


@pytest.mark.parametrize("ranks", ["2 and 1", "1 and 2", "2 and 2"])
@pytest.mark.parametrize("heads", [1, 2])
def test_clusters_have_ranks_of_one_kv_head_and_of_several(
    rank_kills: Stories, ranks: str, heads: int
) -> None:
    assert rank_kills.more_than(0, f"engines of {ranks} ranks for {heads} KV heads$")


def test_equal_seeds_with_ranks_give_equal_runs() -> None:
    for seed in SEEDS[:4]:
        assert run_seed(seed).digest == run_seed(seed).digest


@pytest.mark.parametrize(
    ("name", "faults", "seeds"),
    [
        ("rank-unawaited", ["stalling transfers"], SEEDS),
        ("ranks-unnamed", ["stalling transfers", "kill an engine"], SEEDS),
    ],
)
def test_planted_bugs_of_ranks_are_found(name: str, faults: list[str], seeds: range) -> None:
    assert finds(name, seeds, *faults)


class Pipe:
    """Two processes connected by a pipe, and the values that the second one reads."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.first, self.second = (Process(self.world, name) for name in ("first", "second"))
        self.threads = SimThreads(self.second)
        self.mine, self.theirs = RankPipe.pair(SimThreads(self.first), self.threads)
        self.read: list[object] = []

    def reads(self) -> list[object]:
        """Make the second process read until the end of the pipe."""

        def read() -> None:
            try:
                while True:
                    self.read.append(self.theirs.recv())
            except EOFError:
                self.read.append("end")

        self.threads.start("reads", read)
        self.world.run(lambda: False, 1.0)
        return self.read


@pytest.mark.parametrize("seed", range(10))
def test_all_values_arrive_in_order_before_the_end(seed: int) -> None:
    pipe = Pipe(seed)
    for number in range(5):
        pipe.mine.send(number)
    pipe.mine.cut()
    assert pipe.reads() == [0, 1, 2, 3, 4, "end"]


def test_a_sent_value_is_a_copy() -> None:
    pipe, value = Pipe(), [1]
    pipe.mine.send(value)
    value.append(2)
    assert pipe.reads() == [[1]]


def test_a_stopped_process_reads_when_it_is_resumed() -> None:
    pipe = Pipe()
    pipe.second.stop()
    pipe.mine.send("late")
    assert pipe.reads() == []
    pipe.second.resume()
    pipe.world.run(lambda: False, 1.0)
    assert pipe.read == ["late"]


def test_sending_to_a_process_that_is_known_to_have_exited_fails() -> None:
    pipe = Pipe()
    pipe.theirs.cut()
    pipe.world.run(lambda: False, 1.0)
    with pytest.raises(BrokenPipeError):
        pipe.mine.send("unread")


def test_an_engine_has_exited_when_all_its_ranks_have() -> None:
    world = World(0)
    shared = ClusterResources(world)
    (first, known), (second, other) = (shared.process(n, "host-0") for n in ("first", "second"))
    engine = HostProcess(known.host, known.pid, known.start_ticks, ranks=(other,))
    first.kill()
    world.run(lambda: False, 1.0)
    assert not shared.has_exited("host-0", engine)
    second.kill()
    world.run(lambda: False, 1.0)
    assert shared.has_exited("host-0", engine)
    assert not shared.has_exited("host-1", engine)


def test_an_engine_that_does_not_name_a_live_rank_counts_as_dead_too_early() -> None:
    world = World(0)
    shared = ClusterResources(world)
    first, known = shared.process("first", "host-0")
    shared.process("second", "host-0", known)
    first.kill()
    world.run(lambda: False, 1.0)
    shared.has_exited("host-0", known)
    assert world.problems == [f"host-0 takes process {known.pid} for dead, which is alive"]
