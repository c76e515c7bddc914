"""Registered memory is aligned, zeroed, writable and outlives its object through its views."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.core.errors import ConfigError
from dualpath.transport.memory import address_of, allocate_registered


@given(size_bytes=st.integers(1, 100_000), power=st.integers(0, 16))
def test_memory_is_aligned_zeroed_and_of_the_asked_size(size_bytes: int, power: int) -> None:
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


def test_a_view_keeps_the_memory() -> None:
    view = allocate_registered(4096).view(0, 4096)
    gc.collect()
    view[:] = bytes(range(256)) * 16
    assert view[255] == 255


@pytest.mark.parametrize(
    ("size_bytes", "alignment"), [(0, 4096), (-1, 4096), (1, 3), (2**62, 4096)]
)
def test_absurd_sizes_are_refused(size_bytes: int, alignment: int) -> None:
    with pytest.raises(ConfigError):
        allocate_registered(size_bytes, alignment)
