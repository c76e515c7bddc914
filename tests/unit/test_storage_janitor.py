"""The janitor enforces the limits of a storage; another candidate replaces a dead one."""

from collections.abc import Callable

import pytest
from tests.maintained_storage import BLOCK_BYTES, PLACE, Story, chain

from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage import janitor as janitor_module
from dualpath.storage.janitor import LEASE_S, STALE_S, TERMS, pin_name, read_status
from dualpath.storage.journal import JOURNAL, segment_name
from dualpath.storage.posix import key_of, object_name
from dualpath.storage.quotas import StorageLimits

TENANT = "a" * 16


def limits(blocks: int, **others: float) -> StorageLimits:
    wanted: dict[str, float] = {"high": 1.0, "low": 1.0, "protect_s": 0.0, **others}
    return StorageLimits(quota_bytes=blocks * BLOCK_BYTES, **wanted)  # type: ignore[arg-type]


def test_journaled_events_let_the_janitor_enforce_the_quota() -> None:
    story = Story(limits(10))
    janitor, engine = story.janitor(), story.engine()
    assert janitor.step()
    for number in range(5):
        story.now_s += 10
        engine.serve(chain(number, 4))
        engine.journal.flush()
        story.now_s += 1
        assert janitor.step()
        assert story.used_bytes <= 10 * BLOCK_BYTES
    assert [story.head(chain(number, 4)) for number in range(5)] == [0, 0, 2, 4, 4]
    assert (janitor.totals.evicted_blocks, janitor.totals.evicted_bytes) == (10, 10 * BLOCK_BYTES)
    status = read_status(story.tree)
    assert status is not None
    assert (status.blocks, status.used_bytes) == (10, 10 * BLOCK_BYTES)
    assert status.applied_segments[engine.journal.writer] == 5


def test_the_status_lists_owners_that_have_a_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = Story(StorageLimits(tenant_quota_bytes=100 * BLOCK_BYTES))
    janitor, engine = story.janitor(), story.engine()
    for number, tenant in enumerate(("a" * 16, "b" * 16, "c" * 16), 1):
        engine.write(chain(number, 2 * number), tenant=tenant)
    engine.journal.flush()
    janitor.step()
    status = read_status(story.tree)
    assert status is not None
    sizes = {"a" * 16: 2, "b" * 16: 4, "c" * 16: 6}
    assert status.fullest_tenants == {name: n * BLOCK_BYTES for name, n in sizes.items()}
    assert status.fullest_namespaces == {}, "they have no quota"
    monkeypatch.setattr(janitor_module, "MAX_NAMED_OWNERS", 2)
    janitor.step()
    status = read_status(story.tree)
    assert status is not None
    assert status.fullest_tenants == {"c" * 16: 6 * BLOCK_BYTES, "b" * 16: 4 * BLOCK_BYTES}


def test_the_survey_finds_existing_blocks_with_chains_and_tenants() -> None:
    story = Story(limits(6))
    engine = story.engine()
    engine.write(chain(1, 4), tenant=TENANT)
    story.now_s += 100
    engine.write(chain(2, 4))
    story.now_s += 100
    janitor = story.janitor()  # has received no report
    janitor.step()
    assert story.head(chain(1, 4)) == 2
    assert story.head(chain(2, 4)) == 4
    assert janitor.index is not None
    assert janitor.index.used_by_tenant() == {TENANT: 2 * BLOCK_BYTES, "": 4 * BLOCK_BYTES}


def test_blocks_without_a_tenant_count_with_their_parents() -> None:
    """A survey lists keys in hash order: it finds most blocks before their parents."""
    story = Story(StorageLimits(tenant_quota_bytes=8 * BLOCK_BYTES, high=1.0, low=1.0, protect_s=0))
    engine, prompt, generated = story.engine(), chain(1, 2), chain(1, 12)
    engine.write(prompt, tenant=TENANT)
    engine.write(generated, len(prompt))  # as older engines did
    engine.write(chain(2, 4))
    story.now_s += 100
    janitor = story.janitor()  # has received no report
    janitor.step()
    janitor.step()
    assert janitor.index is not None
    assert janitor.index.used_by_tenant() == {TENANT: 8 * BLOCK_BYTES, "": 4 * BLOCK_BYTES}
    assert story.head(generated) == 8


