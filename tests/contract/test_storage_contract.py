"""Contract of ``dualpath.storage.contract``, for all storage backends."""

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from tests.s3_servers import RCLONE, FaultyS3, rclone_s3
from tests.stored_runs import read_run, stored_head

from dualpath.core.blocks import BlockGeometry, BlockKey, Protection, StoreNamespace, block_keys
from dualpath.storage.compression import Compressor
from dualpath.storage.contract import BlockStorage
from dualpath.storage.journal import Journal
from dualpath.storage.maintenance import MaintainedStorage, StorageMaintenance
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.node_dram import NodeDram, NodeDramStorage
from dualpath.storage.objects import ObjectTree, PosixObjects
from dualpath.storage.posix import LengthOnlyStorage, PosixStorage, namespace_name
from dualpath.storage.quotas import WriteGate
from dualpath.storage.s3 import S3Storage
from dualpath.storage.sealed_blocks import KeyRing, block_codec
from dualpath.storage.wrapping import LookupCachingStorage, ThrottledStorage
from dualpath.transport.memory import allocate_registered
from dualpath.transport.nixl import nixl_package
from dualpath.transport.nixl_storage import NixlReader

#: Every other layer is a window layer.
GEOMETRY = BlockGeometry(16, ((3072,), (1024, 512), (3072,), (4608,)), (0, 32, 0, 32))
NAMESPACE = StoreNamespace("org/tiny-model", "float32", "NHD", GEOMETRY)
AUTHENTICATED, ENCRYPTED = (
    msgspec.structs.replace(NAMESPACE, protection=protection) for protection in Protection
)
#: The blocks are small: padding as for direct I/O on a device would leave nothing to save.
COMPRESSOR = Compressor(pad_bytes=512)
KEYS = KeyRing("0123456789abcdef" * 4, "a test")
ORACLE_NAMESPACE = msgspec.structs.replace(NAMESPACE, mode="oracle")
BLOCK_BYTES = GEOMETRY.full_block_bytes
BLOCKS = 6

Damage = Callable[[BlockStorage, BlockKey], None]


@contextlib.contextmanager
def open_backend(name: str, root: Path) -> Iterator[BlockStorage]:
    with contextlib.ExitStack() as servers:
        storage = make_backend(name, root, servers)
        yield storage
        storage.close()
        storage.close()


def make_backend(name: str, root: Path, servers: contextlib.ExitStack) -> BlockStorage:
    match name:
        case "memory":
            return MemoryStorage(NAMESPACE)
        case "posix-direct":
            return PosixStorage(root, NAMESPACE, direct_io="auto")
        case "posix-cached":
            return PosixStorage(root, NAMESPACE, direct_io=False, sync=True)
        case "memory-encrypted":
            return MemoryStorage(ENCRYPTED, keys=KEYS)
        case "posix-authenticated":
            return PosixStorage(root, AUTHENTICATED, keys=KEYS)
        case "posix-encrypted":
            return PosixStorage(root, ENCRYPTED, keys=KEYS)
        case "s3-encrypted":
            server = FaultyS3()
            servers.callback(server.close)
            return S3Storage(server.location, ENCRYPTED, keys=KEYS)
        case "memory-compressed":
            return MemoryStorage(NAMESPACE, compressor=COMPRESSOR)
        case "posix-compressed":
            return PosixStorage(root, NAMESPACE, compressor=COMPRESSOR)
        case "posix-compressed-encrypted":
            return PosixStorage(root, ENCRYPTED, keys=KEYS, compressor=COMPRESSOR)
        case "s3-compressed":
            server = FaultyS3()
            servers.callback(server.close)
            return S3Storage(server.location, NAMESPACE, compressor=COMPRESSOR)
        case "nixl-posix" | "nixl-posix-cached" | "nixl-posix-encrypted":
            encrypts = name.endswith("encrypted")
            return PosixStorage(
                root,
                ENCRYPTED if encrypts else NAMESPACE,
                direct_io=False if name.endswith("cached") else "auto",
                keys=KEYS,
                reader=NixlReader("POSIX"),
            )
        case "throttled":
            return ThrottledStorage(MemoryStorage(NAMESPACE), 1e12)
        case "lookup-cache":
            return LookupCachingStorage(MemoryStorage(NAMESPACE), time.monotonic_ns)
        case "maintained":
            return MaintainedStorage(PosixStorage(root, NAMESPACE), maintenance(PosixObjects(root)))
        case "node-dram":
            dram = NodeDram(root, NAMESPACE, 1 << 24)
            return NodeDramStorage(MemoryStorage(NAMESPACE), dram)
        case "lengths":
            return LengthOnlyStorage(root, ORACLE_NAMESPACE)
        case "s3" | "s3-unconditional":
            server = FaultyS3(conditional=name == "s3")
            servers.callback(server.close)
            return S3Storage(server.location, NAMESPACE)
        case "s3-rclone":
            return S3Storage(servers.enter_context(rclone_s3(root)), NAMESPACE)
    raise AssertionError(name)


