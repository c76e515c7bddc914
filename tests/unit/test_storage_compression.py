"""Compressed blocks in storages: what is read, counted, refused and chosen."""

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from tests.maintained_storage import Story

from dualpath.cli.main import main
from dualpath.core.blocks import BlockGeometry, BlockOrigin, Protection, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError
from dualpath.core.rates import StorageCodec
from dualpath.core.runs import BlockRun
from dualpath.engine.counters import Counter, Counters
from dualpath.engine.io.persister import Persister, WriteTask
from dualpath.engine.settings import parse_settings
from dualpath.engine.trace import TraceRecorder
from dualpath.launch.doctor.checks import storage_codec
from dualpath.plan.movements import PERSIST_PROMPT
from dualpath.plan.steps import step_of
from dualpath.storage import compression
from dualpath.storage.block_file import (
    HEADER_BYTES,
    Compression,
    FileOrder,
    PlainBlocks,
    Sections,
    defect_of_file,
    encode_header,
)
from dualpath.storage.compression import CompressedBlocks, Compressor, chosen_codec, measure_codec
from dualpath.storage.inventory import load_or_survey
from dualpath.storage.journal import Journal, Written, decode_segment, segments
from dualpath.storage.maintenance import MaintainedStorage, StorageMaintenance
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.node_dram import NodeDram, NodeDramStorage
from dualpath.storage.objects import PosixObjects
from dualpath.storage.posix import PosixStorage, namespace_name
from dualpath.storage.quotas import StorageLimits, WriteGate
from dualpath.storage.sealed_blocks import KeyRing, SealedBlocks, block_codec
from dualpath.transport.memory import allocate_registered

pytest.importorskip("backports.zstd")

#: Every other layer is a window layer; large enough for whole pages.
GEOMETRY = BlockGeometry(16, ((1 << 15,), (1 << 14,), (1 << 15,), (1 << 14,)), (0, 32, 0, 32))
NAMESPACE = StoreNamespace("org/tiny-model", "bfloat16", "NHD", GEOMETRY)
ENCRYPTED = msgspec.structs.replace(NAMESPACE, protection=Protection.ENCRYPTED)
RING = KeyRing("0123456789abcdef" * 4, "a test")
KEYS = block_keys(range(6 * 16), 16)
HEAD_BYTES, BLOCK_BYTES = 1 << 16, GEOMETRY.full_block_bytes


