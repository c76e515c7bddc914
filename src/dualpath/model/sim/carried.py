"""How many bytes steps carry where layers see different lengths of a context; both cores ask here.

Layers come in kinds, one per window: a step carries of each kind the blocks that ``plan.counts``
says, as a plan has a step for each layer.  Compiles with numba as it stands.

The hits of a prompt lie so: before ``pe_first`` at the DE, whose buffer has kept them, the next
``pe_blocks`` at the PE, the others of ``hit_blocks`` at the DE again (``policy.read_side``).
"""

from dualpath.core.blocks import first_seen_block, holding_blocks
from dualpath.model.sim.result import FloatArray
from dualpath.plan.counts import load_blocks, reload_blocks, seen_blocks, send_hit_blocks

LayerKinds = list[list[float]] | FloatArray
"""Rows by window: its tokens, and the bytes of a block in such layers.

The first row is of layers that attend to all, with a window of 0.
"""
WINDOW, BLOCK_BYTES = range(2)


def seen_from(kinds: LayerKinds, kind: int, tokens: int, block_tokens: int) -> int:
    """Return the first block that a kind of layers needs for the token behind ``tokens``."""
    return first_seen_block(tokens, int(kinds[kind][WINDOW]), block_tokens)


def whole_from(kinds: LayerKinds, hit_blocks: int, block_tokens: int) -> int:
    """Return from which block on a hit is read with its window layers, as the widest needs it."""
    return seen_from(kinds, len(kinds) - 1, hit_blocks * block_tokens, block_tokens)


def read_bytes(
    kinds: LayerKinds,
    at_decode: bool,
    found_blocks: int,
    pe_first: int,
    pe_blocks: int,
    hit_blocks: int,
    block_tokens: int,
) -> float:
    """Return what a side reads from storage: its blocks but the first ``found_blocks``, kept ones.

    Blocks before ``whole_from`` come without window layers.
    """
    whole = whole_from(kinds, hit_blocks, block_tokens)
    if at_decode:
        blocks = hit_blocks - pe_blocks - found_blocks
        whole_blocks = seen_blocks(found_blocks, hit_blocks - found_blocks, whole)
        whole_blocks -= seen_blocks(pe_first, pe_blocks, whole)
    else:
        blocks = pe_blocks - found_blocks
        whole_blocks = seen_blocks(pe_first + found_blocks, blocks, whole)
    total_bytes = blocks * kinds[0][BLOCK_BYTES]
    for kind in range(1, len(kinds)):
        total_bytes += whole_blocks * kinds[kind][BLOCK_BYTES]
    return total_bytes


def load_bytes(
    kinds: LayerKinds,
    first_block: int,
    pe_first: int,
    pe_blocks: int,
    hit_blocks: int,
    block_tokens: int,
    resident: bool,
) -> tuple[float, float, float]:
    """Return what is loaded before the chunk that begins with ``first_block``.

    From the PE's buffer, hits from the DE's, and what earlier chunks computed.
    """
    from_prefill = from_decode = reloaded = 0.0
    for kind in range(len(kinds)):
        seen = seen_from(kinds, kind, first_block * block_tokens, block_tokens)
        at_prefill = load_blocks(pe_first, pe_blocks, seen, first_block, hit_blocks, resident)
        at_both = load_blocks(0, hit_blocks, seen, first_block, hit_blocks, resident)
        block_bytes = kinds[kind][BLOCK_BYTES]
        from_prefill += at_prefill * block_bytes
        from_decode += (at_both - at_prefill) * block_bytes
        reloaded += reload_blocks(seen, first_block, hit_blocks, resident) * block_bytes
    return from_prefill, from_decode, reloaded


def send_bytes(
    kinds: LayerKinds,
    chunk_blocks: int,
    first_block: int,
    pe_first: int,
    pe_blocks: int,
    hit_blocks: int,
    prompt_tokens: int,
    block_tokens: int,
) -> float:
    """Return what goes to the DE of a chunk: its blocks, and hits that the DE will look at."""
    total_bytes = 0.0
    for kind in range(len(kinds)):
        seen = seen_from(kinds, kind, prompt_tokens - 1, block_tokens)
        hits = send_hit_blocks(pe_first, pe_blocks, seen, first_block, hit_blocks)
        total_bytes += (chunk_blocks + hits) * kinds[kind][BLOCK_BYTES]
    return total_bytes


def fill_bytes(kinds: LayerKinds, prompt_tokens: int, block_tokens: int) -> float:
    """Return what of a prompt enters the DE's HBM."""
    prompt_blocks, total_bytes = holding_blocks(prompt_tokens, block_tokens), 0.0
    for kind in range(len(kinds)):
        seen = seen_from(kinds, kind, prompt_tokens - 1, block_tokens)
        total_bytes += seen_blocks(0, prompt_blocks, seen) * kinds[kind][BLOCK_BYTES]
    return total_bytes


def whole_at_prefill(
    kinds: LayerKinds,
    found_blocks: int,
    pe_first: int,
    pe_blocks: int,
    hit_tokens: int,
    block_tokens: int,
) -> int:
    """Return how many blocks of a PE's run it may keep: full ones that are there in all layers.

    Those are the first ``found_blocks``, which were kept, and what was read whole if it follows.
    """
    full = min(pe_blocks, hit_tokens // block_tokens - pe_first)
    hit_blocks = holding_blocks(hit_tokens, block_tokens)
    if pe_first + found_blocks >= whole_from(kinds, hit_blocks, block_tokens):
        return full
    return min(found_blocks, full)


def whole_at_decode(
    kinds: LayerKinds,
    found_blocks: int,
    pe_first: int,
    pe_blocks: int,
    hit_tokens: int,
    prompt_tokens: int,
    block_tokens: int,
) -> int:
    """Return how many blocks from a prompt's first on a DE may keep: as ``whole_at_prefill``.

    With windows, hits that a PE sent came without what the DE does not look at.
    """
    end = prompt_tokens // block_tokens
    if pe_blocks > 0 and len(kinds) > 1:
        end = pe_first
    hit_blocks = holding_blocks(hit_tokens, block_tokens)
    if found_blocks >= whole_from(kinds, hit_blocks, block_tokens):
        return end
    return min(found_blocks, end)
