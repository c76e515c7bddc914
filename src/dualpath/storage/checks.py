"""Argument checks shared by all storage backends."""

from collections.abc import Sequence

from dualpath.core.blocks import BlockGeometry, BlockKey, BlockOrigin


def check_sources(
    geometry: BlockGeometry, keys: Sequence[BlockKey], buffers: Sequence[memoryview]
) -> list[memoryview]:
    """Return a write's sources as flat byte views.

    Raises ``ValueError`` if there is not one contiguous buffer of ``full_block_bytes`` per key.
    """
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers; one per key is needed")
    return [_flat(geometry, buffer, writable=False) for buffer in buffers]


def run_origins(keys: Sequence[BlockKey], origin: BlockOrigin) -> list[BlockOrigin]:
    """Return the origin of each block of a run; ``origin`` is that of the first."""
    parents = [origin.parent, *keys[:-1]] if origin.parent else [b""] * len(keys)
    return [BlockOrigin(parent, origin.tenant) for _, parent in zip(keys, parents, strict=False)]


def check_destination(geometry: BlockGeometry, destination: memoryview) -> memoryview:
    """Return a read's destination as a flat byte view.

    Raises ``ValueError`` unless it has ``full_block_bytes``, is contiguous and writable.
    """
    return _flat(geometry, destination, writable=True)


def _flat(geometry: BlockGeometry, buffer: memoryview, *, writable: bool) -> memoryview:
    if buffer.nbytes != geometry.full_block_bytes:
        raise ValueError(
            f"buffer has {buffer.nbytes} bytes; must be {geometry.full_block_bytes}, one Full Block"
        )
    if not buffer.contiguous or (writable and buffer.readonly):
        raise ValueError("buffer must be contiguous, and the destination of a read writable")
    return buffer.cast("B")
