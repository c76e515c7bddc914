"""Online re-balancing: when a node moves between the prefill and the decode role (§8.1).

The paper leaves the adjustment of P/D to future work; this is dualpath's own rule.  It works on
*demand in nodes*.  Over the last interval a role with ``n`` nodes at utilisation ``u`` did the
work of ``u·n`` nodes, and a backlog of ``w`` tokens, to be worked off within the horizon ``H`` by
nodes that get ``q`` tokens per second done, asks for ``w / (q·H)`` more:

    demand d = u·n + w / (q·H)            pressure = d / n

A role that breaks its latency objective has at least the pressure latency / objective (at most
``LARGEST_BREACH``).  The cluster is as slow as its most pressed role: the work of the horizon
takes ``H·m`` seconds, with

    m(P, D) = max(1, d_prefill / P, d_decode / D)

A move takes the node out of service for ``switch_s`` = s, so that m is m(switching) meanwhile
(the giver is one node short, the taker not yet stronger) and m(after) then:

    gain = H · (m(now) - m(after))        cost = s · (1 - m(after) / m(switching))
    move  ⇔  gain > ``margin`` · cost  and  m(now) - m(after) ≥ ``least_improvement`` · m(now)

The cost is what the same work would take less if the node changed its role at once; a switch that
makes the giver the bottleneck costs up to s.  A gain means m falls with every move, so under a
constant demand the policy settles and never returns to a shape it left.  Against noise, a move must
be the answer ``patience`` times in a row.  It is not asked while a node switches, and rests for
``rest_s`` then.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings

#: A latency ten times its objective does not ask for ten times the nodes: it mostly is a queue,
#: which ``waiting_tokens`` counts already.
LARGEST_BREACH = 1.5
#: Re-balancing is about minutes; observing more often than this only costs time.
MIN_INTERVAL_S = 0.1
#: A larger value of any of these settings is a typing error.
LARGEST = 1e6


class RebalanceSettings(Settings, frozen=True, kw_only=True):
    """Constants of the rule and of its driver; times in seconds.

    The driver observes the cluster every ``interval_s``.  ``switch_s`` is taken for what a switch
    costs, from the decision until the node serves in its new role, until one has been measured
    (``policy.rebalance``); the simulator's nodes restart for so long, once they are empty.
    ``ttft_slo_s`` and ``tpot_slo_s`` are the objectives, None for none (offline).
    ``prefill_node_tokens_per_s`` and ``decode_node_tokens_per_s`` are the speed of one node of the
    role (q), in the tokens in which ``RoleLoad.waiting_tokens`` is counted; None leaves the
    rate to the driver, which knows the model's costs (``with_rates``).
    """

    interval_s: Annotated[
        float, Setting("from one look to the next", ge=MIN_INTERVAL_S, le=LARGEST)
    ] = 15.0
    switch_s: Annotated[
        float, Setting("until a moved node serves again, before one is measured", ge=0, le=LARGEST)
    ] = 30.0
    horizon_s: Annotated[float, Setting("for which a move has to pay", gt=0)] = 300.0
    margin: Annotated[float, Setting("gain over cost that a move needs", ge=1, le=LARGEST)] = 2.0
    least_improvement: Annotated[
        float, Setting("prevents the policy from moving nodes without a benefit", gt=0, lt=1)
    ] = 0.05
    patience: Annotated[int, Setting("equal answers in a row", ge=1, le=LARGEST)] = 2
    rest_s: Annotated[float, Setting("after a switch", ge=0, le=LARGEST)] = 60.0
    ttft_slo_s: Annotated[float | None, Setting("objective; none offline", gt=0)] = None
    tpot_slo_s: Annotated[float | None, Setting("objective; none offline", gt=0)] = None
    prefill_node_tokens_per_s: Annotated[
        float | None, Setting("what a prefill node gets done; none: by the model's costs", gt=0)
    ] = None
    decode_node_tokens_per_s: Annotated[
        float | None, Setting("what a decode node gets done; none: by the model's costs", gt=0)
    ] = None

    def with_rates(self, prefill: float, decode: float) -> "RebalanceSettings":
        """Return the settings with these rates in tokens/s in the place of those not given."""
        return msgspec.structs.replace(
            self,
            prefill_node_tokens_per_s=self.prefill_node_tokens_per_s or prefill,
            decode_node_tokens_per_s=self.decode_node_tokens_per_s or decode,
        )

    def node_tokens_per_s(self, role: Role) -> float:
        """Return what a node of ``role`` gets done; raises ``ConfigError`` if it is not given."""
        name = f"{role}_node_tokens_per_s"
        rate: float | None = getattr(self, name)
        if rate is None:
            raise ConfigError(f"{name} is not given and has no default; set it above 0 tokens/s")
        return rate


class RoleLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One role over the last interval.

    ``utilisation`` (0 to 1) is the share of its capacity in use.  For PEs: prompt tokens done over
    what ``prefill_node_tokens_per_s`` allows, not the time in forward passes, which one request
    fills as well.  For DEs: the share of HBM held.  ``waiting_requests`` and ``waiting_tokens``
    wait for this role at the end of the interval; requests that are being read from storage do not
    count, as a move of engines does not make storage faster.
    ``latency_s`` is the mean TTFT (prefill) or TPOT (decode) of the interval, None without any.
    """

    nodes: int
    utilisation: float
    waiting_requests: int = 0
    waiting_tokens: int = 0
    latency_s: float | None = None


class ClusterObservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the policy observes at the end of every interval of ``interval_s`` seconds."""

    interval_s: float
    prefill: RoleLoad
    decode: RoleLoad

    def of(self, role: Role) -> RoleLoad:
        """Return the load of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def check(self) -> None:
        """Raise ``ConfigError`` for an observation that cannot be."""
        if not 0 < self.interval_s < math.inf:
            raise ConfigError(f"interval_s is {self.interval_s}, must be above 0; correct it")
        for role in Role:
            load = self.of(role)
            if load.nodes < 1:
                raise ConfigError(f"{role} has {load.nodes} nodes, every role needs at least 1")
            if not 0 <= load.utilisation <= 1:
                raise ConfigError(f"utilisation of {role} is {load.utilisation}, must be 0 to 1")
            if min(load.waiting_requests, load.waiting_tokens) < 0:
                raise ConfigError(f"{role} has a negative number waiting, must be at least 0")
            if load.latency_s is not None and not load.latency_s >= 0:
                raise ConfigError(f"latency of {role} is {load.latency_s} s, must be at least 0")


class Move(msgspec.Struct, frozen=True):
    """One node changes its role; ``gain_s`` and ``cost_s`` over the horizon, as in the module.

    ``reason``: "prefill-bound" or "decode-bound", after the role that gets the node.
    """

    from_role: Role
    to_role: Role
    reason: str
    gain_s: float
    cost_s: float


class Stay(msgspec.Struct, frozen=True):
    """Nothing moves.

    ``reason``: "balanced" (no role is pressed, or no move makes the most pressed one better),
    "last-node" (the giver has one node), "giver-breaks-slo" (the giver's own latency would exceed
    its objective), "small-improvement", "cost-exceeds-gain", "patience", "rest".
    """

    reason: str


Decision = Move | Stay


