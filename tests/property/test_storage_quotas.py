"""Quotas hold for writes, except for blocks of other engines that are not in the status yet."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.maintained_storage import BLOCK_BYTES, PLACE, Engine, Story, chain

from dualpath.storage.quotas import ALL, StorageLimits, StoredBytes

TENANTS = ["a" * 16, "b" * 16, ""]
PROTECT_S = 50.0
LIMITS = StorageLimits(tenant_quota_bytes=10 * BLOCK_BYTES, high=0.8, low=0.6, protect_s=PROTECT_S)
#: Of the namespace or of all, in turn.
MORE_BYTES = 24 * BLOCK_BYTES

_TURNS = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2), st.integers(1, 8))
_STEPS = st.lists(
    st.one_of(
        _TURNS, st.tuples(st.just("beat"), st.integers(0, 1)), st.sampled_from(["janitor", "sleep"])
    ),
    max_size=50,
)


class Storage:
    """Two engines with explicit ticks, a janitor, and the blocks that they do not know yet."""

    def __init__(self, limits: StorageLimits) -> None:
        self.story = Story(limits)
        self.engines = [self.story.engine(), self.story.engine()]
        self.janitor = self.story.janitor()
        #: By writer and tenant: written, journaled, and counted blocks not in the status yet.
        self.unreported: list[list[str]] = [[], []]
        self.reported: list[list[str]] = [[], []]
        self.counted: list[list[str]] = [[], []]
        self.janitor.step()
        for engine in self.engines:
            engine.maintenance.tick()

    def beat(self, number: int) -> None:
        """Tick an engine: it reads the status and writes its journal."""
        self.engines[number].maintenance.tick()
        self.counted[1 - number].clear()
        self.reported[number] += self.unreported[number]
        self.unreported[number].clear()

    def count(self) -> None:
        """Run a step of the janitor: it applies the journals."""
        self.janitor.step()
        for counted, reported in zip(self.counted, self.reported, strict=True):
            counted += reported
            reported.clear()

    def stored(self) -> StoredBytes:
        """An index with all events applied."""
        index = self.janitor.index
        assert index is not None
        late = [*self.reported[0], *self.reported[1], *self.unreported[0], *self.unreported[1]]
        by_tenant = {tenant: late.count(tenant) * BLOCK_BYTES for tenant in TENANTS}
        known = len(late) * BLOCK_BYTES
        return index.stored_bytes().plus(StoredBytes(known, {PLACE: known}, by_tenant))

    def unread_by(self, number: int) -> list[str]:
        """Return the tenants of the other engine's blocks that this one does not know of."""
        other = 1 - number
        return [*self.unreported[other], *self.reported[other], *self.counted[other]]


@pytest.mark.parametrize(
    "more",
    [{}, {"namespace_quota_bytes": MORE_BYTES}, {"quota_bytes": MORE_BYTES}],
    ids=["tenants", "namespaces", "all"],
)
@given(steps=_STEPS)
def test_no_engine_writes_beyond_a_quota_it_knows_to_be_exhausted(more, steps) -> None:
    storage = Storage(msgspec.structs.replace(LIMITS, **more))
    for step in steps:
        match step:
            case "janitor":
                storage.count()
            case "sleep":
                storage.story.now_s += 30.0
            case "beat", int(number):
                storage.beat(number)
            case number, tenant_number, conversation, blocks:
                _serve(
                    storage, storage.engines[number], number, tenant_number, conversation, blocks
                )
    _comes_back(storage)


def _serve(
    storage: Storage,
    engine: Engine,
    number: int,
    tenant_number: int,
    conversation: int,
    blocks: int,
) -> None:
    tenant = TENANTS[tenant_number]
    unread = storage.unread_by(number)
    written = engine.serve_within_quotas(chain(10 * tenant_number + conversation, blocks), tenant)
    storage.unreported[number] += [tenant] * written
    if not written:
        return
    quotas = storage.story.limits.quotas(storage.stored())
    unread_counts = (unread.count(tenant), len(unread), len(unread))
    for quota, owner, late in zip(quotas, (tenant, PLACE, ALL), unread_counts, strict=True):
        if quota.limit_bytes:
            assert quota.used_bytes[owner] <= quota.limit_bytes + late * BLOCK_BYTES


def _comes_back(storage: Storage) -> None:
    """With all events applied and nothing protected, no quota is above its high watermark."""
    for _ in range(2):
        for number in (0, 1):
            storage.beat(number)
        storage.story.now_s += PROTECT_S + 1
        storage.count()
    storage.count()
    assert storage.janitor.index is not None
    assert storage.stored().total == storage.story.used_bytes
    for quota in storage.story.limits.quotas(storage.stored()):
        assert quota.above(LIMITS.high) == {}
