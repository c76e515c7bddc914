"""Argument checks shared by all storage backends."""

from collections.abc import Sequence

from dualpath.core.blocks import BlockGeometry, BlockKey


def check_buffers(
    geometry: BlockGeometry,
    keys: Sequence[BlockKey],
    buffers: Sequence[memoryview],
    *,
    writable: bool,
) -> list[memoryview]:
    """Return the buffers as flat byte views.

    Raises ``ValueError`` if there is not one buffer of ``full_block_bytes`` per key, if a buffer
    is not contiguous or, where needed, not writable.
    """
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers; one per key is needed")
    flat = []
    for buffer in buffers:
        if buffer.nbytes != geometry.full_block_bytes:
            raise ValueError(
                f"buffer of {buffer.nbytes} bytes; a Full Block has {geometry.full_block_bytes}"
            )
        if not buffer.contiguous or (writable and buffer.readonly):
            raise ValueError("buffer must be contiguous, and writable as a read's destination")
        flat.append(buffer.cast("B"))
    return flat
