"""``dualpath simulate``: compares the modes on a simulated cluster, model and trace."""

import argparse
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

from dualpath.cli.output import add_json_argument, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.cluster import Role, nodes_text
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings, declared, option
from dualpath_sim.cli.simulation_inputs import (
    Trace,
    add_machine_arguments,
    add_workload_arguments,
    arriving,
    checked_core,
    load_cluster,
    load_model,
    workload_note,
)

if TYPE_CHECKING:
    from dualpath_sim.evaluation.comparison import RunSummary
    from dualpath_sim.simulator.result import Progress
    from dualpath_sim.simulator.settings import ClusterSettings, Setup

SCHEMA = "dualpath.simulation/1"
_DESCRIPTION = """Simulate modes of the system on a modelled cluster and print them side by side:
the scheduler and the transfer plans are those of the live system, time is virtual. Everything is
seeded; equal commands give equal numbers. docs/simulator.md describes the model."""
_EPILOG = """\
dualpath simulate --cluster paper-660b --model ds-v3.2 --trace 64k --agents 1024
dualpath simulate --cluster c.toml --model costs.toml --trace t.jsonl --mode basic,dualpath \\
    --nodes 4P8D --snic-bytes-per-s 25GB
"""


class SimulateSettings(Settings, frozen=True, kw_only=True):
    """The runs; each mode runs once, in the order of the ablation."""

    mode: Annotated[tuple[Mode, ...], Setting("modes to compare")] = tuple(Mode)
    agents_per_s: Annotated[
        float | None,
        Setting("arrival rate of agents (Poisson); none: all at once", gt=0, le=1e6),
    ] = None
    until_s: Annotated[float | None, Setting("end of the run in virtual time", gt=0, le=1e9)] = None


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath simulate`."""
    parser = subparsers.add_parser(
        "simulate",
        help="compare the modes on a simulated cluster, model and trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(parser, SimulateSettings)
    add_machine_arguments(parser)
    add_workload_arguments(parser)
    add_json_argument(parser, "setting and figures")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Simulate, print the comparison, write JSON if requested; return 0.

    Raises ``ConfigError`` or ``TraceError`` before anything is simulated.
    """
    from rich.text import Text

    from dualpath.report.text import print_report, terminal
    from dualpath_sim.evaluation.comparison import compare, summarise
    from dualpath_sim.simulator.derived import check
    from dualpath_sim.simulator.run import simulate
    from dualpath_sim.simulator.settings import Setup

    settings = flag_settings(args, SimulateSettings)
    core = checked_core(args)
    cluster = load_cluster(args)
    model = load_model(args, cluster)
    trace = Trace.read(args, cluster, model)
    agents = arriving(trace.agents(), settings.agents_per_s, trace.settings.seed)
    setups = [
        Setup(cluster=cluster, model=model, mode=mode) for mode in Mode if mode in settings.mode
    ]
    for setup in setups:
        check(setup, agents)
    summaries = []
    with _SimulationProgress(agents.rounds, args.quiet) as progress:
        for setup in setups:
            advance = progress.begin(setup.mode.value)
            result = simulate(setup, agents, core=core, until_s=settings.until_s, progress=advance)
            summaries.append(summarise(result))
            progress.end(summaries[-1])
    notes = [_setting_note(args, setups[0]), workload_note(trace, agents, settings.agents_per_s)]
    document = _document(settings, trace.settings.seed, setups[0], notes[-1], summaries)
    if wrote_json(args, document):
        return 0
    terminal().print(Text("Simulated results.", style="bold"))
    print_report(compare(summaries, notes))
    return 0


def _setting_note(args: argparse.Namespace, setup: "Setup") -> str:
    from dualpath_sim.simulator.settings import ClusterSettings

    cluster = setup.cluster
    names = ("nodes", *(field.name for field in declared(ClusterSettings)))
    changes = [f"{option(name)} {getattr(args, name)}" for name in names if name in args]
    changed = f" with {' '.join(changes)}" if changes else ""
    return (
        f"Cluster {args.cluster}{changed}: "
        f"{nodes_text(cluster.prefill_nodes, cluster.decode_nodes)} of "
        f"{cluster.gpus_per_node} GPUs{_engines(cluster)}, "
        f"storage NIC {cluster.snic_bytes_per_s / 1e9:g} GB/s per node. "
        f"Model {setup.model.name}, {setup.model.kv_bytes_per_token:,.0f} bytes of KV per token."
    )


def _engines(cluster: "ClusterSettings") -> str:
    """Return the GPUs of engines as text, empty if each has one."""
    prefill, decode = cluster.gpus_per_engine(Role.PREFILL), cluster.gpus_per_engine(Role.DECODE)
    return "" if prefill == decode == 1 else f", {prefill} for a PE and {decode} for a DE"


def _document(
    settings: SimulateSettings,
    seed: int,
    setup: "Setup",
    workload: str,
    summaries: "Sequence[RunSummary]",
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "simulated": True,
        "cluster": setup.cluster,
        "model": setup.model,
        "workload": workload,
        "seed": seed,
        "agents_per_s": settings.agents_per_s,
        "until_s": settings.until_s,
        "runs": list(summaries),
    }


class _SimulationProgress:
    """Progress on standard error: bars on a terminal, else a line per finished mode."""

    def __init__(self, rounds: int, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._rounds = rounds
        self._console = Console(file=sys.stderr, quiet=quiet)
        self._bars = Progress(
            TextColumn("{task.description:12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds, virtual time {task.fields[virtual_s]:,.0f} s"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def begin(self, mode: str) -> "Progress":
        """Return the progress callback of a mode."""
        task = self._bars.add_task(mode, total=self._rounds, virtual_s=0.0)
        self._task = task

        def advance(done: int, total: int, virtual_s: float) -> None:
            self._bars.update(task, completed=done, total=total, virtual_s=virtual_s)

        return advance

    def end(self, summary: "RunSummary") -> None:
        """Show a mode as done."""
        done = summary.rounds - summary.unfinished_rounds
        self._bars.update(self._task, completed=done, virtual_s=summary.jct_s)
        if not self._console.is_terminal:
            self._console.print(
                f"{summary.mode}: {done} rounds, virtual time {summary.jct_s:,.0f} s",
                highlight=False,
            )
