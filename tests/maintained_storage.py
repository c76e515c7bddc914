"""A storage with a janitor, engines and a clock, in one thread; a process may die at any step."""

from collections.abc import Iterator, Sequence

from dualpath.core.blocks import BlockKey, BlockOrigin, block_keys, chain_root
from dualpath.core.errors import StorageError
from dualpath.storage.block_file import Sections, encode_header
from dualpath.storage.contract import run_origins
from dualpath.storage.janitor import PINS, Janitor
from dualpath.storage.journal import Journal
from dualpath.storage.maintenance import StorageMaintenance
from dualpath.storage.objects import MemoryObjects, ObjectInfo
from dualpath.storage.posix import object_name
from dualpath.storage.quotas import StorageLimits, WriteGate

PLACE = "model_0123456789abcdef"
DIGEST = "0123456789abcdef"
PAYLOAD = b"kv" * 50
BLOCK_BYTES = 4096 + len(PAYLOAD)


class EndedError(Exception):
    """The simulated process dies."""


class FailingTree(MemoryObjects):
    """``steps_left`` changes pass; the one after ends the process, or fails if ``refuses``.

    To name the pins takes ``pins_take_s``.
    """

    def __init__(self, story: "Story") -> None:
        super().__init__(lambda: story.now_s)
        self._story = story
        self.steps_left: int | None = None
        self.refuses = False
        self.changes = 0
        self.pins_take_s = 0.0

    def create(self, name: str, content: bytes) -> bool:
        self._change()
        return super().create(name, content)

    def replace(self, name: str, content: bytes) -> None:
        self._change()
        super().replace(name, content)

    def remove(self, names: Sequence[str]) -> int:
        return sum(self._remove_one(name) for name in names)

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix == PINS:
            self._story.now_s += self.pins_take_s
        return super().objects(prefix)

    def _remove_one(self, name: str) -> int:
        self._change()
        return super().remove([name])

    def _change(self) -> None:
        self.changes += 1
        if self.steps_left is None:
            return
        if self.steps_left == 0:
            if self.refuses:
                raise StorageError("the device refuses; see it")
            raise EndedError
        self.steps_left -= 1


class Story:
    """One storage; ``now_s`` is every clock's time."""

    def __init__(self, limits: StorageLimits) -> None:
        self.now_s = 1000.0
        self.limits = limits
        self.tree = FailingTree(self)
        self._processes = 0

    def janitor(self) -> Janitor:
        """Start a candidate."""
        return Janitor(
            self.tree, self._process(), self.limits, lambda: self.now_s, lambda: self.now_s
        )

    def engine(self) -> "Engine":
        """Start an engine."""
        return Engine(self, self._process())

    def stored(self) -> set[BlockKey]:
        """Return the keys of all stored blocks."""
        names = [info.name for info in self.tree.objects(f"{PLACE}/")]
        return {bytes.fromhex(name[-67:-3]) for name in names}

    def head(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of a chain are stored."""
        stored = self.stored()
        return next((n for n, key in enumerate(keys) if key not in stored), len(keys))

    @property
    def used_bytes(self) -> int:
        """An index of the blocks actually stored."""
        return len(self.stored()) * BLOCK_BYTES

    def _process(self) -> str:
        self._processes += 1
        return f"process-{self._processes}"


class Engine:
    """Writes and uses prefixes, and journals that when it is flushed."""

    def __init__(self, story: Story, name: str) -> None:
        self._story = story
        self.journal = Journal(story.tree, PLACE, name)

        def now_s() -> float:
            return story.now_s

        self.maintenance = StorageMaintenance(
            story.tree, self.journal, WriteGate(), None, now_s, now_s
        )

    def write(self, keys: Sequence[BlockKey], first: int = 0, tenant: str = "") -> None:
        """Store the blocks of a chain from ``first`` on."""
        origin = BlockOrigin(keys[first - 1] if first else chain_root(), tenant)
        new = keys[first:]
        origins = run_origins(new, origin)
        for key, own in zip(new, origins, strict=True):
            name = object_name(PLACE, key)
            MemoryObjects.create(
                self._story.tree,
                name,
                encode_header(key, DIGEST, Sections([PAYLOAD]), own) + PAYLOAD,
            )
        self.journal.written(new, origins, [BLOCK_BYTES] * len(new), self._story.now_s)

    def serve(self, keys: Sequence[BlockKey]) -> int:
        """Run a turn: look up, compute missing blocks, store them; return the hit blocks."""
        hit = self._story.head(keys)
        if hit:
            self.journal.used(keys[hit - 1], self._story.now_s)
        if hit < len(keys):
            self.write(keys, hit)
        return hit

    def serve_within_quotas(self, keys: Sequence[BlockKey], tenant: str) -> int:
        """Run a turn, store the admitted blocks; return how many."""
        hit = self._story.head(keys)
        origin = BlockOrigin(keys[hit - 1] if hit else chain_root(), tenant)
        count, _ = self.maintenance.admitted(keys[hit:], origin, BLOCK_BYTES)
        self.write(keys[: hit + count], hit, tenant)
        return count


def chain(number: int, blocks: int) -> list[BlockKey]:
    """Return the keys of a separate chain."""
    return block_keys([number] * blocks, 1)
