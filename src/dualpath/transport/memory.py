"""Page-aligned memory that can be registered with a transport and read into directly.

Memory of one process is an anonymous mapping.  Memory that the ranks of an engine share, or that
engines of the same machine map, is a *memory file* (memfd).  Other processes open it as
``/proc/PID/fd/N``, which the kernel permits to processes of the same user and PID namespace.

* A memory file has no name: nothing appears in ``/dev/shm``, the 64 MB limit of ``/dev/shm`` in
  containers does not apply (the container's memory limit does), and the kernel frees the pages when
  the last process that maps them exits, however it exits.  A file in ``/dev/shm`` has none of this.
* Passing descriptors over a Unix socket would also work between PID namespaces.  It needs a thread
  and a protocol with time limits at every engine, and reaches engines that can never confirm each
  other's death.  Such engines use the network.
"""

import contextlib
import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError

PAGE_BYTES = 4096
#: Bytes at the start of the last page of a memory file that identify the file.
NONCE_BYTES = 16
#: ``MFD_NOEXEC_SEAL`` of Linux 6.3, which Python 3.11 does not name.
_MFD_NOEXEC_SEAL = 0x8
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryFile:
    """An open memory file, mapped in this process at ``address``; closed with its last reference.

    It has ``size_bytes`` for use, rounded up to whole pages, and a last page with the ``nonce``.
    """

    def __init__(self, descriptor: int, size_bytes: int, mapping: NDArray[np.uint8]) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.address = int(mapping.ctypes.data)
        self.nonce = bytes(mapping[_usable_bytes(size_bytes) :][:NONCE_BYTES])

    @property
    def path(self) -> str:
        """The path by which other processes open the file."""
        return file_path(os.getpid(), self.descriptor)

    def __del__(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def file_path(process_id: int, descriptor: int) -> str:
    """Return the path of a file that a process has open."""
    return f"/proc/{process_id}/fd/{descriptor}"


class RegisteredMemory:
    """``size_bytes`` writable, zeroed bytes at a fixed ``address``; freed with the last view.

    ``array`` is the whole memory as ``uint8``.  Keep this object (or any view) alive for as long
    as a transport or a device may access the memory.  ``file`` is the memory file that contains it,
    None for anonymous memory.
    """

    def __init__(self, array: NDArray[np.uint8], file: MemoryFile | None = None) -> None:
        self.array = array
        self.file = file
        self.address = int(array.ctypes.data)
        self.size_bytes = int(array.nbytes)

    def area(self, offset_bytes: int, size_bytes: int) -> "RegisteredMemory":
        """Return a part as a ``RegisteredMemory``; raises ``ValueError`` as ``view``."""
        self.view(offset_bytes, size_bytes)
        return RegisteredMemory(self.array[offset_bytes : offset_bytes + size_bytes], self.file)

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
            f"buffer of {size_bytes} bytes cannot be allocated ({error}); make the buffer "
            "smaller (buffer_bytes)"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
    skip_bytes = -int(whole.ctypes.data) % alignment
    return RegisteredMemory(whole[skip_bytes : skip_bytes + size_bytes])


def allocate_shared(size_bytes: int) -> RegisteredMemory:
    """Allocate zeroed memory in a memory file, which processes of this user can map.

    The size of the file is fixed, so that an access never meets a missing page.  Raises
    ``ConfigError`` for invalid sizes and when the kernel refuses.
    """
    if size_bytes < 1:
        raise ConfigError(f"buffer of {size_bytes} bytes: at least 1 byte is needed")
    try:
        descriptor = _create_file()
    except OSError as error:
        raise ConfigError(
            f"memory cannot be shared with other processes ({error}); allow memfd_create in this "
            "container"
        ) from error
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, _usable_bytes(size_bytes) + PAGE_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
        os.pwrite(descriptor, os.urandom(NONCE_BYTES), _usable_bytes(size_bytes))
    except (OSError, OverflowError) as error:
        os.close(descriptor)
        raise ConfigError(
            f"buffer of {size_bytes} bytes cannot be allocated ({error}); make the buffer "
            "smaller (buffer_bytes)"
        ) from error
    return _mapped(descriptor, size_bytes)


def map_shared(path: str, size_bytes: int) -> RegisteredMemory:
    """Map the memory of another process of this machine, by the ``path`` of its memory file.

    Processes that this one forks do not get the mapping: when this process has exited, no process
    can write through it.  Raises ``ConfigError`` if the memory cannot be reached or has another
    size.
    """
    try:
        # Without O_NONBLOCK, a path that has become another process's FIFO would block.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise ConfigError(
            f"memory of another process cannot be reached ({error}); both processes need the same "
            "user, machine and PID namespace (containers: --pid=host or one container for all)"
        ) from error
    if not _is_sealed(descriptor):
        os.close(descriptor)
        raise ConfigError(
            f"{path} is not the memory of an engine; the process that had it has been replaced"
        )
    found_bytes = os.fstat(descriptor).st_size - PAGE_BYTES
    if found_bytes != _usable_bytes(size_bytes):
        os.close(descriptor)
        raise ConfigError(
            f"memory of another process has {found_bytes} bytes, expected {size_bytes}; give all "
            "ranks of an engine the same settings"
        )
    return _mapped(descriptor, size_bytes, to_children=False)


def _create_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("dualpath", flags | _MFD_NOEXEC_SEAL)
    except OSError:  # Linux before 6.3
        return os.memfd_create("dualpath", flags)


def _is_sealed(descriptor: int) -> bool:
    """Whether a file is a memory file with a fixed size."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED_SIZE == _FIXED_SIZE
    except OSError:  # not a memory file
        return False


def _usable_bytes(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _mapped(descriptor: int, size_bytes: int, *, to_children: bool = True) -> RegisteredMemory:
    """Map a memory file; the returned memory owns the descriptor, which is closed on failure.

    ``to_children``: forked processes inherit the mapping.
    """
    whole_bytes = _usable_bytes(size_bytes) + PAGE_BYTES
    try:
        mapping = mmap.mmap(descriptor, whole_bytes, flags=mmap.MAP_SHARED)
        if not to_children:
            mapping.madvise(mmap.MADV_DONTFORK)
    except (OSError, OverflowError, ValueError) as error:
        os.close(descriptor)
        raise ConfigError(
            f"buffer of {size_bytes} bytes cannot be mapped ({error}); make the buffer "
            "smaller (buffer_bytes)"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    array: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
    return RegisteredMemory(array[:size_bytes], MemoryFile(descriptor, size_bytes, array))


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a contiguous, non-empty view."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
