"""The ledger: what every engine and node has to do, by report and by assignment since (§6.1).

The load of an engine is its last report plus what was placed on it and is not in that report.  A
placement is *held* while the request's other engine is still to be found and gets its
``assign_seq`` when both are known: only then is the engine told, so numbers reach an engine
in order and without gaps, and a report that echoes one of them counts in exactly what was told.

Columns are kept per group, rows in ``EngineSpec.order``, so that the kernels of ``prefill`` and
``decode`` read them as they are and the first minimum is the one of lowest order.  Here they are
lists, which Python reads faster than arrays; the simulator's compiled core keeps arrays.
"""

from bisect import insort
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, EngineLostError, IncompatibleError
from dualpath.policy.events import EngineReport, EngineSpec

IntArray = NDArray[np.int64]
Column = list[int] | IntArray
"""What kernels read by index: lists in Python, arrays where they are compiled."""


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


class EngineState:
    """One engine's account; owned by the ledger, read by placement rules."""

    def __init__(self, spec: EngineSpec, node_row: int) -> None:
        self.spec = spec
        self.node_row = node_row
        self.row = 0
        self.last_seq = 0
        self.report: EngineReport | None = None
        self.held: dict[str, int] = {}
        self.pending: dict[str, _Charge] = {}
        self.pending_reads: dict[str, _Charge] = {}
        self.extra_tokens = 0
        self.extra_reads = 0

    @property
    def tokens(self) -> int:
        """Unfinished tokens of the engine's requests: tok_e of §6.1."""
        reported = self.report.unfinished_tokens if self.report else 0
        return reported + self.extra_tokens

    @property
    def requests(self) -> int:
        """Unfinished requests of the engine: seq_e of §6.1."""
        reported = self.report.unfinished_requests if self.report else 0
        return reported + len(self.held) + len(self.pending)

    @property
    def free_hbm_tokens(self) -> int:
        """Remaining HBM; negative when a report came in below what was assigned since."""
        reported = self.report.free_hbm_tokens if self.report else self.spec.hbm_tokens
        return reported - self.extra_tokens

    @property
    def read_tokens(self) -> int:
        """This engine's part of its node's reading queue."""
        reported = self.report.read_queue_tokens if self.report else 0
        return reported + self.extra_reads


class GroupState:
    """The engines of one group as columns, in order; owned by the ledger."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.engines: list[EngineState] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Lay the columns out anew after engines came or went."""
        self.engines.sort(key=lambda engine: engine.spec.order)
        for row, engine in enumerate(self.engines):
            engine.row = row
        engines = self.engines
        self.tok = [e.tokens for e in engines]
        self.seq = [e.requests for e in engines]
        self.free_hbm = [e.free_hbm_tokens for e in engines]
        self.node = [e.node_row for e in engines]
        self.total_tokens = sum(self.tok)
        self.largest_hbm_tokens = max((e.spec.hbm_tokens for e in engines), default=0)

    def refresh(self, engine: EngineState) -> None:
        """Copy one engine's account into its row."""
        row, report, extra_tokens = engine.row, engine.report, engine.extra_tokens
        tokens = extra_tokens
        requests = len(engine.held) + len(engine.pending)
        free_hbm = engine.spec.hbm_tokens
        if report is not None:
            tokens += report.unfinished_tokens
            requests += report.unfinished_requests
            free_hbm = report.free_hbm_tokens
        self.total_tokens += tokens - self.tok[row]
        self.tok[row] = tokens
        self.seq[row] = requests
        self.free_hbm[row] = free_hbm - extra_tokens


