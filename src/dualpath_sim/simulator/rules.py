"""The rules of the simulated machine on plain numbers; both cores call them.

Numbers, lists or arrays in, numbers out: every function compiles with numba as it stands, so that a
rule of ``docs/simulator.md`` is written once.  ``plan.counts`` counts the blocks of a step, the
policy places requests.  The cores differ only in how they store events, queues and loads.

Layers come in kinds, one per window.  A step carries of each kind the blocks that ``plan.counts``
returns, as a plan has a step for each layer.  The hits of a prompt are in this order: before
``pe_first`` in the DE's buffer, which has cached them; the next ``pe_blocks`` at the PE; the rest
of ``hit_blocks`` at the DE again (``policy.read_side``).
"""

import math

from dualpath.core.blocks import first_seen_block, holding_blocks
from dualpath.plan.counts import load_blocks, reload_blocks, seen_blocks, send_hit_blocks
from dualpath_sim.simulator.result import NS_PER_S, FloatArray

UseTable = list[list[float]] | FloatArray
"""Bytes by window of time and node."""


def to_ns(seconds: float) -> int:
    """Round a duration to whole nanoseconds."""
    return int(seconds * NS_PER_S + 0.5)


def transfer_ns(transfer_bytes: float, bytes_per_s: float) -> int:
    """Return how long a link needs for so many bytes."""
    return int(transfer_bytes / bytes_per_s * NS_PER_S + 0.5)