def kv(seed: int, bits: int = 2) -> memoryview:
    """A block of which ``bits`` of every second byte are random, and all of the others."""
    rng = np.random.default_rng(seed)
    content = rng.integers(0, 256, BLOCK_BYTES, np.uint8)
    content[1::2] = rng.integers(0, 1 << bits, BLOCK_BYTES // 2)
    return content.data


def into() -> memoryview:
    return memoryview(bytearray(BLOCK_BYTES))


# ---------------------------------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("protection", "digest"),
    [
        (None, "957dd94739e3d05ff5addf6a991dcf23e329d283ffbdb1191c13587c34cbad3f"),
        ("authenticated", "017e3f7a36a518bdf8abcd17faa0efae2c9f2e0b33d7d8fc793d8b7ffa1200a9"),
        ("encrypted", "dd954e9226257f0065b3ade92df1ef85d1ff802e24ec551bee09e5c150fccf3f"),
    ],
)
def test_without_codec_the_bytes_are_those_of_format_versions_2_and_3(
    protection: str | None, digest: str
) -> None:
    """The digests were computed before there was a codec."""
    geometry = BlockGeometry(16, ((3072,), (1024, 512), (3072,), (4608,)), (0, 32, 0, 32))
    namespace = StoreNamespace("org/tiny-model", "float32", "NHD", geometry)
    codec = block_codec(namespace)
    if protection is not None:
        sealed = SealedBlocks(
            *(namespace.digest(), Protection(protection), KeyRing("0" * 64, "a test")),
            lambda count: bytes(range(count)),
        )
        codec = CompressedBlocks(sealed)
    content = bytes(range(256)) * (geometry.full_block_bytes // 256)
    origin = BlockOrigin(bytes(range(1, 33)), "0123456789abcdef")
    payload = FileOrder(geometry).of(memoryview(content))
    file = b"".join(codec.encoded(bytes(range(32)), payload, origin))
    assert hashlib.sha256(file).hexdigest() == digest


@pytest.mark.parametrize(("keys", "version"), [(None, 4), (RING, 5)])
def test_earlier_versions_find_an_intact_header_of_a_version_that_they_do_not_read(
    tmp_path: Path, keys: KeyRing | None, version: int
) -> None:
    """They report such a block as of another format version, and neither read nor remove it."""
    namespace = NAMESPACE if keys is None else ENCRYPTED
    storage = PosixStorage(tmp_path, namespace, keys=keys, compressor=Compressor())
    storage.write(KEYS[:1], [kv(1)])
    header = storage.block_path(KEYS[0]).read_bytes()[:HEADER_BYTES]
    assert struct.unpack_from("<8sII", header) == (b"DUALPATH", version, HEADER_BYTES)
    assert header[160:176] == xxhash.xxh3_128_digest(header[:160])


@pytest.mark.parametrize(("namespace", "keys"), [(NAMESPACE, None), (ENCRYPTED, RING)])
@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_engines_with_and_without_codec_read_each_others_blocks(
    tmp_path: Path, namespace: StoreNamespace, keys: KeyRing | None, direct_io: bool
) -> None:
    plain = PosixStorage(tmp_path, namespace, keys=keys, direct_io=direct_io)
    packing = PosixStorage(
        tmp_path, namespace, keys=keys, direct_io=direct_io, compressor=Compressor()
    )
    assert plain.write(KEYS[:1], [kv(0)]).payload_bytes == (BLOCK_BYTES,)
    (packed_bytes,) = packing.write(KEYS[1:2], [kv(1)]).payload_bytes
    assert packed_bytes < 0.75 * BLOCK_BYTES
    assert packed_bytes == packing.block_path(KEYS[1]).stat().st_size - HEADER_BYTES
    for storage in (plain, packing):
        for number in (0, 1):
            memory = into()
            assert storage.read(KEYS[number], memory).is_good
            assert memory == kv(number)
        again = storage.write(KEYS[:2], [kv(0), kv(1)])
        assert (again.new, again.payload_bytes) == (0, (BLOCK_BYTES, packed_bytes))


def test_a_block_that_cannot_be_compressed_is_stored_as_without_codec(tmp_path: Path) -> None:
    noise = np.random.default_rng(5).integers(0, 256, BLOCK_BYTES, np.uint8).data
    files = []
    for name, compressor in (("off", None), ("on", Compressor())):
        storage = PosixStorage(tmp_path / name, NAMESPACE, compressor=compressor)
        assert storage.write(KEYS[:1], [noise]).payload_bytes == (BLOCK_BYTES,)
        files.append(storage.block_path(KEYS[0]).read_bytes())
    assert files[0] == files[1]


# ----------------------------------------------------------------------------------------- reads


def test_reads_without_window_layers_get_no_part_of_the_tail(tmp_path: Path) -> None:
    """From the second one on: the first one cannot know how long a compressed head is."""
    storage = PosixStorage(tmp_path, NAMESPACE, compressor=Compressor())
    storage.write(KEYS[:4], [kv(n) for n in range(4)])
    (whole,) = storage.write(KEYS[:1], [kv(0)]).payload_bytes
    memory = into()
    first = storage.read(KEYS[0], memory, whole=False)
    assert first.bytes_read == HEAD_BYTES < whole
    later = [storage.read(key, memory, whole=False) for key in KEYS[1:4]]
    assert all(outcome.is_good for outcome in later)
    assert {outcome.bytes_read for outcome in later} == {later[0].bytes_read}
    assert later[0].bytes_read < 0.7 * HEAD_BYTES
    assert storage.read(KEYS[3], memory).bytes_read == whole


def test_a_head_that_is_longer_than_the_last_one_is_read_again(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path, NAMESPACE, compressor=Compressor())
    noise = np.random.default_rng(5).integers(0, 256, BLOCK_BYTES, np.uint8).data
    storage.write(KEYS[:3], [kv(0, bits=1), kv(1, bits=5), noise])
    memory, order = into(), FileOrder(GEOMETRY)
    storage.read(KEYS[0], memory, whole=False)
    short = storage.read(KEYS[0], memory, whole=False).bytes_read
    for key, content in ((KEYS[1], kv(1, bits=5)), (KEYS[2], noise)):
        storage.read(KEYS[0], memory, whole=False)
        outcome = storage.read(key, memory, whole=False)
        assert outcome.is_good
        right = order.of(content, whole=False).buffers
        assert order.of(memory, whole=False).buffers == right
        assert outcome.bytes_read > short + 0.6 * HEAD_BYTES, "bytes of both reads crossed the NIC"


def test_a_node_caches_blocks_uncompressed_in_dram(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "kv", NAMESPACE, compressor=Compressor())
    storage.write(KEYS[:1], [kv(1)])
    dram = NodeDram(tmp_path / "dram", NAMESPACE, 1 << 24)
    behind = NodeDramStorage(storage, dram)
    assert behind.read(KEYS[0], memory := into()).storage_bytes < BLOCK_BYTES
    assert dram.files.block_path(KEYS[0]).stat().st_size == HEADER_BYTES + BLOCK_BYTES
    assert behind.read(KEYS[0], memory).from_dram
    assert memory == kv(1)


def test_without_zstandard_a_compressed_block_is_unreadable_and_the_next_write_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PosixStorage(tmp_path, NAMESPACE, compressor=Compressor()).write(KEYS[:1], [kv(1)])
    monkeypatch.setattr(compression, "find_zstd", lambda: None)
    storage = PosixStorage(tmp_path, NAMESPACE)
    assert storage.read(KEYS[0], into()).reason == "codec"
    assert storage.block_path(KEYS[0]).exists()
    assert storage.write(KEYS[:1], [kv(1)]).new == 1
    assert storage.read(KEYS[0], into()).is_good
    with pytest.raises(ConfigError, match=r"pip install 'backports\.zstd>=1'"):
        Compressor()


# ---------------------------------------------------------------------------------------- damage


def section(content: bytes, width: int, *chunks: tuple[int, int]) -> bytes:
    """The beginning of a stored section with these chunks."""
    fields = struct.pack("<16sII", xxhash.xxh3_128_digest(content), width, len(chunks))
    return fields + b"".join(struct.pack("<II", *chunk) for chunk in chunks)


def frame_of(content: bytes, level: int = 1) -> bytes:
    zstd = compression.find_zstd()
    assert zstd is not None
    frame: bytes = zstd.compress(content, level)
    return frame


ZEROS = bytes(4096)
FRAME = frame_of(ZEROS)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (section(ZEROS, 1, (4096, len(FRAME))) + FRAME, None),
        (section(ZEROS, 1, (4096, 0)) + ZEROS, None),
        (b"short", "decompression"),
        (section(ZEROS, 3, (4096, len(FRAME))) + FRAME, "decompression"),
        (section(b"other", 1, (4096, len(FRAME))) + FRAME, "decompression"),
        (section(ZEROS, 1), "decompression"),
        (section(ZEROS, 1, (2048, 0)) + ZEROS[:2048], "decompression"),
        (section(ZEROS, 1, (4096, 0), (4096, 0)) + 2 * ZEROS, "decompression"),
        (section(ZEROS, 1, (0, len(FRAME))) + FRAME, "decompression"),
        (section(ZEROS, 1, (4096, len(FRAME) + 9)) + FRAME, "decompression"),
        (section(ZEROS, 1, (1 << 30, len(FRAME))) + FRAME, "decompression"),
        (struct.pack("<16sII", b"", 1, 1 << 31), "decompression"),
        (section(ZEROS, 2, (4096, len(FRAME))) + FRAME + ZEROS[:2048], "decompression"),
        (section(ZEROS, 1, (4096, 4)) + b"junk", "decompression"),
        (section(ZEROS, 1, (4096, len(FRAME) - 3)) + FRAME[:-3], "decompression"),
        (section(ZEROS, 1, (4096, 2 * len(FRAME))) + 2 * FRAME, "decompression"),
        (section(ZEROS, 1, (4096, len(frame_of(bytes(1 << 28))))) + frame_of(bytes(1 << 28)),
         "decompression"),
    ],
    ids=[
        *("good", "good, not compressed", "too short", "unknown width", "other content"),
        *("no chunk", "missing bytes", "too many bytes", "empty chunk", "frame beyond the end"),
        *("huge chunk", "huge table", "frame too long for a plane", "no frame", "frame cut"),
        *("two frames", "frame of 256 MiB"),
    ],
)  # fmt: skip
def test_what_no_compressor_writes_is_a_bad_block_below_intact_checksums(
    stored: bytes, reason: str | None
) -> None:
    codec = CompressedBlocks(PlainBlocks("0" * 16))
    header = encode_header(
        KEYS[0], "0" * 16, Sections([stored]), compression=Compression(1, len(ZEROS), 0)
    )
    memory = memoryview(bytearray(b"\x5a" * max(len(ZEROS), len(stored))))
    memory[: len(stored)] = stored
    place = memory[: len(ZEROS)] if len(stored) <= len(ZEROS) else memory
    expected = reason
    if len(stored) > len(ZEROS):
        expected = "wrong length"  # a compressed block is never longer than its KV
    assert codec.defect(KEYS[0], header, Sections([place])) == expected
    assert defect_of_file(codec, KEYS[0], header + stored) == reason
    if expected is None:
        assert bytes(place) == ZEROS


