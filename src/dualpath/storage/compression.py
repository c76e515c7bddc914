"""Compressed blocks: Zstandard compresses the most significant bytes of their numbers.

The exponents of KV's floating-point numbers are alike, its mantissas are noise.  So numbers of two
or four bytes are split into planes, one for each byte of a number; the plane with sign and exponent
is compressed and the others are stored as they are.  Zstandard finds hardly any repetitions there
and is set to search for few: what it saves is the Huffman coding of bytes.  This is faster than its
level 1 and saves more (``lab/dualpath_lab/benchmarks/storage_codec.py``).

A section of a compressed block, little-endian:

====== ===== ===================================================================================
offset bytes field
====== ===== ===================================================================================
0      16    XXH3-128 of the section before compression
16     4     bytes of a number: 1, 2 or 4
20     4     number of chunks, n
24     8 n   of each chunk: its bytes before compression, and the bytes of its Zstandard frame
24+8n        the chunks; at the end zeros up to a multiple of 4096 bytes
====== ===== ===================================================================================

A chunk is the frame of the most significant plane, then the other planes from the least significant
one on.  A frame of 0 bytes: the chunk is stored as it is, not in planes.

Compression is below checksums and seals: those of the header are over the stored bytes, so that
only verified bytes reach the decompressor, and the section's own checksum is compared afterwards.
"""

import importlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from dualpath.core.blocks import (
    UNKNOWN_ORIGIN,
    BlockGeometry,
    BlockKey,
    BlockOrigin,
    StoreNamespace,
)
from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.core.rates import CODEC_CPU_SHARE, StorageCodec
from dualpath.storage.block_file import (
    BAD_HEADER,
    DECOMPRESSION,
    OTHER_CODEC,
    WRONG_LENGTH,
    BlockCodec,
    BlockHeader,
    BlockVerifier,
    Buffer,
    Compression,
    FileOrder,
    PlainBlocks,
    Sections,
    checksum,
    decode_header,
    fill,
    first_of,
    is_compressed,
    stored_bytes,
)

Bytes = NDArray[np.uint8]

#: Values of the setting ``storage_codec``.
CodecName = Literal["off", "auto", "zstd"]
#: The codec's number in a header.
ZSTD_PLANES = 1
#: Sections end at a multiple of this, so that direct I/O reads them on any device.
PAD_BYTES = 4096
#: Chunks fit into a core's cache, and bound what a damaged length can allocate.
CHUNK_BYTES = 1 << 20
_WINDOW_LOG = 20
#: A block of more bytes is not decompressed to check it where the namespace's geometry is unknown.
_LARGEST_BLOCK_BYTES = 1 << 30
#: A block is compressed only if this share of each section is saved.
_MIN_SAVED = 1 / 16
#: Pieces of a section by which the width of its numbers is chosen; not at regular distances, as a
#: repetition would look like a saving.
_SAMPLE_PIECE_BYTES = 1 << 12
_SAMPLE_PLACES = (0.0, 0.23, 0.54, 0.83)
_WIDTHS = (2, 4, 1)
_UNSIGNED: dict[int, Any] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_SECTION = struct.Struct("<16sII")
_CHUNK = struct.Struct("<II")


