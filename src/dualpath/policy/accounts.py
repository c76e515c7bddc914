"""The ledger: what every engine and node has to do, by report and by assignment since (§6.1).

The load of an engine is its last report plus what was placed on it and is not in that report.  A
request is *held* from its placement until its other engine is known, *assigned* from then on: only
then is the engine notified.  An assigned request is *uncounted* until a report of the engine counts
it in.

*HBM of a DE* is booked for a request's whole length from its assignment on: by the ledger until a
report counts the request, by the report (``Load.unallocated_hbm_tokens``) until the engine has
allocated HBM for it.  From then on the engine's own free HBM shows it, until the request ends.

Accounts are stored per group as columns of plain integers, one list or array per column, rows in
``EngineSpec.order``, so that the kernels of ``prefill`` and ``decode`` read them as they are and
the first minimum is the one of lowest order.  Here they are lists, which Python reads faster than
arrays; the simulator's compiled core keeps one table of arrays, and compiles the functions on
accounts with numba as they stand.  ``node_reads`` has one entry per node, the reading queue of its
storage NIC.
"""

from bisect import bisect, insort
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.core.control import Load
from dualpath.core.errors import ConfigError, EngineLostError, IncompatibleError
from dualpath.policy.events import EngineReport, EngineSpec

IntArray = NDArray[np.int64]
Column = list[int] | IntArray
"""What kernels read by index: lists in Python, arrays where they are compiled."""
Table = list[list[int]] | NDArray[np.signedinteger]
"""The same in two dimensions, by row and then by column."""
Accounts = list[list[int]] | IntArray

#: Columns.  Unfinished tokens and requests (tok_e and seq_e), remaining HBM, which is negative when
#: a report came in below what was assigned since, and the engine's part of its node's reading
#: queue; of these what is held, and what is assigned and uncounted; the engine's node; the tokens
#: that it has to compute: at a PE those of its assigned requests that are no hits and not computed
#: yet, at a DE those of the appends that it computes itself.  No report knows them.
(
    TOK,
    SEQ,
    FREE_HBM,
    READS,
    HELD_TOKENS,
    HELD_REQUESTS,
    UNCOUNTED_TOKENS,
    UNCOUNTED_REQUESTS,
    UNCOUNTED_READS,
    NODE,
    COMPUTING,
) = range(11)
ACCOUNT_COLUMNS = 11


def new_account(hbm_tokens: int, node: int) -> list[int]:
    """Return the row of an engine without work."""
    row = [0] * ACCOUNT_COLUMNS
    row[FREE_HBM], row[NODE] = hbm_tokens, node
    return row


def decode_tokens(prompt_tokens: int, max_new_tokens: int, reserve_tokens: int) -> int:
    """Return len_r, what a request counts for at its DE: its prompt and what it may generate.

    Of the latter ``reserve_tokens`` at most; at its PE it counts for its prompt.
    """
    return prompt_tokens + min(max_new_tokens, reserve_tokens)


def charge(accounts: Accounts, row: int, tokens: int, requests: int) -> None:
    """Count so much more (or, below 0, less) to an engine's load."""
    accounts[TOK][row] += tokens
    accounts[SEQ][row] += requests
    accounts[FREE_HBM][row] -= tokens


def hold(accounts: Accounts, row: int, tokens: int) -> None:
    """Charge a request to an engine that does not know of it yet."""
    accounts[HELD_TOKENS][row] += tokens
    accounts[HELD_REQUESTS][row] += 1
    charge(accounts, row, tokens, 1)


def assign(accounts: Accounts, row: int, tokens: int, more_tokens: int) -> None:
    """Turn a held charge into an assigned one.

    The request turned out to count for ``more_tokens`` more than it was held for.
    """
    charge(accounts, row, more_tokens, 0)
    accounts[HELD_TOKENS][row] -= tokens
    accounts[HELD_REQUESTS][row] -= 1
    accounts[UNCOUNTED_TOKENS][row] += tokens + more_tokens
    accounts[UNCOUNTED_REQUESTS][row] += 1


def strike_held(accounts: Accounts, row: int, tokens: int) -> None:
    """Strike a request that was placed only."""
    accounts[HELD_TOKENS][row] -= tokens
    accounts[HELD_REQUESTS][row] -= 1
    charge(accounts, row, -tokens, -1)


