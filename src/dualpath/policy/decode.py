"""Two-level decode scheduling: groups by tokens, then engines by threshold Z (§6.1).

Phase 1 drains the global queue when any DE group fetches: each request joins the private queue of
the group with the fewest tokens.  Phase 2 serves the private queue of the fetching group from its
head: among the engines with enough HBM, low-token ones (tok + len ≤ Z) by fewest requests, else
high-token ones by fewest tokens; when no engine has the HBM the fetch ends.

Left open by the paper, decided here:

- A group's total counts its private queue as well; otherwise one drain would send everything to
  the same group.
- A group in which no engine could ever hold the request is passed over; if that is every group,
  the request stays in the global queue and delays no other.
- Blocks that an engine caches in DRAM weigh among groups and engines with room for the request
  (``policy.placement``).  Z needs no second check: an engine that weighs less than the usual one,
  cached tokens subtracted, is as far below Z as that one.
- A request whose KV is cached at an engine without room for it may wait there (below).
- Equal request counts go to the engine with fewer tokens, everything else equal to the lowest
  order (groups: the one that joined first).

*Waiting for the engine that caches the KV* (beyond the paper).  An engine that caches a prompt may
have no HBM for it, while another engine of the group has.  Placed there, the request reads from
storage what its first engine has in DRAM.  So it waits for that engine

- if the engine would be taken for what it caches, had it room: it weighs less than the other one;
- if the wait is shorter than the read is worth.  The engine's requests have it for a known time on
  average, in which it frees its tokens once: that is the wait for those that are short.  The read
  takes the reading queues of the PE and of the other engine, and the tokens that neither of them
  caches, at the rate behind α.  It counts twice, as a cached token does (``policy.placement``):
  requests behind it at the storage NICs wait for it as well;
- and not longer than that.  Then it is placed by the rules above.

It waits for one engine only, and its tokens count there as if it had been placed: no later request
takes that HBM.  So whatever holds the HBM that it waits for is older, which the order of the
scheduler relies on (``policy.scheduler``).  Later requests are placed on other engines meanwhile.
A request that has waited and finds no room then waits first in line again: requests behind it in
the queue stop waiting, so that their tokens do not count against it.
Requests wait for no engine while α is unknown or the driver gives no times.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from dualpath.core.cluster import Role
from dualpath.policy.accounts import (
    FREE_HBM,
    NODE,
    SEQ,
    TOK,
    Column,
    EngineAccount,
    GroupState,
    IntArray,
    Ledger,
    Table,
    Taking,
)
from dualpath.policy.events import (
    ALPHA_S,
    DE_HIGH_TOKEN,
    DE_KEPT,
    DE_LOW_TOKEN,
    DE_REASONS,
    DE_WAITED,
    UNLIMITED_TOKENS,
)
from dualpath.policy.placement import (
    DECODE_WORTH,
    KvWait,
    LiveRequest,
    WaitQueues,
    cached_table,
    weighed_tokens,
)


def choose_group(totals: Column, largest_hbm: Column, length: int) -> int:
    """Phase 1: return the row of the group with the fewest tokens, -1 if none can hold it.

    This and the other kernels compile with numba as they stand.
    """
    best = -1
    for row in range(len(totals)):
        if largest_hbm[row] >= length and (best < 0 or totals[row] < totals[best]):
            best = row
    return best


def choose_caching_group(
    totals: Column, largest_hbm: Column, length: int, cached: Column, usual: int
) -> int:
    """Phase 1: return the group for a request with cached tokens.

    ``cached`` are the most tokens that any engine of a group caches; ``usual`` is the group of
    ``choose_group``.
    """
    best, least = usual, weighed_tokens(totals[usual], cached[usual], DECODE_WORTH)
    for row in range(len(totals)):
        weighed = weighed_tokens(totals[row], cached[row], DECODE_WORTH)
        if largest_hbm[row] >= length and weighed < least:
            best, least = row, weighed
    return best


def unfragmented_hbm(free_hbm: Column) -> int:
    """Phase 2: return what a group could hold if its free HBM were in one piece."""
    tokens = 0
    for row in range(len(free_hbm)):
        tokens += max(free_hbm[row], 0)
    return tokens


def upper_bound_set(free_hbm: Column, lengths: Iterable[int]) -> list[int]:
    """Phase 2: return the lengths at the queue's head that fit if HBM had no fragmentation (R)."""
    left = unfragmented_hbm(free_hbm)
    fitting: list[int] = []
    for length in lengths:
        left -= length
        if left < 0:
            break
        fitting.append(length)
    return fitting


