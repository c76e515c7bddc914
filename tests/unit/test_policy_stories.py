"""Small examples in the manner of Fig. 5 and Fig. 6, as the scheduler sees them."""

import pytest

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.errors import BadRequestError
from dualpath.core.modes import Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.core.runs import BlockRun, HitRun
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineReport,
    EngineResumed,
    EngineSpec,
    Fetch,
    Finished,
    PrefillEnded,
    ReadsDone,
    SchedulerSettings,
    SlotsGranted,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler


def engine(name: str, role: Role, node: str, group: str, order: int, hbm: int = 1_000_000):
    return EngineSpec(name, role, node, group, order, hbm)


def scheduler_with(*specs: EngineSpec, mode: Mode = Mode.DUALPATH, **settings) -> RequestScheduler:
    defaults = {"alpha_tokens": 1000, "beta_tokens": 5000, "generated_reserve_tokens": 0}
    scheduler = RequestScheduler(SchedulerSettings(mode=mode, **{**defaults, **settings}))
    for spec in specs:
        scheduler.apply(EngineJoined(spec))
    return scheduler


def one_pair(**settings) -> RequestScheduler:
    return scheduler_with(
        engine("p0", Role.PREFILL, "node-p", "P", 0),
        engine("d0", Role.DECODE, "node-d", "D", 1),
        **settings,
    )


def report(
    name: str,
    requests: int = 0,
    tokens: int = 0,
    read_q: int = 0,
    hbm: int = 1_000_000,
    uncounted: tuple[str, ...] = (),
) -> EngineReport:
    return EngineReport(name, Load(requests, tokens, read_q, hbm, 0), uncounted)


def request(name: str, prompt: int = 1000, hit: int = 0, new: int = 1) -> Request:
    return Request(name, prompt, hit, new)


def assign(scheduler: RequestScheduler, *groups: str):
    return [
        assignment for group in groups for assignment in scheduler.apply(Fetch(group)).assignments
    ]


def test_prefill_engine_of_the_node_with_the_short_queue_wins_over_one_with_fewer_tokens() -> None:
    """Fig. 5: two nodes in one PE group; node a has a short reading queue, node b a long one."""
    scheduler = scheduler_with(
        engine("a0", Role.PREFILL, "a", "P", 0),
        engine("a1", Role.PREFILL, "a", "P", 1),
        engine("b0", Role.PREFILL, "b", "P", 2),
        engine("b1", Role.PREFILL, "b", "P", 3),
        engine("d0", Role.DECODE, "d", "D", 4),
    )
    scheduler.apply(report("a0", tokens=5001, requests=2, read_q=400))
    scheduler.apply(report("a1", tokens=3500, requests=2, read_q=600))
    scheduler.apply(report("b0", tokens=100, requests=1, read_q=900))
    scheduler.apply(report("b1", tokens=200, requests=1, read_q=101))
    for name in ("r0", "r1", "r2", "r3", "r4", "r5"):
        scheduler.apply(Submitted(request(name, prompt=2000)))

    placed = [(a.prefill_engine, a.pe_reason) for a in assign(scheduler, "D", "P")]

    # a0 is overloaded; a1 is of category 2 until its tokens pass β; then category 3 shares.
    assert placed == [
        ("a1", "short-queue"),
        ("b0", "long-queue"),
        ("b1", "long-queue"),
        ("b0", "long-queue"),
        ("b1", "long-queue"),
        ("b0", "long-queue"),
    ]


def test_overloaded_engines_end_the_fetch_and_the_rest_waits_in_order() -> None:
    scheduler = one_pair()
    for name in ("r0", "r1", "r2"):
        scheduler.apply(Submitted(request(name, prompt=4000)))

    assert [a.request_id for a in assign(scheduler, "D", "P")] == ["r0", "r1"]
    assert scheduler.waiting == 1

    scheduler.apply(PrefillEnded("r0"))
    assert [a.request_id for a in assign(scheduler, "P")] == ["r2"]


