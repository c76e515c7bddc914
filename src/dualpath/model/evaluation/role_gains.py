"""Beyond the paper: what other divisions into prefill and decode nodes gain, fixed or moving.

*Fixed*: every division of the nodes (``planner.reshaped``), best JCT against the paper's own.
*Moving*: online re-balancing (``sim.reference.rebalancing``), started from the paper's division and
from its mirror image (D prefill and P decode nodes), against the same start with fixed roles.
"""

from collections.abc import Sequence

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import DualPathError
from dualpath.model.catalog.costs import DEFAULT_GPU
from dualpath.model.catalog.load import load_gpu, load_model
from dualpath.model.evaluation.planner import reshaped
from dualpath.model.evaluation.runs import Runs
from dualpath.model.evaluation.settings import EvaluationSettings, RunSpec
from dualpath.model.sim.result import RoleMove
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.report.model import Table, cell

#: Agents ask again only when they were answered, so that a backlog never exceeds one round per
#: agent: it has to weigh within a minute to weigh at all.
REBALANCING = RebalanceSettings(horizon_s=60.0)

Case = tuple[str, RunSpec]
Shape = tuple[int, int]
_SECONDS = "{:,.0f} s"


class ShapeGain(msgspec.Struct, frozen=True):
    """JCT in seconds by (P, D), None where the shape cannot hold the model or a round."""

    case: str
    own: Shape
    jct_s: tuple[tuple[Shape, float | None], ...]

    @property
    def best(self) -> Shape:
        """The shape of the shortest JCT, the paper's own of equals."""
        known = {shape: seconds for shape, seconds in self.jct_s if seconds is not None}
        return min(known, key=lambda shape: (known[shape], shape != self.own))

    def seconds(self, shape: Shape) -> float | None:
        """Return the JCT of a shape."""
        return dict(self.jct_s)[shape]

    @property
    def gain(self) -> float | None:
        """The share of the own shape's JCT that the best one saves."""
        own_s, best_s = self.seconds(self.own), self.seconds(self.best)
        return None if not own_s or best_s is None else 1 - best_s / own_s


class MoveGain(msgspec.Struct, frozen=True):
    """JCT in seconds with fixed roles and with moving ones, None where the start cannot be."""

    case: str
    start: Shape
    fixed_s: float | None = None
    moving_s: float | None = None
    moves: tuple[RoleMove, ...] = ()

    @property
    def gain(self) -> float | None:
        """The share of the JCT that moving saves."""
        if not self.fixed_s or self.moving_s is None:
            return None
        return 1 - self.moving_s / self.fixed_s


def rebalanced_agents(settings: EvaluationSettings) -> int:
    """Agents of the moving runs, which only the reference core plays."""
    return 32 if settings.quick else 512


def shape_gains(runs: Runs, cases: Sequence[Case]) -> list[ShapeGain]:
    """Run every shape of every case that has more than one."""
    gains = []
    for case, spec in cases:
        own = _own_shape(runs, spec)
        nodes = sum(own)
        if nodes == 2:
            continue
        shapes = [(prefill, nodes - prefill) for prefill in range(1, nodes)]
        jct_s = tuple((shape, _jct_s(runs, spec, shape)) for shape in shapes)
        gains.append(ShapeGain(case, own, jct_s))
    return gains


def move_gains(runs: Runs, cases: Sequence[Case]) -> list[MoveGain]:
    """Run every case with fixed and with moving roles, from both starts."""
    gains = []
    for _, many in cases:
        own = _own_shape(runs, many)
        if sum(own) == 2:
            continue
        spec = msgspec.structs.replace(many, agents=rebalanced_agents(runs.settings))
        case = f"{spec.system.title}, {spec.workload}"
        for start in dict.fromkeys((own, own[::-1])):
            gains.append(_move_gain(runs, case, spec, start))
    return gains


def shape_table(gains: Sequence[ShapeGain]) -> Table:
    """Return one row per case."""
    rows = tuple(
        (
            one.case,
            _name(one.own),
            _name(one.best),
            cell(one.gain, "{:+.1%}"),
            ", ".join(
                f"{_name(shape)} {cell(seconds, '{:,.0f} s')}" for shape, seconds in one.jct_s
            ),
        )
        for one in gains
    )
    columns = ("setting", "paper's P:D", "best P:D", "JCT saved", "JCT of every division")
    return Table("Best division into prefill and decode nodes", columns, rows)


def move_table(gains: Sequence[MoveGain], settings: EvaluationSettings) -> Table:
    """Return one row per case and start."""
    rows = tuple(
        (
            one.case,
            _name(one.start),
            cell(one.fixed_s, _SECONDS),
            cell(one.moving_s, _SECONDS),
            cell(one.gain, "{:+.1%}"),
            "; ".join(_moved(move) for move in one.moves) or "none",
        )
        for one in gains
    )
    columns = ("setting", "start", "fixed roles", "moving roles", "JCT saved", "moves")
    title = f"Online re-balancing, {rebalanced_agents(settings)} agents"
    return Table(title, columns, rows)


def _move_gain(runs: Runs, case: str, spec: RunSpec, start: Shape) -> MoveGain:
    try:
        started = _reshaped(runs, spec, start)
        fixed_s = runs.offline(started).jct_s
    except DualPathError:
        return MoveGain(case, start)
    overrides = (*started.overrides, ("rebalancing", REBALANCING))
    moving = msgspec.structs.replace(started, overrides=overrides)
    result = runs.result(moving)
    return MoveGain(case, start, fixed_s, result.jct_s, result.moves)


def _jct_s(runs: Runs, spec: RunSpec, shape: Shape) -> float | None:
    try:
        return runs.offline(_reshaped(runs, spec, shape)).jct_s
    except DualPathError:
        return None


def _own_shape(runs: Runs, spec: RunSpec) -> Shape:
    cluster = runs.setup(spec).cluster
    return cluster.prefill_nodes, cluster.decode_nodes


def _reshaped(runs: Runs, spec: RunSpec, shape: Shape) -> RunSpec:
    """Return a run on another shape, with the HBM that the weights leave there."""
    cluster = runs.setup(spec).cluster
    if shape == (cluster.prefill_nodes, cluster.decode_nodes):
        return spec
    weights = (load_model(spec.system.model), load_gpu(DEFAULT_GPU))
    changed = reshaped(cluster, *shape, weights)
    hbm = tuple((f"{role}_hbm_bytes", getattr(changed, f"{role}_hbm_bytes")) for role in Role)
    return msgspec.structs.replace(spec, nodes=shape, overrides=(*spec.overrides, *hbm))


def _moved(move: RoleMove) -> str:
    joined = "" if move.joined_ns < 0 else f", serves at {move.joined_ns / 1e9:,.0f} s"
    return f"{move.reason} at {move.decided_ns / 1e9:,.0f} s{joined}"


def _name(shape: Shape) -> str:
    return f"{shape[0]}P{shape[1]}D"
