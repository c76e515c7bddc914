"""After crashes, failures and duplicates only evicted blocks are missing, and quotas hold again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.maintained_storage import BLOCK_BYTES, EndedError, Story, chain

from dualpath.core.errors import StorageError
from dualpath.storage.janitor import Janitor
from dualpath.storage.quotas import StorageLimits

QUOTA_BLOCKS = 20
LIMITS = StorageLimits(quota_bytes=QUOTA_BLOCKS * BLOCK_BYTES, high=0.8, low=0.6, protect_s=20.0)
CHAINS = 5
#: More than the time in which the newest blocks are protected and a dead janitor is replaced.
CALM_S = 60.0

_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.integers(0, CHAINS - 1), st.integers(1, 8)),
        st.tuples(st.just("flush"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("janitor"), st.integers(0, 1), st.integers(0, 40)),
        st.tuples(st.just("sleep"), st.integers(1, 45), st.just(0)),
        st.tuples(st.just("survey"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


class Cluster:
    """Two engines and two candidates; each may die at any change of the storage."""

    def __init__(self) -> None:
        self.story = Story(LIMITS)
        self.engines = [self.story.engine(), self.story.engine()]
        self.candidates = [self.story.janitor(), self.story.janitor()]
        self.told_all = True

    def step(self, number: int, steps_left: int, *, refuses: bool) -> None:
        """Run a candidate's step that dies after this many changes; 40 is rarely reached."""
        tree = self.story.tree
        tree.steps_left, tree.refuses = steps_left, refuses
        try:
            self.candidates[number].step()
        except EndedError:
            self.candidates[number] = self.story.janitor()
        except StorageError:
            pass  # the next step goes on
        finally:
            tree.steps_left = None

    def settle(self) -> Janitor:
        """All engines write their journals, and one candidate is janitor for long enough."""
        for engine in self.engines:
            engine.journal.flush()
        for _ in range(6):
            self.story.now_s += CALM_S
            holders = [janitor for janitor in self.candidates if janitor.step()]
        assert len(holders) == 1
        survey = holders[0].survey
        assert survey is not None
        self.story.now_s += CALM_S
        survey.run_to_end()
        holders[0].step()
        return holders[0]


@settings(max_examples=120, deadline=None)
@given(_EVENTS, st.booleans())
def test_a_storage_returns_within_its_quota_after_any_crash(
    events: list[tuple[str, int, int]], refuses: bool
) -> None:
    cluster = Cluster()
    story = cluster.story
    for what, number, detail in events:
        before = story.stored()
        match what:
            case "serve":
                cluster.engines[number % 2].serve(chain(number, detail))
            case "flush":
                cluster.engines[number].journal.flush()
            case "lose":
                cluster.engines[number] = story.engine()
                cluster.told_all = False
            case "janitor":
                cluster.step(number, detail, refuses=refuses)
            case "sleep":
                story.now_s += number
            case _:
                for janitor in cluster.candidates:
                    if janitor.survey is not None and janitor.lease.is_held():
                        janitor.survey.run_to_end()
        if what != "janitor":
            assert before <= story.stored(), "only a janitor removes blocks"
        _has_no_holes(cluster)

    janitor = cluster.settle()

    assert janitor.index is not None
    assert janitor.index.blocks == len(story.stored())
    assert janitor.index.used_bytes == story.used_bytes
    assert story.used_bytes <= LIMITS.high * LIMITS.quota_bytes
    _has_no_holes(cluster)


def _has_no_holes(cluster: Cluster) -> None:
    if not cluster.told_all:
        return  # unreported blocks stay behind evicted ones until a survey finds them
    stored = cluster.story.stored()
    for number in range(CHAINS):
        keys = chain(number, 8)
        assert not stored & set(keys[cluster.story.head(keys) :]), "a chain lost its middle"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, CHAINS - 1), st.integers(1, 8)), min_size=5, max_size=40))
def test_with_a_janitor_at_work_only_what_is_in_flight_exceeds_the_high_watermark(
    turns: list[tuple[int, int]],
) -> None:
    cluster = Cluster()
    story, janitor, engine = cluster.story, cluster.candidates[0], cluster.engines[0]
    janitor.step()
    for number, blocks in turns:
        in_flight = blocks - story.head(chain(number, blocks))
        engine.serve(chain(number, blocks))
        engine.journal.flush()
        story.now_s += LIMITS.protect_s + 1
        high_bytes = LIMITS.high * LIMITS.quota_bytes
        assert story.used_bytes <= high_bytes + in_flight * BLOCK_BYTES
        janitor.step()
        assert story.used_bytes <= high_bytes


@pytest.mark.parametrize("steps_left", range(30))
def test_another_janitor_continues_after_a_crash_at_any_change(
    steps_left: int,
) -> None:
    cluster = Cluster()
    story, engine = cluster.story, cluster.engines[0]
    assert cluster.candidates[0].step()
    for number in range(CHAINS):
        engine.serve(chain(number, 8))
        story.now_s += 1
    engine.journal.flush()
    story.now_s += 30
    cluster.step(0, steps_left, refuses=False)
    _has_no_holes(cluster)
    janitor = cluster.settle()
    assert janitor.index is not None
    assert janitor.index.used_bytes == story.used_bytes <= LIMITS.high * LIMITS.quota_bytes
    assert story.head(chain(CHAINS - 1, 8)) == 8, "the youngest chain is the last to go"
