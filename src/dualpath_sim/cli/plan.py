"""``dualpath plan``: finds the best split of N nodes into prefill and decode nodes."""

import argparse
from typing import TYPE_CHECKING, Annotated

from dualpath.cli.output import add_json_argument, print_progress, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.cluster import nodes_text
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.report.model import NOTHING, Block, Notes, Table
from dualpath_sim.cli.model_tables import kv_table, link_table, model_table, needs_blocks
from dualpath_sim.cli.simulation_inputs import (
    Trace,
    add_machine_arguments,
    add_workload_arguments,
    arriving,
    checked_core,
    load_cluster,
    load_model,
    load_weights,
    workload_note,
)
from dualpath_sim.evaluation.settings import PlanSettings

if TYPE_CHECKING:
    from dualpath.workload.columns.agent_table import AgentTable
    from dualpath_sim.evaluation.needs import RoleNeeds
    from dualpath_sim.evaluation.planner import Plan, ShapeResult
    from dualpath_sim.simulator.result import SimulationResult
    from dualpath_sim.simulator.settings import Setup

SCHEMA = "dualpath.plan/1"
_DESCRIPTION = """Simulate every division of N nodes into prefill and decode nodes (or a bounded
search of them) and print the best: the shortest JCT of all agents at once, or the highest rate
of arriving agents within an SLO on mean TTFT and TPOT, found by bisection with the ending rule of
§7.4. Groups have the size given in the cluster file, or that of the whole role."""
_EPILOG = """\
dualpath plan --total-nodes 6 --cluster paper-660b --model ds-v3.2 --trace 64k --agents 1024
dualpath plan --total-nodes 6 --cluster paper-660b --model ds-v3.2 --trace 64k --objective capacity
"""


class PlanMode(Settings, frozen=True):
    """The mode to plan for."""

    mode: Annotated[Mode, Setting("how KV is loaded")] = Mode.DUALPATH


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="find the best split of nodes into prefill and decode, and its capacity",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(parser, PlanSettings, without=("first_rate",))
    add_settings(parser, PlanMode)
    add_machine_arguments(parser, nodes=False)
    add_workload_arguments(parser)
    add_json_argument(parser, "setting and figures")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Search, print all tried shapes and the best; return 0.

    Raises ``ConfigError`` or ``TraceError`` for invalid input, also if no shape is possible.
    """
    from dualpath.report.text import print_blocks
    from dualpath_sim.evaluation.planner import make_plan

    settings = flag_settings(args, PlanSettings)
    inputs = _Inputs(args, settings)
    if settings.objective == "capacity" and inputs.trace.settings.agents is not None:
        raise ConfigError(
            f"--agents is {inputs.trace.settings.agents}, but with --objective capacity agents "
            "arrive until --horizon-s at the tried rates; omit --agents"
        )
    progress = (lambda text: None) if args.quiet else print_progress
    plan = make_plan(settings, inputs.setup, inputs.agents, inputs.simulate, progress)
    best = inputs.setup(plan.best.prefill_nodes, plan.best.decode_nodes)
    needs = inputs.needs(best)
    document = {"schema": SCHEMA, "simulated": True, "plan": plan, "needs": needs}
    if wrote_json(args, document):
        return 0
    of_model = inputs.model_blocks(best, needs)
    print_blocks(*(*of_model, _table(plan), Notes((*_verdict(plan), inputs.note()))))
    return 0


class _Inputs:
    """Cluster, model and agents by shape and rate; reads the trace once."""

    def __init__(self, args: argparse.Namespace, settings: "PlanSettings") -> None:
        self._args = args
        self._settings = settings
        self._core = checked_core(args)
        self._mode = flag_settings(args, PlanMode).mode
        self._cluster = load_cluster(args)
        self.trace = Trace.read(args, self._cluster, load_model(args, self._cluster))
        self._weights = load_weights(args)
        self._at_once: AgentTable | None = None

    def setup(self, prefill_nodes: int, decode_nodes: int) -> "Setup":
        """Return a shape; costs and memory of experts depend on it."""
        from dualpath_sim.evaluation.planner import reshaped
        from dualpath_sim.simulator.settings import Setup

        cluster = reshaped(self._cluster, prefill_nodes, decode_nodes, self._weights)
        model = load_model(self._args, cluster)
        return Setup(cluster=cluster, model=model, mode=self._mode)

    def needs(self, setup: "Setup") -> "tuple[RoleNeeds, ...]":
        """Return what a shape's engines need; empty for measured costs."""
        from dualpath_sim.evaluation.needs import role_needs

        return role_needs(setup.cluster, *self._weights) if self._weights else ()

    def model_blocks(self, setup: "Setup", needs: "tuple[RoleNeeds, ...]") -> "tuple[Block, ...]":
        """Return the model's row of Table 1, what a shape's engines need, and its links."""
        from dualpath.plan.bounds import plan_bytes_per_s
        from dualpath.policy.events import TYPICAL_APPEND_TOKENS, TYPICAL_CONTEXT_TOKENS
        from dualpath_sim.evaluation.needs import replicas_of
        from dualpath_sim.evaluation.planner import link_shape

        if not self._weights:
            return ()
        (model, _), cluster = self._weights, setup.cluster
        name = nodes_text(cluster.prefill_nodes, cluster.decode_nodes)
        shape = link_shape(cluster, replicas_of(cluster, model))
        hits, misses = TYPICAL_CONTEXT_TOKENS, TYPICAL_APPEND_TOKENS
        loads = plan_bytes_per_s(shape, model.block_geometry(1), hits, misses)
        title = f"Links of {name} with all storage NICs saturated, {hits:,} hits, {misses} misses"
        links = link_table(title, shape, loads, 1e-9)
        return (model_table(model), kv_table(model), *needs_blocks(needs, name), *links)

    def agents(self, agents_per_s: float | None) -> "AgentTable":
        """Return the agents of one run: all at once, or those that arrive until the horizon."""
        if agents_per_s is None:
            if self._at_once is None:
                self._at_once = self.trace.agents()
            return self._at_once
        from dualpath.workload.arrivals import poisson_times_for_s

        times_s = poisson_times_for_s(
            self._settings.horizon_s, agents_per_s, self.trace.settings.seed
        )
        agents = self.trace.agents(max(times_s.size, 1))
        return arriving(agents, agents_per_s, self.trace.settings.seed)

    def simulate(
        self, setup: "Setup", agents: "AgentTable", *, until_s: float | None = None
    ) -> "SimulationResult":
        """Run the selected simulator core."""
        from dualpath_sim.simulator.run import simulate

        return simulate(setup, agents, core=self._core, until_s=until_s)

    def note(self) -> str:
        """Describe the workload."""
        if self._settings.objective == "jct":
            return workload_note(self.trace, self.agents(None))
        return (
            f"Trace {self.trace.asked.trace}, agents arriving at random for "
            f"{self._settings.horizon_s:g} s at most; seed {self.trace.settings.seed}."
        )


