"""The cache of successful look-ups, and the invalidation of its entries."""

from collections.abc import Sequence

from tests.engine_harness import full_block, memory_storage, prompt_keys

from dualpath.storage.memory import MemoryStorage
from dualpath.storage.wrapping import LookupCachingStorage

KEYS = prompt_keys(24)
TRUST_NS = 60_000_000_000


class Story:
    """A storage, the look-up cache in front of it, and a clock."""

    def __init__(self, **limits: int) -> None:
        self.now_ns = 0
        self.inner: MemoryStorage = memory_storage()
        self.storage = LookupCachingStorage(self.inner, lambda: self.now_ns, trust_s=60, **limits)

    def write(self, keys: Sequence[bytes]) -> None:
        self.storage.write(keys, [memoryview(full_block(key)) for key in keys])

    def read(self, key: bytes) -> str | None:
        size = self.storage.geometry.full_block_bytes
        return self.storage.read(key, memoryview(bytearray(size))).reason

    @property
    def known(self) -> int:
        return self.storage.cached_head(KEYS)


def test_written_read_and_found_blocks_are_cached() -> None:
    story = Story()
    story.write(KEYS[:1])
    assert story.known == 1
    story.inner.write(KEYS[1:3], [memoryview(full_block(key)) for key in KEYS[1:3]])
    assert story.known == 1
    assert story.read(KEYS[1]) is None
    assert story.known == 2
    assert story.storage.is_stored(KEYS[2])
    assert story.known == 3
    assert story.storage.cached_head(KEYS, 2) == 3


def test_a_read_of_a_missing_or_corrupt_block_removes_the_entry() -> None:
    story = Story()
    story.write(KEYS[:4])
    story.inner.drop(KEYS[3])
    assert story.known == 4
    assert story.read(KEYS[3]) == "missing"
    assert story.known == 3
    story.inner.corrupt(KEYS[1])
    assert story.read(KEYS[1]) == "checksum"
    assert story.known == 1
    story.inner.drop(KEYS[0])
    assert not story.storage.is_stored(KEYS[0])
    assert story.known == 0


def test_entries_expire_after_twice_the_trust_time() -> None:
    story = Story()
    story.write(KEYS[:2])
    story.now_ns += TRUST_NS - 1
    assert story.known == 2
    story.now_ns += 1
    assert story.read(KEYS[0]) is None  # seen again
    story.now_ns += TRUST_NS
    assert story.known == 1
    story.now_ns += 2 * TRUST_NS
    assert story.known == 0


def test_the_cache_is_bounded() -> None:
    story = Story(max_keys=2)
    for key in KEYS:
        story.write([key])
    assert sum(story.storage.cached_head([key]) for key in KEYS) <= 4
