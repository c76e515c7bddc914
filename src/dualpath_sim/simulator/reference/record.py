"""Collects times, passes, moves and decisions of a run, and returns them as columns."""

import numpy as np

from dualpath.core.cluster import Role
from dualpath.policy.events import DE_REASONS, PE_REASONS, Assignment
from dualpath.policy.read_side import READ_REASONS
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.reference.machine import SimulatedMachine
from dualpath_sim.simulator.reference.units import Pass
from dualpath_sim.simulator.result import (
    Batches,
    Decisions,
    LinkUse,
    RoleMove,
    SimulationResult,
    TurnTimes,
)
from dualpath_sim.simulator.settings import Setup

#: The PE of a round in which the DE computes the append.
NO_ENGINE = -1
DecisionRow = tuple[int, int, int, int, int, int, int, int, int, int]


class Record:
    """Stage times per round, forward passes, moves of nodes, and decisions if asked for."""

    def __init__(self, agents: AgentTable, record_decisions: bool) -> None:
        self._agents = agents
        never = [-1] * agents.rounds
        self.submitted_ns = never.copy()
        self.assigned_ns = never.copy()
        self.granted_ns = never.copy()
        self.loaded_ns = never.copy()
        self.prefill_ns = never.copy()
        self.first_token_ns = never.copy()
        self.decoding_ns = never.copy()
        self.second_token_ns = never.copy()
        self.finished_ns = never.copy()
        self.finished = 0
        self._decisions: list[DecisionRow] | None = [] if record_decisions else None
        self._batches: list[tuple[int, int, int, int, float, float]] = []
        self.moves: list[RoleMove] = []

    def assigned(
        self, r: int, assignment: Assignment, cached_tokens: dict[Role, int], now_ns: int
    ) -> None:
        """Record an assignment, and the tokens taken from the DRAM of its engines."""
        self.assigned_ns[r] = now_ns
        if self._decisions is None:
            return
        self._decisions.append(
            (
                r,
                NO_ENGINE if assignment.prefill_engine is None else int(assignment.prefill_engine),
                int(assignment.decode_engine),
                assignment.prefill_read_tokens,
                assignment.decode_read_tokens,
                PE_REASONS.index(assignment.pe_reason),
                DE_REASONS.index(assignment.de_reason),
                READ_REASONS.index(assignment.read_reason),
                cached_tokens[Role.PREFILL],
                cached_tokens[Role.DECODE],
            )
        )

    def batch(self, unit: int, formed: Pass, start_ns: int, end_ns: int) -> None:
        """Record a forward pass."""
        self._batches.append(
            (
                start_ns,
                end_ns,
                unit,
                formed.tokens,
                formed.attention_max_s,
                formed.attention_mean_s,
            )
        )

    def finish(self, r: int, now_ns: int) -> None:
        """Record the end of a round."""
        self.finished_ns[r] = now_ns
        self.finished += 1

    def result(
        self,
        setup: Setup,
        machine: SimulatedMachine,
        window_ns: int,
        *,
        end_ns: int,
        stopped: bool,
        events: int,
        dram_tier_hit_tokens: int,
    ) -> SimulationResult:
        """Return the result of the run."""
        return SimulationResult(
            setup=setup,
            agents=self._agents,
            turns=TurnTimes(
                *(np.array(getattr(self, name), np.int64) for name in TurnTimes._fields)
            ),
            batches=_batches(self._batches),
            links=_link_use(machine, window_ns, end_ns),
            decisions=None if self._decisions is None else _decisions(self._decisions),
            end_ns=end_ns,
            stopped=stopped,
            events=events,
            dram_tier_hit_tokens=dram_tier_hit_tokens,
            moves=tuple(self.moves),
        )


def _batches(rows: list[tuple[int, int, int, int, float, float]]) -> Batches:
    table = np.array(rows, np.float64).reshape(-1, 6)
    start_ns, end_ns, unit, tokens = (
        np.array([row[column] for row in rows], np.int64) for column in range(4)
    )
    return Batches(start_ns, end_ns, unit, tokens, table[:, 4].copy(), table[:, 5].copy())


def _decisions(rows: list[DecisionRow]) -> Decisions:
    table = np.array(rows, np.int64).reshape(-1, 10)
    rounds, prefill, decode, at_prefill, at_decode = (table[:, i].copy() for i in range(5))
    pe, de, read = (table[:, i].astype(np.int8) for i in range(5, 8))
    cached = (table[:, i].copy() for i in (8, 9))
    return Decisions(rounds, prefill, decode, at_prefill, at_decode, pe, de, read, *cached)


def _link_use(machine: SimulatedMachine, window_ns: int, end_ns: int) -> LinkUse:
    windows = -(-end_ns // window_ns)
    tables = [
        use.table(windows)
        for use in (machine.snic_read_use, machine.snic_write_use, machine.cnic_use)
    ]
    longest = max(len(table) for table in tables)
    padded = [np.pad(table, ((0, longest - len(table)), (0, 0))) for table in tables]
    return LinkUse(window_ns, *padded)
