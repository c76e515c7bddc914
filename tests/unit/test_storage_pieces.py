"""A block read in pieces is verified while it is read, with the same result as a complete one."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.storage.block_file import HEADER_BYTES, PlainBlocks, Sections, encode_header
from dualpath.storage.posix import PosixStorage
from dualpath.storage.readers import KernelReader, OnProgress, ignore_progress
from dualpath.transport.memory import allocate_registered

KEY = bytes(range(32))
DIGEST = "0123456789abcdef"
HEAD, TAIL = bytes(range(256)) * 4, bytes(range(255, -1, -1))
PIECE = 4096

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=8192)
NAMESPACE = StoreNamespace("org/tiny model", "float32", "NHD", GEOMETRY)


class Device:
    """A file with the page number in each byte; reads can be nested.

    ``preadv`` first starts the read of another file, until ``at_a_time`` are under way.
    """

    def __init__(self, file_bytes: int, at_a_time: int) -> None:
        self.content = bytes(at // PIECE % 251 for at in range(file_bytes))
        self.at_a_time = at_a_time
        self.reader = KernelReader(self, piece_bytes=PIECE)  # type: ignore[arg-type]
        self.asked: dict[int, list[int]] = {}
        self.progress: dict[int, list[int]] = {}

    def read(self, descriptor: int, sizes: Sequence[int]) -> bytes:
        buffers = [memoryview(bytearray(size)) for size in sizes]
        progress = self.progress.setdefault(descriptor, [])
        done = self.reader.fill_from_file(descriptor, buffers, progress.append)
        return b"".join(buffers)[:done]

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        asked = self.asked.setdefault(descriptor, [])
        if not asked and descriptor < self.at_a_time:
            self.read(descriptor + 1, [len(self.content)])
        asked.append(sum(buffer.nbytes for buffer in buffers))
        done = 0
        for buffer in buffers:
            piece = self.content[offset + done : offset + done + buffer.nbytes]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done


def test_few_reads_use_one_call_and_many_use_equal_pieces() -> None:
    device = Device(9 * PIECE, at_a_time=4)
    assert device.read(1, [PIECE, 0, 5 * PIECE, 3 * PIECE]) == device.content
    # The first read started before there were many.
    assert device.asked[1] == [9 * PIECE]
    assert device.asked[4] == [PIECE] * 9
    assert device.progress[4] == [PIECE * count for count in range(1, 10)]


def test_pieces_are_equal_and_the_end_of_a_short_file_is_its_end() -> None:
    device = Device(5 * PIECE, at_a_time=4)
    device.reader = KernelReader(device, piece_bytes=3 * PIECE)  # type: ignore[arg-type]
    assert device.read(4, [7 * PIECE]) == device.content
    alone = device.asked[4]
    assert alone == [7 * PIECE, 2 * PIECE]
    device.read(1, [5 * PIECE])
    assert device.asked[4][2:] == [3 * PIECE, 2 * PIECE]


@given(
    progress=st.lists(st.integers(0, HEADER_BYTES + len(HEAD) + len(TAIL)), max_size=6).map(sorted),
    cut=st.integers(0, len(HEAD)),
    with_tail=st.booleans(),
    damage=st.none() | st.integers(0, len(HEAD) + len(TAIL) - 1),
)
def test_verification_does_not_depend_on_the_pieces(
    progress: list[int], cut: int, with_tail: bool, damage: int | None
) -> None:
    header = encode_header(KEY, DIGEST, Sections([HEAD], [TAIL]))
    content = bytearray(HEAD + TAIL)
    if damage is not None:
        content[damage] ^= 4
    memory = memoryview(bytearray(len(content)))
    head, tail = memory[: len(HEAD)], memory[len(HEAD) :]
    payload = Sections([head[:cut], head[cut:]], [tail] if with_tail else None)
    verifier = PlainBlocks(DIGEST).verifier(payload)
    for file_bytes in progress:
        there = max(file_bytes - HEADER_BYTES, 0)
        memory[:there] = content[:there]
        verifier.received(file_bytes)
    memory[:] = content
    is_bad = damage is not None and (with_tail or damage < len(HEAD))
    assert verifier.defect(KEY, header) == ("checksum" if is_bad else None)


class RefusedHalfWay:
    """A reader with a first read that fails half way, as direct I/O may."""

    def __init__(self) -> None:
        self.reads = 0

    def fill_from_file(
        self,
        descriptor: int,
        buffers: Sequence[memoryview],
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        self.reads += 1
        if self.reads == 1:
            on_progress(HEADER_BYTES + 100)
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.preadv(descriptor, list(buffers), 0)

    def close(self) -> None:
        pass


def test_bytes_read_before_direct_io_was_refused_are_ignored(tmp_path: Path) -> None:
    reader = RefusedHalfWay()
    storage = PosixStorage(tmp_path, NAMESPACE, reader=reader)
    if not storage.uses_direct_io:
        pytest.skip("this file system knows no direct I/O")
    (key,) = block_keys(range(4), 4)
    data = os.urandom(GEOMETRY.full_block_bytes)
    storage.write([key], [memoryview(data)])
    into = allocate_registered(GEOMETRY.full_block_bytes).view(0, GEOMETRY.full_block_bytes)
    assert storage.read(key, into).is_good
    assert (reader.reads, bytes(into)) == (2, data)