def _table(plan: "Plan") -> Table:
    jct = plan.settings.objective == "jct"
    columns = (
        *("P:D", "JCT, s" if jct else "capacity, agents/s", "TTFT mean, s", "TPOT mean, ms"),
        *("SNIC PE", "SNIC DE", "Eq. 9", "bottleneck", *(() if jct else ("beyond it",)), ""),
    )
    rows = tuple(_cells(shape, jct, shape == plan.best) for shape in plan.shapes)
    return Table("", columns, rows, align="lrrrrr".ljust(len(columns), "l"))


def _cells(shape: "ShapeResult", jct: bool, best: bool) -> tuple[str, ...]:
    name = f"{shape.prefill_nodes}P{shape.decode_nodes}D"
    free = "within" if shape.bottleneck_free else "outside"
    slo = [] if jct else [f"{shape.slo} too slow" if shape.slo in ("TTFT", "TPOT") else shape.slo]
    if shape.refusal:
        return (name, *([NOTHING] * 6), shape.refusal, *slo, "")
    value = shape.jct_s if jct else shape.agents_per_s
    figure = NOTHING if value is None else f"{value:,.1f}" if jct else f"{value:.3f}"
    mark = "best" if best else ""
    if shape.summary is None:
        return (name, figure, *([NOTHING] * 4), free, NOTHING, *slo, mark)
    ttft, tpot, use = shape.summary.ttft, shape.summary.tpot, shape.summary.use
    return (
        name,
        figure,
        NOTHING if ttft is None else f"{ttft.mean_s:.3f}",
        NOTHING if tpot is None else f"{tpot.mean_s * 1000:.1f}",
        f"{use.snic_prefill:.0%}",
        f"{use.snic_decode:.0%}",
        free,
        shape.binds,
        *slo,
        mark,
    )


def _verdict(plan: "Plan") -> list[str]:
    best, settings = plan.best, plan.settings
    low, high = plan.ratio_range
    name = f"{best.prefill_nodes}P{best.decode_nodes}D"
    if settings.objective == "jct":
        first = f"Best of {len(plan.shapes)} shapes tried: {name}, JCT {best.jct_s:,.1f} s."
    else:
        first = (
            f"Best of {len(plan.shapes)} shapes tried: {name}, {best.agents_per_s or 0:.3f} agents "
            f"per second with mean TTFT up to {settings.ttft_slo_s:g} s and mean TPOT up to "
            f"{settings.tpot_slo_s * 1000:g} ms."
        )
    possible = settings.total_nodes - 1
    searched = "" if len(plan.shapes) == possible else f" {possible} shapes are possible."
    eq9 = (
        f"Eq. 9 finds no bottleneck at P/D from {low:.3g} to {high:.3g}."
        if low <= high
        else "Eq. 9 finds a bottleneck at every P/D: the storage NICs are too fast for the compute "
        "NICs."
    )
    return ["All figures are simulated.", first + searched, eq9]
