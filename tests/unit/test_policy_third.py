"""Third DEs serve a part of a hit, from DRAM or through their storage NICs.

p0 and d0 serve the request, d1 to d3 are third DEs, each on a node of its own.  Blocks have 64
tokens; the hit is 40 blocks.
"""

import pytest

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.modes import Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineReport,
    EngineSpec,
    Fetch,
    Finished,
    PrefillEnded,
    SchedulerSettings,
    SlotsGranted,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler

HBM_TOKENS = 100_000
BLOCKS = 40
ENGINES = ("p0", "d0", "d1", "d2", "d3")

#: A run: engine, first block, blocks, and whether they are in its DRAM.
Run = tuple[str, int, int, bool]


def cluster(mode: Mode = Mode.SPLIT, thirds: int = 3) -> RequestScheduler:
    scheduler = RequestScheduler(SchedulerSettings(mode, 10**6, 10**6, third_engine_reads=thirds))
    for order, name in enumerate(ENGINES):
        role = Role.PREFILL if name == "p0" else Role.DECODE
        group = "P" if name == "p0" else "D"
        scheduler.apply(EngineJoined(EngineSpec(name, role, name, group, order, HBM_TOKENS)))
    return scheduler


def queued(scheduler: RequestScheduler, **tokens: int) -> None:
    """Let engines report reading queues; third DEs have requests, so that d0 gets the next one."""
    for name in ENGINES:
        busy = name in ("d1", "d2", "d3")
        load = Load(busy, 1000 * busy, tokens.get(name, 0), HBM_TOKENS - 1000 * busy, 0)
        scheduler.apply(EngineReport(name, load))


def assigned(scheduler: RequestScheduler, *cached: CachedPrefix) -> Assignment:
    hit = BLOCKS * 64
    scheduler.apply(Submitted(Request("r", hit + 10, hit, 1, cached)))
    (made,) = [one for group in "PD" for one in scheduler.apply(Fetch(group)).assignments]
    assert made.engines == ("p0", "d0")
    return made


def granted(scheduler: RequestScheduler, **changes) -> Assignment:
    grant = {"decode_blocks": 0, "prefill_blocks": 0, **changes}
    (made,) = scheduler.apply(SlotsGranted("r", **grant)).assignments
    return made


def runs(assignment: Assignment) -> list[Run]:
    names = {Role.PREFILL: "p0", Role.DECODE: "d0"}
    return [
        (run.third or names[run.side], run.blocks.first, run.blocks.count, run.cached)
        for run in assignment.reads
    ]


def queue_of(scheduler: RequestScheduler, engine: str) -> int:
    return next(one.read_queue_tokens for one in scheduler.loads() if one.engine_id == engine)


def test_without_the_setting_a_grant_changes_nothing() -> None:
    scheduler = cluster(thirds=0)
    queued(scheduler)
    assert [name for name, *_ in runs(assigned(scheduler))] == ["p0", "d0"]
    assert scheduler.apply(SlotsGranted("r", 0, 0)).assignments == ()


def test_split_reads_end_together_at_all_storage_nics() -> None:
    """1,280 tokens are queued at p0 and 1,920 at d3: the other three read 2,560 before that."""
    scheduler = cluster()
    queued(scheduler, p0=1280, d3=1920)
    assert [name for name, *_ in runs(assigned(scheduler))] == ["p0", "d0"]

    made = granted(scheduler)
    assert runs(made) == [("d1", 0, 13, False), ("d2", 13, 13, False), ("d0", 26, 14, False)]
    assert made.read_reason == "third"
    assert [(third.engine_id, third.read_tokens) for third in made.thirds] == [
        ("d1", 13 * 64),
        ("d2", 13 * 64),
    ]
    assert [queue_of(scheduler, name) for name in ENGINES] == [1280, 896, 832, 832, 1920]


def test_at_most_so_many_thirds_as_the_setting_allows_those_with_the_shortest_queues() -> None:
    scheduler = cluster(thirds=1)
    queued(scheduler, d1=64, d2=0, d3=64)
    assigned(scheduler)
    made = granted(scheduler)
    assert runs(made) == [("d2", 0, 13, False), ("p0", 13, 14, False), ("d0", 27, 13, False)]