@pytest.mark.parametrize("position", [20, 170, 237, 260])
def test_a_compressed_block_with_a_damaged_header_is_not_taken_for_a_short_one(
    tmp_path: Path, position: int
) -> None:
    storage = PosixStorage(tmp_path, NAMESPACE, compressor=Compressor())
    storage.write(KEYS[:1], [kv(1)])
    path = storage.block_path(KEYS[0])
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert storage.read(KEYS[0], into()).reason == "bad header"
    assert not path.exists()


@pytest.mark.parametrize("payload_bytes", [BLOCK_BYTES - 4096, BLOCK_BYTES + 4096, 1 << 40])
def test_verification_of_a_file_decompresses_no_more_than_a_full_block(payload_bytes: int) -> None:
    """A forged header could have it decompress for hours."""
    stored = section(ZEROS, 1, (4096, len(FRAME))) + FRAME
    how = Compression(1, payload_bytes, 0)
    header = encode_header(KEYS[0], NAMESPACE.digest(), Sections([stored]), compression=how)
    assert defect_of_file(block_codec(NAMESPACE), KEYS[0], header + stored) == "wrong length"


@pytest.mark.parametrize(("namespace", "keys"), [(NAMESPACE, None), (ENCRYPTED, RING)])
def test_compressed_files_are_verified_without_an_engine(
    tmp_path: Path, namespace: StoreNamespace, keys: KeyRing | None
) -> None:
    storage = PosixStorage(tmp_path, namespace, keys=keys, compressor=Compressor())
    storage.write(KEYS[:1], [kv(1)])
    content = storage.block_path(KEYS[0]).read_bytes()
    codec = block_codec(namespace, keys)
    assert defect_of_file(codec, KEYS[0], content) is None
    assert defect_of_file(codec, KEYS[0], content[:-1]) == "wrong length"
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    assert defect_of_file(codec, KEYS[0], damaged) == (
        "checksum" if keys is None else "not authentic"
    )