def test_drain_shares_requests_between_decode_groups_by_their_tokens() -> None:
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "p", "P", 0),
        engine("x0", Role.DECODE, "x", "X", 1),
        engine("y0", Role.DECODE, "y", "Y", 2),
        beta_tokens=100_000,
    )
    scheduler.apply(report("x0", tokens=2500, requests=1))
    for name in ("r0", "r1", "r2", "r3"):
        scheduler.apply(Submitted(request(name, prompt=1000)))
    scheduler.apply(Fetch("P"))

    of_y = assign(scheduler, "Y")
    of_x = assign(scheduler, "X")

    assert [a.request_id for a in of_y] == ["r0", "r1", "r2"]
    assert [a.request_id for a in of_x] == ["r3"]


def test_decode_prefers_few_requests_below_z_and_few_tokens_above_it() -> None:
    """Z = 1.05 × (4000 + 9000) / 2 = 6825: d0 (few requests, many tokens) is a high-token DE.

    When d1 has 6000 tokens as well both are, and the lower order wins.
    """
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "p", "P", 0),
        engine("d0", Role.DECODE, "d", "D", 1),
        engine("d1", Role.DECODE, "d", "D", 2),
        beta_tokens=100_000,
    )
    scheduler.apply(report("d0", tokens=6000, requests=1))
    scheduler.apply(report("d1", tokens=3000, requests=9))
    for name in ("r0", "r1", "r2", "r3"):
        scheduler.apply(Submitted(request(name, prompt=1000)))

    placed = [(a.decode_engine, a.de_reason) for a in assign(scheduler, "P", "D")]

    assert placed == [
        ("d1", "low-token min-seq"),
        ("d1", "low-token min-seq"),
        ("d1", "low-token min-seq"),
        ("d0", "high-token min-tok"),
    ]


def test_hits_are_computed_while_the_pe_waits_for_what_others_load() -> None:
    """Both sides read 2,000 tokens/s, the PE computes 1,000: a hit of 512 takes it half a second.

    The hit before it is 1 s of reading and no work of the PE, which is free until then.
    """
    scheduler = one_pair(
        mode=Mode.SPLIT,
        alpha_tokens=3000,
        beta_tokens=10_000,
        computed_weight=2.0,
        recompute_limit_s=60.0,
    )

    def recomputed(name: str, prompt: int, hit: int) -> int:
        scheduler.apply(Submitted(request(name, prompt, hit)))
        (assignment,) = assign(scheduler, "D", "P")
        tokens: int = assignment.recompute_tokens
        return tokens

    assert recomputed("long", 2000, 1984) == 0
    scheduler.apply(SlotsGranted("long", decode_blocks=0, prefill_blocks=0))
    assert recomputed("second", 528, 512) == 512
    scheduler.apply(SlotsGranted("second", decode_blocks=0, prefill_blocks=0))
    assert recomputed("third", 528, 512) == 0, "the PE computes the second"
    scheduler.apply(PrefillEnded("second"))
    assert recomputed("fourth", 528, 512) == 512
    scheduler.apply(Finished("fourth"))
    assert recomputed("fifth", 528, 512) == 512


def test_reads_that_wait_for_slots_make_no_hit_recomputed() -> None:
    """Storage reads 1,000 tokens/s at either side, the PE computes as many."""
    scheduler = one_pair(
        mode=Mode.SPLIT,
        alpha_tokens=3000,
        beta_tokens=10_000,
        computed_weight=2.0,
        recompute_limit_s=60.0,
    )

    def submit(name: str, hit: int = 1984) -> Assignment:
        scheduler.apply(Submitted(request(name, hit + 16, hit)))
        (assignment,) = assign(scheduler, "D", "P")
        assert isinstance(assignment, Assignment)
        return assignment

    assert [submit(name).recompute_tokens for name in ("first", "second", "third")] == [0, 0, 0]
    for name in ("first", "second"):
        effects = scheduler.apply(SlotsGranted(name, decode_blocks=0, prefill_blocks=0))
        assert effects.assignments == ()
    assert submit("fourth", 512).recompute_tokens == 512
    for name in ("first", "second"):
        scheduler.apply(ReadsDone(name))
    granted = SlotsGranted("fourth", decode_blocks=0, prefill_blocks=0)
    (replanned,) = scheduler.apply(granted).assignments
    assert (replanned.recompute_tokens, replanned.read_reason) == (0, "split")


