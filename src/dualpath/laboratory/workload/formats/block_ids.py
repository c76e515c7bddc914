"""Block ids of requests in traces, and the number of tokens of a block."""

from collections.abc import Iterable, Iterator

from dualpath.core.errors import TraceError
from dualpath.laboratory.workload.formats.lines import MAX_TURN_TOKENS, Document

Runs = tuple[tuple[int, int], ...]
"""Block ids in order, as inclusive (first, last) runs."""

MAX_BLOCK_ID = 1 << 40
#: The block size of Mooncake's own traces, and aiperf's default.
USUAL_BLOCK_TOKENS = 512


def id_runs(document: Document, where: str, listed: Iterable[int | tuple[int, int]]) -> Runs:
    """Return ids and inclusive runs of ids as runs; raises ``TraceError`` for invalid ones."""
    runs: list[tuple[int, int]] = []
    for item in listed:
        first, last = (item, item) if isinstance(item, int) else item
        if not 0 <= first <= last < MAX_BLOCK_ID or last - first >= MAX_TURN_TOKENS:
            raise document.error(f"{where}: [{first}, {last}] is not a run of block ids")
        if runs and first == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return tuple(runs)


def each_id(runs: Runs) -> Iterator[int]:
    """Yield all ids."""
    for first, last in runs:
        yield from range(first, last + 1)


def count_ids(runs: Runs) -> int:
    """Return the number of ids."""
    return sum(last - first + 1 for first, last in runs)


def full_blocks(
    document: Document, where: str, runs: Runs, prompt_tokens: int, block_tokens: int
) -> Runs:
    """Return only the ids of full blocks.

    Most exporters also list an id for the partial last block.  That id changes when the next turn
    fills the block, so it can never be hit.  Raises ``TraceError`` for more ids than that.
    """
    blocks = count_ids(runs)
    if blocks * block_tokens >= prompt_tokens + block_tokens:
        raise document.error(
            f"{where}: {blocks} blocks of {block_tokens} tokens exceed its prompt of "
            f"{prompt_tokens} tokens"
        )
    full: list[tuple[int, int]] = []
    left = prompt_tokens // block_tokens
    for first, last in runs:
        if left <= 0:
            break
        full.append((first, min(last, first + left - 1)))
        left -= last - first + 1
    return tuple(full)


def block_size(place: str, counted: Iterable[tuple[int, int]]) -> int:
    """Return the tokens of a block, derived from each request's (prompt tokens, number of ids).

    Mooncake's format does not contain it.  With an id for the partial last block, n ids stand for
    more than n - 1 and at most n blocks of tokens; without one, for at least n and less than n + 1.
    The result is 512, the size in Mooncake's own traces, if it fits, else the smallest power of two
    that fits.  Raises ``TraceError`` if no size fits all requests.
    """
    some = [(tokens, ids) for tokens, ids in counted if ids]
    for partial in (1, 0):
        least, below = 1, MAX_TURN_TOKENS
        for tokens, ids in some:
            # ids - partial < tokens / size ≤ ids, or ids ≤ tokens / size < ids + 1.
            low = -(-tokens // ids) if partial else tokens // (ids + 1) + 1
            high = -(-tokens // (ids - 1)) if partial and ids > 1 else tokens // ids + 1
            least = max(least, low)
            below = min(below, MAX_TURN_TOKENS if partial and ids == 1 else high)
        if least < below:
            power = 1 << (least - 1).bit_length()
            fits = least <= USUAL_BLOCK_TOKENS < below
            return USUAL_BLOCK_TOKENS if fits else power if power < below else least
    raise TraceError(
        f"{place}: no block size fits the prompt lengths and numbers of block ids of all requests; "
        "list an id for every block of a prompt, with blocks of one size"
    )