def maintenance(tree: ObjectTree) -> StorageMaintenance:
    """Return the maintenance of an engine that is not a janitor candidate and declines nothing."""
    journal = Journal(tree, namespace_name(NAMESPACE), "engine")
    return StorageMaintenance(tree, journal, WriteGate(), None, time.time, time.monotonic)


NIXL = [
    pytest.mark.nixl,
    pytest.mark.skipif(not find_spec(nixl_package()), reason="NIXL is not here"),
]
BYTE_BACKENDS = [
    *(
        "memory",
        "posix-direct",
        "posix-cached",
        "throttled",
        "lookup-cache",
        "maintained",
        "node-dram",
    ),
    *("s3", "s3-unconditional"),
    *("memory-encrypted", "posix-authenticated", "posix-encrypted", "s3-encrypted"),
    *("memory-compressed", "posix-compressed", "posix-compressed-encrypted", "s3-compressed"),
    *(
        pytest.param(name, marks=NIXL)
        for name in ("nixl-posix", "nixl-posix-cached", "nixl-posix-encrypted")
    ),
    pytest.param("s3-rclone", marks=pytest.mark.skipif(not RCLONE, reason="rclone is not here")),
]


@pytest.fixture(params=[*BYTE_BACKENDS, "lengths"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStorage]:
    """Any backend."""
    with open_backend(request.param, tmp_path) as backend:
        yield backend


@pytest.fixture(params=BYTE_BACKENDS)
def byte_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStorage]:
    """A backend that stores payload."""
    with open_backend(request.param, tmp_path) as backend:
        yield backend


@pytest.fixture
def keys() -> list[BlockKey]:
    return block_keys(range(BLOCKS * 16), 16)


def contents(seed: int = 1, blocks: int = BLOCKS) -> list[memoryview]:
    # A quarter of the bits is random, so that the blocks can be compressed.
    data = np.random.default_rng(seed).integers(0, 4, (blocks, BLOCK_BYTES), dtype=np.uint8)
    return [row.data for row in data]


def compresses(storage: BlockStorage) -> bool:
    if isinstance(storage, MemoryStorage | PosixStorage | S3Storage):
        return storage._codec._compressor is not None
    return False


def destinations(blocks: int = BLOCKS, offset_bytes: int = 0) -> list[memoryview]:
    """Views into aligned memory, like slots of a DRAM buffer; ``offset_bytes`` misaligns them."""
    memory = allocate_registered(blocks * BLOCK_BYTES + offset_bytes)
    return [memory.view(offset_bytes + i * BLOCK_BYTES, BLOCK_BYTES) for i in range(blocks)]


def test_a_new_storage_is_empty(storage: BlockStorage, keys: list[BlockKey]) -> None:
    assert not any(map(storage.is_stored, keys))
    assert storage.parallel_lookups >= 1
    outcome = read_run(storage, keys, destinations())
    assert (outcome.good_blocks, outcome.reason) == (0, "missing")