def test_only_stale_temporary_files_are_removed_after_a_day() -> None:
    story = Story(limits(6))
    tree, janitor = story.tree, story.janitor()
    left = [f"{PLACE}/tmp/lost-host-4026531836-77-3", "janitor/tmp/0123abcd"]
    for name in (*left, f"{PLACE}/namespace.json", "somebody-elses/tmp/notes"):
        tree.create(name, b"half")
    story.engine().write(chain(1, 2))
    janitor.step()
    assert all(tree.get(name) for name in left), "they may still be written"
    story.now_s += STALE_S + 1.0
    tree.create(f"{PLACE}/tmp/host-1-2-3", b"begun just now")
    janitor.step()
    names = {info.name for info in tree.objects("")}
    assert names.isdisjoint(left)
    assert {
        f"{PLACE}/tmp/host-1-2-3",
        f"{PLACE}/namespace.json",
        "somebody-elses/tmp/notes",
    } <= names
    assert sum(key_of(name) is not None for name in names) == 2


def test_planning_is_not_delayed_after_slow_reads_of_pins() -> None:
    story = Story(limits(2, protect_s=10.0))
    janitor, engine = story.janitor(), story.engine()
    story.tree.pins_take_s = 6.0
    engine.write(chain(1, 4))
    janitor.step()
    assert story.head(chain(1, 4)) == 4, "it was written a moment ago"
    story.tree.pins_take_s = 0.0
    story.now_s += 11
    janitor.step()
    assert story.head(chain(1, 4)) == 2


def test_nothing_is_evicted_before_the_first_survey_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(janitor_module, "STEP_BUDGET_S", -1.0)  # one folder at a time
    story = Story(limits(10, high=0.5, low=0.5))
    engine = story.engine()
    old = [chain(number, 1) for number in range(8)]
    for keys in old:
        engine.write(keys)
    janitor = story.janitor()
    for _ in range(7):
        story.now_s += 1
        janitor.step()
        assert len(story.stored()) == 8
    story.now_s += 1
    janitor.step()
    assert janitor.survey is not None
    assert janitor.survey.surveyed_s is not None


def test_a_restart_loads_the_saved_index_and_later_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = Story(limits(8))
    janitor, engine = story.janitor(), story.engine()
    engine.serve(chain(1, 4))
    engine.journal.flush()
    janitor.step()
    janitor.close()
    assert not [info for info in story.tree.objects(JOURNAL)]
    story.now_s += 10
    engine.serve(chain(2, 4))
    story.now_s += 10
    engine.serve(chain(1, 4))
    engine.journal.flush()
    listed: list[str] = []
    monkeypatch.setattr(story.tree, "get", _noting(story.tree.get, listed))
    successor = story.janitor()
    successor.step()
    assert not [name for name in listed if name.endswith(".kv")]  # no block is looked at
    assert successor.index is not None
    assert successor.index.blocks == 8
    story.now_s += 10
    engine.serve(chain(3, 4))
    engine.journal.flush()
    successor.step()
    assert [story.head(chain(n, 4)) for n in (1, 2, 3)] == [4, 0, 4]


def test_events_that_cannot_be_read_are_applied_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = Story(limits(8))
    janitor, first, second = story.janitor(), story.engine(), story.engine()
    janitor.step()
    first.write(chain(1, 4))
    second.write(chain(2, 4))
    first.journal.flush()
    second.journal.flush()
    get, broken = story.tree.get, segment_name(second.journal.writer, 1)

    def refusing(name: str, max_bytes: int | None = None) -> bytes | None:
        if name == broken:
            raise StorageError("the device refuses; see it")
        return get(name, max_bytes)

    monkeypatch.setattr(story.tree, "get", refusing)
    with pytest.raises(StorageError, match="the device refuses"):
        janitor.step()
    monkeypatch.setattr(story.tree, "get", get)
    janitor.step()
    assert janitor.index is not None
    assert janitor.index.blocks == 8