def strike(accounts: Accounts, row: int, tokens: int) -> None:
    """Strike an assigned request that is uncounted."""
    accounts[UNCOUNTED_TOKENS][row] -= tokens
    accounts[UNCOUNTED_REQUESTS][row] -= 1
    charge(accounts, row, -tokens, -1)


def charge_computing(accounts: Accounts, row: int, tokens: int) -> None:
    """Charge so many tokens (or, below 0, strike them) that an engine has to compute."""
    accounts[COMPUTING][row] += tokens


def charge_read(
    accounts: Accounts, node_reads: Column, node_totals: Column, row: int, tokens: int
) -> None:
    """Charge a read to an engine and its node; ``node_totals`` is all that a node was given."""
    node = accounts[NODE][row]
    accounts[UNCOUNTED_READS][row] += tokens
    accounts[READS][row] += tokens
    node_reads[node] += tokens
    node_totals[node] += tokens


def change(
    accounts: Accounts,
    node_reads: Column,
    node_totals: Column,
    row: int,
    tokens: int,
    read_tokens: int,
    uncounted: bool,
) -> None:
    """Let an assigned request count for so much more (or, below 0, less), also in what is read."""
    node = accounts[NODE][row]
    charge(accounts, row, tokens, 0)
    accounts[READS][row] += read_tokens
    node_reads[node] += read_tokens
    node_totals[node] += read_tokens
    if uncounted:
        accounts[UNCOUNTED_TOKENS][row] += tokens
        accounts[UNCOUNTED_READS][row] += read_tokens


def strike_read(accounts: Accounts, node_reads: Column, row: int, tokens: int) -> None:
    """Strike a read that is uncounted."""
    accounts[UNCOUNTED_READS][row] -= tokens
    accounts[READS][row] -= tokens
    node_reads[accounts[NODE][row]] -= tokens


def count_in_all(accounts: Accounts, row: int) -> None:
    """The next report counts in all that was assigned, except what ``leave_uncounted`` adds."""
    accounts[UNCOUNTED_TOKENS][row] = 0
    accounts[UNCOUNTED_REQUESTS][row] = 0
    accounts[UNCOUNTED_READS][row] = 0


def leave_uncounted(
    accounts: Accounts, row: int, tokens: int, requests: int, read_tokens: int
) -> None:
    """So much of what was assigned is not in the next report either."""
    accounts[UNCOUNTED_TOKENS][row] += tokens
    accounts[UNCOUNTED_REQUESTS][row] += requests
    accounts[UNCOUNTED_READS][row] += read_tokens


def take_report(
    accounts: Accounts,
    node_reads: Column,
    row: int,
    unfinished_requests: int,
    unfinished_tokens: int,
    read_queue_tokens: int,
    free_hbm_tokens: int,
    unallocated_hbm_tokens: int,
) -> None:
    """Take over a report, once the uncounted columns have only what is not in it."""
    more_tokens = accounts[UNCOUNTED_TOKENS][row] + accounts[HELD_TOKENS][row]
    more_requests = accounts[UNCOUNTED_REQUESTS][row] + accounts[HELD_REQUESTS][row]
    reads = read_queue_tokens + accounts[UNCOUNTED_READS][row]
    node_reads[accounts[NODE][row]] += reads - accounts[READS][row]
    accounts[TOK][row] = unfinished_tokens + more_tokens
    accounts[SEQ][row] = unfinished_requests + more_requests
    accounts[FREE_HBM][row] = free_hbm_tokens - unallocated_hbm_tokens - more_tokens
    accounts[READS][row] = reads