@pytest.mark.parametrize("offset_bytes", [0, 8])
def test_a_block_is_read_without_its_window_layers(
    byte_storage: BlockStorage, keys: list[BlockKey], offset_bytes: int
) -> None:
    (content,), (destination,) = contents(blocks=1), destinations(1, offset_bytes)
    byte_storage.write(keys[:1], [content])
    destination[:] = before = b"\x5a" * BLOCK_BYTES
    outcome = byte_storage.read(keys[0], destination, whole=False)
    assert outcome.is_good
    assert outcome.bytes_read == 2 * 3072 or compresses(byte_storage)
    for layer in range(GEOMETRY.layers):
        right = before if GEOMETRY.is_window_layer(layer) else content
        place = GEOMETRY.slice_of(layer)
        assert destination[place] == right[place], layer


def test_a_block_is_read_completely_after_a_read_without_window_layers(
    byte_storage: BlockStorage, keys: list[BlockKey]
) -> None:
    data, targets = contents(), destinations()
    byte_storage.write(keys, data)
    assert byte_storage.read(keys[0], targets[0], whole=False).is_good
    assert byte_storage.read(keys[0], targets[0]).is_good
    assert targets[0] == data[0]


def test_a_missing_block_is_missing_without_its_window_layers_too(
    byte_storage: BlockStorage, keys: list[BlockKey]
) -> None:
    outcome = byte_storage.read(keys[0], destinations(1)[0], whole=False)
    assert (outcome.bytes_read, outcome.reason) == (0, "missing")


def test_written_blocks_are_stored_and_read_up_to_the_first_gap(
    storage: BlockStorage, keys: list[BlockKey]
) -> None:
    stored = [0, 1, 2, 4, 5]
    data = contents()
    assert storage.write([keys[i] for i in stored], [data[i] for i in stored]).new == 5
    assert [i for i, key in enumerate(keys) if storage.is_stored(key)] == stored
    outcome = read_run(storage, keys, destinations())
    assert (outcome.good_blocks, outcome.reason) == (3, "missing")


def test_a_second_write_of_a_key_changes_nothing(
    storage: BlockStorage, keys: list[BlockKey]
) -> None:
    assert storage.write(keys[:3], contents()[:3]).new == 3
    assert storage.write(keys, contents()).new == BLOCKS - 3
    assert storage.write(keys, contents()).new == 0


@pytest.mark.parametrize("offset_bytes", [0, 64])
def test_reads_return_the_written_bytes(
    byte_storage: BlockStorage, keys: list[BlockKey], offset_bytes: int
) -> None:
    data, into = contents(), destinations(offset_bytes=offset_bytes)
    stored_bytes = sum(byte_storage.write(keys, data).payload_bytes)
    outcome = read_run(byte_storage, keys, into)
    assert (outcome.good_blocks, outcome.reason) == (BLOCKS, None)
    assert outcome.bytes_read == stored_bytes
    assert (stored_bytes < BLOCKS * BLOCK_BYTES // 2) == compresses(byte_storage)
    assert sum(byte_storage.write(keys, data).payload_bytes) == stored_bytes, "they are stored"
    assert [bytes(view) for view in into] == [bytes(view) for view in data]


def test_equal_keys_mean_the_first_content(
    byte_storage: BlockStorage, keys: list[BlockKey]
) -> None:
    byte_storage.write(keys[:1], contents(1)[:1])
    byte_storage.write(keys[:1], contents(2)[:1])
    into = destinations(1)
    byte_storage.read(keys[0], into[0])
    assert bytes(into[0]) == bytes(contents(1)[0])


def test_wrong_buffers_are_refused(storage: BlockStorage, keys: list[BlockKey]) -> None:
    with pytest.raises(ValueError, match="6 keys but 5"):
        storage.write(keys, destinations()[:5])
    with pytest.raises(ValueError, match="Full Block"):
        storage.read(keys[0], memoryview(bytearray(BLOCK_BYTES - 1)))
    with pytest.raises(ValueError, match="writable"):
        storage.read(keys[0], memoryview(bytes(BLOCK_BYTES)))
    with pytest.raises(ValueError, match="1 keys but 0"):
        storage.write(keys[:1], [])


def test_threads_write_and_read_the_same_blocks(
    byte_storage: BlockStorage, keys: list[BlockKey]
) -> None:
    data = contents()
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda _: byte_storage.write(keys, data), range(4)))
        buffers = [destinations() for _ in range(4)]
        outcomes = list(pool.map(lambda into: read_run(byte_storage, keys, into), buffers))
    assert sum(outcome.new for outcome in written) == BLOCKS
    assert [outcome.good_blocks for outcome in outcomes] == [BLOCKS] * 4
    assert all([bytes(view) for view in into] == [bytes(view) for view in data] for into in buffers)


