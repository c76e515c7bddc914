"""How many blocks each kind of step carries: the rules behind the steps, on plain integers.

The step builders (``plan.steps``) call them, and so do both cores of the simulator, the compiled
one as they stand: whoever has to know a number of blocks asks here.  A prompt's hits are whole
blocks (``hit_blocks``), its chunks begin at block boundaries; ``block_tokens`` ≥ 1.  The blocks of
a whole prompt, in the DE's buffer and HBM, are ``core.blocks.holding_blocks``.

A layer with a sliding window sees of a prompt the blocks from ``seen_from`` on, which is
``core.blocks.first_seen_block`` for what is computed next; 0 for any other layer.
"""

from dualpath.core.blocks import holding_blocks


def new_full_blocks(tokens_before: int, tokens: int, block_tokens: int) -> int:
    """Blocks that become full while KV grows from ``tokens_before`` to ``tokens`` tokens.

    They are written to storage: of a prompt between its hit tokens and its end, of a generation
    between the prompt and ``kv_tokens``.
    """
    return tokens // block_tokens - tokens_before // block_tokens


def kv_tokens(prompt_tokens: int, generated_tokens: int) -> int:
    """Tokens that have KV when a request is over: that of the last token is never computed."""
    return prompt_tokens + generated_tokens - 1


def chunk_blocks(cached_tokens: int, computed_tokens: int, block_tokens: int) -> int:
    """Blocks of a chunk: ``computed_tokens`` ≥ 1 behind ``cached_tokens``."""
    end = holding_blocks(cached_tokens + computed_tokens, block_tokens)
    return end - cached_tokens // block_tokens


def is_first_chunk(first_block: int, hit_blocks: int) -> bool:
    """Whether the chunk that begins with ``first_block`` is a prompt's first."""
    return first_block <= hit_blocks


def seen_blocks(run_first: int, run_blocks: int, seen_from: int) -> int:
    """Blocks of a run that begins with ``run_first`` which are not before ``seen_from``."""
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

    All of them that the chunk sees, also before later chunks, as HBM holds a few layers only; with
    all layers ``resident`` the first chunk leaves them there.
    """
    if resident and not is_first_chunk(first_block, hit_blocks):
        return 0
    return seen_blocks(run_first, run_blocks, seen_from)


def reload_blocks(seen_from: int, first_block: int, hit_blocks: int, resident: bool) -> int:
    """Blocks of earlier chunks that come back from the DE buffer before a chunk sees them."""
    return 0 if resident else seen_blocks(hit_blocks, first_block - hit_blocks, seen_from)


def send_hit_blocks(
    run_first: int, run_blocks: int, seen_from: int, first_block: int, hit_blocks: int
) -> int:
    """Blocks of a run of hits, read at the PE, that go to the DE buffer after a chunk.

    Those that the DE will see (``seen_from``): the others nobody reads there.
    """
    if not is_first_chunk(first_block, hit_blocks):
        return 0
    return seen_blocks(run_first, run_blocks, seen_from)
