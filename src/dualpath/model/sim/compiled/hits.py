"""Where the hits of a round lie, in the terms of ``carried``."""

from dualpath.core.blocks import holding_blocks
from dualpath.model.sim.compiled.columns import DE_KEPT, HIT, PE_BLOCKS, PE_KEPT, PE_READ
from dualpath.model.sim.compiled.jit import inlined
from dualpath.model.sim.compiled.machine_tables import World


@inlined
def hit_blocks(p: World, agent: int) -> int:
    """Return how many blocks of a round's prompt are hits."""
    return holding_blocks(p.machine.flights[agent, HIT], p.constants.block_tokens)


@inlined
def first_at_prefill(p: World, agent: int) -> int:
    """Return the first block of a round's prompt that its PE holds: what the DE keeps is before."""
    if not p.constants.keeps:
        return 0
    return holding_blocks(p.machine.flights[agent, DE_KEPT], p.constants.block_tokens)


@inlined
def count_blocks(p: World, agent: int) -> None:
    """Note how many blocks of a round's hit its PE and its DE have: what they keep and read."""
    flights = p.machine.flights
    for side in range(2):
        tokens = flights[agent, PE_KEPT + side] + flights[agent, PE_READ + side]
        flights[agent, PE_BLOCKS + side] = holding_blocks(tokens, p.constants.block_tokens)


@inlined
def found_blocks(p: World, agent: int, side: int) -> int:
    """Return how many blocks a side's buffer had kept when it was granted: it reads the others."""
    flights = p.machine.flights
    read_blocks = holding_blocks(flights[agent, PE_READ + side], p.constants.block_tokens)
    return flights[agent, PE_BLOCKS + side] - read_blocks