# --- damage --------------------------------------------------------------------------------------


def block_path(storage: BlockStorage, key: BlockKey) -> Path:
    assert isinstance(storage, PosixStorage)
    return storage.block_path(key)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def flip_payload(storage: BlockStorage, key: BlockKey) -> None:
    target = storage
    if isinstance(storage, NodeDramStorage):
        flip_payload(storage.dram.files, key)
        target = storage.inner
    if isinstance(storage, ThrottledStorage | LookupCachingStorage | MaintainedStorage):
        target = storage.inner
    if isinstance(target, MemoryStorage):
        target.corrupt(key, offset_bytes=-1)
        return
    if isinstance(target, S3Storage):
        name = target.object_name(key)
        content = bytearray(target.client.get(name) or b"")
        content[-1] ^= 1
        target.client.delete(name)
        target.client.put(name, [bytes(content)])
        return
    path = block_path(target, key)
    last = path.read_bytes()[-1]
    overwrite(path, path.stat().st_size - 1, bytes([last ^ 1]))


def cut_short(storage: BlockStorage, key: BlockKey) -> None:
    path = block_path(storage, key)
    path.write_bytes(path.read_bytes()[:-777])


def cut_in_header(storage: BlockStorage, key: BlockKey) -> None:
    path = block_path(storage, key)
    path.write_bytes(path.read_bytes()[:100])


def empty(storage: BlockStorage, key: BlockKey) -> None:
    block_path(storage, key).write_bytes(b"")


def break_magic(storage: BlockStorage, key: BlockKey) -> None:
    overwrite(block_path(storage, key), 0, b"X")


def replace_by_another_block(storage: BlockStorage, key: BlockKey) -> None:
    other = block_keys([9] * 16, 16)
    storage.write(other, contents(3, 1))
    block_path(storage, key).write_bytes(block_path(storage, other[0]).read_bytes())


def read_past_damage(storage: BlockStorage, keys: list[BlockKey], damage: Damage) -> str | None:
    """Damage block 2; blocks 0 and 1 must stay good, and block 2 can be written again."""
    data = contents()
    storage.write(keys, data)
    damage(storage, keys[2])
    into = destinations()

    outcome = read_run(storage, keys, into)

    assert outcome.good_blocks == 2
    assert [bytes(view) for view in into[:2]] == [bytes(view) for view in data[:2]]
    assert stored_head(storage, keys) == 2
    assert storage.write(keys, data).new == 1
    assert read_run(storage, keys, into).good_blocks == BLOCKS
    assert [bytes(view) for view in into] == [bytes(view) for view in data]
    return outcome.reason


def test_a_flipped_bit_ends_the_hit_and_the_block_can_be_written_again(
    byte_storage: BlockStorage, keys: list[BlockKey]
) -> None:
    assert read_past_damage(byte_storage, keys, flip_payload) in ("checksum", "not authentic")


@pytest.mark.parametrize("direct_io", [False, "auto"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_short, "short"),
        (cut_in_header, "short"),
        (empty, "short"),
        (break_magic, "bad header"),
        (replace_by_another_block, "wrong key"),
    ],
)
@pytest.mark.parametrize("namespace", [NAMESPACE, ENCRYPTED])
@pytest.mark.parametrize("compressor", [None, COMPRESSOR], ids=["", "compressed"])
def test_a_damaged_file_ends_the_hit_and_can_be_written_again(
    tmp_path: Path,
    keys: list[BlockKey],
    damage: Damage,
    reason: str,
    direct_io: bool,
    namespace: StoreNamespace,
    compressor: Compressor | None,
) -> None:
    storage = PosixStorage(
        tmp_path, namespace, direct_io=direct_io, keys=KEYS, compressor=compressor
    )
    assert read_past_damage(storage, keys, damage) == reason
    storage.close()


