"""``dualpath simulate``: what the modes would bring on a cluster, model and trace of one's own."""

import argparse
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dualpath.cli.simulation_inputs import (
    Trace,
    add_machine_arguments,
    add_workload_arguments,
    arriving,
    check_core,
    load_cluster,
    load_model,
    workload_note,
)
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report.files import as_json, require_writable, write_file

if TYPE_CHECKING:
    from dualpath.laboratory.workload.columns.agent_table import AgentTable
    from dualpath.model.evaluation.comparison import RunSummary
    from dualpath.model.sim.progress import Progress
    from dualpath.model.sim.settings import Setup

ALL = "all"
SCHEMA = "dualpath.simulation/1"
_DESCRIPTION = """Simulate modes of the system on a modelled cluster and print them side by side:
the scheduler and the transfer plans are those of the live system, time is virtual. Everything is
seeded; equal commands give equal numbers. docs/simulator.md is the model."""
_EPILOG = """\
dualpath simulate --cluster paper-660b --model ds-v3.2 --trace 64k --agents 1024
dualpath simulate --cluster c.toml --model costs.toml --trace t.jsonl --mode basic dualpath \\
    --set prefill_nodes=4 snic_bytes_per_s=25e9
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath simulate`."""
    parser = subparsers.add_parser(
        "simulate",
        help="what the modes would bring on a modelled cluster, model and trace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_machine_arguments(parser)
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=[ALL, *(mode.value for mode in Mode)],
        default=[ALL],
        help="modes to compare",
    )
    add_workload_arguments(parser)
    parser.add_argument(
        "--aps",
        type=float,
        metavar="R",
        help="agents arrive at R per second (Poisson) instead of all at once",
    )
    parser.add_argument("--until", type=float, metavar="S", help="cut the run at this virtual time")
    parser.add_argument("--json", metavar="FILE.json", help="write setting and figures as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Simulate, print the comparison, write JSON if asked for; return 0.

    Raises ``ConfigError`` or ``TraceError`` before anything is simulated.
    """
    from rich.text import Text

    from dualpath.model.evaluation.comparison import compare, summarise
    from dualpath.model.sim.derived import check
    from dualpath.model.sim.run import simulate
    from dualpath.model.sim.settings import Setup
    from dualpath.report.text import print_report, terminal

    require_writable("--json", args.json)
    check_core(args.core)
    if args.until is not None and not 0 < args.until <= 1e9:
        raise ConfigError(f"--until is {args.until} s, must be above 0 and at most 1e9")
    cluster = load_cluster(args)
    model = load_model(args, cluster)
    agents = arriving(Trace.read(args, cluster, model).agents(), args.aps, args.seed)
    setups = [Setup(cluster=cluster, model=model, mode=mode) for mode in modes(args.mode)]
    for setup in setups:
        check(setup, agents)
    summaries = []
    with _SimulationProgress(agents.rounds, args.quiet) as progress:
        for setup in setups:
            advance = progress.begin(setup.mode.value)
            result = simulate(setup, agents, core=args.core, until_s=args.until, progress=advance)
            summaries.append(summarise(result))
            progress.end(summaries[-1])
    notes = [_setting_note(args, setups[0]), workload_note(args, agents)]
    if args.json:
        write_file(args.json, as_json(_document(args, setups[0], agents, summaries)))
    terminal().print(Text("Simulated: figures of a model, nothing was served.", style="bold"))
    print_report(compare(summaries, notes))
    return 0


def modes(chosen: Sequence[str]) -> list[Mode]:
    """Return the modes meant, each once, in the order of the ablation."""
    return [mode for mode in Mode if ALL in chosen or mode.value in chosen]


def _setting_note(args: argparse.Namespace, setup: "Setup") -> str:
    cluster = setup.cluster
    changed = f" with {' '.join(args.overrides)}" if args.overrides else ""
    return (
        f"Cluster {args.cluster}{changed}: {cluster.prefill_nodes}P{cluster.decode_nodes}D of "
        f"{cluster.gpus_per_node} GPUs, storage NIC {cluster.snic_bytes_per_s / 1e9:g} GB/s per "
        f"node. Model {setup.model.name}, {setup.model.kv_bytes_per_token:,.0f} bytes of KV per "
        "token."
    )


def _document(
    args: argparse.Namespace,
    setup: "Setup",
    agents: "AgentTable",
    summaries: "Sequence[RunSummary]",
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "simulated": True,
        "cluster": setup.cluster,
        "model": setup.model,
        "workload": workload_note(args, agents),
        "seed": args.seed,
        "agents_per_s": args.aps,
        "until_s": args.until,
        "runs": list(summaries),
    }


class _SimulationProgress:
    """Bars on a terminal, a line per finished mode elsewhere; all on standard error."""

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
        """Return what the simulator calls now and then."""
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