def assign_decode(
    tok: Column,
    seq: Column,
    free_hbm: Column,
    lengths: Column,
    cached_rows: Column,
    cached: Table,
    threshold_factor: float,
) -> tuple[IntArray, IntArray]:
    """Phase 2: return the rows given to the first requests of R, and why (in ``DE_REASONS``).

    ``tok``, ``seq`` and ``free_hbm`` have one row per engine of the group in order, ``lengths``
    holds R, ``cached_rows`` and ``cached`` are as for ``assign_prefill``.  The result is as long as
    the number of requests placed.
    """
    tokens, requests, free = tok.copy(), seq.copy(), free_hbm.copy()
    threshold = threshold_factor * (sum(lengths) + sum(tokens)) / len(tokens)
    rows = np.empty(len(lengths), np.int64)
    why = np.empty(len(lengths), np.int64)
    for position in range(len(lengths)):
        length = lengths[position]
        low = high = -1
        for row in range(len(tokens)):
            if free[row] < length:
                continue
            if tokens[row] + length <= threshold:
                fewer = low < 0 or requests[row] < requests[low]
                if fewer or (requests[row] == requests[low] and tokens[row] < tokens[low]):
                    low = row
            elif high < 0 or tokens[row] < tokens[high]:
                high = row
        row = low if low >= 0 else high
        if row < 0:
            return rows[:position], why[:position]
        why[position] = DE_LOW_TOKEN if low >= 0 else DE_HIGH_TOKEN
        if cached_rows[position] >= 0:
            of_engine, usual = cached[cached_rows[position]], row
            least = weighed_tokens(tokens[row], of_engine[row], DECODE_WORTH)
            for other in range(len(tokens)):
                if free[other] < length:
                    continue
                weighed = weighed_tokens(tokens[other], of_engine[other], DECODE_WORTH)
                if of_engine[other] > of_engine[usual] and weighed < least:
                    row, least = other, weighed
                    why[position] = DE_KEPT
        rows[position] = row
        tokens[row] += length
        requests[row] += 1
        free[row] -= length
    return rows, why