@pytest.mark.parametrize("payload_bytes", [BLOCK_BYTES, 100])
@pytest.mark.parametrize("name", ["posix-direct", "posix-cached", "s3"])
def test_a_block_of_another_format_version_is_a_miss_and_is_not_removed(
    name: str, payload_bytes: int, tmp_path: Path, keys: list[BlockKey]
) -> None:
    old = as_version_1(keys[0], bytes(payload_bytes))
    with open_backend(name, tmp_path) as storage:
        if isinstance(storage, S3Storage):
            storage.client.put(storage.object_name(keys[0]), [old])
        else:
            path = block_path(storage, keys[0])
            path.parent.mkdir(parents=True)
            path.write_bytes(old)
        for whole in (True, False):
            outcome = storage.read(keys[0], destinations(1)[0], whole=whole)
            assert outcome.reason == "format version"
        assert storage.is_stored(keys[0])
        assert storage.write(keys[:1], contents()[:1]).new == 1, "it is replaced"
        assert storage.read(keys[0], destinations(1)[0]).is_good


@pytest.mark.parametrize(
    "name", ["memory-encrypted", "posix-authenticated", "posix-encrypted", "s3-encrypted"]
)
def test_a_block_sealed_with_a_removed_key_is_absent_and_the_next_write_replaces_it(
    name: str, tmp_path: Path, keys: list[BlockKey], caplog: pytest.LogCaptureFixture
) -> None:
    """The new key is added below the old one, then moved above; at last the old one is removed."""
    old_text, new_text = "0123456789abcdef" * 4, "fedcba9876543210" * 4
    data, into = contents(), destinations()
    with open_backend(name, tmp_path) as storage:
        assert isinstance(storage, MemoryStorage | PosixStorage | S3Storage)

        def use_keys(*texts: str) -> None:
            storage._codec = block_codec(storage.namespace, KeyRing("\n".join(texts), "a test"))

        assert storage.write(keys[:4], data[:4]).new == 4
        use_keys(new_text, old_text)
        assert storage.write(keys, data).new == BLOCKS - 4
        assert read_run(storage, keys, into).good_blocks == BLOCKS
        use_keys(new_text)

        assert [storage.is_stored(key) for key in keys] == [False] * 4 + [True] * 2
        assert storage.read(keys[0], into[0]).reason == "storage key"
        use_keys(new_text, old_text)
        assert storage.is_stored(keys[0]), "nothing was removed"
        use_keys(new_text)
        assert storage.write(keys, data).new == 4
        assert storage.write(keys, data).new == 0
        assert read_run(storage, keys, into).good_blocks == BLOCKS
        assert [bytes(view) for view in into] == [bytes(view) for view in data]
    absent = [record for record in caplog.records if "count as absent" in record.message]
    assert len(absent) == (name != "memory-encrypted"), "one warning for all of them"


def test_an_unreadable_block_is_not_reported_as_removed(
    tmp_path: Path, keys: list[BlockKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file still takes room."""
    reports = maintenance(PosixObjects(tmp_path))
    posix = PosixStorage(tmp_path, ENCRYPTED, keys=KEYS)
    storage = MaintainedStorage(posix, reports)
    storage.write(keys, contents())
    posix._codec = block_codec(ENCRYPTED, KeyRing("fedcba9876543210" * 4, "a test"))
    removed: list[BlockKey] = []
    monkeypatch.setattr(reports, "removed", removed.append)
    assert storage.read(keys[0], destinations(1)[0]).reason == "storage key"
    assert removed == []
    posix.block_path(keys[0]).unlink()
    assert storage.read(keys[0], destinations(1)[0]).reason == "missing"
    assert removed == keys[:1]
    storage.close()


def as_version_1(key: BlockKey, payload: bytes) -> bytes:
    """A block of format version 1."""
    fields = struct.pack(
        "<8sIIQ32s16s16s",
        *(b"DUALPATH", 1, 4096, len(payload), key, NAMESPACE.digest().encode()),
        xxhash.xxh3_128_digest(payload),
    )
    return (fields + xxhash.xxh3_128_digest(fields)).ljust(4096, b"\0") + payload
