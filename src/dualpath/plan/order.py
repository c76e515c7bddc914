"""What a step waits for, and whether steps were executed in an order that may be.

One rule says both: KV moves from where it lies.  A block can leave a place, in some layer, once it
has come there: brought by a step that is over, computed there, or stored before.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.runs import BlockRun
from dualpath.plan.movements import Place
from dualpath.plan.steps import Step


class Executed(msgspec.Struct, frozen=True):
    """A step of one request, and when it began and was over."""

    step: Step
    start_ns: int
    end_ns: int


class Present(msgspec.Struct, frozen=True):
    """KV of one request that no step brought: stored before, or computed by ``since_ns``.

    ``layer`` None: in all layers.
    """

    place: Place
    blocks: BlockRun
    layer: int | None
    since_ns: int


def waits_for(step: Step, plan: Iterable[Step]) -> tuple[str, ...]:
    """Return the labels of the steps that bring what ``step`` moves, of those before it in a plan.

    Empty for what is stored or computed where it begins.
    """
    bringing = (
        other.label
        for other in itertools.takewhile(lambda other: other != step, plan)
        if other.destination is step.source
        and max(other.blocks.first, step.blocks.first) < min(other.blocks.end, step.blocks.end)
        and (other.layer is None or step.layer is None or other.layer == step.layer)
    )
    return tuple(dict.fromkeys(bringing))


def begun_too_early(
    executed: Iterable[Executed], present: Iterable[Present], geometry: BlockGeometry
) -> list[str]:
    """Return what left a place before it had come there; empty if the order may be."""
    steps = list(executed)
    came_ns: dict[tuple[Place, int, int], int] = {}

    def comes(place: Place, layer_blocks: Iterable[tuple[int, int]], at_ns: int) -> None:
        for block, layer in layer_blocks:
            came_ns[place, block, layer] = min(came_ns.get((place, block, layer), at_ns), at_ns)

    for kv in present:
        comes(kv.place, _layer_blocks(kv.blocks, _layers_of(kv.layer, geometry)), kv.since_ns)
    for done in steps:
        comes(done.step.destination, _moved(done.step, geometry), done.end_ns)
    return [
        f"{done.step.label} moved block {block} of layer {layer} from {done.step.source.value} "
        f"at {done.start_ns} ns, where it came at {came_ns.get((done.step.source, block, layer))}"
        for done in steps
        for block, layer in _moved(done.step, geometry)
        if came_ns.get((done.step.source, block, layer), done.start_ns + 1) > done.start_ns
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