def next_multiple_ns(now_ns: int, interval_ns: int) -> int:
    """Return the first multiple of ``interval_ns`` that is not before ``now_ns``."""
    return -(-now_ns // interval_ns) * interval_ns


def first_group(now_ns: int, interval_ns: int, groups: int) -> int:
    """Return which of the PE groups fetches first at this tick: another one at every tick."""
    return now_ns // interval_ns % groups


def node_of(
    engine: int,
    prefill_engines: int,
    prefill_nodes: int,
    prefill_node_engines: int,
    decode_node_engines: int,
) -> int:
    """Return the node of an engine: engines are numbered node by node, those of PEs first."""
    if engine < prefill_engines:
        return engine // prefill_node_engines
    return prefill_nodes + (engine - prefill_engines) // decode_node_engines


# Links.


def serve(
    now_ns: int, busy_until_ns: int, transfer_bytes: float, bytes_per_s: float
) -> tuple[int, int]:
    """Return when a link, busy until then, starts a transfer queued now, and when it is over."""
    start_ns = now_ns if now_ns > busy_until_ns else busy_until_ns
    return start_ns, start_ns + transfer_ns(transfer_bytes, bytes_per_s)


def last_window(start_ns: int, end_ns: int, window_ns: int) -> int:
    """Return the last window of time in which a transfer is under way."""
    return start_ns // window_ns if end_ns <= start_ns else (end_ns - 1) // window_ns


def count_use(
    use: UseTable,
    node: int,
    start_ns: int,
    end_ns: int,
    last: int,
    transfer_bytes: float,
    window_ns: int,
) -> None:
    """Spread a transfer evenly over the windows of its time, rows of ``use`` up to ``last``."""
    first = start_ns // window_ns
    if first == last:
        use[first][node] += transfer_bytes
        return
    for window in range(first, last + 1):
        begin = max(start_ns, window * window_ns)
        end = min(end_ns, (window + 1) * window_ns)
        use[window][node] += transfer_bytes * (end - begin) / (end_ns - start_ns)


def equal_served_bytes(elapsed_ns: int, bytes_per_s: float) -> float:
    """Return the bytes that an SNIC with equal sharing carried of all its reads."""
    return elapsed_ns * (bytes_per_s / 1e9)


def equal_wait_ns(left_bytes: float, reads: int, bytes_per_s: float) -> int:
    """Return when the read of which least is left, ``left_bytes``, is over: all go on till then."""
    return int(max(left_bytes, 0.0) * reads / (bytes_per_s / 1e9) + 0.5)


# Memories.

#: A node's intervals between uses of an agent's KV fade over so many uses (``policy.reuse``).
REUSE_WINDOW = 64


def room_blocks(free_bytes: float, block_bytes: float) -> int:
    """Return how many blocks the unused part of a buffer can cache."""
    return int(max(free_bytes, 0.0) / block_bytes)


def adopted_blocks(cached_blocks: int, first: int, count: int) -> int:
    """Return how many of ``count`` blocks from ``first`` on a request finds in the cache.

    The first ``cached_blocks`` of an agent's context are cached.
    """
    return min(max(cached_blocks - first, 0), count)


def extended_blocks(cached_blocks: int, first: int, end: int) -> int:
    """Return how many blocks are cached after a request has freed blocks [first, end).

    Only a run from an agent's first block on is of use to its next round, so that blocks behind a
    gap are not cached.
    """
    return cached_blocks if cached_blocks < first else max(cached_blocks, end)


def cached_after_eviction(cached_blocks: int, excess_blocks: int) -> int:
    """Return how many of an agent's blocks remain after the last ``excess_blocks`` are evicted."""
    return max(cached_blocks - excess_blocks, 0)


# Forward passes.


def chunk_limit_tokens(cap_left_tokens: int, hbm_left_tokens: int, cached_tokens: int) -> int:
    """Return how many tokens a request may add to a batch; HBM also holds its earlier tokens."""
    return min(cap_left_tokens, hbm_left_tokens - cached_tokens)


def pass_s(
    attention_max_s: float,
    mean_tokens: float,
    batch_s: float,
    feed_forward_token_s: float,
    exchange_token_s: float,
    interleaved: bool,
) -> float:
    """Return the computation time of a forward pass of a unit (see ``PrefillCosts``).

    ``attention_max_s`` is its slowest engine's attention, ``mean_tokens`` the tokens of its mean
    engine: experts are spread over the unit, so their work is.
    """
    compute_s = attention_max_s + feed_forward_token_s * mean_tokens
    exchange_s = exchange_token_s * mean_tokens
    if interleaved:
        return batch_s + max(compute_s, exchange_s)
    return batch_s + compute_s + exchange_s


def pass_end_ns(
    now_ns: int, compute_ns: int, moved_ns: int, layers: int, resident: bool, overlapped: bool
) -> int:
    """Return when a pass ends that begins now; its KV has been moved at ``moved_ns``.

    With all layers ``resident`` that is the loads alone, and they come before the computation.
    Layerwise, loads and sends flow meanwhile, but the first layer's loads and the last layer's
    sends have no computation to hide behind; unless the pass is ``overlapped``: it has begun
    during the previous pass, and the sends of that pass end behind its first layers.

    Deviation: no pass follows the last one, which could hide its last layer's sends.  They are
    taken for hidden as well.
    """
    if resident:
        return moved_ns + compute_ns
    exposed_ns = 0 if overlapped else (moved_ns - now_ns) // layers
    return max(now_ns + compute_ns, moved_ns) + exposed_ns


# Decoding in virtual token time.


def decode_context_tokens(prompt_tokens: int, generated_tokens: int) -> int:
    """Return the context a round decodes with, taken at half of its generation."""
    return prompt_tokens + generated_tokens // 2


def seen_tokens(context_tokens: int, window_tokens: int) -> int:
    """Return how many tokens of a context attention sees; a window of 0 sees all."""
    return min(context_tokens, window_tokens) if window_tokens else context_tokens


def decode_step_s(
    requests: int,
    window_context_tokens: int,
    context_tokens: int,
    engines: int,
    step_s: float,
    request_s: float,
    pair_s: float,
    index_pair_s: float,
) -> float:
    """Return the time of one decode step of a unit of ``engines`` (see ``DecodeCosts``)."""
    return (
        step_s
        + (request_s * requests + pair_s * window_context_tokens + index_pair_s * context_tokens)
        / engines
    )


def decode_step_ns(
    requests: int,
    window_context_tokens: int,
    context_tokens: int,
    engines: int,
    step_s: float,
    request_s: float,
    pair_s: float,
    index_pair_s: float,
) -> int:
    """Return ``decode_step_s`` in whole nanoseconds, at least one."""
    return max(
        to_ns(
            decode_step_s(
                requests,
                window_context_tokens,
                context_tokens,
                engines,
                step_s,
                request_s,
                pair_s,
                index_pair_s,
            )
        ),
        1,
    )


def joining_step(unit_tokens: float) -> int:
    """Return after which token of its unit a round joins: the end of the step under way."""
    return math.ceil(unit_tokens)


def steps_ns(tokens: float, step_ns: int) -> int:
    """Return how long a unit needs for so many more tokens, none if they are over."""
    return int(max(tokens, 0.0) * step_ns + 0.5)


# The bytes of steps.

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
    """Return the bytes that a side reads from storage: all but its first, cached ``found_blocks``.

    Blocks before ``whole_from`` are read without window layers.
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
    """Return the bytes loaded before the chunk that begins with ``first_block``.

    Those from the PE's buffer, of hits in the DE's, and of blocks that earlier chunks computed.
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
    """Return the bytes of a chunk sent to the DE: its blocks, and hits that the DE's layers see."""
    total_bytes = 0.0
    for kind in range(len(kinds)):
        seen = seen_from(kinds, kind, prompt_tokens - 1, block_tokens)
        hits = send_hit_blocks(pe_first, pe_blocks, seen, first_block, hit_blocks)
        total_bytes += (chunk_blocks + hits) * kinds[kind][BLOCK_BYTES]
    return total_bytes


def fill_bytes(kinds: LayerKinds, prompt_tokens: int, block_tokens: int) -> float:
    """Return the bytes of a prompt that enter the DE's HBM."""
    prompt_blocks, total_bytes = holding_blocks(prompt_tokens, block_tokens), 0.0
    for kind in range(len(kinds)):
        seen = seen_from(kinds, kind, prompt_tokens - 1, block_tokens)
        total_bytes += seen_blocks(0, prompt_blocks, seen) * kinds[kind][BLOCK_BYTES]
    return total_bytes


def fill_hit_bytes(
    kinds: LayerKinds,
    pe_first: int,
    pe_blocks: int,
    hit_blocks: int,
    prompt_tokens: int,
    block_tokens: int,
) -> float:
    """Return the bytes of hits in the DE's buffer that enter its HBM."""
    total_bytes = 0.0
    for kind in range(len(kinds)):
        seen = seen_from(kinds, kind, prompt_tokens - 1, block_tokens)
        at_both = seen_blocks(0, hit_blocks, seen)
        at_prefill = seen_blocks(pe_first, pe_blocks, seen)
        total_bytes += (at_both - at_prefill) * kinds[kind][BLOCK_BYTES]
    return total_bytes


def whole_at_prefill(
    kinds: LayerKinds,
    found_blocks: int,
    pe_first: int,
    pe_blocks: int,
    hit_tokens: int,
    block_tokens: int,
) -> int:
    """Return how many blocks of its run a PE may cache: full ones, present in all layers.

    Those are the first ``found_blocks``, which were cached, and blocks behind them that were read
    in all layers.
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
    """Return how many blocks from a prompt's first on a DE may cache, as ``whole_at_prefill``.

    With windows, hits that a PE sent lack the layers that the DE does not need.
    """
    end = prompt_tokens // block_tokens
    if pe_blocks > 0 and len(kinds) > 1:
        end = pe_first
    hit_blocks = holding_blocks(hit_tokens, block_tokens)
    if found_blocks >= whole_from(kinds, hit_blocks, block_tokens):
        return end
    return min(found_blocks, end)
