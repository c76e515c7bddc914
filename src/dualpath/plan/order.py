"""The dependencies of steps, and a check of the order in which steps were executed.

Both follow from one rule: a layer of a block can be moved from a place only once it is there, moved
by a completed step, computed, or stored before.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.runs import BlockRun
from dualpath.plan.movements import Place
from dualpath.plan.steps import Step


class Executed(msgspec.Struct, frozen=True):
    """An executed step of one request with its start and end."""

    step: Step
    start_ns: int
    end_ns: int


class Present(msgspec.Struct, frozen=True):
    """KV of one request that was stored before, or computed at ``since_ns``.

    ``layer`` None: in all layers.
    """

    place: Place
    blocks: BlockRun
    layer: int | None
    since_ns: int


def waits_for(step: Step, plan: Iterable[Step]) -> tuple[str, ...]:
    """Return the labels of earlier steps of a plan that write to the source of ``step``.

    Empty for KV that is stored or computed at that place.
    """
    dependencies = (
        other.label
        for other in itertools.takewhile(lambda other: other != step, plan)
        if other.destination is step.source
        and max(other.blocks.first, step.blocks.first) < min(other.blocks.end, step.blocks.end)
        and (other.layer is None or step.layer is None or other.layer == step.layer)
    )
    return tuple(dict.fromkeys(dependencies))


def begun_too_early(
    executed: Iterable[Executed], present: Iterable[Present], geometry: BlockGeometry
) -> list[str]:
    """Describe each Layer Block that was moved from a place before it was there; empty if none."""
    steps = list(executed)
    arrival_ns: dict[tuple[Place, int, int], int] = {}

    def arrives(place: Place, layer_blocks: Iterable[tuple[int, int]], at_ns: int) -> None:
        for block, layer in layer_blocks:
            earlier_ns = arrival_ns.get((place, block, layer), at_ns)
            arrival_ns[place, block, layer] = min(earlier_ns, at_ns)

    for kv in present:
        arrives(kv.place, _layer_blocks(kv.blocks, _layers_of(kv.layer, geometry)), kv.since_ns)
    for done in steps:
        arrives(done.step.destination, _moved(done.step, geometry), done.end_ns)
    return [
        f"{done.step.label} moved block {block} of layer {layer} from {done.step.source.value} "
        f"at {done.start_ns} ns, where it arrived at "
        f"{arrival_ns.get((done.step.source, block, layer))}"
        for done in steps
        for block, layer in _moved(done.step, geometry)
        if arrival_ns.get((done.step.source, block, layer), done.start_ns + 1) > done.start_ns
    ]


def _moved(step: Step, geometry: BlockGeometry) -> Iterator[tuple[int, int]]:
    layers = _layers_of(step.layer, geometry)
    if not step.whole:
        layers = [layer for layer in layers if not geometry.is_window_layer(layer)]
    return _layer_blocks(step.blocks, layers)


def _layers_of(layer: int | None, geometry: BlockGeometry) -> Sequence[int]:
    return range(geometry.layers) if layer is None else (layer,)


def _layer_blocks(blocks: BlockRun, layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    for block in range(blocks.first, blocks.end):
        for layer in layers:
            yield block, layer
