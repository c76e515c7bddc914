"""A block's tenant follows from its chain, in whatever order its blocks are reported."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.core.blocks import BlockKey, block_keys, chain_root
from dualpath.storage.chain_index import ChainIndex
from dualpath.storage.janitor import Progress, decode, encode

PLACE = "model_0123456789abcdef"
TENANTS = ["", "a" * 16]
#: Branches of each tenant, in blocks: all share the first two.
BRANCHES, LENGTH = 2, 5


def tree(tenant: int) -> dict[BlockKey, BlockKey]:
    """Return the parent of each block of a tenant."""
    parents: dict[BlockKey, BlockKey] = {}
    for branch in range(BRANCHES):
        tokens = [tenant, tenant, *[10 + branch] * (LENGTH - 2)]
        keys = block_keys(tokens, 1, cache_salt=TENANTS[tenant] or None)
        parents |= dict(zip(keys, [chain_root(), *keys], strict=False))
    return parents


TREES = [tree(tenant) for tenant in range(len(TENANTS))]
PARENTS = {key: parent for blocks in TREES for key, parent in blocks.items()}
#: Of each block its tenant as its writer knew it.
OWNERS = {key: TENANTS[tenant] for tenant, blocks in enumerate(TREES) for key in blocks}
KEYS = list(PARENTS)


def expected(tenants: dict[BlockKey, str], stored: set[BlockKey]) -> dict[str, int]:
    """Count the stored blocks of each tenant; without a reported one that of a predecessor."""
    used: dict[str, int] = {}
    for key in stored:
        above = key
        while above in tenants and not tenants[above]:
            above = PARENTS[above]
        tenant = tenants.get(above, "")
        used[tenant] = used.get(tenant, 0) + 1
    return used


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["old", "new", "used", "gone"]))),
    st.integers(0, 20),
)
def test_tenants_are_counted_alike_in_any_order_of_reports(
    reports: list[tuple[BlockKey, str]], saved_after: int
) -> None:
    """Old writers name the tenant with first blocks only, new ones always."""
    index, tenants, stored = ChainIndex(), dict[BlockKey, str](), set[BlockKey]()
    for number, (key, what) in enumerate(reports):
        if number == saved_after:
            found = decode(encode(index, Progress()))
            assert found is not None
            index = found[0]
        if what == "used":
            index.use(PLACE, key, 1.0)
        elif what == "gone":
            index.remove(PLACE, key)
            stored.discard(key)
        else:
            first = PARENTS[key] == chain_root()
            tenant = OWNERS[key] if what == "new" or first else ""
            index.add(PLACE, key, PARENTS[key], tenant, 1, 1.0)
            tenants[key] = tenants.get(key) or tenant
            stored.add(key)
        assert index.used_by_tenant() == expected(tenants, stored)
        assert index.used_bytes == len(stored)