def _noting(
    get: Callable[[str, int | None], bytes | None], listed: list[str]
) -> Callable[[str, int | None], bytes | None]:
    def noting(name: str, max_bytes: int | None = None) -> bytes | None:
        listed.append(name)
        return get(name, max_bytes)

    return noting


def test_a_dead_janitor_is_replaced_and_a_suspended_one_removes_nothing() -> None:
    story = Story(limits(4))
    first, second = story.janitor(), story.janitor()
    assert first.step()
    assert not second.step()
    story.now_s += LEASE_S - 1
    assert first.step()  # counts, so that it is seen to live
    story.now_s += LEASE_S - 1
    assert not second.step()
    story.now_s += LEASE_S
    assert second.step()
    engine = story.engine()
    engine.write(chain(1, 8))
    engine.journal.flush()
    story.now_s += 1
    assert not first.step()
    assert len(story.stored()) == 8
    assert second.step()
    assert len(story.stored()) == 4
    second.close()
    assert first.step()
    assert len(list(story.tree.objects(TERMS))) == 1


def test_a_janitor_that_gets_the_lease_back_knows_what_was_stored_meanwhile() -> None:
    story = Story(limits(100))
    first, second, engine = story.janitor(), story.janitor(), story.engine()
    assert first.step()
    assert not second.step()
    story.now_s += LEASE_S
    assert second.step()
    engine.write(chain(1, 8))
    engine.journal.flush()
    second.step()
    second.close()
    assert not list(story.tree.objects(JOURNAL))
    assert first.step()
    assert first.index is not None
    assert first.index.blocks == 8


