"""A request waits for HBM of the decode engine that caches its KV, while that beats a read.

d0 and d1 have HBM for two prompts of 1,000 tokens each.  A storage NIC reads 100 tokens in 1 s.
Requests have their decode engine for 2 s, so that a full one frees 1,000 tokens in 1 s.
"""

import random

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.modes import Mode
from dualpath.core.request import CachedPrefix, Request
from dualpath.policy.events import (
    Assignment,
    EngineJoined,
    EngineLost,
    EngineReport,
    EngineSpec,
    Fetch,
    Finished,
    SchedulerSettings,
    SetThresholds,
    Submitted,
)
from dualpath.policy.scheduler import RequestScheduler

HBM_TOKENS = 2000
READ_TOKENS_PER_S = 100


def cluster(read_tokens_per_s: int = READ_TOKENS_PER_S, mode: Mode = Mode.DUALPATH):
    scheduler = RequestScheduler(
        SchedulerSettings(
            mode=mode,
            alpha_tokens=3 * read_tokens_per_s,
            beta_tokens=100_000,
            generated_reserve_tokens=0,
        )
    )
    scheduler.apply(EngineJoined(EngineSpec("p0", Role.PREFILL, "p", "P", 0, HBM_TOKENS)))
    for order, name in enumerate(("d0", "d1"), start=1):
        scheduler.apply(EngineJoined(EngineSpec(name, Role.DECODE, name, "D", order, HBM_TOKENS)))
    return scheduler


def submit(scheduler: RequestScheduler, name: str, cached_at: str = "", blocks: int = 14) -> None:
    cached = (CachedPrefix(cached_at, blocks),) if cached_at else ()
    scheduler.apply(Submitted(Request(name, 1000, blocks * 64, 1, cached)))


def fetch(scheduler: RequestScheduler, now_s: float) -> dict[str, Assignment]:
    made = [one for group in "PD" for one in scheduler.apply(Fetch(group, now_s)).assignments]
    return {assignment.request_id: assignment for assignment in made}


def with_full_d0(scheduler: RequestScheduler) -> None:
    """Let four requests have their engines for 2 s; then fill d0, and half of d1."""
    for name in ("w0", "w1", "w2", "w3"):
        submit(scheduler, name)
    assert len(fetch(scheduler, 1.0)) == 4
    for name in ("w0", "w1", "w2", "w3"):
        scheduler.apply(Finished(name, 3.0))
    for name, engine in (("b0", "d0"), ("b1", "d0"), ("b2", "d1")):
        submit(scheduler, name, cached_at=engine)
    made = fetch(scheduler, 3.0)
    assert [made[name].decode_engine for name in ("b0", "b1", "b2")] == ["d0", "d0", "d1"]


def test_it_waits_for_the_engine_that_caches_it_and_others_are_placed_meanwhile() -> None:
    scheduler = cluster()
    with_full_d0(scheduler)
    submit(scheduler, "kv", cached_at="d0")
    submit(scheduler, "new")

    made = fetch(scheduler, 3.1)
    assert {name: one.decode_engine for name, one in made.items()} == {"new": "d1"}

    scheduler.apply(Finished("b0", 4.0))
    (placed,) = fetch(scheduler, 4.0).values()
    assert (placed.decode_engine, placed.de_reason) == ("d0", "waited")
    assert placed.read_reason == "kept"


def test_no_later_request_takes_the_hbm_that_it_waits_for() -> None:
    """d0 frees half of what it needs: a short request would fit there, and fits nowhere else."""
    scheduler = cluster()
    with_full_d0(scheduler)
    scheduler.apply(EngineReport("d0", Load(2, 1500, 0, 500, 0)))
    submit(scheduler, "kv", cached_at="d0")
    scheduler.apply(Submitted(Request("filler", 900, 0, 1)))
    scheduler.apply(Submitted(Request("short", 400, 0, 1)))
    assert {one.decode_engine for one in fetch(scheduler, 3.1).values()} == {"d1"}

    scheduler.apply(EngineReport("d0", Load(1, 1000, 0, 1000, 0)))
    (placed,) = fetch(scheduler, 3.5).values()
    assert (placed.request_id, placed.decode_engine) == ("kv", "d0")


