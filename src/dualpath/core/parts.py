"""Slices of parts: the share of every Full Block that one engine, or one of its ranks, moves.

Parts are head-major, so the heads of a rank are one contiguous slice of a part.  The slice is a
property of the rank and not of the block: engines of different tensor-parallel sizes share buffers
and storage.
"""

import msgspec

from dualpath.core.blocks import LayerPart
from dualpath.core.errors import ConfigError


class PartSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slice ``index`` of a part cut into ``count`` equal ones, 0 ≤ index < count."""

    index: int = 0
    count: int = 1

    def of(self, part: LayerPart) -> LayerPart:
        """Return the bytes of the slice; raises ``ConfigError`` if there are no equal slices."""
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"slice {self.index} of {self.count}; slices are counted from 0 to {self.count - 1}"
            )
        size_bytes, rest = divmod(part.size_bytes, self.count)
        if rest or not size_bytes:
            raise ConfigError(
                f"part {part.part} of layer {part.layer} has {part.size_bytes} bytes, which "
                f"{self.count} ranks cannot share evenly; use a number of ranks that divides the "
                "KV heads"
            )
        return part._replace(
            offset_bytes=part.offset_bytes + self.index * size_bytes, size_bytes=size_bytes
        )


#: The slice of an engine of one device: whole parts.
WHOLE = PartSlice()


def slices_of(ranks: int, heads: int) -> int:
    """Return into how many slices ``ranks`` of an engine divide each part of ``heads`` KV heads.

    With fewer heads than ranks several ranks hold the same slice, as in vLLM; latent KV counts as
    one head.  Raises ``ConfigError`` if neither number divides the other.
    """
    slices = min(ranks, heads)
    if ranks % slices or heads % slices:
        raise ConfigError(
            f"{ranks} ranks for {heads} KV heads; one number must divide the other, correct "
            "--tensor-parallel-size"
        )
    return slices