# ------------------------------------------------------------------------ the ledger


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine's load as the scheduler counts it; ``read_queue_tokens`` is its node's."""

    engine_id: str
    role: Role
    unfinished_requests: int
    unfinished_tokens: int
    read_queue_tokens: int
    free_hbm_tokens: int


#: The mean time for which requests have an engine is over about so many of them.
_RECENT_REQUESTS = 16


class EngineAccount:
    """One engine: its row in its group's columns, and its requests.

    ``held`` and ``uncounted`` have the tokens of requests, ``uncounted_reads`` those of reads;
    ``counted`` are the assigned requests that a report has counted in.  ``mean_stay_s`` is how long
    the latest requests had the engine, from their placement to their end; 0 before one has ended.
    """

    def __init__(self, spec: EngineSpec, columns: list[list[int]]) -> None:
        self.spec = spec
        self.columns = columns
        self.row = 0
        self.paused = False
        self.held: dict[str, int] = {}
        self.uncounted: dict[str, int] = {}
        self.uncounted_reads: dict[str, int] = {}
        self.counted: set[str] = set()
        self.mean_stay_s = 0.0
        self._stays = 0

    def stayed(self, stay_s: float) -> None:
        """Take down how long a request had the engine."""
        self._stays = min(self._stays + 1, _RECENT_REQUESTS)
        self.mean_stay_s += (stay_s - self.mean_stay_s) / self._stays

    def account(self, column: int) -> int:
        """Return one entry of the engine's account."""
        return self.columns[column][self.row]

    def count_in(self, uncounted: Sequence[str]) -> None:
        """Count in all assigned requests and reads, except those of ``uncounted``."""
        before, reads_before = self.uncounted, self.uncounted_reads
        self.uncounted = {name: before[name] for name in uncounted if name in before}
        self.uncounted_reads = {
            name: reads_before[name] for name in uncounted if name in reads_before
        }
        self.counted.update(before.keys() - self.uncounted.keys())
        count_in_all(self.columns, self.row)
        leave_uncounted(
            self.columns,
            self.row,
            sum(self.uncounted.values()),
            len(self.uncounted),
            sum(self.uncounted_reads.values()),
        )


class Taking(NamedTuple):
    """Engines in order, and their accounts as columns with a row for each."""

    engines: Sequence["EngineAccount"]
    columns: Sequence[list[int]]


class GroupState:
    """The engines of one group in order, and their accounts as columns; owned by the ledger."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.engines: list[EngineAccount] = []
        self.columns: list[list[int]] = [[] for _ in range(ACCOUNT_COLUMNS)]
        self.largest_hbm_tokens = 0
        self._taking: tuple[EngineAccount, ...] | None = None
        self._taking_tokens: int | None = None
        #: The HBM of the largest engine that gets requests.
        self.largest_taking_hbm_tokens = 0

    def taking(self) -> "Taking":
        """Return the engines that get requests, and their accounts; a rule reads no others."""
        if self._taking is None:
            return Taking(self.engines, self.columns)
        rows = [engine.row for engine in self._taking]
        return Taking(self._taking, [[column[row] for row in rows] for column in self.columns])

    def taking_tokens(self) -> int:
        """Return the unfinished tokens of the engines that get requests; added up once a change."""
        if self._taking_tokens is None:
            self._taking_tokens = sum(self.taking().columns[TOK])
        return self._taking_tokens

    def changed(self) -> None:
        """Note that an engine's unfinished tokens have changed."""
        self._taking_tokens = None

    def note_pauses(self) -> None:
        """Take down which engines are paused now."""
        taking = tuple(engine for engine in self.engines if not engine.paused)
        self._taking = None if len(taking) == len(self.engines) else taking
        self.largest_taking_hbm_tokens = max((e.spec.hbm_tokens for e in taking), default=0)
        self.changed()

    def add(self, spec: EngineSpec, node_row: int) -> EngineAccount:
        """Open an account, empty, in its row."""
        engine = EngineAccount(spec, self.columns)
        row = bisect(self.engines, spec.order, key=lambda other: other.spec.order)
        self.engines.insert(row, engine)
        new = new_account(spec.hbm_tokens, node_row)
        for column, value in zip(self.columns, new, strict=True):
            column.insert(row, value)
        self._number()
        return engine

    def remove(self, engine: EngineAccount) -> None:
        """Close an account."""
        del self.engines[engine.row]
        for column in self.columns:
            del column[engine.row]
        self._number()

    def _number(self) -> None:
        for row, engine in enumerate(self.engines):
            engine.row = row
        self.note_pauses()
        self.largest_hbm_tokens = max((e.spec.hbm_tokens for e in self.engines), default=0)