def test_blocks_evicted_at_the_decode_engine_are_read_by_the_rule() -> None:
    """Blocks cached when a request is queued are evicted before its slots are granted."""
    scheduler = one_pair(mode=Mode.SPLIT)
    scheduler.apply(Submitted(Request("r", 2000, 1920, 1, cached=(CachedPrefix("d0", 30),))))
    scheduler.apply(Submitted(Request("s", 2000, 1920, 1, cached=(CachedPrefix("d0", 30),))))
    first, second = assign(scheduler, "D", "P")
    assert first.reads == (HitRun(Role.DECODE, BlockRun(0, 30), cached=True),)
    assert scheduler.apply(SlotsGranted("r", 30, 0)).assignments == ()

    (replanned,) = scheduler.apply(SlotsGranted("s", 2, 0)).assignments

    assert (replanned.prefill_engine, replanned.decode_engine) == ("p0", "d0")
    assert replanned.reads == (
        HitRun(Role.DECODE, BlockRun(0, 2), cached=True),
        HitRun(Role.PREFILL, BlockRun(2, 14)),
        HitRun(Role.DECODE, BlockRun(16, 14)),
    )
    assert (replanned.read_reason, second.read_reason) == ("split", "kept")
    queues = {load.engine_id: load.read_queue_tokens for load in scheduler.loads()}
    assert queues == {"p0": 14 * 64, "d0": 14 * 64}
    assert scheduler.apply(SlotsGranted("s", 2, 0)).assignments == (), (
        "a repeated report changes nothing"
    )

    scheduler.apply(ReadsDone("s"))
    scheduler.apply(Finished("s"))
    assert all(load.read_queue_tokens == 0 for load in scheduler.loads())
    assert scheduler.apply(SlotsGranted("s", 0, 0)).assignments == ()


def test_blocks_evicted_at_the_prefill_engine_are_read_by_the_rule() -> None:
    scheduler = one_pair(mode=Mode.SPLIT)
    cached = CachedPrefix("d0", 10), CachedPrefix("p0", 30)
    scheduler.apply(Submitted(Request("r", 2000, 1920, 1, cached=cached)))
    (assignment,) = assign(scheduler, "D", "P")
    assert [(run.side, run.blocks.count, run.cached) for run in assignment.reads] == [
        (Role.DECODE, 10, True),
        (Role.PREFILL, 20, True),
    ]
    assert scheduler.apply(SlotsGranted("r", 10, 30)).assignments == ()

    (replanned,) = scheduler.apply(SlotsGranted("r", 10, 12)).assignments

    assert [(run.side, run.blocks.count, run.cached) for run in replanned.reads] == [
        (Role.DECODE, 10, True),
        (Role.PREFILL, 2, True),
        (Role.PREFILL, 9, False),
        (Role.DECODE, 9, False),
    ]


def test_blocks_that_only_an_engine_has_are_hits_at_this_engine() -> None:
    """Storage has 10 blocks, d0 caches 30; the PE computes what neither of its engines has."""
    scheduler = one_pair()
    scheduler.apply(EngineJoined(engine("d1", Role.DECODE, "node-e", "E", 2)))
    for name in ("there", "elsewhere"):
        cached = (CachedPrefix("d0", 30),)
        scheduler.apply(Submitted(Request(name, 2000, 640, 1, cached=cached)))
        if name == "there":
            (there,) = assign(scheduler, "D", "P")
            scheduler.apply(EnginePaused("d0"))
    (elsewhere,) = assign(scheduler, "E", "P")
    assert (there.decode_engine, there.unstored_tokens) == ("d0", 1920 - 640)
    assert there.reads == (HitRun(Role.DECODE, BlockRun(0, 30), cached=True),)
    assert (there.read_reason, there.prefill_read_tokens, there.decode_read_tokens) == (
        *("kept", 0, 0),
    )
    assert (elsewhere.decode_engine, elsewhere.unstored_tokens) == ("d1", 0)
    assert elsewhere.reads[-1].blocks.end == 10
    assert scheduler._live["there"].computing_tokens == 2000 - 1920
    assert scheduler._live["elsewhere"].computing_tokens == 2000 - 640


