"""The DRAM of one engine: its buffer, its staging slots and, with several ranks, their board.

All ranks of an engine share this memory: rank 0 allocates it, the others map the same pages.  So
one rank reads, verifies and writes a whole Full Block, and each rank moves its slice of it.  The
buffer of a decode engine can also be mapped by prefill engines of the same machine
(``transport.shared_memory``), which read and write nothing else there.
"""

import logging
import mmap
from typing import NamedTuple

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.ranks.group import RankBoard, RankGroup
from dualpath.engine.settings import EngineSettings
from dualpath.transport.memory import (
    RegisteredMemory,
    allocate_registered,
    allocate_shared,
    map_shared,
)

log = logging.getLogger(__name__)


class EngineMemory(NamedTuple):
    """See the module's docstring."""

    buffer: RegisteredMemory
    staging: RegisteredMemory
    board: RankBoard


class _Sizes(NamedTuple):
    buffer: int
    staging: int
    board: int


def open_memory(
    settings: EngineSettings, geometry: BlockGeometry, group: RankGroup
) -> EngineMemory:
    """Allocate the engine's memory, or map the memory that rank 0 has allocated.

    Every rank calls it.  Raises ``ConfigError`` at all ranks if one of them fails.  On a machine
    with less memory than it promised, the kernel kills the process when it touches the pages.
    """
    if settings.mode.moves_bytes:
        settings.check_buffer(geometry.full_block_bytes)
    slots = max(settings.buffer_slots(geometry), 1)
    sizes = _Sizes(
        slots * geometry.full_block_bytes,
        max(settings.staging_blocks, 1) * geometry.full_block_bytes,
        RankBoard.size_bytes(group.size, settings.staging_blocks),
    )
    touch = settings.touch_memory
    if group.size == 1:
        return EngineMemory(
            _buffer(sizes.buffer, settings),
            allocated(sizes.staging, touch=touch),
            RankBoard.alone(settings.staging_blocks),
        )
    return _areas(_shared(sum(map(_whole_pages, sizes)), group, touch=touch), sizes, group)


def allocated(size_bytes: int, *, touch: bool) -> RegisteredMemory:
    """Allocate memory of one process; raises ``ConfigError`` as ``allocate_registered``."""
    memory = allocate_registered(size_bytes)
    if touch:
        memory.touch()
    return memory


def _buffer(size_bytes: int, settings: EngineSettings) -> RegisteredMemory:
    """Allocate the buffer of an engine of one rank, as shared memory if other engines may map it.

    Huge pages of shared memory are off in most kernels, so other buffers stay anonymous.
    """
    if settings.role is not Role.DECODE or settings.transport == "nixl":
        return allocated(size_bytes, touch=settings.touch_memory)
    try:
        memory = allocate_shared(size_bytes)
    except ConfigError as error:
        if settings.transport == "memory":
            raise
        log.warning("prefill engines of this machine use NIXL to reach this engine: %s", error)
        return allocated(size_bytes, touch=settings.touch_memory)
    if settings.touch_memory:
        memory.touch()
    return memory


def _shared(size_bytes: int, group: RankGroup, *, touch: bool) -> RegisteredMemory:
    if group.rank == 0:
        memory = allocate_shared(size_bytes)
        assert memory.file is not None
        if touch:
            memory.touch()
        group.broadcast(memory.file.path)
        _raise_first(group.gather(""))
        return memory
    path = group.broadcast("")
    try:
        memory = map_shared(path, size_bytes)
    except ConfigError as error:
        group.gather(str(error))
        raise
    _raise_first(group.gather(""))
    return memory


def _raise_first(errors: list[str]) -> None:
    for rank, error in enumerate(errors):
        if error:
            raise ConfigError(f"rank {rank}: {error}")


def _areas(memory: RegisteredMemory, sizes: _Sizes, group: RankGroup) -> EngineMemory:
    staging_at = _whole_pages(sizes.buffer)
    board_at = staging_at + _whole_pages(sizes.staging)
    board = memory.area(board_at, sizes.board)
    return EngineMemory(
        memory.area(0, sizes.buffer),
        memory.area(staging_at, sizes.staging),
        RankBoard(board.array, group.rank, group.size),
    )


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