def test_dualpath_lets_a_third_engine_read_if_its_queue_is_shorter_than_those_of_both_sides() -> (
    None
):
    scheduler = cluster(Mode.DUALPATH)
    queued(scheduler, p0=200, d0=100, d1=90, d2=80, d3=95)
    assigned(scheduler)
    assert runs(granted(scheduler)) == [("d2", 0, 40, False)]

    equal = cluster(Mode.DUALPATH)
    queued(equal)
    assigned(equal)
    assert [name for name, *_ in runs(granted(equal))] == ["p0"]


def test_what_a_third_engine_caches_is_not_read() -> None:
    """d0 caches 4 blocks, p0 10, d2 30: each serves what those before it lack."""
    scheduler = cluster()
    queued(scheduler)
    assigned(scheduler, CachedPrefix("d0", 4), CachedPrefix("p0", 10))
    made = granted(
        scheduler,
        decode_blocks=4,
        prefill_blocks=10,
        others=(CachedPrefix("d1", 20), CachedPrefix("d2", 30)),
        third_reads=True,
    )
    assert runs(made)[:3] == [("d0", 0, 4, True), ("p0", 4, 6, True), ("d2", 10, 20, True)]
    assert sum(count for _, _, count, cached in runs(made) if not cached) == 10
    without = granted(
        scheduler,
        decode_blocks=4,
        prefill_blocks=10,
        others=(CachedPrefix("d2", 30),),
        third_reads=False,
    )
    assert {name for name, *_ in runs(without)} == {"d0", "p0", "d2"}
    assert [third.read_tokens for third in without.thirds] == [0]


def test_a_third_engine_that_grants_no_slots_is_left_out_and_not_charged() -> None:
    scheduler = cluster()
    queued(scheduler)
    assigned(scheduler)
    assert granted(scheduler).thirds
    made = granted(scheduler, use_thirds=False)
    assert made.thirds == ()
    assert [name for name, *_ in runs(made)] == ["p0", "d0"]
    assert [queue_of(scheduler, name) for name in ("d1", "d2", "d3")] == [0, 0, 0]


def test_a_paused_engine_and_nodes_of_the_pair_serve_nothing() -> None:
    scheduler = cluster()
    neighbour = EngineSpec("d4", Role.DECODE, "d0", "D", 9, HBM_TOKENS)
    scheduler.apply(EngineJoined(neighbour))
    scheduler.apply(EngineReport("d4", Load(9, 9000, 0, HBM_TOKENS - 9000, 0)))
    queued(scheduler)
    assigned(scheduler)
    for name in ("d1", "d2"):
        scheduler.apply(EnginePaused(name))
    assert {name for name, *_ in runs(granted(scheduler))} == {"p0", "d0", "d3"}


@pytest.mark.parametrize("mode", [Mode.BASIC, Mode.LAYERWISE, Mode.ROUND_ROBIN, Mode.ORACLE])
def test_baselines_read_at_their_own_engines(mode: Mode) -> None:
    scheduler = cluster(mode)
    hit = BLOCKS * 64
    scheduler.apply(Submitted(Request("r", hit + 10, hit, 1)))
    (made,) = [one for group in "PD" for one in scheduler.apply(Fetch(group)).assignments]
    effects = scheduler.apply(SlotsGranted("r", 0, 0))
    assert not any(run.third for one in (made, *effects.assignments) for run in one.reads)


def test_a_request_is_lost_with_its_third_engine_until_its_prompt_is_computed() -> None:
    scheduler = cluster()
    queued(scheduler)
    assigned(scheduler)
    third = granted(scheduler).thirds[0].engine_id
    assert scheduler.apply(EngineLost(third)).lost_requests == ("r",)
    assert queue_of(scheduler, "d2") == 0

    other = cluster()
    queued(other)
    assigned(other)
    third = granted(other).thirds[0].engine_id
    other.apply(PrefillEnded("r"))
    assert other.apply(EngineLost(third)).lost_requests == ()
    other.apply(Finished("r"))
