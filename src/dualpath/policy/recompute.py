"""Which part of a hit is computed again, because that is faster (beyond the paper).

A request is prefilled when its hits are there and its PE is free.  If r tokens are read per second
behind q queued ones, c computed, and the PE is busy for w seconds, then loading x of u unread hit
tokens ends the prefill max(w, (q + x) / r) + (u - x) / c from now, where nothing is waited for at
x = 0.  That is linear between its corners, so that the best x is one of three: all; none; or what
is read anyway while the PE is busy, x = w r - q.  The head is loaded and the tail computed, since
what is computed attends to all before it.

- r is the speed behind α, of either node; c is that behind β on *appended* tokens, at the turn that
  β is stated for, the typical one or the longest that fits the model's context: a token computed
  counts as ``computed_weight`` prompt tokens.  Longer appends and shorter contexts are computed
  faster than that, so that too much is loaded rather than computed.
- How long the PE is busy follows from what it computes of the requests before, with that weight.
  What they load makes nobody wait there: of tok_e, their prompts, most are hits.
- What is computed again counts with that weight to the PE's load; else one long reading queue would
  send everything to PEs at once.
- Only DualPath and Split compute again.  Basic, Layerwise and Round robin are what they are
  compared with, and Oracle reads nothing.  Where α or β is unlimited, or 0, it says nothing of a
  rate: everything is loaded.
"""

from dualpath.policy.events import (
    ALPHA_S,
    BETA_S,
    UNLIMITED_TOKENS,
)
from dualpath.policy.read_side import BOTH_SIDES, SHORTER_QUEUE


def weight_tokens(recomputed_tokens: int, computed_weight: float) -> int:
    """Return how many prompt tokens' worth of work hit tokens are that are computed again."""
    return int(recomputed_tokens * computed_weight)


def more_weight(before_tokens: int, after_tokens: int, computed_weight: float) -> int:
    """Return how much more a request counts for at its PE that computes more of its hit again."""
    before = weight_tokens(before_tokens, computed_weight)
    return weight_tokens(after_tokens, computed_weight) - before


def recompute_tokens(
    rule: int,
    unread_tokens: int,
    computing_tokens: int,
    pe_queue: int,
    de_queue: int,
    alpha_tokens: int,
    beta_tokens: int,
    computed_weight: float,
    limit_s: float,
    block_tokens: int,
) -> int:
    """Return how many tokens at the end of a hit are computed again, 0 where loading is as fast.

    ``unread_tokens`` of the hit lie in neither engine's DRAM, ``computing_tokens`` are those that
    its PE has to compute of requests before it, ``*_queue`` are the reading queues of both nodes.
    Computing them takes ``limit_s`` at most; 0 computes nothing.  Compiles with numba as it stands.
    """
    least, most = min(alpha_tokens, beta_tokens), max(alpha_tokens, beta_tokens)
    unknown = least <= 0 or most >= UNLIMITED_TOKENS
    if limit_s <= 0 or unknown or (rule != SHORTER_QUEUE and rule != BOTH_SIDES):
        return 0
    prompt_per_s, read_per_s = beta_tokens / BETA_S, alpha_tokens / ALPHA_S
    queue = min(pe_queue, de_queue)
    if rule == BOTH_SIDES:
        queue, read_per_s = pe_queue + de_queue, 2 * read_per_s
    wait_s = computing_tokens * computed_weight / prompt_per_s
    meanwhile = min(max(int(min(wait_s * read_per_s, 1e15)) - queue, 0), unread_tokens)
    loaded, end_s = unread_tokens, max(wait_s, (queue + unread_tokens) / read_per_s)
    for tokens in (meanwhile // block_tokens * block_tokens, 0):
        compute_s = weight_tokens(unread_tokens - tokens, computed_weight) / prompt_per_s
        load_s = (queue + tokens) / read_per_s if tokens else 0.0
        if compute_s <= limit_s and max(wait_s, load_s) + compute_s < end_s:
            loaded, end_s = tokens, max(wait_s, load_s) + compute_s
    return unread_tokens - loaded
