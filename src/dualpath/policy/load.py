"""The ledger: what every engine and node has to do, by report and by assignment since (§6.1).

The load of an engine is its last report plus what was placed on it and is not in that report.  A
placement is *held* while the request's other engine is still to be found and gets its
``assign_seq`` when both are known: only then is the engine notified, so numbers reach an engine
in order and without gaps, and a report that echoes one of them counts in exactly what was assigned.

Accounts (``policy.accounts``) are stored per group as columns, rows in ``EngineSpec.order``, so
that the kernels of ``prefill`` and ``decode`` read them as they are and the first minimum is the
one of lowest order.  Here they are lists, which Python reads faster than arrays.
"""

from bisect import bisect, insort
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, EngineLostError, IncompatibleError
from dualpath.policy import accounts
from dualpath.policy.accounts import ACCOUNT_COLUMNS, FREE_HBM, LAST_SEQ, NODE, READS, SEQ, TOK
from dualpath.policy.events import EngineReport, EngineSpec


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine's load as the scheduler counts it; ``read_queue_tokens`` is its node's.

    ``free_buffer_tokens`` is as last reported, None before the first report.
    """

    engine_id: str
    role: Role
    node: str
    group: str
    unfinished_requests: int
    unfinished_tokens: int
    read_queue_tokens: int
    free_hbm_tokens: int
    free_buffer_tokens: int | None


class _Charge(NamedTuple):
    assign_seq: int
    tokens: int


class EngineAccount:
    """One engine: its row in its group's columns, and the charges that no report counts in yet."""

    def __init__(self, spec: EngineSpec, columns: list[list[int]]) -> None:
        self.spec = spec
        self.columns = columns
        self.row = 0
        self.free_buffer_tokens: int | None = None
        self.paused = False
        self.held: dict[str, int] = {}
        self.pending: dict[str, _Charge] = {}
        self.pending_reads: dict[str, _Charge] = {}

    def account(self, column: int) -> int:
        """Return one entry of the engine's account."""
        return self.columns[column][self.row]


class Taking(NamedTuple):
    """Engines in order, and their accounts as columns with a row for each."""

    engines: Sequence["EngineAccount"]
    columns: Sequence[list[int]]

    @property
    def largest_hbm_tokens(self) -> int:
        """What the largest of them holds in all, 0 without any."""
        return max((engine.spec.hbm_tokens for engine in self.engines), default=0)