class Rebalancer:
    """The policy over time; owns nothing but how long it has wanted what, and its rest."""

    def __init__(self, settings: RebalanceSettings) -> None:
        """Raises ``ConfigError`` for settings out of range or without a role's rate."""
        for role in Role:
            settings.node_tokens_per_s(role)
        self._settings = settings
        self._wanted: Role | None = None
        self._streak = 0
        self._rest_s = 0.0

    def retune(self, settings: RebalanceSettings) -> None:
        """Go on with other settings: rates and the time of a switch, as measured meanwhile.

        Raises as the constructor does.
        """
        for role in Role:
            settings.node_tokens_per_s(role)
        self._settings = settings

    def observe(self, observation: ClusterObservation) -> Decision:
        """Return the decision after one more interval; the caller executes a ``Move``.

        It asks again when that is over.  Raises ``ConfigError`` for an observation that cannot be.
        """
        observation.check()
        if self._rest_s > 0:
            self._rest_s -= observation.interval_s
            return Stay("rest")
        decision = weigh(self._settings, observation)
        if isinstance(decision, Stay):
            self._wanted, self._streak = None, 0
            return decision
        self._streak = self._streak + 1 if decision.to_role is self._wanted else 1
        self._wanted = decision.to_role
        if self._streak < self._settings.patience:
            return Stay("patience")
        self._wanted, self._streak = None, 0
        self._rest_s = self._settings.rest_s
        return decision


def weigh(settings: RebalanceSettings, observation: ClusterObservation) -> Decision:
    """Return what one observation by itself calls for, without memory."""
    demand = {role: _demand_nodes(settings, observation, role) for role in Role}
    nodes = {role: observation.of(role).nodes for role in Role}
    taker = max(Role, key=lambda role: demand[role] / nodes[role])
    giver = Role.DECODE if taker is Role.PREFILL else Role.PREFILL
    now = _slowdown(demand, nodes)
    if now <= 1.0:
        return Stay("balanced")
    if nodes[giver] == 1:
        return Stay("last-node")
    left = {**nodes, giver: nodes[giver] - 1}
    switching = _slowdown(demand, left)
    after = _slowdown(demand, {**left, taker: nodes[taker] + 1})
    if after >= now:
        return Stay("balanced")
    if _breaks_slo(settings, observation, giver):
        return Stay("giver-breaks-slo")
    if now - after < settings.least_improvement * now:
        return Stay("small-improvement")
    gain_s = settings.horizon_s * (now - after)
    cost_s = settings.switch_s * (1 - after / switching)
    if gain_s <= settings.margin * cost_s:
        return Stay("cost-exceeds-gain")
    return Move(giver, taker, f"{taker}-bound", gain_s, cost_s)


def _slowdown(demand: dict[Role, float], nodes: dict[Role, int]) -> float:
    return max(1.0, *(demand[role] / nodes[role] for role in Role))


def _demand_nodes(
    settings: RebalanceSettings, observation: ClusterObservation, role: Role
) -> float:
    load = observation.of(role)
    backlog = load.waiting_tokens / (settings.node_tokens_per_s(role) * settings.horizon_s)
    demand = load.utilisation * load.nodes + backlog
    objective_s = _objective_s(settings, role)
    if objective_s is not None and load.latency_s is not None and load.latency_s > objective_s:
        breach = min(load.latency_s / objective_s, LARGEST_BREACH)
        demand = max(demand, breach * load.nodes)
    return demand


def _breaks_slo(settings: RebalanceSettings, observation: ClusterObservation, giver: Role) -> bool:
    """Return whether the giver's latency, grown as its nodes shrink, would miss its objective."""
    load = observation.of(giver)
    objective_s = _objective_s(settings, giver)
    if objective_s is None or load.latency_s is None:
        return False
    return load.latency_s * load.nodes / (load.nodes - 1) > objective_s


def _objective_s(settings: RebalanceSettings, role: Role) -> float | None:
    return settings.ttft_slo_s if role is Role.PREFILL else settings.tpot_slo_s


# ------------------------------------------------------------------------ loads of the roles


_Node = TypeVar("_Node")


class RoleQueue(NamedTuple):
    """The load of a role's engines and the queue for them, in the tokens that tok_e counts.

    ``placed_tokens`` are of requests that have an engine of the role (HBM held, for DEs);
    ``waiting`` requests of ``waiting_tokens`` have none yet.
    """

    placed_tokens: int
    waiting: int
    waiting_tokens: int


