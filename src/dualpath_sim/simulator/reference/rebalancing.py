"""Nodes that change their role while the cluster serves (§8.1 leaves it to future work).

Every ``interval_s`` the live router's own policy (``policy.rebalance``) observes how both roles
fare, measures what it needs to know and decides.

A ``Move`` takes the serving node of the giving role that has the fewest unfinished tokens, since
it is empty soonest; of equals the one with the highest number.  It gets no new requests, finishes
those it has (nothing is recomputed or sent elsewhere), and ``switch_s`` later its engines join the
other role as a group and with lock-step as a unit of their own; what they leave behind steps as a
smaller unit.  Costs per token and HBM are those of the new role's other engines: how much wider or
narrower experts are then spread is not modelled.  One node at most is on its way.
"""

from dualpath.core.cluster import Role
from dualpath.policy.events import Assignment
from dualpath.policy.rebalance import (
    Decision,
    Move,
    RebalanceSettings,
    RoleNodes,
    RolePolicy,
    soonest_empty,
)
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator.derived import Limits
from dualpath_sim.simulator.reference.driver import SchedulerDriver
from dualpath_sim.simulator.reference.machine import EventQueue, SimulatedMachine
from dualpath_sim.simulator.reference.record import Record
from dualpath_sim.simulator.reference.units import Units
from dualpath_sim.simulator.result import NS_PER_S, RoleMove
from dualpath_sim.simulator.rules import to_ns
from dualpath_sim.simulator.settings import Setup


class Rebalancing:
    """Measures rounds, asks the policy and executes its moves."""

    def __init__(
        self,
        settings: RebalanceSettings,
        setup: Setup,
        limits: Limits,
        agents: AgentTable,
        events: EventQueue,
        record: Record,
        driver: SchedulerDriver,
        machine: SimulatedMachine,
        units: Units,
    ) -> None:
        """Start; ``driver`` reports rounds from now on."""
        self._settings = settings
        # Both roles have equal engines where nodes change theirs.
        self._node_engines = setup.cluster.node_engines(Role.PREFILL)
        self._agents = agents
        self._events = events
        self._record = record
        self._driver = driver
        self._machine = machine
        self._units = units
        self._decode_node_tokens = limits.decode_hbm_tokens * self._node_engines
        self._prefill_node_tokens_per_s = setup.model.prefill_tokens_per_s * self._node_engines
        self._policy = RolePolicy(settings)
        cluster = setup.cluster
        self._nodes = {
            Role.PREFILL: list(range(cluster.prefill_nodes)),
            Role.DECODE: list(range(cluster.prefill_nodes, cluster.nodes)),
        }
        self._draining: int | None = None
        self._switching = False
        self._took_s: list[float] = []
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        driver.watch = self
        events.at(to_ns(settings.interval_s), self._tick)

    # What the driver reports.

    def loaded(self, round_index: int) -> None:
        """A prompt waits at its PE."""
        self._policy.loaded(str(round_index), int(self._agents.prompt_tokens[round_index]))

    def prefilled(self, round_index: int, assignment: Assignment) -> None:
        """A PE has prefilled a prompt."""
        r, record = round_index, self._record
        self._policy.prefilled(str(r), assignment.decode_tokens, self._now_s)
        waited_ns = record.first_token_ns[r] - record.submitted_ns[r]
        self._ttft_s.append(waited_ns / NS_PER_S)
        self._leave_if_empty()

    def finished(self, round_index: int, assignment: Assignment) -> None:
        """A DE has finished a round."""
        r, record = round_index, self._record
        self._policy.over(str(r), self._now_s)
        later = int(self._agents.generated_tokens[r]) - 1
        if later:
            took_ns = record.finished_ns[r] - record.first_token_ns[r]
            self._tpot_s.append(took_ns / later / NS_PER_S)
        self._leave_if_empty()

    # Deciding.

    def _tick(self) -> None:
        decision = self._decision()
        if isinstance(decision, Move):
            self._begin(decision)
        self._ttft_s, self._tpot_s = [], []
        # The run is over if no other event is left.
        if self._events.next_ns() is not None:
            next_ns = self._events.now_ns + to_ns(self._settings.interval_s)
            self._events.at(next_ns, self._tick)

    def _decision(self) -> Decision:
        prefill, decode = len(self._nodes[Role.PREFILL]), len(self._nodes[Role.DECODE])
        return self._policy.evaluate(
            RoleNodes(prefill, decode, self._decode_node_tokens * decode),
            {role: self._driver.queue(role) for role in Role},
            self._prefill_node_tokens_per_s,
            self._took_s,
            switching=self._switching,
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
        )

    @property
    def _now_s(self) -> float:
        return self._events.now_ns / NS_PER_S

    # Moving.

    def _begin(self, move: Move) -> None:
        serving = sorted(self._nodes[move.from_role])
        node = soonest_empty({n: self._driver.unfinished(self._engines(n))[0] for n in serving})
        self._nodes[move.from_role].remove(node)
        self._nodes[move.to_role].append(node)
        self._record.moves.append(
            RoleMove(node, move.from_role, move.to_role, move.reason, self._events.now_ns, -1, -1)
        )
        self._driver.retire(self._engines(node))
        self._draining, self._switching = node, True
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        node = self._draining
        if node is None or self._driver.unfinished(self._engines(node))[1]:
            return
        self._draining = None
        # After the round that ends now has freed everything.
        self._events.at(self._events.now_ns, self._leave, len(self._record.moves) - 1)

    def _leave(self, index: int) -> None:
        move = self._record.moves[index]
        now_ns = self._events.now_ns
        self._record.moves[index] = move._replace(drained_ns=now_ns)
        self._units.leave(self._engines(move.node), move.from_role)
        self._machine.change_role(move.node, move.to_role)
        self._events.at(now_ns + to_ns(self._settings.switch_s), self._join, index)

    def _join(self, index: int) -> None:
        move = self._record.moves[index]._replace(joined_ns=self._events.now_ns)
        self._record.moves[index] = move
        self._switching = False
        self._took_s.append((move.joined_ns - move.decided_ns) / NS_PER_S)
        self._units.join(self._engines(move.node), move.to_role)
        self._driver.join(self._engines(move.node), move.to_role)

    def _engines(self, node: int) -> range:
        return range(node * self._node_engines, (node + 1) * self._node_engines)
