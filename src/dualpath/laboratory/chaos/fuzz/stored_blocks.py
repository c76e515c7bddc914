"""Malformed stored blocks, without sealing."""

from typing import TYPE_CHECKING, Any, Self

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.errors import StorageError
from dualpath.laboratory.chaos.fuzz.files import TAKEN, FolderSubject
from dualpath.laboratory.chaos.fuzz.inputs import Inputs
from dualpath.storage.block_file import UNREADABLE_HERE, BlockCodec, PlainBlocks
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.posix import PosixStorage
from dualpath.storage.sections import FileOrder

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing

_NAMESPACE = StoreNamespace(
    model="fuzzed",
    dtype="float32",
    layout="none",
    geometry=BlockGeometry(4, ((512, 512), (1024,), (2048,)), layer_windows=(0, 8, 0)),
)
_ORDER = FileOrder(_NAMESPACE.geometry)


class BlockSubject(FolderSubject):
    """Stored blocks: a read may be good only if no byte of the block differs."""

    namespace = _NAMESPACE
    keys: "KeyRing | None" = None
    fields_bytes = 176

    def form(self, digest: str, inputs: Inputs) -> BlockCodec:
        """Return the codec with which an input is written."""
        return PlainBlocks(digest)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._storage = PosixStorage(self._folder, self.namespace, keys=self.keys)
        self._into = memoryview(bytearray(_NAMESPACE.geometry.full_block_bytes))
        return self

    def input(self, inputs: Inputs) -> tuple[bytes, bytes, bytes]:
        """Return the requested key, the payload written under it, and the file's bytes."""
        key = inputs.random.randbytes(32)
        payload = inputs.random.randbytes(self._into.nbytes)
        other = inputs.random.randbytes(32) if inputs.chance(0.1) else key
        digest = "0" * 16 if inputs.chance(0.1) else self.namespace.digest()
        sections = _ORDER.of(memoryview(payload))
        whole = b"".join(self.form(digest, inputs).encoded(other, sections))
        match inputs.random.randrange(4):
            case 0:
                fields = inputs.damaged(whole[: self.fields_bytes])
                whole = fields + whole[len(fields) :]
            case 1:
                whole = inputs.damaged(whole)
            case 2:
                whole = whole[:HEADER_BYTES] + inputs.damaged(whole[HEADER_BYTES:])
        return key, payload, whole

    async def run_input(self, given: Any) -> str:  # noqa: ANN401 - what ``input`` returns
        """Write the file and read the block."""
        key, payload, whole = given
        path = self._storage.block_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
        self._into[:] = bytes(self._into.nbytes)
        try:
            if self._storage.read(key, self._into, whole=False).is_good:
                arrived, right = (
                    _ORDER.of(memoryview(block), whole=False).buffers
                    for block in (self._into, payload)
                )
                assert arrived == right, "a wrong block without its window layers is good"
                outcome = self._storage.read(key, self._into)
            else:
                path.write_bytes(whole)
                outcome = self._storage.read(key, self._into)
                assert not outcome.is_good, "a block with a bad part was read as good"
        except StorageError as error:
            raise AssertionError("reading a bad block must not raise") from error
        if outcome.is_good:
            assert bytes(self._into) == payload, "a wrong block was read as good"
            path.unlink()
            return TAKEN
        stays = outcome.reason in UNREADABLE_HERE
        problem = "a block was removed" if stays else "a bad block was not removed"
        assert path.exists() == stays, problem
        path.unlink(missing_ok=True)
        return str(outcome.reason)

    async def still_works(self) -> None:
        """A block can be written and read."""
        key, payload = b"k" * 32, bytearray(b"p" * self._into.nbytes)
        assert self._storage.write([key], [memoryview(payload)]) == 1
        assert self._storage.read(key, self._into).is_good
