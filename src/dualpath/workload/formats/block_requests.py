"""Builds sessions of block ids, with sub-agents, from traces that list single requests.

A *thread* is one conversation: requests that each continue the previous one.  It may be a sub-agent
that starts after a request of another thread.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import pairwise
from typing import NamedTuple, TypeVar

import msgspec

from dualpath.core.errors import TraceError
from dualpath.workload.conversation.block_session import BlockSession, BlockTurn, SubAgent
from dualpath.workload.formats.lines import MAX_TURN_TOKENS, Document, OnBroken, report

# --------------------------------------------------------------------------------------- block ids
# Block ids of requests in traces, and the number of tokens of a block.

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


def too_many(blocks: int, prompt_tokens: int, block_tokens: int) -> str:
    """Return what is wrong with so many ids for a prompt, empty if nothing is."""
    if blocks * block_tokens < prompt_tokens + block_tokens:
        return ""
    return f"{blocks} blocks of {block_tokens} tokens exceed its prompt of {prompt_tokens} tokens"


def full_blocks(
    document: Document, where: str, runs: Runs, prompt_tokens: int, block_tokens: int
) -> Runs:
    """Return only the ids of full blocks.

    Most exporters also list an id for the partial last block.  That id changes when the next turn
    fills the block, so it can never be hit.  Raises ``TraceError`` for more ids than that.
    """
    if fault := too_many(count_ids(runs), prompt_tokens, block_tokens):
        raise document.error(f"{where}: {fault}")
    full: list[tuple[int, int]] = []
    left = prompt_tokens // block_tokens
    for first, last in runs:
        if left <= 0:
            break
        full.append((first, min(last, first + left - 1)))
        left -= last - first + 1
    return tuple(full)


_T = TypeVar("_T")


def consistent(
    items: Sequence[_T],
    facts: Callable[[_T], tuple[Document, int, Sequence[int]]],
    stated_block_tokens: Set[int | None],
    on_broken: OnBroken | None,
) -> tuple[int, list[_T]]:
    """Return the tokens of a block, and the requests with ids and a length that agree with it.

    ``facts`` returns a request's document, prompt tokens and block ids.  The size of blocks is the
    one that the requests state, else it is derived from them (``block_size``).  Requests that
    contradict it are reported to ``on_broken``, or the first one raises ``TraceError``.
    """
    listed = [facts(item) for item in items]
    stated = stated_block_tokens - {None}
    # A request may state fewer ids than blocks, but not where all others have one per block.
    derived = None
    block_tokens = next(iter(stated), None) if len(stated) == 1 else None
    if block_tokens is None:
        place = listed[0][0].source if listed else ""
        derived = block_size(place, [(tokens, len(ids)) for _, tokens, ids in listed])
        block_tokens = derived.tokens
    found: list[_T] = []
    for item, (document, tokens, ids) in zip(items, listed, strict=True):
        if derived is None or derived.fits(tokens, len(ids)):
            fault = too_many(len(ids), tokens, block_tokens)
        else:
            fault = (
                f"hash_ids has {len(ids)} ids for a prompt of {tokens} tokens, while blocks have "
                f"{block_tokens} tokens by the other lines"
            )
        if fault:
            report(document.error(fault), on_broken)
        else:
            found.append(item)
    return block_tokens, found


class BlockSize(NamedTuple):
    """The tokens of a block; ``partial``: the partial last block of a prompt has an id as well."""

    tokens: int
    partial: bool

    def fits(self, prompt_tokens: int, ids: int) -> bool:
        """Return whether a prompt has this number of ids; a prompt without ids says nothing."""
        low, high = _sizes(prompt_tokens, ids, self.partial) if ids else (1, MAX_TURN_TOKENS)
        return low <= self.tokens <= high


def _sizes(prompt_tokens: int, ids: int, partial: bool) -> tuple[int, int]:
    """Return the least and the largest size of blocks with which a prompt has so many ids."""
    if partial:
        # ids - 1 < tokens / size ≤ ids
        high = (prompt_tokens - 1) // (ids - 1) if ids > 1 else MAX_TURN_TOKENS
        return -(-prompt_tokens // ids), high
    # ids ≤ tokens / size < ids + 1
    return prompt_tokens // (ids + 1) + 1, prompt_tokens // ids


def block_size(place: str, counted: Sequence[tuple[int, int]]) -> BlockSize:
    """Return the size of blocks, derived from each request's (prompt tokens, number of ids).

    Mooncake's format does not contain it.  With an id for the partial last block, n ids stand for
    more than n - 1 and at most n blocks of tokens; without one, for at least n and less than n + 1.
    Of the sizes that fit most requests the result is 512, the size in Mooncake's own traces, else
    the smallest power of two, else the smallest.  Raises ``TraceError`` if none fits more than
    half of the requests.
    """
    some = [(tokens, ids) for tokens, ids in counted if ids]
    if not some:
        return BlockSize(USUAL_BLOCK_TOKENS, partial=True)
    best, fitting = BlockSize(USUAL_BLOCK_TOKENS, partial=True), 0
    for partial in (True, False):
        fits, least, most = _most_fitting([_sizes(*one, partial) for one in some])
        if fits > fitting:
            power = 1 << (least - 1).bit_length()
            size = power if power <= most else least
            usual = least <= USUAL_BLOCK_TOKENS <= most
            best, fitting = BlockSize(USUAL_BLOCK_TOKENS if usual else size, partial), fits
    if 2 * fitting <= len(some):
        raise TraceError(
            f"{place}: no block size fits the prompt lengths and numbers of block ids of most "
            "requests; list an id for every block of a prompt, with blocks of one size"
        )
    return best


def _most_fitting(sizes: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Return how many intervals of sizes have a common part at most, and its two ends.

    Of several such parts it is the one that contains 512, else the first.
    """
    # +1 where an interval begins, -1 behind its end.
    changes: Counter[int] = Counter()
    for low, high in sizes:
        if low <= high:
            changes[low] += 1
            changes[high + 1] -= 1
    places = sorted(changes)
    best, fits = (0, 1, 1), 0
    for place, after in pairwise([*places, MAX_TURN_TOKENS + 1]):
        fits += changes[place]
        usual = place <= USUAL_BLOCK_TOKENS < after
        if fits > best[0] or (fits == best[0] and usual):
            best = fits, place, after - 1
    return best