@pytest.mark.parametrize(("left", "hit_blocks"), [(30, 30), (20, 20), (10, 10), (3, 10), (0, 10)])
def test_if_they_were_evicted_meanwhile_the_hit_ends_where_storage_or_the_engine_does(
    left: int, hit_blocks: int
) -> None:
    scheduler = one_pair()
    scheduler.apply(Submitted(Request("r", 2000, 640, 1, cached=(CachedPrefix("d0", 30),))))
    assign(scheduler, "D", "P")
    replanned = scheduler.apply(SlotsGranted("r", left, 0)).assignments
    assert len(replanned) == (left < 30)
    for assignment in replanned:
        assert assignment.unstored_tokens == (hit_blocks - 10) * 64
        assert [run.blocks.end for run in assignment.reads][-1] == hit_blocks
        read_tokens = assignment.prefill_read_tokens + assignment.decode_read_tokens
        assert read_tokens == max(10 - left, 0) * 64
    assert scheduler._live["r"].computing_tokens == 2000 - hit_blocks * 64
    scheduler.apply(Finished("r"))
    assert all(load.read_queue_tokens == load.unfinished_tokens == 0 for load in scheduler.loads())


def test_an_engine_that_caches_all_of_a_prompt_is_refused() -> None:
    """At least one token is computed."""
    scheduler = one_pair()
    with pytest.raises(BadRequestError, match="1984 cached"):
        scheduler.apply(Submitted(Request("r", 1984, 640, 1, cached=(CachedPrefix("d0", 31),))))


def test_replanned_reads_count_as_reported_once_they_are() -> None:
    scheduler = one_pair(mode=Mode.SPLIT)
    for name in ("r", "s"):
        scheduler.apply(Submitted(Request(name, 2000, 1920, 1, cached=(CachedPrefix("d0", 30),))))
    assign(scheduler, "D", "P")
    scheduler.apply(report("d0", requests=1, tokens=2000, uncounted=("s",)))
    scheduler.apply(SlotsGranted("s", 0, 0))
    scheduler.apply(SlotsGranted("r", 0, 0))
    at_decode = scheduler.loads()[1].read_queue_tokens
    assert at_decode == 2 * 15 * 64

    scheduler.apply(report("d0", requests=2, tokens=4000, read_q=at_decode))
    assert scheduler.loads()[1].read_queue_tokens == at_decode
    scheduler.apply(ReadsDone("r"))
    assert scheduler.loads()[1].read_queue_tokens == at_decode, "the next report has it"


def test_a_hit_that_was_pushed_out_is_computed_where_that_is_faster() -> None:
    """Both sides read 2,000 tokens/s, the PE computes 4,000."""
    scheduler = one_pair(
        mode=Mode.SPLIT,
        alpha_tokens=3000,
        beta_tokens=40_000,
        computed_weight=2.0,
        recompute_limit_s=60.0,
    )
    scheduler.apply(Submitted(Request("r", 2000, 1920, 1, cached=(CachedPrefix("d0", 30),))))
    (assignment,) = assign(scheduler, "D", "P")
    assert assignment.recompute_tokens == 0

    (replanned,) = scheduler.apply(SlotsGranted("r", 10, 0)).assignments

    assert (replanned.recompute_tokens, replanned.read_reason) == (20 * 64, "recompute")
    assert replanned.reads == (HitRun(Role.DECODE, BlockRun(0, 10), cached=True),)
    assert replanned.prefill_tokens == 2000 + 2 * 20 * 64
    assert scheduler.loads()[0].unfinished_tokens == replanned.prefill_tokens
    scheduler.apply(PrefillEnded("r"))
    assert scheduler.loads()[0].unfinished_tokens == 0


def test_decode_waits_at_the_head_for_hbm() -> None:
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "p", "P", 0),
        engine("d0", Role.DECODE, "d", "D", 1, hbm=1000),
        engine("d1", Role.DECODE, "d", "D", 2, hbm=1000),
    )
    for name, prompt in (("r0", 600), ("r1", 600), ("r2", 700), ("r3", 100)):
        scheduler.apply(Submitted(request(name, prompt=prompt)))

    assert [a.request_id for a in assign(scheduler, "P", "D")] == ["r0", "r1"]
    scheduler.apply(Finished("r0"))
    assert [a.request_id for a in assign(scheduler, "D")] == ["r2", "r3"]


