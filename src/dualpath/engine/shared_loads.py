"""Shared loads: ranks that replicate KV load one part each and exchange the parts on the device.

Latent KV is replicated on every rank of an engine.  By default each of ``a`` ranks loads all of it,
without communication but with ``a`` times the bytes.  With ``share_loads`` each rank loads one
block in ``a``, in turn as with sends, and before a layer is computed the ranks gather the other
blocks: one collective per layer, over the links between GPUs.

The thread that computes calls it once for every layer, in the same order at all ranks.  By then
nothing reads the layer's region any more: its previous layer has been sent (``layer_stream``), and
the kernels of that layer were queued before.  The exchanged blocks depend only on the plan, not on
the outcome of transfers: if a rank failed to load a request, undefined bytes are exchanged and the
request fails at the end of the pass at all ranks.
"""

from collections.abc import Sequence
from typing import Protocol

from dualpath.core.blocks import BlockGeometry
from dualpath.engine.step_transfers import PrefillChunk, Replica
from dualpath.plan.steps import load_steps


class LoadExchange(Protocol):
    """The collective of ranks that replicate KV, on their devices."""

    def exchange(self, layer: int, blocks: Sequence[Sequence[int]]) -> None:
        """Copy HBM blocks ``blocks[r]`` of a layer from replica ``r`` to every other replica.

        Ordered on the device after the calling thread's queued work and waits, and before its next
        work.
        """
        ...


class SharedLoads:
    """The shared loads of one pass.

    ``chunks`` are all chunks of the pass, the same at all ranks, including chunks for which this
    rank moves nothing.  ``resident`` as in ``plan.steps.load_steps``.
    """

    def __init__(
        self,
        exchange: LoadExchange,
        replica: Replica,
        chunks: Sequence[PrefillChunk],
        geometry: BlockGeometry,
        *,
        resident: bool,
    ) -> None:
        self._exchange = exchange
        self._replica = replica
        self._chunks = [(chunk, chunk.layout(geometry)) for chunk in chunks]
        self._resident = resident
        self._complete: set[int] = set()

    def complete(self, layer: int) -> None:
        """Gather the KV before the chunks in ``layer``'s HBM; this rank has loaded its own part."""
        if layer in self._complete:
            return
        self._complete.add(layer)
        blocks: list[list[int]] = [[] for _ in range(self._replica.count)]
        for chunk, layout in self._chunks:
            for step in load_steps(layout, layer, chunk.chunk, resident=self._resident):
                for position in range(step.blocks.count):
                    loads = blocks[self._replica.turn(step, position)]
                    loads.append(chunk.hbm_blocks[step.blocks.first + position])
        if any(blocks):
            self._exchange.exchange(layer, blocks)
