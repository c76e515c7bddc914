"""Checks that every transport makes before it touches memory.

A wrong address in a one-sided transfer silently corrupts KV, so each region and each index is
checked against the registered regions before a backend uses it.
"""

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from dualpath.core.errors import ConfigError, TransportError
from dualpath.transport.contract import PieceIndices, RegionInfo

MEMORY_KINDS = ("DRAM", "VRAM")


def span_bytes(region: RegionInfo) -> int:
    """Return the bytes from the start of the first piece to the end of the last one."""
    return (region.pieces - 1) * region.stride_bytes + region.piece_bytes


def check_region(region: RegionInfo, known: Iterable[str]) -> None:
    """Raise ``ConfigError`` if the region is invalid or its name is taken."""
    if region.name in known:
        raise ConfigError(
            f"region {region.name!r} is registered already; give each region its own name"
        )
    if region.memory not in MEMORY_KINDS:
        raise ConfigError(
            f"region {region.name!r}: memory {region.memory!r} is none of {MEMORY_KINDS}"
        )
    if region.pieces < 1 or region.piece_bytes < 1 or region.base_address < 1:
        raise ConfigError(
            f"region {region.name!r}: {region.pieces} pieces of {region.piece_bytes} bytes at "
            f"address {region.base_address}; each of the three must be at least 1"
        )
    if region.stride_bytes < region.piece_bytes and region.pieces > 1:
        raise ConfigError(
            f"region {region.name!r}: a stride of {region.stride_bytes} bytes makes pieces of "
            f"{region.piece_bytes} bytes overlap; the stride must not be smaller than a piece"
        )


def check_view(view: RegionInfo, regions: Iterable[RegionInfo], known: Iterable[str]) -> None:
    """Raise ``ConfigError`` unless a view is part of one of ``regions``, piece by piece.

    Also raises it if the view is an invalid region, or its name is one of the ``known``.
    """
    check_region(view, known)
    if not any(_is_part(view, region) for region in regions):
        raise ConfigError(
            f"view {view.name!r} of {view.pieces} pieces of {view.piece_bytes} bytes at address "
            f"{view.base_address} is not part of a registered region; derive it from one"
        )


def _is_part(view: RegionInfo, region: RegionInfo) -> bool:
    offset_bytes = view.base_address - region.base_address
    return (
        (view.stride_bytes, view.pieces, view.memory, view.device)
        == (region.stride_bytes, region.pieces, region.memory, region.device)
        and offset_bytes >= 0
        and offset_bytes + view.piece_bytes <= region.piece_bytes
    )


def named_regions(
    regions: Iterable[RegionInfo], views: Iterable[RegionInfo]
) -> dict[str, RegionInfo]:
    """Return an agent's regions and the views of them by name; raise as ``check_view`` does."""
    registered = tuple(regions)
    named = {region.name: region for region in registered}
    for view in views:
        check_view(view, registered, named)
        named[view.name] = view
    return named


def find_region(regions: Mapping[str, RegionInfo], name: str, agent: str) -> RegionInfo:
    """Return the region of that name; raise ``TransportError`` listing those that exist."""
    if (region := regions.get(name)) is None:
        raise TransportError(f"agent {agent!r} has no region {name!r}; it has {list(regions)}")
    return region


def check_pieces(region: RegionInfo, pieces: PieceIndices) -> NDArray[np.int64]:
    """Return the indices as an array; raise ``TransportError`` if one is out of range."""
    indices: NDArray[np.int64] = np.asarray(pieces, dtype=np.int64)
    if indices.ndim != 1:
        raise TransportError(f"piece indices of shape {indices.shape}: a flat sequence is needed")
    # One reduction: as an unsigned number, a negative index is larger than any region.
    if indices.size and np.maximum.reduce(indices.view(np.uint64)) >= region.pieces:
        raise TransportError(
            f"pieces {indices.min()}..{indices.max()} of region {region.name!r}, which has "
            f"pieces 0..{region.pieces - 1}"
        )
    return indices


def check_pair(
    local: RegionInfo, local_pieces: PieceIndices, remote: RegionInfo, remote_pieces: PieceIndices
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return both index arrays; raise ``TransportError`` if the two sides do not match."""
    if local.piece_bytes != remote.piece_bytes:
        raise TransportError(
            f"region {local.name!r} has pieces of {local.piece_bytes} bytes, {remote.name!r} of "
            f"{remote.piece_bytes}; they must be equal"
        )
    local_indices = check_pieces(local, local_pieces)
    remote_indices = check_pieces(remote, remote_pieces)
    if local_indices.size != remote_indices.size:
        raise TransportError(
            f"{local_indices.size} local pieces against {remote_indices.size} remote ones; "
            "the lists must be equally long"
        )
    return local_indices, remote_indices


def check_traffic_class(traffic_class: str, carried: Collection[str]) -> None:
    """Raise ``TransportError`` for a traffic class that this agent does not carry."""
    if traffic_class not in carried:
        raise TransportError(
            f"traffic class {traffic_class!r} is not carried by this agent ({sorted(carried)}); "
            "open a transport with that class's network settings"
        )


def piece_addresses(region: RegionInfo, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the address of each piece."""
    return region.base_address + indices * region.stride_bytes
