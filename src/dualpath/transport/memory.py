"""Page-aligned anonymous memory that can be registered with a transport and read into directly.

Anonymous mappings, not POSIX shared memory: nothing appears in ``/dev/shm``, and the kernel frees
the pages when the last process that maps them dies, however it dies.  Other engines access the
memory through the transport (cross-memory attach or TCP on one machine, RDMA elsewhere).  The ranks
of one engine map the same pages at different addresses, through a path in /proc that exists until
all of them have mapped it.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError

PAGE_BYTES = 4096


class RegisteredMemory:
    """``size_bytes`` writable, zeroed bytes at a fixed ``address``; freed with the last view.

    ``array`` is the whole memory as ``uint8``.  Keep this object (or any view) alive for as long
    as a transport or a device may access the memory.
    """

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array
        self.address = int(array.ctypes.data)
        self.size_bytes = int(array.nbytes)

    def area(self, offset_bytes: int, size_bytes: int) -> "RegisteredMemory":
        """Return a part as a ``RegisteredMemory``; raises ``ValueError`` as ``view``."""
        self.view(offset_bytes, size_bytes)
        return RegisteredMemory(self.array[offset_bytes : offset_bytes + size_bytes])

    def touch(self) -> None:
        """Fault in all pages by writing zeros; call it before the memory is used.

        Otherwise the first transfer to each page waits for the kernel to clear the page.
        """
        self.array[::PAGE_BYTES] = 0

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Return ``[offset, offset + length)`` as a writable memoryview.

        Raises ``ValueError`` if it exceeds the memory.
        """
        if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > self.size_bytes:
            raise ValueError(
                f"view of {length_bytes} bytes at {offset_bytes} exceeds {self.size_bytes} bytes"
            )
        return self.array[offset_bytes : offset_bytes + length_bytes].data


def allocate_registered(size_bytes: int, alignment: int = PAGE_BYTES) -> RegisteredMemory:
    """Allocate ``size_bytes`` ≥ 1 of anonymous memory aligned to ``alignment`` (a power of two).

    Uses huge pages if available: there are 512 times fewer pages to fault in and to pin for direct
    I/O.

    Raises ``ConfigError`` for invalid sizes and when the kernel refuses the mapping.
    """
    if size_bytes < 1:
        raise ConfigError(f"buffer of {size_bytes} bytes: at least 1 byte is needed")
    if alignment < 1 or alignment & (alignment - 1):
        raise ConfigError(f"alignment of {alignment} bytes: use a power of two, such as 4096")
    slack_bytes = alignment if alignment > PAGE_BYTES else 0
    try:
        mapping = mmap.mmap(
            -1, size_bytes + slack_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"buffer of {size_bytes} bytes cannot be allocated ({error}); make the buffer smaller"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
    skip_bytes = -int(whole.ctypes.data) % alignment
    return RegisteredMemory(whole[skip_bytes : skip_bytes + size_bytes])


@contextlib.contextmanager
def allocate_shared(size_bytes: int) -> Iterator[tuple[RegisteredMemory, str]]:
    """Allocate zeroed memory that other processes can map by its path during the ``with`` block.

    The path works for processes of the same user that see this one in /proc.  Raises
    ``ConfigError`` for invalid sizes and when the kernel refuses.
    """
    if size_bytes < 1:
        raise ConfigError(f"buffer of {size_bytes} bytes: at least 1 byte is needed")
    try:
        descriptor = os.memfd_create("dualpath", os.MFD_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"memory cannot be shared with the engine's other ranks ({error}); allow memfd_create "
            "in this container"
        ) from error
    try:
        try:
            os.ftruncate(descriptor, size_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"buffer of {size_bytes} bytes cannot be allocated ({error}); make the buffer "
                "smaller"
            ) from error
        yield _map(descriptor, size_bytes), f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def map_shared(path: str, size_bytes: int) -> RegisteredMemory:
    """Map memory that another rank of this engine has allocated.

    Raises ``ConfigError`` if it cannot be reached or has another size.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the memory of this engine's first rank cannot be reached ({error}); ranks of one "
            "engine need the same user, machine and PID namespace (containers: --pid=host or one "
            "container for all)"
        ) from error
    try:
        found_bytes = os.fstat(descriptor).st_size
        if found_bytes != size_bytes:
            raise ConfigError(
                f"the memory of this engine's first rank has {found_bytes} bytes, expected "
                f"{size_bytes}; give all ranks the same settings"
            )
        return _map(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size_bytes: int) -> RegisteredMemory:
    try:
        mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"buffer of {size_bytes} bytes cannot be mapped ({error}); make the buffer smaller"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return RegisteredMemory(np.frombuffer(mapping, dtype=np.uint8))


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a contiguous, non-empty view."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
