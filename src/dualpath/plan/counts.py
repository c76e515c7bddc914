"""Numbers of blocks that each kind of step moves, as functions of plain integers.

The step builders (``plan.steps``) and both cores of the simulator call them; the compiled core
compiles them unchanged.  A prompt's hits are full blocks (``hit_blocks``), its chunks begin at
block boundaries; ``block_tokens`` ≥ 1.  The blocks of a whole prompt, in the DE's buffer and HBM,
are ``core.blocks.holding_blocks``.

A layer with a sliding window attends to the blocks of a prompt from ``seen_from`` on, which is
``core.blocks.first_seen_block`` for the next computed token; 0 for any other layer.
"""

from dualpath.core.blocks import holding_blocks


def new_full_blocks(tokens_before: int, tokens: int, block_tokens: int) -> int:
    """Blocks that become full while KV grows from ``tokens_before`` to ``tokens`` tokens.

    They are written to storage: for a prompt from its hit tokens to its end, for a generation from
    the end of the prompt to ``kv_tokens``.
    """
    return tokens // block_tokens - tokens_before // block_tokens


def kv_tokens(prompt_tokens: int, generated_tokens: int) -> int:
    """Tokens with KV when a request is complete: the KV of the last token is never computed."""
    return prompt_tokens + generated_tokens - 1


def chunk_blocks(cached_tokens: int, computed_tokens: int, block_tokens: int) -> int:
    """Blocks of a chunk of ``computed_tokens`` ≥ 1 after ``cached_tokens``."""
    end = holding_blocks(cached_tokens + computed_tokens, block_tokens)
    return end - cached_tokens // block_tokens


def is_first_chunk(first_block: int, hit_blocks: int) -> bool:
    """Whether the chunk that begins with ``first_block`` is a prompt's first."""
    return first_block <= hit_blocks


def seen_blocks(run_first: int, run_blocks: int, seen_from: int) -> int:
    """Blocks from ``seen_from`` on of a run that begins with ``run_first``."""
    return max(run_first + run_blocks - max(run_first, seen_from), 0)


def load_blocks(
    run_first: int,
    run_blocks: int,
    seen_from: int,
    first_block: int,
    hit_blocks: int,
    resident: bool,
) -> int:
    """Blocks of a run of hits that are loaded into the PE's HBM before a chunk.

    All blocks that the chunk attends to are loaded before each chunk, as HBM has only a few layers;
    with all layers ``resident`` they stay in HBM after the first chunk.
    """
    if resident and not is_first_chunk(first_block, hit_blocks):
        return 0
    return seen_blocks(run_first, run_blocks, seen_from)


def reload_blocks(seen_from: int, first_block: int, hit_blocks: int, resident: bool) -> int:
    """Blocks of earlier chunks that are reloaded from the DE buffer before a chunk."""
    return 0 if resident else seen_blocks(hit_blocks, first_block - hit_blocks, seen_from)


def send_hit_blocks(
    run_first: int, run_blocks: int, seen_from: int, first_block: int, hit_blocks: int
) -> int:
    """Blocks of a run of hits, read at the PE, that are sent to the DE buffer after a chunk.

    Only blocks from ``seen_from`` on, as the DE's attention does not need the others.
    """
    if not is_first_chunk(first_block, hit_blocks):
        return 0
    return seen_blocks(run_first, run_blocks, seen_from)