class RoleNodes(NamedTuple):
    """The nodes of both roles, and how many tokens the HBM of all decode nodes holds."""

    prefill: int
    decode: int
    decode_hbm_tokens: int


class RoleWatch:
    """Progress of requests, and the work done since the last observation.

    Waiting requests count where they are delayed:

    - a loaded prompt at its PE waits for prefill; one that is still read waits for storage, which
      no move makes faster;
    - requests without an engine of a role wait for the same as those before them: they count in
      full if at least half of the tokens placed at the role are loaded (PE) or past their first
      token (DE), less as this share falls to none;
    - a DE holds a request's HBM from its assignment on, also during read and prefill, so the HBM
      held is the DE's load by the same share.

    It is notified right after the scheduler.  Unknown requests change nothing, so an end may be
    reported twice.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, int] = {}
        self._decoding: dict[str, int] = {}
        self._loaded_tokens = self._decoding_tokens = self._prompt_tokens = 0

    def loaded(self, request_id: str, prefill_tokens: int) -> None:
        """All hits of a request are in DRAM: its prompt waits for its PE."""
        self._loaded_tokens += prefill_tokens - self._loaded.pop(request_id, 0)
        self._loaded[request_id] = prefill_tokens

    def prefilled(self, request_id: str, decode_tokens: int) -> None:
        """Its PE has finished; its DE has ``decode_tokens`` of HBM for it."""
        prompt_tokens = self._loaded.pop(request_id, 0)
        self._loaded_tokens -= prompt_tokens
        self._prompt_tokens += prompt_tokens
        self._decoding_tokens += decode_tokens - self._decoding.pop(request_id, 0)
        self._decoding[request_id] = decode_tokens

    def over(self, request_id: str) -> None:
        """It has ended, well or not."""
        self._loaded_tokens -= self._loaded.pop(request_id, 0)
        self._decoding_tokens -= self._decoding.pop(request_id, 0)

    def skip(self) -> None:
        """The last interval is not looked at; the next one begins."""
        self._prompt_tokens = 0

    def observe(
        self,
        settings: RebalanceSettings,
        nodes: RoleNodes,
        queues: Mapping[Role, RoleQueue],
        ttft_s: Sequence[float],
        tpot_s: Sequence[float],
    ) -> ClusterObservation:
        """Return how the last interval was; the next one begins.

        ``ttft_s`` and ``tpot_s`` are those of the interval.  Raises ``ConfigError`` if the rate of
        prefill nodes is not given.
        """
        done, self._prompt_tokens = self._prompt_tokens, 0
        rate = settings.node_tokens_per_s(Role.PREFILL)
        before, behind = queues[Role.PREFILL], queues[Role.DECODE]
        at_pes = _share(2 * self._loaded_tokens, before.placed_tokens)
        at_des = _share(2 * self._decoding_tokens, behind.placed_tokens)
        prefill = RoleLoad(
            nodes=nodes.prefill,
            utilisation=_share(done, rate * nodes.prefill * settings.interval_s),
            waiting_requests=int(at_pes * before.waiting),
            waiting_tokens=self._loaded_tokens + int(at_pes * before.waiting_tokens),
            latency_s=_mean(ttft_s),
        )
        decode = RoleLoad(
            nodes=nodes.decode,
            utilisation=at_des * _share(behind.placed_tokens, nodes.decode_hbm_tokens),
            waiting_requests=int(at_des * behind.waiting),
            waiting_tokens=int(at_des * behind.waiting_tokens),
            latency_s=_mean(tpot_s),
        )
        return ClusterObservation(interval_s=settings.interval_s, prefill=prefill, decode=decode)


def soonest_empty(unfinished_tokens: Mapping[_Node, int]) -> _Node:
    """Return the node with the fewest unfinished tokens, of equals the last one."""
    return min(reversed(list(unfinished_tokens)), key=lambda node: unfinished_tokens[node])


def _share(part: float, whole: float) -> float:
    return min(part / whole, 1.0) if whole else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# ------------------------------------------------------------------------ over time


_RECENT_STAYS = 256
_RECENT_SWITCHES = 16


class RolePolicy:
    """Re-balancing over time, for simulator and router alike; ``evaluate`` every ``interval_s``.

    The rule's constants of a cluster follow from measurements:

    - the rate of a full decode node is its HBM in tokens over the mean time that the last requests
      stayed, from their prefill to their end;
    - a switch takes as long as the last ones took from the decision on, their drain included.

    There is no decision until the first request has ended, and none during a switch; intervals go
    on all the same, and the rest begins when the node serves again.  Times in seconds, of any
    clock.
    """

    def __init__(self, settings: RebalanceSettings) -> None:
        self._settings = settings
        self._watch = RoleWatch()
        self._since_s: dict[str, float] = {}
        self._stays_s: deque[float] = deque(maxlen=_RECENT_STAYS)
        self._rebalancer: Rebalancer | None = None

    def loaded(self, request_id: str, prefill_tokens: int) -> None:
        """As ``RoleWatch.loaded``."""
        self._watch.loaded(request_id, prefill_tokens)

    def prefilled(self, request_id: str, decode_tokens: int, now_s: float) -> None:
        """As ``RoleWatch.prefilled``."""
        self._since_s[request_id] = now_s
        self._watch.prefilled(request_id, decode_tokens)

    def over(self, request_id: str, now_s: float) -> None:
        """As ``RoleWatch.over``."""
        if (since_s := self._since_s.pop(request_id, None)) is not None:
            self._stays_s.append(now_s - since_s)
        self._watch.over(request_id)

    def evaluate(
        self,
        nodes: RoleNodes,
        queues: Mapping[Role, RoleQueue],
        prefill_node_tokens_per_s: float,
        took_s: Sequence[float],
        *,
        switching: bool,
        ttft_s: Sequence[float] = (),
        tpot_s: Sequence[float] = (),
    ) -> Decision:
        """Return the decision after one more interval; the caller executes a ``Move``.

        ``prefill_node_tokens_per_s`` is what engines report, 0 if they do not know.
        ``took_s`` are the switches so far.  Besides the reasons of ``Stay``: "unmeasured" (a rate
        is not known yet, or a role has no engine) and "switching".
        """
        settings = self._tuned(nodes, prefill_node_tokens_per_s, took_s)
        if settings is None:
            self._watch.skip()
            return Stay("unmeasured")
        observation = self._watch.observe(settings, nodes, queues, ttft_s, tpot_s)
        if self._rebalancer is None:
            self._rebalancer = Rebalancer(settings)
        self._rebalancer.retune(settings)
        return Stay("switching") if switching else self._rebalancer.observe(observation)

    def _tuned(
        self, nodes: RoleNodes, prefill_node_tokens_per_s: float, took_s: Sequence[float]
    ) -> RebalanceSettings | None:
        """Return the settings with what is measured by now, None while a rate is not known."""
        if not (nodes.prefill and nodes.decode):
            return None
        given = self._settings
        stay_s = sum(self._stays_s) / len(self._stays_s) if self._stays_s else 0.0
        decode = nodes.decode_hbm_tokens / nodes.decode / stay_s if stay_s else 0.0
        prefill = given.prefill_node_tokens_per_s or prefill_node_tokens_per_s
        decode = given.decode_node_tokens_per_s or decode
        if not (prefill and decode):
            return None
        cost_s = switch_cost_s(took_s)
        return msgspec.structs.replace(
            given.with_rates(prefill, decode),
            switch_s=given.switch_s if cost_s is None else cost_s,
        )


def switch_cost_s(took_s: Iterable[float]) -> float | None:
    """Return what a switch takes, drain included: the median of the last, None before any."""
    last = list(took_s)[-_RECENT_SWITCHES:]
    return statistics.median(last) if last else None