def find_zstd() -> Any | None:  # noqa: ANN401 - a module without types
    """Return the module ``zstd`` (in the standard library from Python 3.14), None without it."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


# ---------------------------------------------------------------------------------------- sections


class Compressor:
    """Compresses the sections of blocks; thread-safe, with buffers for each thread.

    ``pad_bytes``: sections end at a multiple of it.  Raises ``ConfigError`` without Zstandard.
    """

    def __init__(self, pad_bytes: int = PAD_BYTES) -> None:
        if (zstd := find_zstd()) is None:
            raise ConfigError(
                "compressed blocks need the package backports.zstd; "
                f"{extra('zstd').remedy}, or set {{storage_codec}} to off"
            )
        self._zstd = zstd
        self._pad_bytes = pad_bytes
        parameter = zstd.CompressionParameter
        self._options = {
            parameter.compression_level: 1,
            parameter.strategy: zstd.Strategy.fast,
            parameter.window_log: _WINDOW_LOG,
            # Few searches for repetitions: of long ones, in a small table.
            parameter.hash_log: 6,
            parameter.min_match: 7,
        }
        self._per_thread = threading.local()

    def compressed(self, payload: Sections) -> tuple[Sections, Compression] | None:
        """Return the stored sections of a block, None if compression saves too little.

        They are in a buffer of this thread, which the next call reuses.
        """
        head, tail = payload.head, payload.tail or ()
        room = self._room(payload)
        head_bytes = self._pack(head, room)
        if head_bytes is None:
            return None
        tail_bytes = self._pack(tail, room[head_bytes:])
        if tail_bytes is None or head_bytes + tail_bytes == 0:
            return None
        stored = _sections(room, head_bytes, head_bytes + tail_bytes)
        sizes = (payload.size_bytes, Sections(tail).size_bytes)
        return stored, Compression(ZSTD_PLANES, *sizes)

    def _pack(self, section: Sequence[Buffer], room: memoryview) -> int | None:
        """Compress a section into ``room``; return its stored bytes, None if too many."""
        buffers = [memoryview(buffer) for buffer in section if memoryview(buffer).nbytes]
        if not buffers:
            return 0
        size_bytes = sum(buffer.nbytes for buffer in buffers)
        most_bytes = size_bytes - max(int(size_bytes * _MIN_SAVED), 1)
        width = self._width(buffers)
        if width is None:
            return None
        chunks = [
            np.frombuffer(buffer[start : start + CHUNK_BYTES], np.uint8)
            for buffer in buffers
            for start in range(0, buffer.nbytes, CHUNK_BYTES)
        ]
        into = np.frombuffer(room, np.uint8)
        end = _SECTION.size + len(chunks) * _CHUNK.size
        _SECTION.pack_into(room, 0, checksum(section), width, len(chunks))
        for number, chunk in enumerate(chunks):
            frame_bytes, stored = self._pack_chunk(chunk, width, into[end:])
            place = _SECTION.size + number * _CHUNK.size
            _CHUNK.pack_into(room, place, chunk.nbytes, frame_bytes)
            end += stored
            if end > most_bytes:
                return None
        padded = -(-end // self._pad_bytes) * self._pad_bytes
        if padded > most_bytes:
            return None
        room[end:padded] = bytes(padded - end)
        return padded

    def _pack_chunk(self, chunk: Bytes, width: int, into: Bytes) -> tuple[int, int]:
        """Return the bytes of the frame and of the whole chunk as stored."""
        top, numbers, shifted = self._planes(chunk, width)
        frame = self._frame(top)
        count = top.nbytes
        if len(frame) >= count:
            into[: chunk.nbytes] = chunk
            return 0, chunk.nbytes
        into[: len(frame)] = np.frombuffer(frame, np.uint8)
        end = len(frame)
        for plane in range(width - 1):
            np.right_shift(numbers, 8 * plane, out=shifted)
            np.copyto(into[end : end + count], shifted, casting="unsafe")
            end += count
        return len(frame), end

    def _planes(self, chunk: Bytes, width: int) -> tuple[Bytes, NDArray[Any], NDArray[Any]]:
        """Return the most significant plane, the numbers, and memory for as many."""
        if width == 1:
            return chunk, chunk, chunk
        numbers = chunk.view(_UNSIGNED[width])
        shifted = self._memory("shifted", CHUNK_BYTES).view(_UNSIGNED[width])[: numbers.size]
        top = self._memory("top", CHUNK_BYTES)[: numbers.size]
        np.right_shift(numbers, 8 * (width - 1), out=shifted)
        np.copyto(top, shifted, casting="unsafe")
        return top, numbers, shifted

    def _frame(self, plane: Bytes) -> bytes:
        """Return the Zstandard frame of a plane."""
        zstd: Any = getattr(self._per_thread, "zstd", None)
        if zstd is None:
            zstd = self._per_thread.zstd = self._zstd.ZstdCompressor(options=self._options)
        zstd.set_pledged_input_size(plane.nbytes)
        frame: bytes = zstd.compress(plane, zstd.FLUSH_FRAME)
        return frame

    def _width(self, buffers: Sequence[memoryview]) -> int | None:
        """Return the width of numbers that saves most in a sample, None if none saves enough."""
        largest = max(buffers, key=lambda buffer: buffer.nbytes)
        starts = [int(largest.nbytes * share) // 4 * 4 for share in _SAMPLE_PLACES]
        pieces = [largest[start : start + _SAMPLE_PIECE_BYTES] for start in starts]
        sample = np.frombuffer(b"".join(pieces), np.uint8)
        sizes = {}
        for width in _WIDTHS:
            if any(buffer.nbytes % width for buffer in buffers):
                continue
            whole = sample[: sample.nbytes // width * width]
            if whole.nbytes:
                top, _, _ = self._planes(whole, width)
                sizes[width] = (len(self._frame(top)) + whole.nbytes - top.nbytes) / whole.nbytes
        width = min(sizes, key=lambda one: sizes[one], default=1)
        return width if sizes and sizes[width] < 1 - _MIN_SAVED else None

    def _room(self, payload: Sections) -> memoryview:
        chunks = sum(buffer.nbytes // CHUNK_BYTES + 1 for buffer in payload.buffers)
        extra_bytes = 2 * (_SECTION.size + self._pad_bytes) + chunks * _CHUNK.size
        return memoryview(self._memory("room", payload.size_bytes + extra_bytes).data).cast("B")

    def _memory(self, name: str, size_bytes: int) -> Bytes:
        return _thread_memory(self._per_thread, name, size_bytes)


def _thread_memory(per_thread: threading.local, name: str, size_bytes: int) -> Bytes:
    """Return memory of this thread; the next call with this name reuses it."""
    memory: Bytes | None = getattr(per_thread, name, None)
    if memory is None or memory.nbytes < size_bytes:
        memory = np.empty(size_bytes, np.uint8)
        setattr(per_thread, name, memory)
    return memory[:size_bytes]


def _sections(room: memoryview, head_bytes: int, end: int) -> Sections:
    """Return stored sections, one buffer each, none for an empty one."""
    head, tail = room[:head_bytes], room[head_bytes:end]
    return Sections([head] if head.nbytes else (), [tail] if tail.nbytes else ())


class _Chunk(NamedTuple):
    """One chunk of a stored section; without a ``frame``, ``rest`` is the chunk itself."""

    size_bytes: int
    frame: memoryview
    rest: memoryview


class _Decompressor:
    """Decompresses sections; thread-safe.  It allocates a chunk for each thread."""

    def __init__(self, zstd: Any) -> None:  # noqa: ANN401 - a module without types
        self._zstd = zstd
        self._options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        self._per_thread = threading.local()

    def unpack(
        self, stored: memoryview, size_bytes: int, into: Sequence[memoryview] | None
    ) -> bool:
        """Decompress a section of ``size_bytes`` and compare its checksum; False if it is bad.

        ``into`` has its buffers, None to check the section only.
        """
        if stored.nbytes < _SECTION.size:
            return False
        expected, width, count = _SECTION.unpack_from(stored)
        hasher = xxhash.xxh3_128()
        left = None if into is None else [buffer for buffer in into if buffer.nbytes]
        for chunk in self._chunks(stored, width, count):
            if chunk is None or chunk.size_bytes > size_bytes:
                return False
            size_bytes -= chunk.size_bytes
            in_place = bool(left) and left[0].nbytes >= chunk.size_bytes  # type: ignore[index]
            place = left[0] if in_place else self._scratch().data  # type: ignore[index]
            memory = memoryview(place)[: chunk.size_bytes]
            if not self._unpack_chunk(chunk, width, memory):
                return False
            hasher.update(memory)
            if left is not None:
                _advance(left, None if in_place else memory, chunk.size_bytes)
        return size_bytes == 0 and hasher.digest() == expected

    def _chunks(self, stored: memoryview, width: int, count: int) -> Iterator[_Chunk | None]:
        """Yield the chunks, None in place of one that no compressor writes."""
        end = _SECTION.size + count * _CHUNK.size
        if width not in _WIDTHS or end > stored.nbytes:
            yield None
            return
        for number in range(count):
            place = _SECTION.size + number * _CHUNK.size
            size_bytes, frame_bytes = _CHUNK.unpack_from(stored, place)
            rest_bytes = size_bytes - size_bytes // width if frame_bytes else size_bytes
            start, end = end, end + frame_bytes + rest_bytes
            if not 0 < size_bytes <= CHUNK_BYTES or size_bytes % width or end > stored.nbytes:
                yield None
                return
            middle = start + frame_bytes
            yield _Chunk(size_bytes, stored[start:middle], stored[middle:end])

    def _unpack_chunk(self, chunk: _Chunk, width: int, memory: memoryview) -> bool:
        if not chunk.frame.nbytes:
            memory[:] = chunk.rest
            return True
        count = chunk.size_bytes // width
        decompressor = self._zstd.ZstdDecompressor(options=self._options)
        try:
            top = decompressor.decompress(chunk.frame, count)
        except self._zstd.ZstdError:
            return False
        if len(top) != count or not decompressor.eof or decompressor.unused_data:
            return False
        if width == 1:
            memory[:] = top
            return True
        numbers = np.frombuffer(memory, _UNSIGNED[width])
        np.copyto(numbers, np.frombuffer(top, np.uint8))
        planes = np.frombuffer(chunk.rest, np.uint8).reshape(width - 1, count)
        for plane in planes[::-1]:
            np.left_shift(numbers, 8, out=numbers)
            np.bitwise_or(numbers, plane, out=numbers)
        return True

    def _scratch(self) -> Bytes:
        return _thread_memory(self._per_thread, "chunk", CHUNK_BYTES)


def _advance(left: list[memoryview], memory: memoryview | None, size_bytes: int) -> None:
    """Drop the first bytes of ``left``, after ``memory`` is copied there if it is given."""
    done = 0
    while done < size_bytes:
        piece = min(left[0].nbytes, size_bytes - done)
        if memory is not None:
            left[0][:piece] = memory[done : done + piece]
        done += piece
        left[0] = left[0][piece:]
        if not left[0].nbytes:
            left.pop(0)


# ------------------------------------------------------------------------------------------ blocks


class CompressedBlocks:
    """See ``BlockCodec``: reads compressed and other blocks of ``inner``, the codec that seals.

    ``compressor`` compresses the blocks that are written, None leaves them as they are.
    ``block_bytes`` is the length of a Full Block, None if it is unknown.
    """

    def __init__(
        self,
        inner: BlockCodec,
        compressor: Compressor | None = None,
        block_bytes: int | None = None,
    ) -> None:
        self._block_bytes = block_bytes
        self.has_keys = inner.has_keys
        self._inner = inner
        self._compressor = compressor
        zstd = find_zstd()
        self._decompressor = None if zstd is None else _Decompressor(zstd)
        self._per_thread = threading.local()
        #: Stored bytes of the last head that was read, None if it was not compressed.
        self._head_bytes: int | None = None

    def unreadable(self, header: memoryview | bytes) -> str | None:
        """Look for the codec, then let ``inner`` look for its keys."""
        if is_compressed(header) and self._decompressible(header) == OTHER_CODEC:
            return OTHER_CODEC
        return self._inner.unreadable(header)

    def encoded(
        self,
        key: BlockKey,
        payload: Sections,
        origin: BlockOrigin = UNKNOWN_ORIGIN,
        compression: Compression | None = None,
    ) -> list[memoryview]:
        """Compress where that saves enough, then let ``inner`` encode what is to be stored."""
        if self._compressor is not None and compression is None:
            found = self._compressor.compressed(payload)
            if found is not None:
                payload, compression = found
        return self._inner.encoded(key, payload, origin, compression)

    def defect(self, key: BlockKey, header: memoryview | bytes, payload: Sections) -> str | None:
        """Verify; the stored bytes of a compressed block in ``payload`` become its KV."""
        if is_compressed(header):
            return self._decompressed(key, header, payload)
        return self._inner.defect(key, header, payload)

    def defect_of_compressed(
        self, key: BlockKey, header: memoryview | bytes, stored: Sections
    ) -> str | None:
        """Verify the stored bytes, then decompress them chunk by chunk to compare the checksum."""
        found = self._decompressible(header)
        if isinstance(found, str):
            return found
        _, how = found
        reason = self._inner.defect_of_compressed(key, header, stored)
        if reason is not None:
            return reason
        size_bytes = how.payload_bytes
        if size_bytes > _LARGEST_BLOCK_BYTES or self._block_bytes not in (None, size_bytes):
            return WRONG_LENGTH
        return self._unpacked(how, stored, None)

    def verifier(self, payload: Sections) -> BlockVerifier:
        """Let ``inner`` verify while the file is read, as most blocks are not compressed."""
        return _Verifier(self, self._inner.verifier(payload), payload)

    def first_bytes(self, payload: Sections) -> int:
        """Return how many bytes behind the header to read first.

        Of a head without its tail that is what the last one took, if it was compressed: a longer
        read would get a part of the tail.  ``stored_bytes`` of the header then has the length.
        """
        if payload.tail is not None or self._head_bytes is None:
            return payload.size_bytes
        return min(self._head_bytes, payload.size_bytes)

    def _decompressible(self, header: memoryview | bytes) -> tuple[BlockHeader, Compression] | str:
        """Return the header of a compressed block, or why the block cannot be decompressed here."""
        found = decode_header(header)
        if found is None or found.compression is None:
            return BAD_HEADER
        if found.compression.codec != ZSTD_PLANES or self._decompressor is None:
            return OTHER_CODEC
        return found, found.compression

    def _decompressed(
        self, key: BlockKey, header: memoryview | bytes, payload: Sections
    ) -> str | None:
        """Replace the stored bytes at the beginning of ``payload`` by the block's KV."""
        decoded = self._decompressible(header)
        if isinstance(decoded, str):
            return decoded
        found, how = decoded
        needed, head_bytes = stored_bytes(header, payload), found.payload_bytes - found.tail_bytes
        if head_bytes < 0 or needed > payload.size_bytes:
            return WRONG_LENGTH
        sizes = Sections(payload.head).size_bytes, Sections(payload.tail or ()).size_bytes
        whole = payload.tail is not None
        if (how.payload_bytes - how.tail_bytes, how.tail_bytes if whole else 0) != sizes:
            return WRONG_LENGTH
        room = memoryview(_thread_memory(self._per_thread, "room", needed).data).cast("B")
        done = 0
        for piece in first_of(payload.buffers, needed):
            room[done : done + piece.nbytes] = piece
            done += piece.nbytes
        stored = _sections(room, head_bytes, needed)
        if not whole:
            stored = Sections(stored.head, None)
        reason = self._inner.defect_of_compressed(key, header, stored)
        if reason is None:
            self._head_bytes = head_bytes
            reason = self._unpacked(how, stored, payload)
        return reason

    def _unpacked(self, how: Compression, stored: Sections, payload: Sections | None) -> str | None:
        """Decompress what ``inner`` has verified; return the defect."""
        assert self._decompressor is not None, "the caller has looked for Zstandard"
        head_bytes = how.payload_bytes - how.tail_bytes
        parts = [(stored.head, head_bytes, payload and payload.head)]
        if stored.tail is not None:
            parts.append((stored.tail, how.tail_bytes, payload and payload.tail))
        for section, size_bytes, into in parts:
            content = memoryview(section[0] if section else b"")
            buffers = None if into is None else [memoryview(buffer) for buffer in into]
            if not content.nbytes and not size_bytes:
                continue
            if not self._decompressor.unpack(content, size_bytes, buffers):
                return DECOMPRESSION
        return None


