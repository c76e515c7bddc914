"""The layout of KV in an engine's HBM, and views of Full Blocks in DRAM that match it."""

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from dualpath.core.blocks import WHOLE, BlockGeometry, PartSlice
from dualpath.core.errors import ConfigError
from dualpath.transport.contract import RegionInfo
from dualpath.transport.memory import RegisteredMemory

#: An engine's id of one block of a request in HBM; if groups of layers have separate block ids, one
#: id for each group.
HbmBlock = int | tuple[int, ...]
#: Prefix of the names of views of another engine's HBM.
HBM_REGION = "hbm-kv"
#: In place of an id: the group has no such block, as it is outside the window of its layers; or
#: the block is in the engine's HBM prefix cache and must not be written to.
NO_BLOCK = -1


def block_ids(blocks: Iterable[HbmBlock]) -> tuple[int, ...]:
    """Return the ids of all groups, without ``NO_BLOCK``."""
    ids = (block if isinstance(block, tuple) else (block,) for block in blocks)
    return tuple(i for block in ids for i in block if i != NO_BLOCK)


class HbmPart(msgspec.Struct, frozen=True):
    """A region with a piece per engine block, and the slice of a part that its pieces hold."""

    region: RegionInfo
    slice: PartSlice = WHOLE


class HbmLayout(msgspec.Struct, frozen=True):
    """The KV memory of one rank: ``layers[l][p]`` holds its slice of part ``p`` of layer ``l``.

    ``memories`` are the registered regions; a part's region is one of them or a view of one.  With
    layerwise prefill several layers share a memory: block ``b`` of each must then be within the
    same bytes (``engine.chunk_transfers``).  ``capacity_tokens`` of all layers.
    ``group_of_layer``: the group of block ids of each layer, empty if all layers have the same ids.
    ``layer_names`` are the engine's names of its layers, empty if they have numbers only.
    ``owner`` is the allocation of ``memories``, None if the engine holds it.
    """

    memories: tuple[RegionInfo, ...]
    layers: tuple[tuple[HbmPart, ...], ...]
    capacity_tokens: int
    group_of_layer: tuple[int, ...] = ()
    layer_names: tuple[str, ...] = ()
    owner: RegisteredMemory | None = None

    @property
    def remote_views(self) -> tuple[RegionInfo, ...]:
        """The views by which peers address its KV, by layer and part (``AgentAddress.hbm``)."""
        return tuple(
            msgspec.structs.replace(part.region, name=view_name(HBM_REGION, layer, number))
            for layer, parts in enumerate(self.layers)
            for number, part in enumerate(parts)
        )

    def name_of(self, layer: int) -> str:
        """Return the name of a layer for messages."""
        return self.layer_names[layer] if self.layer_names else f"layer {layer}"

    def views(self) -> tuple[RegionInfo, ...]:
        """Return the regions of parts that are views of a memory."""
        regions = dict.fromkeys(part.region for parts in self.layers for part in parts)
        return tuple(region for region in regions if region not in self.memories)


def shared_layers(
    memories: Sequence[RegionInfo],
    geometry: BlockGeometry,
    capacity_tokens: int,
    held: PartSlice = WHOLE,
) -> HbmLayout:
    """Return the layout in which layer ``l`` is in memory ``l`` mod the number of memories.

    A layer's parts are adjacent in each block of the memory, which has room for the largest of its
    layers.  ``geometry`` is that of the slices of blocks that this rank holds.
    """
    layers = []
    for layer, sizes in enumerate(geometry.layer_parts):
        memory = memories[layer % len(memories)]
        offsets = itertools.accumulate(sizes, initial=0)
        layers.append(
            tuple(
                HbmPart(
                    memory
                    if size == memory.piece_bytes
                    else memory.part(view_name(f"{memory.name}.layer", layer, part), offset, size),
                    held,
                )
                for part, (offset, size) in enumerate(zip(offsets, sizes, strict=False))
            )
        )
    return HbmLayout(tuple(memories), tuple(layers), capacity_tokens)


class PartViews:
    """Views of regions of Full Blocks for a rank with this HBM: one view per part that it moves.

    Raises ``ConfigError`` if the HBM does not match the blocks.
    """

    def __init__(self, geometry: BlockGeometry, hbm: HbmLayout) -> None:
        if tuple(map(len, hbm.layers)) != tuple(map(len, geometry.layer_parts)):
            raise ConfigError(
                f"HBM has {len(hbm.layers)} layers with {[len(p) for p in hbm.layers]} parts, "
                f"blocks have {geometry.layers} with {[len(p) for p in geometry.layer_parts]}"
            )
        self._full_block_bytes = geometry.full_block_bytes
        self._moved = []
        for part in geometry.parts:
            held = hbm.layers[part.layer][part.part]
            moved = held.slice.of(part)
            if held.region.piece_bytes != moved.size_bytes:
                raise ConfigError(
                    f"part {part.part} of layer {part.layer}: {moved.size_bytes} bytes of each "
                    f"block are moved, a block in HBM has {held.region.piece_bytes}"
                )
            self._moved.append(moved)

    def of(self, region: RegionInfo) -> tuple[RegionInfo, ...]:
        """Return the views of a region with a Full Block per piece.

        Raises ``ConfigError`` if its pieces have another size than these blocks.
        """
        if region.piece_bytes != self._full_block_bytes:
            raise ConfigError(
                f"region {region.name!r} has blocks of {region.piece_bytes} bytes, this engine of "
                f"{self._full_block_bytes}; both ends need the same model and block size"
            )
        return tuple(
            region.part(view_name(region.name, p.layer, p.part), p.offset_bytes, p.size_bytes)
            for p in self._moved
        )

    def of_hbm(self, views: Sequence[RegionInfo]) -> tuple[RegionInfo, ...]:
        """Return a peer's views of its HBM, one per part of each layer in order.

        Empty if its blocks are cut differently from this rank's: then it gets KV in its buffer.
        """
        sizes = [moved.size_bytes for moved in self._moved]
        return tuple(views) if [view.piece_bytes for view in views] == sizes else ()


def view_name(region: str, layer: int, part: int) -> str:
    """Return the name of a view of a region of Full Blocks."""
    return f"{region}.{layer}.{part}"