def test_it_reads_where_that_is_faster_than_the_wait() -> None:
    """1,000 tokens are short for 1 s; 896 tokens are read in 0.09 s, which counts twice."""
    scheduler = cluster(read_tokens_per_s=10_000)
    with_full_d0(scheduler)
    submit(scheduler, "kv", cached_at="d0")

    (placed,) = fetch(scheduler, 3.1).values()
    assert (placed.decode_engine, placed.de_reason) == ("d1", "low-token min-seq")
    assert placed.decode_read_tokens + placed.prefill_read_tokens == 896


def test_a_queue_of_reads_makes_the_wait_worth_it() -> None:
    """As before, behind 10,000 tokens that both storage NICs have to read for others."""
    scheduler = cluster(read_tokens_per_s=10_000)
    with_full_d0(scheduler)
    for name, tokens in (("p0", 0), ("d0", 2000), ("d1", 1000)):
        scheduler.apply(EngineReport(name, Load(0, tokens, 10_000, HBM_TOKENS - tokens, 0)))
    submit(scheduler, "kv", cached_at="d0")
    assert fetch(scheduler, 3.1) == {}


def test_it_does_not_wait_for_an_engine_whose_load_outweighs_its_cache() -> None:
    """64 cached tokens count for 128; d0 has 1,000 tokens more than d1."""
    scheduler = cluster()
    with_full_d0(scheduler)
    submit(scheduler, "kv", cached_at="d0", blocks=1)
    assert [one.decode_engine for one in fetch(scheduler, 3.1).values()] == ["d1"]


def test_it_waits_no_longer_than_the_read_is_worth_and_waits_once() -> None:
    """896 tokens are read in 8.96 s, which counts twice."""
    scheduler = cluster()
    with_full_d0(scheduler)
    submit(scheduler, "kv", cached_at="d0")
    assert fetch(scheduler, 3.0) == {}
    assert fetch(scheduler, 3.0 + 17.9) == {}
    (placed,) = fetch(scheduler, 3.0 + 18.0).values()
    assert (placed.decode_engine, placed.de_reason) == ("d1", "low-token min-seq")


def test_split_reads_are_twice_as_fast() -> None:
    """Both storage NICs read half: the wait is worth 8.96 s."""
    scheduler = cluster(mode=Mode.SPLIT)
    with_full_d0(scheduler)
    submit(scheduler, "kv", cached_at="d0")
    assert fetch(scheduler, 3.0) == {}
    assert fetch(scheduler, 3.0 + 8.9) == {}
    assert [one.decode_engine for one in fetch(scheduler, 3.0 + 9.0).values()] == ["d1"]


def test_nothing_waits_while_no_rate_of_reading_is_known() -> None:
    scheduler = cluster()
    with_full_d0(scheduler)
    scheduler.apply(SetThresholds(1 << 60, 100_000))
    submit(scheduler, "kv", cached_at="d0")
    assert [one.decode_engine for one in fetch(scheduler, 3.1).values()] == ["d1"]


def test_a_lost_engine_is_not_waited_for() -> None:
    scheduler = cluster()
    with_full_d0(scheduler)
    submit(scheduler, "kv", cached_at="d0")
    assert fetch(scheduler, 3.1) == {}
    scheduler.apply(EngineLost("d0"))
    (placed,) = fetch(scheduler, 3.2).values()
    assert (placed.decode_engine, placed.de_reason) == ("d1", "low-token min-seq")