class _Verifier:
    """See ``BlockVerifier``: ``inner``'s, unless the block turns out to be compressed."""

    def __init__(self, codec: CompressedBlocks, inner: BlockVerifier, payload: Sections) -> None:
        self._codec = codec
        self._inner = inner
        self._payload = payload
        self.received = inner.received

    def defect(self, key: BlockKey, header: memoryview | bytes) -> str | None:
        if is_compressed(header):
            return self._codec.defect(key, header, self._payload)
        self._codec._head_bytes = None
        return self._inner.defect(key, header)


# ------------------------------------------------------------------------------------------ choice
# Whether compression pays: a probe of the cores, compared with the storage's rate.

#: Reads must become faster by this factor.
MIN_GAIN = 1.1
_SAMPLE_SEED = 0
#: How long compression and decompression are measured, each.
_PROBE_S = 0.05


def sample_block(geometry: BlockGeometry, dtype: str) -> memoryview:
    """Return a Full Block of normally distributed numbers: of ``dtype`` float32, else bf16.

    KV compresses about as well; the scale differs between 64 channels.
    """
    rng = np.random.default_rng(_SAMPLE_SEED)
    scales = np.exp(rng.standard_normal(64)).astype(np.float32)
    rows = rng.standard_normal((4093, 64), np.float32) * scales
    numbers = rows.view(np.uint32)
    content = numbers if dtype == "float32" else (numbers >> 16).astype(np.uint16)
    return memoryview(np.resize(content.view(np.uint8), geometry.full_block_bytes).data)