class GroupState:
    """The engines of one group in order, and their accounts as columns; owned by the ledger."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.engines: list[EngineAccount] = []
        self.columns: list[list[int]] = [[] for _ in range(ACCOUNT_COLUMNS)]
        self.largest_hbm_tokens = 0
        self._taking: tuple[EngineAccount, ...] | None = None

    def taking(self) -> "Taking":
        """Return the engines that get requests, and their accounts; a rule reads no others."""
        if self._taking is None:
            return Taking(self.engines, self.columns)
        rows = [engine.row for engine in self._taking]
        return Taking(self._taking, [[column[row] for row in rows] for column in self.columns])

    def note_pauses(self) -> None:
        """Take down which engines are paused now."""
        taking = tuple(engine for engine in self.engines if not engine.paused)
        self._taking = None if len(taking) == len(self.engines) else taking

    def add(self, spec: EngineSpec, node_row: int) -> EngineAccount:
        """Open an account, empty, in its row."""
        engine = EngineAccount(spec, self.columns)
        row = bisect(self.engines, spec.order, key=lambda other: other.spec.order)
        self.engines.insert(row, engine)
        new = accounts.new_account(spec.hbm_tokens, node_row)
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
        """Take over a report; one that echoes less than an earlier one is late and dropped.

        Raises ``EngineLostError`` for an unknown engine and ``IncompatibleError`` for a report
        that cannot be true.
        """
        engine = self.engine(report.engine_id)
        self._check_report(engine, report)
        columns, row = engine.columns, engine.row
        if report.assign_seq < engine.account(accounts.REPORTED_SEQ):
            return
        engine.free_buffer_tokens = report.free_buffer_tokens
        for charge in _drop_counted(engine.pending, report.assign_seq):
            accounts.count_in(columns, row, charge.tokens, 1, 0)
        for charge in _drop_counted(engine.pending_reads, report.assign_seq):
            accounts.count_in(columns, row, 0, 0, charge.tokens)
        accounts.take_report(
            columns,
            self.node_read_q,
            row,
            report.assign_seq,
            report.unfinished_requests,
            report.unfinished_tokens,
            report.read_queue_tokens,
            report.free_hbm_tokens,
        )

    def hold(self, engine_id: str, request_id: str, tokens: int) -> None:
        """Charge a request to an engine that does not know of it yet."""
        engine = self.engines[engine_id]
        engine.held[request_id] = tokens
        accounts.hold(engine.columns, engine.row, tokens)

    def assign(self, engine_id: str, request_id: str, more_tokens: int = 0) -> int:
        """Turn a held charge into an assigned one and return its ``assign_seq``, from 1 on.

        ``more_tokens`` are what it counts for beyond what was held.
        """
        engine = self.engines[engine_id]
        tokens = engine.held.pop(request_id)
        seq = accounts.assign(engine.columns, engine.row, tokens, more_tokens)
        engine.pending[request_id] = _Charge(seq, tokens + more_tokens)
        return seq

    def change(self, engine_id: str, request_id: str, tokens: int, read_tokens: int) -> None:
        """Let an assigned request count for so much more, also in what the engine reads."""
        engine = self.engines[engine_id]
        charge = engine.pending.get(request_id)
        if charge is not None:
            engine.pending[request_id] = charge._replace(tokens=charge.tokens + tokens)
            read = engine.pending_reads.get(request_id, charge._replace(tokens=0))
            engine.pending_reads[request_id] = read._replace(tokens=read.tokens + read_tokens)
            # They are dropped in the order of their numbers.
            in_order = sorted(engine.pending_reads.items(), key=lambda item: item[1].assign_seq)
            engine.pending_reads = dict(in_order)
        accounts.change(
            engine.columns,
            self.node_read_q,
            self.node_read_total,
            engine.row,
            tokens,
            read_tokens,
            charge is not None,
        )

    def charge_computing(self, engine_id: str, tokens: int) -> None:
        """Charge a PE with tokens to compute, or strike them; a lost engine has no account."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            accounts.charge_computing(engine.columns, engine.row, tokens)

    def charge_read(self, engine_id: str, request_id: str, tokens: int) -> None:
        """Charge a read of the engine's latest assignment."""
        engine = self.engines[engine_id]
        engine.pending_reads[request_id] = _Charge(engine.account(LAST_SEQ), tokens)
        accounts.charge_read(
            engine.columns, self.node_read_q, self.node_read_total, engine.row, tokens
        )

    def release_read(self, engine_id: str, request_id: str) -> None:
        """Strike a read that no report has counted in yet."""
        engine = self.engines.get(engine_id)
        charge = engine.pending_reads.pop(request_id, None) if engine else None
        if engine and charge:
            accounts.strike_read(engine.columns, self.node_read_q, engine.row, charge.tokens)

    def release(self, engine_id: str, request_id: str) -> None:
        """Strike a request that no report has counted in yet; a lost engine has no account."""
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        charge = engine.pending.pop(request_id, None)
        if charge:
            accounts.strike(engine.columns, engine.row, charge.tokens)
        elif request_id in engine.held:
            accounts.strike_held(engine.columns, engine.row, engine.held.pop(request_id))

    def snapshot(self) -> tuple[EngineLoad, ...]:
        """The load of every engine, in order of joining."""
        return tuple(
            EngineLoad(
                engine_id=engine_id,
                role=engine.spec.role,
                node=engine.spec.node,
                group=engine.spec.group,
                unfinished_requests=engine.account(SEQ),
                unfinished_tokens=engine.account(TOK),
                read_queue_tokens=self.node_read_q[engine.account(NODE)],
                free_hbm_tokens=engine.account(FREE_HBM),
                free_buffer_tokens=engine.free_buffer_tokens,
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

    @staticmethod
    def _check_report(engine: EngineAccount, report: EngineReport) -> None:
        last_seq = engine.account(LAST_SEQ)
        if not 0 <= report.assign_seq <= last_seq:
            raise IncompatibleError(
                f"engine {report.engine_id!r} reports assignment {report.assign_seq}, it was "
                f"assigned {last_seq}; restart it so that it joins again"
            )
        if min(report.unfinished_requests, report.unfinished_tokens, report.read_queue_tokens) < 0:
            raise IncompatibleError(
                f"engine {report.engine_id!r} reports a negative load ({report}); loads are at "
                "least 0, run the same dualpath version on router and engines"
            )


def _drop_counted(charges: dict[str, _Charge], assign_seq: int) -> list[_Charge]:
    """Remove the charges up to ``assign_seq``, which come first, and return them."""
    if not charges:
        return []
    counted: dict[str, _Charge] = {}
    for request_id, charge in charges.items():
        if charge.assign_seq > assign_seq:
            break
        counted[request_id] = charge
    for request_id in counted:
        del charges[request_id]
    return list(counted.values())
