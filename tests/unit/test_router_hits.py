"""Which blocks of a hit that ended early are read once more, and what is left without them."""

from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.router.scheduler.hits import cached_head, to_read_whole

KEPT = HitRun(Role.DECODE, BlockRun(0, 2), (10, 11), cached=True)
AT_PE = HitRun(Role.PREFILL, BlockRun(2, 3), (0, 1, 2), windowless=3)
AT_DE = HitRun(Role.DECODE, BlockRun(5, 4), (15, 16, 17, 18), windowless=2)


def test_blocks_that_came_without_windows_are_read_from_where_they_are_seen() -> None:
    assert to_read_whole((KEPT, AT_PE, AT_DE), whole_from=7) == ()
    assert to_read_whole((KEPT, AT_PE, AT_DE), whole_from=3) == (
        HitRun(Role.PREFILL, BlockRun(3, 2), (1, 2)),
        HitRun(Role.DECODE, BlockRun(5, 2), (15, 16)),
    )
    # Cached blocks are complete: they are not written to, as others may be reading them.
    (again, _) = to_read_whole((KEPT, AT_PE, AT_DE), whole_from=0)
    assert again == HitRun(Role.PREFILL, BlockRun(2, 3), (0, 1, 2))


def test_cached_blocks_stay_where_a_second_read_fails() -> None:
    at_pe = HitRun(Role.PREFILL, BlockRun(2, 1), (4,), cached=True)
    assert cached_head((KEPT, at_pe, AT_DE)) == (KEPT, at_pe)
    assert cached_head((AT_PE, KEPT)) == cached_head(()) == ()