def test_generated_tokens_count_at_the_decode_engine_up_to_the_reserve() -> None:
    scheduler = one_pair(generated_reserve_tokens=256)
    scheduler.apply(Submitted(request("short", prompt=1000, new=10)))
    scheduler.apply(Submitted(request("long", prompt=1000, new=5000)))

    short, long = assign(scheduler, "P", "D")

    assert (short.prefill_tokens, short.decode_tokens) == (1000, 1010)
    assert (long.prefill_tokens, long.decode_tokens) == (1000, 1256)


def test_reads_alternate_while_nothing_else_sets_the_sides_apart() -> None:
    scheduler = one_pair(beta_tokens=100_000)
    for number in range(4):
        scheduler.apply(Submitted(request(f"r{number}", hit=640)))
        (assignment,) = assign(scheduler, "P", "D")
        side = (Role.PREFILL, Role.DECODE)[number % 2]
        assert assignment.read_reason == "tie"
        assert assignment.reads == (HitRun(side, BlockRun(0, 10)),)
        scheduler.apply(ReadsDone(f"r{number}"))


def test_engines_of_a_node_share_its_reading_queue() -> None:
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "p", "P", 0),
        engine("p1", Role.PREFILL, "p", "P", 1),
        engine("d0", Role.DECODE, "d", "D", 2),
    )
    scheduler.apply(report("p1", tokens=3000, requests=1, read_q=500))
    scheduler.apply(report("d0", read_q=400))
    scheduler.apply(Submitted(request("r0", hit=128)))

    (assignment,) = assign(scheduler, "P", "D")

    assert assignment.prefill_engine == "p0"
    assert assignment.reads == (HitRun(Role.DECODE, BlockRun(0, 2)),)
    assert assignment.read_reason == "shorter-queue"


def test_a_read_counts_until_it_is_done_or_reported() -> None:
    def queues() -> list[int]:
        return [load.read_queue_tokens for load in scheduler.loads()]

    scheduler = one_pair()
    scheduler.apply(Submitted(request("r0", hit=640)))
    assign(scheduler, "P", "D")
    assert queues() == [640, 0]
    scheduler.apply(report("p0", requests=1, tokens=1000, read_q=320))
    assert queues() == [320, 0]
    scheduler.apply(Submitted(request("r1", hit=640)))
    assign(scheduler, "P", "D")
    assert queues() == [320, 640]
    scheduler.apply(ReadsDone("r1"))
    assert queues() == [320, 0]


def test_a_request_held_for_one_engine_is_not_taken_as_reported() -> None:
    """The DE is chosen first; a report that comes before the PE is known must not swallow it."""
    scheduler = one_pair()
    scheduler.apply(Submitted(request("r0")))
    scheduler.apply(Submitted(request("r1")))
    scheduler.apply(Fetch("D"))
    scheduler.apply(report("d0"))

    assert scheduler.loads()[1].unfinished_tokens == 2000
    assert len(scheduler.apply(Fetch("P")).assignments) == 2
    assert scheduler.loads()[1].unfinished_tokens == 2000
    scheduler.apply(report("d0", requests=1, tokens=1000, uncounted=("r1",)))
    assert scheduler.loads()[1].unfinished_tokens == 2000


@pytest.mark.parametrize(
    ("mode", "sides", "reason"),
    [
        (Mode.BASIC, ["prefill"] * 4, "pe-only"),
        (Mode.LAYERWISE, ["prefill"] * 4, "pe-only"),
        (Mode.ROUND_ROBIN, ["prefill", "decode"] * 2, "round-robin"),
        (Mode.ORACLE, [], "oracle"),
    ],
)
def test_modes_read_on_their_sides(mode: Mode, sides: list[str], reason: str) -> None:
    scheduler = one_pair(mode=mode, beta_tokens=100_000)
    for number in range(4):
        scheduler.apply(Submitted(request(f"r{number}", hit=640)))
    assignments = assign(scheduler, "P", "D")

    assert [part.side.value for a in assignments for part in a.reads] == sides
    assert {a.read_reason for a in assignments} == {reason}


