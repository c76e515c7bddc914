"""Registered memory is aligned, zeroed, writable and outlives its object through its views."""

import gc
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError
from dualpath.transport.memory import (
    PAGE_BYTES,
    RegisteredMemory,
    address_of,
    allocate_registered,
    allocate_shared,
    map_shared,
)


@given(size_bytes=st.integers(1, 100_000), power=st.integers(0, 16))
def test_memory_is_aligned_zeroed_and_of_the_requested_size(size_bytes: int, power: int) -> None:
    memory = allocate_registered(size_bytes, alignment=2**power)
    assert memory.address % 2**power == 0
    assert memory.array.nbytes == memory.size_bytes == size_bytes
    assert not memory.array.any()


def test_views_are_windows_into_the_memory() -> None:
    memory = allocate_registered(8192)
    view = memory.view(4096, 4096)
    view[0] = 7
    assert memory.array[4096] == 7
    assert address_of(view) == memory.address + 4096
    with pytest.raises(ValueError, match="exceeds 8192"):
        memory.view(4096, 4097)


def test_a_view_holds_the_memory() -> None:
    view = allocate_registered(4096).view(0, 4096)
    gc.collect()
    view[:] = bytes(range(256)) * 16
    assert view[255] == 255


@pytest.mark.parametrize(
    ("size_bytes", "alignment"), [(0, 4096), (-1, 4096), (1, 3), (2**62, 4096)]
)
def test_invalid_sizes_are_refused(size_bytes: int, alignment: int) -> None:
    with pytest.raises(ConfigError):
        allocate_registered(size_bytes, alignment)


def test_memory_that_was_touched_has_all_its_pages_and_is_still_zero() -> None:
    memory = allocate_registered(64 * PAGE_BYTES)
    assert not _pages_there(memory.address, 64).any()
    memory.touch()
    assert _pages_there(memory.address, 64).all()
    assert not memory.array.any()


def path_of(memory: RegisteredMemory) -> str:
    assert memory.file is not None
    return memory.file.path


def test_shared_memory_is_the_same_bytes_at_another_address() -> None:
    memory = allocate_shared(8000)
    other = map_shared(path_of(memory), 8000)
    memory.array[5000] = 7
    assert memory.size_bytes == other.size_bytes == 8000
    assert other.array[5000] == 7
    assert other.address != memory.address
    assert memory.file is not None
    assert other.file is not None
    assert memory.file.nonce == other.file.nonce != allocate_shared(8000).file.nonce  # type: ignore[union-attr]
    assert memory.area(4096, 100).file is memory.file


def test_shared_memory_is_mapped_only_with_its_size() -> None:
    memory = allocate_shared(8192)
    with pytest.raises(ConfigError, match="has 8192 bytes, expected 4096"):
        map_shared(path_of(memory), 4096)
    with pytest.raises(ConfigError, match="cannot be reached"):
        map_shared("/proc/self/fd/999999", 8192)
    with pytest.raises(ConfigError, match="at least 1 byte"):
        allocate_shared(0)


def test_shared_memory_is_private_to_the_user_and_its_size_is_fixed() -> None:
    memory = allocate_shared(8192)
    assert stat.S_IMODE(os.stat(path_of(memory)).st_mode) == 0o600
    for size_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.truncate(path_of(memory), size_bytes)


def test_shared_memory_is_in_no_folder_and_its_file_is_closed_with_it() -> None:
    before = set(os.listdir("/dev/shm"))
    memory = allocate_shared(8192)
    path = path_of(memory)
    assert set(os.listdir("/dev/shm")) <= before
    assert os.path.exists(path)
    del memory
    gc.collect()
    assert not os.path.exists(path)


def test_a_forked_process_does_not_inherit_what_its_parent_has_mapped() -> None:
    memory = allocate_shared(8192)
    other = map_shared(path_of(memory), 8192)
    lines = f"{other.address:x}-"
    child = os.fork()
    if child == 0:
        maps = Path("/proc/self/maps").read_text()
        os._exit(any(line.startswith(lines) for line in maps.splitlines()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lines in Path("/proc/self/maps").read_text()


def _pages_there(address: int, pages: int) -> NDArray[np.bool_]:
    """Return for each page whether it is present: the highest of its 64 bits in /proc."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(address // PAGE_BYTES * 8)
        entries = np.frombuffer(pagemap.read(pages * 8), np.uint64)
    there: NDArray[np.bool_] = np.not_equal(entries >> np.uint64(63), 0)
    return there