def test_a_group_in_which_a_request_waits_fetches_with_every_other_one() -> None:
    """Reading queues of other engines decide how long it waits."""
    scheduler = cluster()
    with_full_d0(scheduler)
    submit(scheduler, "kv", cached_at="d0")
    fetch(scheduler, 3.1)
    assert list(scheduler.fetching_groups(0, ["p0"])) == ["D"]


def test_a_request_that_has_waited_in_vain_goes_before_those_that_wait_behind_it() -> None:
    """d1 has more HBM and is full; two requests wait for d0 behind "old", which waits no longer."""
    scheduler = cluster()
    scheduler.apply(EngineLost("d1"))
    scheduler.apply(EngineJoined(EngineSpec("d1", Role.DECODE, "d1", "D", 2, 6000)))
    with_full_d0(scheduler)
    scheduler.apply(Submitted(Request("filler", 3000, 0, 1)))
    assert fetch(scheduler, 3.0)["filler"].decode_engine == "d1"
    submit(scheduler, "old", cached_at="d0")
    assert fetch(scheduler, 3.0) == {}
    submit(scheduler, "behind", cached_at="d0")
    scheduler.apply(Submitted(Request("long", 1500, 1408, 1, (CachedPrefix("d0", 22),))))
    assert fetch(scheduler, 20.0) == {}
    scheduler.apply(Submitted(Request("last", 2000, 0, 1)))
    assert set(fetch(scheduler, 20.5)) == {"last"}
    assert fetch(scheduler, 21.0) == {}

    for name in ("b0", "b1"):
        scheduler.apply(Finished(name, 22.0))
    made = fetch(scheduler, 22.0)
    assert {name: one.decode_engine for name, one in made.items()} == {"old": "d0", "behind": "d0"}


def test_all_requests_are_served_in_whatever_order_they_wait() -> None:
    """Three DEs, two PEs that one request overloads; engines come and go.  100 seeds."""
    waited = sum(served_requests(seed) for seed in range(100))
    assert waited > 100


def served_requests(seed: int) -> int:
    """Serve 30 requests, most of which a DE caches; return how many waited for that DE."""
    draw, now_s = random.Random(seed), 0.0
    scheduler = RequestScheduler(SchedulerSettings(Mode.SPLIT, 300, 500, 64))
    engines = [EngineSpec(f"p{n}", Role.PREFILL, f"p{n}", "P", n, HBM_TOKENS) for n in range(2)]
    engines += [EngineSpec(f"d{n}", Role.DECODE, f"d{n}", "D", n + 2, HBM_TOKENS) for n in range(3)]
    for spec in engines:
        scheduler.apply(EngineJoined(spec))
    waiting: dict[str, Request] = {}
    running: dict[str, Assignment] = {}
    number = waited = idle = 0
    while number < 30 or waiting or running:
        now_s += draw.random()
        if number < 30 and draw.random() < 0.5:
            prompt = draw.randint(300, 1700)
            cached = CachedPrefix(f"d{draw.randrange(3)}", (prompt - 1) // 64)
            made = Request(f"r{number}", prompt, cached.blocks * 64, 1, (cached,))
            waiting[made.request_id] = made
            scheduler.apply(Submitted(made))
            number += 1
        if draw.random() < 0.05:
            spec = draw.choice(engines)
            for name in scheduler.apply(EngineLost(spec.engine_id)).lost_requests:
                waiting.setdefault(name, Request(name, 500, 0, 1))
                running.pop(name, None)
                scheduler.apply(Submitted(waiting[name]))
            scheduler.apply(EngineJoined(spec))
        new = fetch(scheduler, now_s)
        for name, assignment in new.items():
            running[name] = assignment
            del waiting[name]
            waited += assignment.de_reason == "waited"
        ended = [name for name in running if draw.random() < 0.3]
        for name in ended:
            scheduler.apply(Finished(name, now_s))
            del running[name]
        idle = 0 if new or running or ended else idle + 1
        assert idle < 60, f"seed {seed}: {sorted(waiting)} wait, and nothing runs"
    return waited