def test_direct_io_reads_a_compressed_block_at_the_first_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that ended between two sectors would be read again through the page cache."""
    storage = PosixStorage(tmp_path, NAMESPACE, compressor=Compressor())
    if not storage.uses_direct_io:
        pytest.skip("the file system of temporary files has no O_DIRECT")
    storage.write(KEYS[:1], [kv(1)])
    attempts: list[int] = []
    read_head = storage._read_head

    def counted(path: str, flags: int, *rest: Any) -> Any:
        attempts.append(flags & os.O_DIRECT)
        return read_head(path, flags, *rest)

    monkeypatch.setattr(storage, "_read_head", counted)
    memory = allocate_registered(BLOCK_BYTES).view(0, BLOCK_BYTES)
    assert storage.read(KEYS[0], memory).is_good
    assert storage.read(KEYS[0], memory, whole=False).is_good
    assert attempts == [os.O_DIRECT] * 2


def test_serve_passes_the_codec_to_its_engines(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--storage", "kv", "--storage-codec", "auto", "--port", "0", "--dry-run")
    assert main(["serve", "m", *given]) == 0
    _, *engines = capsys.readouterr().out.splitlines()
    assert all('"storage_codec": "auto"' in command for command in engines)
    assert engines


def test_a_block_of_another_codec_is_unreadable_here(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path, NAMESPACE)
    how = Compression(7, BLOCK_BYTES, BLOCK_BYTES - HEAD_BYTES)
    header = encode_header(KEYS[0], NAMESPACE.digest(), Sections([b"abc"], [b"d"]), compression=how)
    path = storage.block_path(KEYS[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(header + b"abcd")
    assert storage.read(KEYS[0], into()).reason == "codec"
    assert path.exists()


# ---------------------------------------------------------------------------------------- counts


def test_journal_and_survey_count_bytes_as_stored(tmp_path: Path) -> None:
    tree, now_s = PosixObjects(tmp_path), lambda: 1e9
    journal = Journal(tree, namespace_name(NAMESPACE), "engine")
    upkeep = StorageMaintenance(tree, journal, WriteGate(), None, now_s, now_s)
    inner = PosixStorage(tmp_path, NAMESPACE, compressor=Compressor())
    storage = MaintainedStorage(inner, upkeep)
    storage.write(KEYS[:2], [kv(0), kv(1)])
    storage.write(KEYS[:3], [kv(0), kv(1), kv(2)])
    upkeep.journal.flush()
    sizes = {key: inner.block_path(key).stat().st_size for key in KEYS[:3]}
    assert max(sizes.values()) < 0.8 * BLOCK_BYTES
    journaled = [
        event
        for _, _, name in segments(tree)
        for event in (decode_segment(tree.get(name) or b"") or pytest.fail(name)).events
    ]
    assert [event.bytes for event in journaled if isinstance(event, Written)] == [
        *(sizes[key] for key in KEYS[:2]),
        *(sizes[key] for key in KEYS[:3]),
    ]
    surveyed = load_or_survey(tree, now_s, lambda share: None, survey=True)
    assert surveyed.used_bytes == sum(sizes.values())


def test_a_quota_admits_as_many_blocks_as_fit_compressed() -> None:
    """Once a write has shown how large they are."""
    story = Story(StorageLimits())
    journal = Journal(story.tree, "place", "engine")
    gate = WriteGate(bytes_per_s=(HEADER_BYTES + BLOCK_BYTES) / 10)
    upkeep = StorageMaintenance(story.tree, journal, gate, None, lambda: 0.0, lambda: story.now_s)
    storage = MaintainedStorage(MemoryStorage(NAMESPACE, compressor=Compressor()), upkeep)
    assert storage.write(KEYS[:1], [kv(0)]).new == 1
    story.now_s += 8
    assert storage.write(KEYS[1:2], [kv(1)]).new == 1, "8 s suffice for what it takes in storage"


def test_written_bytes_are_counted_as_stored() -> None:
    storage, counters = MemoryStorage(NAMESPACE, compressor=Compressor()), Counters()
    persister = Persister(storage, counters, TraceRecorder(None, "test"))
    step = step_of(PERSIST_PROMPT, GEOMETRY, BlockRun(0, 2), slots=(0, 1))
    assert step.bytes == 2 * BLOCK_BYTES
    persister.add(WriteTask("r", step, KEYS[:2], [kv(0), kv(1)], lambda: None))
    assert persister.drain(60)
    stored = storage.write(KEYS[:2], [kv(0), kv(1)]).payload_bytes
    assert counters.snapshot()[Counter.STORAGE_WRITE_BYTES] == sum(stored) < 1.5 * BLOCK_BYTES


# ---------------------------------------------------------------------------------------- choice

MEASURED = StorageCodec(
    codec="zstd",
    reason="it is set",
    ratio=1.4,
    compress_bytes_per_s=4e9,
    decompress_bytes_per_s=8e9,
)


@pytest.mark.parametrize(
    ("storage_bytes_per_s", "codec", "kv_bytes_per_s"),
    [(0.1e9, "zstd", 0.14e9), (2e9, "zstd", 2.8e9), (2.1e9, "off", 2.94e9), (50e9, "off", 4e9)],
)
def test_auto_compresses_where_reads_become_faster_and_writes_no_slower(
    storage_bytes_per_s: float, codec: str, kv_bytes_per_s: float
) -> None:
    chosen = chosen_codec(MEASURED, storage_bytes_per_s)
    assert chosen.codec == codec
    assert chosen.kv_bytes_per_s(storage_bytes_per_s) == pytest.approx(kv_bytes_per_s)
    assert f"storage reads {storage_bytes_per_s / 1e6:.0f} MB/s" in chosen.reason


def test_auto_is_off_where_storage_was_not_measured() -> None:
    assert chosen_codec(MEASURED, None).codec == "off"


def test_auto_is_off_where_compression_saves_too_little_or_cores_are_slow() -> None:
    little = msgspec.structs.replace(MEASURED, ratio=1.05)
    slow = msgspec.structs.replace(MEASURED, decompress_bytes_per_s=1.6e9)
    assert [chosen_codec(one, 1e9).codec for one in (MEASURED, little, slow)] == [
        *("zstd", "off", "off")
    ]


def test_the_probe_measures_blocks_of_the_engines_geometry() -> None:
    found = measure_codec(NAMESPACE, 2, 1)
    assert 1.2 < found.ratio < 1.6
    assert min(found.compress_bytes_per_s, found.decompress_bytes_per_s) > 0
    single = msgspec.structs.replace(NAMESPACE, dtype="float32")
    assert 1.05 < measure_codec(single, 1, 1).ratio < found.ratio


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"mode": "oracle"}, "mode oracle stores no KV"),
        ({"storage": "nixl+gds:///kv"}, r"nixl\+gds:// is for storage that is faster"),
    ],
)
def test_combinations_without_sense_are_refused(changed: dict[str, str], why: str) -> None:
    given = {
        "role": "prefill",
        "engine_id": "pe-0",
        "router": "tcp://127.0.0.1:1",
        "api_url": "http://127.0.0.1:2",
        "storage": "kv",
    }
    with pytest.raises(ConfigError, match=why):
        parse_settings(given | changed | {"storage_codec": "zstd"})
    assert parse_settings(given | changed | {"storage_codec": "auto"}).codec_refusal is not None
    assert parse_settings(given | {"storage_codec": "auto"}).codec_refusal is None


def test_doctor_reports_what_auto_would_choose() -> None:
    assert "storage_codec auto would be on: storage reads 1 MB/s" in storage_codec(1e6).found
    assert "storage_codec auto would be off" in storage_codec(1e12).found