class Ledger:
    """Accounts of all joined engines, their groups and nodes."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineState] = {}
        self.groups: dict[str, GroupState] = {}
        self.node_read_q: list[int] = []
        self.node_read_total: list[int] = []
        self._node_rows: dict[str, int] = {}
        self._rings: dict[Role, list[EngineState]] = {role: [] for role in Role}
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
        engine = EngineState(spec, self._node_rows[spec.node])
        self.engines[spec.engine_id] = engine
        self._orders[spec.order] = spec.engine_id
        group.engines.append(engine)
        insort(self._rings[spec.role], engine, key=lambda other: other.spec.order)
        self._rebuild(group)

    def leave(self, engine_id: str) -> EngineSpec:
        """Close an account with everything on it; raises ``EngineLostError`` if there is none."""
        engine = self.engine(engine_id)
        del self.engines[engine_id]
        self.node_read_q[engine.node_row] -= engine.read_tokens
        del self._orders[engine.spec.order]
        group = self.groups[engine.spec.group]
        group.engines.remove(engine)
        self._rings[engine.spec.role].remove(engine)
        if not group.engines:
            del self.groups[group.name]
        self._rebuild(group)
        return engine.spec

    def engine(self, engine_id: str) -> EngineState:
        """Return an account; raises ``EngineLostError`` if there is none."""
        engine = self.engines.get(engine_id)
        if engine is None:
            raise EngineLostError(
                f"engine {engine_id!r} is none of the {len(self.engines)} joined engines; "
                "let it join (again) first"
            )
        return engine

    def ring(self, role: Role) -> list[EngineState]:
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
        if engine.report is not None and report.assign_seq < engine.report.assign_seq:
            return
        reads_before = engine.read_tokens
        engine.report = report
        engine.extra_tokens -= _drop_counted(engine.pending, report.assign_seq)
        engine.extra_reads -= _drop_counted(engine.pending_reads, report.assign_seq)
        self.node_read_q[engine.node_row] += engine.read_tokens - reads_before
        self.groups[engine.spec.group].refresh(engine)

    def hold(self, engine_id: str, request_id: str, tokens: int) -> None:
        """Charge a request to an engine that is not told of it yet."""
        engine = self.engines[engine_id]
        engine.held[request_id] = tokens
        engine.extra_tokens += tokens
        self.groups[engine.spec.group].refresh(engine)

    def tell(self, engine_id: str, request_id: str) -> int:
        """Turn a held charge into a told one and return its ``assign_seq``, counted from 1."""
        engine = self.engines[engine_id]
        engine.last_seq += 1
        tokens = engine.held.pop(request_id)
        engine.pending[request_id] = _Charge(engine.last_seq, tokens)
        return engine.last_seq

    def charge_read(self, engine_id: str, request_id: str, tokens: int) -> None:
        """Charge a read that the engine was told of with its latest assignment."""
        engine = self.engines[engine_id]
        engine.pending_reads[request_id] = _Charge(engine.last_seq, tokens)
        engine.extra_reads += tokens
        self.node_read_q[engine.node_row] += tokens
        self.node_read_total[engine.node_row] += tokens

    def release_read(self, engine_id: str, request_id: str) -> None:
        """Strike a read that no report has counted in yet."""
        engine = self.engines.get(engine_id)
        charge = engine.pending_reads.pop(request_id, None) if engine else None
        if engine and charge:
            engine.extra_reads -= charge.tokens
            self.node_read_q[engine.node_row] -= charge.tokens

    def release(self, engine_id: str, request_id: str) -> None:
        """Strike a request that no report has counted in yet; a lost engine has no account."""
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        charge = engine.pending.pop(request_id, None)
        tokens = charge.tokens if charge else engine.held.pop(request_id, 0)
        if tokens:
            engine.extra_tokens -= tokens
            self.groups[engine.spec.group].refresh(engine)

    def snapshot(self) -> tuple[EngineLoad, ...]:
        """The load of every engine, in order of joining."""
        return tuple(
            EngineLoad(
                engine_id=engine_id,
                role=engine.spec.role,
                node=engine.spec.node,
                group=engine.spec.group,
                unfinished_requests=engine.requests,
                unfinished_tokens=engine.tokens,
                read_queue_tokens=self.node_read_q[engine.node_row],
                free_hbm_tokens=engine.free_hbm_tokens,
                free_buffer_tokens=engine.report.free_buffer_tokens if engine.report else None,
            )
            for engine_id, engine in self.engines.items()
        )

    def _rebuild(self, group: GroupState) -> None:
        group.rebuild()
        self._groups_of[group.role] = [g for g in self.groups.values() if g.role is group.role]
        if group.role is Role.DECODE:
            groups = self._groups_of[Role.DECODE]
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
    def _check_report(engine: EngineState, report: EngineReport) -> None:
        if not 0 <= report.assign_seq <= engine.last_seq:
            raise IncompatibleError(
                f"engine {report.engine_id!r} reports assignment {report.assign_seq}, it was told "
                f"of {engine.last_seq}; restart it so that it joins anew"
            )
        if min(report.unfinished_requests, report.unfinished_tokens, report.read_queue_tokens) < 0:
            raise IncompatibleError(
                f"engine {report.engine_id!r} reports a negative load ({report}); loads are at "
                "least 0, run the same dualpath version on router and engines"
            )


def _drop_counted(charges: dict[str, _Charge], assign_seq: int) -> int:
    """Remove the charges up to ``assign_seq`` and return their tokens."""
    counted: list[str] = []
    tokens = 0
    for request_id, charge in charges.items():
        if charge.assign_seq > assign_seq:
            break
        counted.append(request_id)
        tokens += charge.tokens
    for request_id in counted:
        del charges[request_id]
    return tokens