def test_round_robin_deals_engines_in_turn_over_all_groups() -> None:
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "a", "A", 0),
        engine("p1", Role.PREFILL, "b", "B", 1),
        engine("d0", Role.DECODE, "c", "C", 2),
        engine("d1", Role.DECODE, "c", "C", 3),
        engine("d2", Role.DECODE, "c", "C", 4),
        mode=Mode.ROUND_ROBIN,
    )
    for number in range(6):
        scheduler.apply(Submitted(request(f"r{number}")))

    placed = {a.request_id: a for a in assign(scheduler, "A", "B", "C")}

    order = [f"r{number}" for number in range(6)]
    assert [placed[name].prefill_engine for name in order] == ["p0", "p1"] * 3
    assert [placed[name].decode_engine for name in order] == ["d0", "d1", "d2"] * 2
    assert {(a.pe_reason, a.de_reason) for a in placed.values()} == {("round-robin",) * 2}


def test_balanced_baseline_places_by_tokens_without_looking_at_reading_queues() -> None:
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "a", "P", 0),
        engine("p1", Role.PREFILL, "b", "P", 1),
        engine("d0", Role.DECODE, "d", "D", 2),
        mode=Mode.BASIC,
        balanced_baselines=True,
    )
    scheduler.apply(report("p0", tokens=100, requests=1, read_q=50_000))
    scheduler.apply(report("p1", tokens=200, requests=1))
    scheduler.apply(Submitted(request("r0")))

    (assignment,) = assign(scheduler, "P", "D")

    assert (assignment.prefill_engine, assignment.pe_reason) == ("p0", "short-queue")


def test_split_divides_the_blocks_so_that_both_sides_finish_together() -> None:
    scheduler = one_pair(mode=Mode.SPLIT)
    scheduler.apply(report("p0", read_q=256))
    scheduler.apply(Submitted(request("r0", prompt=1001, hit=1000)))

    (assignment,) = assign(scheduler, "P", "D")

    # 16 blocks, 256 tokens queued at the PE: 6 blocks there and 616 tokens here end closest.
    assert assignment.read_reason == "split"
    assert assignment.reads == (
        HitRun(Role.PREFILL, BlockRun(0, 6)),
        HitRun(Role.DECODE, BlockRun(6, 10)),
    )
    assert (assignment.prefill_read_tokens, assignment.decode_read_tokens) == (384, 616)


def test_losing_a_decode_engine_returns_its_requests_and_not_waiting_ones() -> None:
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "p", "P", 0),
        engine("d0", Role.DECODE, "x", "X", 1, hbm=1000),
        engine("d1", Role.DECODE, "y", "Y", 2, hbm=1000),
    )
    for name in ("r0", "r1", "r2", "r3"):
        scheduler.apply(Submitted(request(name, prompt=900)))
    placed = {a.decode_engine: a.request_id for a in assign(scheduler, "P", "X", "Y")}

    assert scheduler.apply(EngineLost("d0")).lost_requests == (placed["d0"],)
    scheduler.apply(Finished(placed["d1"]))
    assert [a.decode_engine for a in assign(scheduler, "Y")] == ["d1"]
    assert scheduler.waiting == 1

    scheduler.apply(EngineJoined(engine("d0", Role.DECODE, "x", "X", 1, hbm=1000)))
    (again,) = assign(scheduler, "X")
    assert again.decode_engine == "d0"


def test_losing_a_prefill_engine_leaves_alone_what_it_is_through_with() -> None:
    scheduler = one_pair()
    scheduler.apply(Submitted(request("r0")))
    scheduler.apply(Submitted(request("r1")))
    assign(scheduler, "P", "D")
    scheduler.apply(PrefillEnded("r0"))

    assert scheduler.apply(EngineLost("p0")).lost_requests == ("r1",)
    assert scheduler.apply(Fetch("P")).assignments == ()