@pytest.mark.parametrize("stored", [False, True])
def test_events_after_a_refused_segment_are_applied(
    monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """The refused segment may be ``stored`` all the same, and applied before the next one."""
    story = Story(limits(100))
    janitor, engine = story.janitor(), story.engine()
    janitor.step()
    engine.write(chain(1, 4))
    replace = story.tree.replace

    def refusing(name: str, content: bytes) -> None:
        if stored:
            replace(name, content)
        raise StorageError("the answer is lost; try again")

    monkeypatch.setattr(story.tree, "replace", refusing)
    assert not engine.journal.flush()
    monkeypatch.setattr(story.tree, "replace", replace)
    janitor.step()
    assert janitor.index is not None
    assert janitor.index.blocks == (4 if stored else 0)
    engine.write(chain(2, 4))
    assert engine.journal.flush()
    janitor.step()
    assert janitor.index.blocks == 8
    assert engine.journal.unapplied(10**9).total == 0


def test_two_janitors_without_conditional_writes_become_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = Story(limits(4))

    def create(name: str, content: bytes) -> bool:
        story.tree.replace(name, content)
        return True

    monkeypatch.setattr(story.tree, "create", create)
    first, second = story.janitor(), story.janitor()
    first.lease._create_term(1, story.now_s)
    second.lease._create_term(1, story.now_s)
    assert [first.step(), second.step()] == [False, True]


def test_changes_that_were_not_journaled_are_found_within_a_day() -> None:
    story = Story(limits(100))
    janitor, engine = story.janitor(), story.engine()
    keys = chain(1, 4)
    engine.serve(keys)
    engine.journal.flush()
    janitor.step()
    silent = story.engine()
    silent.serve(chain(2, 4))  # ends before it reports
    story.tree.remove([f"{PLACE}/{key.hex()[:3]}/{key.hex()[3:5]}/{key.hex()}.kv" for key in keys])
    for _ in range(26):
        story.now_s += 3600
        janitor.step()
    assert janitor.index is not None
    assert janitor.survey is not None
    assert janitor.index.blocks == 4
    assert janitor.index.row(PLACE, chain(2, 4)[3]) is not None
    assert janitor.survey.differences.missing_blocks == 4


def test_a_used_chain_and_its_ancestors_leave_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(janitor_module, "BATCH", 2)
    story = Story(limits(4, protect_s=30.0))
    janitor, engine = story.janitor(), story.engine()
    janitor.step()
    old, young = chain(1, 6), chain(2, 4)
    engine.write(old)
    story.now_s += 5
    engine.write(young)
    story.now_s += 40
    engine.journal.flush()
    monkeypatch.setattr(janitor_module, "STEP_BUDGET_S", 0.0)
    janitor.step()
    assert janitor._term is not None
    janitor._term._make_plan()
    assert len(janitor._term._plan) == 6
    engine.serve(old)
    engine.journal.flush()
    monkeypatch.setattr(janitor_module, "STEP_BUDGET_S", 0.5)
    janitor.step()
    assert story.head(old) == 6
    assert story.head(young) == 0


def test_pinned_blocks_are_never_removed() -> None:
    story = Story(limits(1))
    janitor, engine = story.janitor(), story.engine()
    for number in range(3):
        engine.write(chain(number, 3), tenant=TENANT if number == 1 else "")
    engine.journal.flush()
    story.tree.replace(pin_name("chain", PLACE, chain(0, 3)[1].hex()), b"")
    story.tree.replace(pin_name("tenant", TENANT), b"")
    story.now_s += 10
    janitor.step()
    assert [story.head(chain(number, 3)) for number in range(3)] == [2, 3, 0]
    with pytest.raises(ConfigError, match="cannot be pinned"):
        pin_name("tenant", "../../secrets")


def test_a_pinned_chain_survives_its_last_block_and_a_change_of_janitor() -> None:
    story = Story(limits(1))
    janitor, engine = story.janitor(), story.engine()
    engine.write(chain(0, 3))
    engine.journal.flush()
    last = chain(0, 3)[2]
    story.tree.replace(pin_name("chain", PLACE, last.hex()), b"")
    story.now_s += 10
    janitor.step()
    story.tree.remove([object_name(PLACE, last)])
    engine.journal.removed(last, story.now_s)
    engine.journal.flush()
    story.now_s += 7200
    janitor.step()
    janitor.close()
    successor = story.janitor()
    successor.step()
    assert story.head(chain(0, 3)) == 2


def test_a_prefix_is_evicted_after_its_time_to_live() -> None:
    story = Story(StorageLimits(ttl_s=3600, protect_s=0.0))
    janitor, engine = story.janitor(), story.engine()
    engine.serve(chain(1, 3))
    engine.serve(chain(2, 3))
    engine.journal.flush()
    janitor.step()
    story.now_s += 3000
    engine.serve(chain(2, 3))
    engine.journal.flush()
    janitor.step()
    story.now_s += 1000
    janitor.step()
    assert (story.head(chain(1, 3)), story.head(chain(2, 3))) == (0, 3)


@pytest.mark.parametrize("noticed_by", ["journal", "survey", "saved index"])
def test_a_clock_that_was_ahead_makes_no_block_immortal(noticed_by: str) -> None:
    month_s = 30 * 86400.0
    story = Story(limits(10))
    engine, janitor = story.engine(), story.janitor()
    if noticed_by != "survey":
        janitor.step()
    story.now_s += month_s
    engine.serve(chain(1, 8))
    if noticed_by != "survey":
        engine.journal.flush()
    if noticed_by == "saved index":
        janitor.step()
        janitor.close()
    story.now_s -= month_s  # the clock is put right
    if noticed_by == "saved index":
        janitor = story.janitor()
    janitor.step()
    for number in range(2, 5):
        story.now_s += 10
        engine.serve(chain(number, 5))
        engine.journal.flush()
        janitor.step()
    assert [story.head(chain(number, 5)) for number in range(1, 5)] == [0, 0, 5, 5]


def test_a_survey_is_due_again_after_a_clock_was_ahead() -> None:
    story = Story(limits(10))
    story.now_s += 30 * 86400.0
    janitor = story.janitor()
    janitor.step()
    story.now_s -= 30 * 86400.0
    story.engine().write(chain(1, 4))  # no event of it arrives
    for _ in range(5):
        story.now_s += janitor_module.SURVEY_S
        janitor.step()
    assert janitor.index is not None
    assert janitor.index.blocks == 4