class Ledger:
    """Accounts of all joined engines, their groups and nodes."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineAccount] = {}
        self.groups: dict[str, GroupState] = {}
        self.node_read_q: list[int] = []
        self.node_read_total: list[int] = []
        self._node_rows: dict[str, int] = {}
        self._rings: dict[Role, list[EngineAccount]] = {role: [] for role in Role}
        self._groups_of: dict[Role, list[GroupState]] = {role: [] for role in Role}
        self._orders: dict[int, str] = {}
        self.largest_decode_hbm_tokens = 0

    def join(self, spec: EngineSpec) -> None:
        """Open an account; raises ``ConfigError`` for a spec that contradicts the others."""
        self._check_spec(spec)
        group = self.groups.setdefault(spec.group, GroupState(spec.group, spec.role))
        if spec.node not in self._node_rows:
            self._node_rows[spec.node] = len(self._node_rows)
            self.node_read_q.append(0)
            self.node_read_total.append(0)
        engine = group.add(spec, self._node_rows[spec.node])
        self.engines[spec.engine_id] = engine
        self._orders[spec.order] = spec.engine_id
        insort(self._rings[spec.role], engine, key=lambda other: other.spec.order)
        self._list_groups(group.role)

    def leave(self, engine_id: str) -> EngineSpec:
        """Close an account with everything on it; raises ``EngineLostError`` if there is none."""
        engine = self.engine(engine_id)
        del self.engines[engine_id]
        self.node_read_q[engine.account(NODE)] -= engine.account(READS)
        del self._orders[engine.spec.order]
        group = self.groups[engine.spec.group]
        group.remove(engine)
        self._rings[engine.spec.role].remove(engine)
        if not group.engines:
            del self.groups[group.name]
        self._list_groups(group.role)
        return engine.spec

    def pause(self, engine_id: str, *, paused: bool) -> EngineSpec:
        """Give an engine nothing new, or something again; its account goes on.

        Raises ``EngineLostError`` if it has none.
        """
        engine = self.engine(engine_id)
        engine.paused = paused
        self.groups[engine.spec.group].note_pauses()
        return engine.spec

    def engine(self, engine_id: str) -> EngineAccount:
        """Return an account; raises ``EngineLostError`` if there is none."""
        engine = self.engines.get(engine_id)
        if engine is None:
            raise EngineLostError(
                f"engine {engine_id!r} is none of the {len(self.engines)} joined engines; "
                "let it join (again) first"
            )
        return engine

    def ring(self, role: Role) -> list[EngineAccount]:
        """All engines of a role, in order."""
        return self._rings[role]

    def groups_of(self, role: Role) -> list[GroupState]:
        """All groups of a role with a live engine, in order of joining."""
        return self._groups_of[role]

    def report(self, report: EngineReport) -> None:
        """Take over a report; a late one, see ``EngineReport``, is dropped.

        Raises ``EngineLostError`` for an unknown engine and ``IncompatibleError`` for a negative
        load.
        """
        engine, load = self.engine(report.engine_id), report.load
        _check_load(report.engine_id, load)
        if not engine.counted.isdisjoint(report.uncounted):
            return
        self.groups[engine.spec.group].changed()
        engine.count_in(report.uncounted)
        take_report(
            engine.columns,
            self.node_read_q,
            engine.row,
            load.unfinished_requests,
            load.unfinished_tokens,
            load.read_queue_tokens,
            load.free_hbm_tokens,
            load.unallocated_hbm_tokens,
        )

    def hold(self, engine_id: str, request_id: str, tokens: int) -> None:
        """Charge a request to an engine that does not know of it yet."""
        engine = self.engines[engine_id]
        engine.held[request_id] = tokens
        self.groups[engine.spec.group].changed()
        hold(engine.columns, engine.row, tokens)

    def assign(self, engine_id: str, request_id: str, more_tokens: int = 0) -> None:
        """Turn a held charge into an assigned one.

        ``more_tokens`` are what it counts for beyond what was held.
        """
        engine = self.engines[engine_id]
        tokens = engine.held.pop(request_id)
        self.groups[engine.spec.group].changed()
        assign(engine.columns, engine.row, tokens, more_tokens)
        engine.uncounted[request_id] = tokens + more_tokens

    def change(self, engine_id: str, request_id: str, tokens: int, read_tokens: int) -> None:
        """Let an assigned request count for so much more, also in what the engine reads."""
        engine = self.engines[engine_id]
        uncounted = request_id in engine.uncounted
        if uncounted:
            engine.uncounted[request_id] += tokens
            reads = engine.uncounted_reads
            reads[request_id] = reads.get(request_id, 0) + read_tokens
        self.groups[engine.spec.group].changed()
        change(
            engine.columns,
            self.node_read_q,
            self.node_read_total,
            engine.row,
            tokens,
            read_tokens,
            uncounted,
        )

    def charge_computing(self, engine_id: str, tokens: int) -> None:
        """Charge tokens to compute, or strike them; a lost engine has no account."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            charge_computing(engine.columns, engine.row, tokens)

    def charge_read(self, engine_id: str, request_id: str, tokens: int) -> None:
        """Charge a read of a request that was assigned just now."""
        engine = self.engines[engine_id]
        engine.uncounted_reads[request_id] = tokens
        charge_read(engine.columns, self.node_read_q, self.node_read_total, engine.row, tokens)

    def change_read(self, engine_id: str, request_id: str, tokens: int) -> None:
        """Let a third DE read so much more for a request; a lost engine has no account."""
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        reads = engine.uncounted_reads
        uncounted = request_id in reads
        if uncounted:
            reads[request_id] += tokens
        columns, queues, totals = engine.columns, self.node_read_q, self.node_read_total
        change(columns, queues, totals, engine.row, 0, tokens, uncounted)

    def release_read(self, engine_id: str, request_id: str) -> None:
        """Strike a read if it is uncounted."""
        engine = self.engines.get(engine_id)
        tokens = engine.uncounted_reads.pop(request_id, 0) if engine else 0
        if engine and tokens:
            strike_read(engine.columns, self.node_read_q, engine.row, tokens)

    def release(self, engine_id: str, request_id: str) -> None:
        """Strike a request if it is uncounted; a lost engine has no account."""
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        self.groups[engine.spec.group].changed()
        if request_id in engine.uncounted:
            strike(engine.columns, engine.row, engine.uncounted.pop(request_id))
        elif request_id in engine.held:
            strike_held(engine.columns, engine.row, engine.held.pop(request_id))
        engine.counted.discard(request_id)

    def snapshot(self) -> tuple[EngineLoad, ...]:
        """The load of every engine, in order of joining."""
        return tuple(
            EngineLoad(
                engine_id=engine_id,
                role=engine.spec.role,
                unfinished_requests=engine.account(SEQ),
                unfinished_tokens=engine.account(TOK),
                read_queue_tokens=self.node_read_q[engine.account(NODE)],
                free_hbm_tokens=engine.account(FREE_HBM),
            )
            for engine_id, engine in self.engines.items()
        )

    def _list_groups(self, role: Role) -> None:
        groups = [group for group in self.groups.values() if group.role is role]
        self._groups_of[role] = groups
        if role is Role.DECODE:
            self.largest_decode_hbm_tokens = max((g.largest_hbm_tokens for g in groups), default=0)

    def _check_spec(self, spec: EngineSpec) -> None:
        if spec.engine_id in self.engines:
            raise ConfigError(
                f"engine {spec.engine_id!r} has joined already; give every engine its own id, "
                "or report the old one lost first"
            )
        if spec.hbm_tokens < 1 or spec.snic_tokens_per_s <= 0:
            raise ConfigError(
                f"engine {spec.engine_id!r}: hbm_tokens {spec.hbm_tokens} must be at least 1 and "
                f"snic_tokens_per_s {spec.snic_tokens_per_s} positive; correct its settings"
            )
        group = self.groups.get(spec.group)
        if group and group.role is not spec.role:
            raise ConfigError(
                f"engine {spec.engine_id!r} is a {spec.role} engine, group {spec.group!r} holds "
                f"{group.role} engines; put it into another group"
            )
        namesake = self._orders.get(spec.order)
        if namesake is not None:
            raise ConfigError(
                f"engine {spec.engine_id!r} has order {spec.order} like engine {namesake!r}; "
                "give every engine its own order"
            )


def _check_load(engine_id: str, load: Load) -> None:
    if min(load.unfinished_requests, load.unfinished_tokens, load.read_queue_tokens) < 0:
        raise IncompatibleError(
            f"engine {engine_id!r} reports a negative load ({load}); loads are at least 0, run the "
            "same dualpath version on router and engines"
        )