def test_newcomers_do_not_hold_hbm_against_an_older_request_that_has_its_prefill_engine() -> None:
    """What the recall is for: without it both queues would wait for each other for ever."""
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "p", "P", 0),
        engine("d0", Role.DECODE, "x", "X", 1, hbm=6500),
        engine("d1", Role.DECODE, "y", "Y", 2, hbm=6000),
    )
    scheduler.apply(Submitted(request("held", prompt=6400)))
    scheduler.apply(Fetch("P"))
    scheduler.apply(Submitted(request("young", prompt=5900)))
    scheduler.apply(Fetch("Y"))
    assert scheduler.apply(EngineLost("d0")).lost_requests == ()
    assert scheduler.unplaceable() == ["held"]
    scheduler.apply(EngineLost("d1"))
    scheduler.apply(EngineJoined(engine("d2", Role.DECODE, "z", "Z", 3, hbm=6500)))

    assert [a.request_id for a in assign(scheduler, "Z")] == ["held"]


def test_a_paused_engine_gets_no_new_requests_and_finishes_its_own() -> None:
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "p", "P", 0),
        engine("p1", Role.PREFILL, "p", "P", 1),
        engine("d0", Role.DECODE, "x", "X", 2, hbm=1000),
        engine("d1", Role.DECODE, "x", "X", 3, hbm=1000),
    )
    scheduler.apply(Submitted(request("r0", prompt=900)))
    (old,) = assign(scheduler, "P", "X")
    assert (old.prefill_engine, old.decode_engine) == ("p0", "d0")

    scheduler.apply(EnginePaused("p0"))
    scheduler.apply(EnginePaused("d1"))
    for name in ("r1", "r2"):
        scheduler.apply(Submitted(request(name, prompt=900)))
    assert assign(scheduler, "P", "X") == []
    scheduler.apply(PrefillEnded("r0"))
    scheduler.apply(Finished("r0"))
    (new,) = assign(scheduler, "P", "X")
    assert (new.prefill_engine, new.decode_engine) == ("p1", "d0")

    scheduler.apply(EngineResumed("d1"))
    (last,) = assign(scheduler, "P", "X")
    assert (last.request_id, last.decode_engine) == ("r2", "d1")


@pytest.mark.parametrize("mode", [Mode.DUALPATH, Mode.ROUND_ROBIN])
def test_a_request_that_has_half_its_engines_gives_a_paused_one_back(mode: Mode) -> None:
    scheduler = scheduler_with(
        engine("p0", Role.PREFILL, "p", "P", 0),
        engine("p1", Role.PREFILL, "q", "Q", 1),
        engine("d0", Role.DECODE, "x", "X", 2),
        mode=mode,
    )
    scheduler.apply(Submitted(request("r0")))
    assert assign(scheduler, "P") == []

    scheduler.apply(EnginePaused("p0"))
    (only,) = assign(scheduler, "P", "X", "Q")
    assert only.prefill_engine == "p1"
    assert {load.engine_id: load.unfinished_requests for load in scheduler.loads()} == {
        "p0": 0,
        "p1": 1,
        "d0": 1,
    }


def test_a_request_that_no_decode_engine_can_hold_is_refused_once_engines_are_known() -> None:
    scheduler = scheduler_with()
    scheduler.apply(Submitted(request("early", prompt=2000)))
    assert scheduler.unplaceable() == []
    scheduler.apply(EngineJoined(engine("p0", Role.PREFILL, "p", "P", 0)))
    scheduler.apply(EngineJoined(engine("d0", Role.DECODE, "d", "D", 1, hbm=1000)))

    with pytest.raises(BadRequestError, match=r"needs 2000 .* holds 1000; shorten"):
        scheduler.apply(Submitted(request("late", prompt=2000)))
    assert scheduler.unplaceable() == ["early"]
    scheduler.apply(Submitted(request("small", prompt=500)))
    assert [a.request_id for a in assign(scheduler, "P", "D")] == ["small"]


def test_a_request_that_only_waits_for_a_decode_engine_cannot_be_through_with_prefill() -> None:
    scheduler = one_pair()
    scheduler.apply(Submitted(request("r0")))
    assert assign(scheduler, "P") == []
    scheduler.apply(PrefillEnded("r0"))
    assert [a.request_id for a in assign(scheduler, "D")] == ["r0"]