class ListedRequest(NamedTuple):
    """One request of a thread; ``hash_ids`` may be any integers."""

    document: Document
    prompt_tokens: int
    generated_tokens: int
    hash_ids: Sequence[int]
    delay_s: float
    start_s: float | None


class Thread(msgspec.Struct):
    """Requests in order; ``parent`` is the index of another thread, earlier in the list."""

    name: str
    requests: list[ListedRequest] = []
    parent: int | None = None
    after_turn: int = -1


def thread_sessions(threads: Sequence[Thread], block_tokens: int) -> Iterator[BlockSession]:
    """Yield the sessions of threads that share one space of block ids.

    Their requests are ``consistent`` with the size of blocks.
    """
    requests = [request for thread in threads for request in thread.requests]
    if not requests:
        return
    place = requests[0].document.source
    small = _small_ids(requests)
    turns = [
        tuple(_turn(request, block_tokens, small) for request in thread.requests)
        for thread in threads
    ]
    children: dict[int, list[int]] = {}
    for number, thread in enumerate(threads):
        if thread.parent is not None:
            children.setdefault(thread.parent, []).append(number)
    roots = [number for number, thread in enumerate(threads) if thread.parent is None]

    def session(number: int) -> BlockSession:
        below = tuple(
            SubAgent(threads[child].after_turn, session(child))
            for child in children.get(number, ())
        )
        return BlockSession(threads[number].name, block_tokens, turns[number], below, place)

    yield from _with_shared_ids([session(number) for number in roots])


def _small_ids(requests: Iterable[ListedRequest]) -> dict[int, int] | None:
    """Number ids by appearance if some are hashes, which are too large or negative; else None."""
    listed = {block_id: None for request in requests for block_id in request.hash_ids}
    if all(0 <= block_id < MAX_BLOCK_ID for block_id in listed):
        return None
    return {block_id: number for number, block_id in enumerate(listed)}


def _turn(request: ListedRequest, block_tokens: int, small: dict[int, int] | None) -> BlockTurn:
    ids = request.hash_ids if small is None else [small[one] for one in request.hash_ids]
    runs = id_runs(request.document, "hash_ids", ids)
    return BlockTurn(
        prompt_tokens=request.prompt_tokens,
        generate_tokens=max(request.generated_tokens, 1),
        id_ranges=full_blocks(
            request.document, "hash_ids", runs, request.prompt_tokens, block_tokens
        ),
        delay_s=request.delay_s,
        start_s=request.start_s,
    )


def _with_shared_ids(sessions: Sequence[BlockSession]) -> Iterator[BlockSession]:
    """Yield the sessions with ``shared_ids`` set to the ids that others also have."""
    own = [frozenset(_ids(session)) for session in sessions]
    holders = Counter(block_id for ids in own for block_id in ids)
    shared = frozenset(block_id for block_id, count in holders.items() if count > 1)
    for session, ids in zip(sessions, own, strict=True):
        yield msgspec.structs.replace(session, shared_ids=ids & shared)


def _ids(session: BlockSession) -> Iterator[int]:
    for turn in session.block_turns:
        yield from each_id(turn.id_ranges)
    for sub_agent in session.sub_agents:
        yield from _ids(sub_agent.session)


class TimedTurn(NamedTuple):
    """A turn of a session, or of one of its sub-agents, as a single request.

    ``turn_id`` numbers all turns of a trace.  ``before`` is the ``turn_id`` of the previous turn in
    the same conversation or, for the first turn of a sub-agent, of its parent's turn; None for
    none.  ``start_s`` is the time at which it was sent or, if unknown, the earliest time that its
    delays allow.
    """

    turn_id: int
    before: int | None
    conversation_id: str
    place: int
    turn: BlockTurn
    start_s: float


def timed_turns(sessions: Iterable[BlockSession]) -> Iterator[TimedTurn]:
    """Yield all turns: those of a conversation in order, followed by those of its sub-agents."""
    number = 0
    for session in sessions:
        for timed in _timed(session, None, 0.0, number):
            yield timed
            number = timed.turn_id + 1


def _timed(
    session: BlockSession, before: int | None, now_s: float, number: int
) -> Iterator[TimedTurn]:
    own: list[TimedTurn] = []
    for index, turn in enumerate(session.block_turns):
        now_s = now_s + turn.delay_s if turn.start_s is None else turn.start_s
        own.append(TimedTurn(number, before, session.session_id, index, turn, now_s))
        before, number = number, number + 1
    yield from own
    for sub_agent in session.sub_agents:
        after = own[sub_agent.after_turn] if sub_agent.after_turn >= 0 else None
        parent_id = None if after is None else after.turn_id
        begun_s = own[0].start_s if after is None else after.start_s
        for timed in _timed(sub_agent.session, parent_id, begun_s, number):
            yield timed
            number = timed.turn_id + 1