def measure_codec(namespace: StoreNamespace, readers: int, writers: int) -> StorageCodec:
    """Compress and decompress a sample with so many threads at a time; takes about 0.2 s.

    Raises ``ConfigError`` without Zstandard.
    """
    order, codec = (
        FileOrder(namespace.geometry),
        CompressedBlocks(PlainBlocks("0" * 16), Compressor()),
    )
    block = sample_block(namespace.geometry, namespace.dtype)
    key, payload = bytes(32), order.of(block)
    header, *stored = codec.encoded(key, payload)
    file = b"".join(stored)

    def decompressing() -> Callable[[], object]:
        memory = memoryview(bytearray(block.nbytes))

        def decompress() -> None:
            fill(order.of(memory).buffers, file)
            reason = codec.defect(key, header, order.of(memory))
            assert reason is None, f"the sample cannot be decompressed: {reason}"

        return decompress

    def compressing() -> Callable[[], object]:
        return lambda: codec.encoded(key, payload)

    return StorageCodec(
        codec="zstd",
        reason="it is set",
        ratio=block.nbytes / len(file),
        compress_bytes_per_s=_rate(compressing, writers) * block.nbytes,
        decompress_bytes_per_s=_rate(decompressing, readers) * block.nbytes,
    )


def _rate(make: Callable[[], Callable[[], object]], threads: int) -> float:
    """Return how many calls per second so many threads make together, each its own function."""
    functions = [make() for _ in range(threads)]
    for function in functions:  # touches memory for the first time
        function()
    began_s = time.perf_counter()

    def repeat(function: Callable[[], object]) -> int:
        calls = 0
        while not calls or time.perf_counter() - began_s < _PROBE_S:
            function()
            calls += 1
        return calls

    with ThreadPoolExecutor(threads, "codec-probe") as pool:
        calls = sum(pool.map(repeat, functions))
    return calls / (time.perf_counter() - began_s)


def chosen_codec(measured: StorageCodec, storage_bytes_per_s: float | None) -> StorageCodec:
    """Return the choice of ``auto``: compression if it makes reads faster and writes no slower.

    ``storage_bytes_per_s``: the rate at which the engine reads plain blocks, None if unknown.
    """
    if storage_bytes_per_s is None:
        return msgspec.structs.replace(measured, codec="off", reason="storage was not measured")
    reads = measured.kv_bytes_per_s(storage_bytes_per_s)
    writes = measured.compress_bytes_per_s * CODEC_CPU_SHARE
    pays = reads >= MIN_GAIN * storage_bytes_per_s and writes >= storage_bytes_per_s
    return msgspec.structs.replace(
        measured,
        codec="zstd" if pays else "off",
        reason=(
            f"storage reads {storage_bytes_per_s / 1e6:.0f} MB/s; compressed {measured.ratio:.2f} "
            f"times, {reads / 1e6:.0f} MB/s of KV would be read and up to {writes / 1e6:.0f} MB/s "
            f"written with {CODEC_CPU_SHARE:.0%} of the cores"
        ),
        storage_bytes_per_s=storage_bytes_per_s,
    )
