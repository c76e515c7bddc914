"""Ranks that hold the same KV may load a part each, and give it to each other on the device.

Latent KV is whole on every rank of an engine.  As a rule each of ``a`` ranks loads all of it, which
costs no agreement and ``a`` times the bytes.  With ``share_loads`` each loads one block in ``a``,
in turn as with sends, and before a layer is computed the ranks gather what the others have: a
collective per layer, over the links between GPUs.

The thread that computes calls it for every layer once, at all ranks in the same order.  By then
nothing reads the layer's region any more: what used it before has been sent (``layer_stream``), and
its kernels were queued before.  What is gathered follows from the plan alone, not from what became
of transfers: a request of which a rank could load nothing takes part with whatever is there, and
fails at the end of the pass at all ranks.
"""

from collections.abc import Sequence
from typing import Protocol

from dualpath.core.blocks import BlockGeometry
from dualpath.engine.step_transfers import PrefillChunk, Replica
from dualpath.plan.steps import load_steps


class LoadExchange(Protocol):
    """The ranks that hold the same KV, on their devices."""

    def exchange(self, layer: int, blocks: Sequence[Sequence[int]]) -> None:
        """Bring HBM blocks ``blocks[r]`` of a layer from replica ``r`` to every other one.

        Queued behind what the calling thread has queued, or made its device wait for, and before
        what it queues next.
        """
        ...


class SharedLoads:
    """What the replicas load for each other in one pass.

    ``chunks`` are those of the whole pass, at all ranks the same ones, also where a rank moves
    nothing for one.  ``resident`` as in ``plan.steps.load_steps``.
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
        """Have all KV before the chunks in ``layer``'s HBM; this rank's own part of it is there."""
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