class TwoPhaseDecodePlacer:
    """The global queue and the private queue of every DE group.

    With ``split_reads`` a hit is read at both of a request's engines.
    """

    def __init__(
        self, ledger: Ledger, threshold_factor: float, alpha_tokens: int, *, split_reads: bool
    ) -> None:
        self._ledger = ledger
        self._threshold_factor = threshold_factor
        self._split_reads = split_reads
        self._queues = WaitQueues()
        self._private_tokens: dict[str, int] = {}
        #: By group, the requests that wait for the DE that caches their KV, the oldest first.
        self._waits: dict[str, dict[str, LiveRequest]] = {}
        self.set_thresholds(alpha_tokens, UNLIMITED_TOKENS)

    def set_thresholds(self, alpha_tokens: int, beta_tokens: int) -> None:
        """Use another α from now on; β does not count here."""
        known = alpha_tokens < UNLIMITED_TOKENS
        #: Of one storage NIC; 0 if it is not known.
        self._read_tokens_per_s = alpha_tokens / ALPHA_S if known else 0.0

    def add(self, live: LiveRequest) -> None:
        """Append a request to the global queue."""
        self._queues.add(live)

    def discard(self, request_id: str) -> None:
        """Remove a waiting request; does nothing if it does not wait here."""
        self._take(request_id)

    def waiting(self) -> int:
        """Return how many requests wait, private queues included."""
        return len(self._queues)

    def requeue(self, requests: Iterable[LiveRequest] = ()) -> None:
        """Move all requests back to the global queue in order of number."""
        self._queues.requeue(requests)
        self._private_tokens.clear()
        self._waits.clear()
        for live in self._queues.common.values():
            live.wait = None

    def may_place(self, group: str) -> bool:
        """Whether a request waits for any group or for this one."""
        return bool(self._queues.common) or bool(self._queues.private(group))

    def waits_for_kv(self, group: str) -> bool:
        """Whether a request of a group waits for the DE that caches its KV.

        The reading queues of all engines decide how long it does.
        """
        return bool(self._waits.get(group))

    def fetch(self, group: str, now_s: float) -> list[LiveRequest]:
        """Run both phases for one group."""
        if self._queues.common:
            self._drain_global_queue()
        state, placed = self._ledger.groups[group], []
        while True:
            served, again = self._serve_private_queue(state, now_s)
            placed += served
            if not again:
                return placed

    def _drain_global_queue(self) -> None:
        groups = self._ledger.groups_of(Role.DECODE)
        private = self._private_tokens
        totals = [group.taking_tokens() + private.get(group.name, 0) for group in groups]
        largest = [group.largest_taking_hbm_tokens for group in groups]
        for live in list(self._queues.common.values()):
            row = choose_group(totals, largest, live.decode_tokens)
            if row < 0:
                continue
            if live.cached_tokens:
                cached = self._most_cached(live, groups)
                row = choose_caching_group(totals, largest, live.decode_tokens, cached, row)
            totals[row] += live.decode_tokens
            name = groups[row].name
            private[name] = private.get(name, 0) + live.decode_tokens
            self._queues.deal(live, name)

    def _serve_private_queue(
        self, group: GroupState, now_s: float
    ) -> tuple[list[LiveRequest], bool]:
        """Run phase 2 up to the first request that begins to wait, or finds no room.

        Also return whether to run it again: one began to wait, or others have stopped.
        """
        taking, waiting = self._reserve(group, now_s)
        queue = self._queues.private(group.name)
        if waiting:
            queue = [live for live in queue if live.request_id not in waiting]
        lengths = upper_bound_set(taking.columns[FREE_HBM], (live.decode_tokens for live in queue))
        if not lengths:
            return [], self._stop_waiting_behind(group.name, next(iter(queue), None))
        bound = list(islice(queue, len(lengths)))
        tokens, free = taking.columns[TOK].copy(), taking.columns[FREE_HBM].copy()
        rows, why = assign_decode(
            taking.columns[TOK],
            taking.columns[SEQ],
            taking.columns[FREE_HBM],
            lengths,
            *cached_table(bound, taking),
            self._threshold_factor,
        )
        placed: list[LiveRequest] = []
        for live, row, reason in zip(bound, rows.tolist(), why.tolist(), strict=False):
            wait = self._worth_waiting(live, taking.engines, tokens, free, row, now_s)
            if wait is not None:
                live.wait = wait
                self._waits.setdefault(group.name, {})[live.request_id] = live
                return placed, True
            tokens[row] += live.decode_tokens
            free[row] -= live.decode_tokens
            engine_id = taking.engines[row].spec.engine_id
            waited = live.wait is not None and live.wait.engine_id == engine_id
            self._take(live.request_id)
            self._ledger.hold(engine_id, live.request_id, live.decode_tokens)
            live.place(Role.DECODE, engine_id, DE_REASONS[DE_WAITED if waited else reason])
            live.decode_since_s = now_s
            placed.append(live)
        left = next((live for live in queue if Role.DECODE not in live.engines), None)
        return placed, self._stop_waiting_behind(group.name, left)

    def _stop_waiting_behind(self, group: str, first: LiveRequest | None) -> bool:
        """Let requests wait no longer that are behind one without room; whether there are any."""
        waits = self._waits.get(group)
        if first is None or not waits:
            return False
        queue = list(self._queues.private(group))
        behind = [live for live in queue[queue.index(first) :] if live.request_id in waits]
        for live in behind:
            del waits[live.request_id]
            live.wait = None
        return bool(behind)

    def _reserve(self, group: GroupState, now_s: float) -> tuple[Taking, dict[str, LiveRequest]]:
        """Return a group's accounts with the requests that still wait as if placed, and these."""
        taking, waits = group.taking(), self._waits.get(group.name)
        if not waits:
            return taking, {}
        columns = [column.copy() for column in taking.columns]
        left = taking.columns[FREE_HBM].copy()
        rows = {engine.spec.engine_id: row for row, engine in enumerate(taking.engines)}
        waiting = {}
        for request_id, live in list(waits.items()):
            assert live.wait is not None, "a request that waits knows for which engine"
            row = rows.get(live.wait.engine_id)
            if row is None or now_s - live.wait.since_s > live.wait.limit_s:
                del waits[request_id]
                continue
            left[row] -= live.decode_tokens
            if left[row] < 0:
                waiting[request_id] = live
                columns[TOK][row] += live.decode_tokens
                columns[SEQ][row] += 1
                columns[FREE_HBM][row] -= live.decode_tokens
        return Taking(taking.engines, columns), waiting

    def _worth_waiting(
        self,
        live: LiveRequest,
        engines: Sequence[EngineAccount],
        tokens: Sequence[int],
        free: Sequence[int],
        usual: int,
        now_s: float,
    ) -> KvWait | None:
        """Return the wait of a request that can be placed on row ``usual``, None for no wait.

        ``tokens`` and ``free`` are those of ``engines``, with what was placed in this fetch.
        """
        if not live.cached_tokens or live.wait is not None or not self._read_tokens_per_s:
            return None
        length = live.decode_tokens
        cached = [live.cached_tokens.get(engine.spec.engine_id, 0) for engine in engines]
        best, least = usual, weighed_tokens(tokens[usual], cached[usual], DECODE_WORTH)
        for row, engine in enumerate(engines):
            if cached[row] <= cached[usual] or not free[row] < length <= engine.spec.hbm_tokens:
                continue
            weighed = weighed_tokens(tokens[row], cached[row], DECODE_WORTH)
            if weighed < least:
                best, least = row, weighed
        if best == usual:
            return None
        engine, taken = engines[best], engines[best].account(TOK)
        if not taken or not engine.mean_stay_s:
            return None
        wait_s = engine.mean_stay_s * (length - free[best]) / taken
        read_s = self._read_s(live, engines[usual], cached[best], cached[usual])
        limit_s = read_s * DECODE_WORTH
        return KvWait(engine.spec.engine_id, now_s, limit_s) if wait_s < limit_s else None

    def _read_s(
        self, live: LiveRequest, decode: EngineAccount, hit_tokens: int, cached_tokens: int
    ) -> float:
        """Return how long a DE that caches less of a hit would wait for the rest from storage.

        Its PE is the request's if that is known, else the one with the shortest reading queue.
        """
        ledger = self._ledger
        known = live.engines.get(Role.PREFILL)
        prefill = [ledger.engines[known]] if known else ledger.ring(Role.PREFILL)
        if not prefill:
            return 0.0
        at_prefill = max(live.cached_tokens.get(one.spec.engine_id, 0) for one in prefill)
        unread = hit_tokens - max(cached_tokens, at_prefill)
        if unread <= 0:
            return 0.0
        pe_queue = min(ledger.node_read_q[one.account(NODE)] for one in prefill)
        de_queue = ledger.node_read_q[decode.account(NODE)]
        if self._split_reads:
            return (pe_queue + de_queue + unread) / (2 * self._read_tokens_per_s)
        return (min(pe_queue, de_queue) + unread) / self._read_tokens_per_s

    def _most_cached(self, live: LiveRequest, groups: Sequence[GroupState]) -> list[int]:
        """Return the most tokens that an engine of each group caches and gets requests."""
        most = dict.fromkeys((group.name for group in groups), 0)
        for engine_id, tokens in live.cached_tokens.items():
            engine = self._ledger.engines.get(engine_id)
            if engine is not None and not engine.paused and engine.spec.group in most:
                most[engine.spec.group] = max(most[engine.spec.group], tokens)
        return list(most.values())

    def _take(self, request_id: str) -> None:
        queue = self._queues.queue_of(request_id)
        live = self._queues.take(request_id)
        if queue is not None:
            self._waits.get(queue, {}).pop(request_id, None)
        if queue is not None and live is not None:
            self._private_tokens[queue] -= live.decode_tokens
