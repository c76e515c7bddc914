"""What `dualpath simulate` and `dualpath plan` are given: machine, model, workload, files."""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.formats import AUTO, FORMATS

if TYPE_CHECKING:
    from dualpath.laboratory.workload.columns.agent_table import AgentTable
    from dualpath.laboratory.workload.columns.from_sessions import WorkloadSettings
    from dualpath.laboratory.workload.columns.generator import Dataset
    from dualpath.laboratory.workload.conversation.session import Session
    from dualpath.model.catalog.geometry import ModelGeometry
    from dualpath.model.catalog.gpu import GpuRates
    from dualpath.model.sim.settings import ClusterSettings, ModelCosts

#: Agents of a generated dataset where none are asked for: the trajectories of §7.2.
DATASET_AGENTS = 500


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes cluster, model and core; `dualpath plan` has the same."""
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--cluster", required=True, metavar="C.toml|NAME", help="cluster file or catalog name"
    )
    machine.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="replace settings of the cluster file",
    )
    machine.add_argument(
        "--model",
        required=True,
        metavar="NAME|COSTS.toml",
        help="catalog model, or measured costs of `dualpath profile`",
    )
    machine.add_argument(
        "--gpu", default="hopper", metavar="NAME", help="rates for a catalog model"
    )
    machine.add_argument(
        "--core", choices=("compiled", "reference"), default="compiled", help="same numbers"
    )


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes the agents; `dualpath plan` has the same."""
    load = parser.add_argument_group("workload")
    load.add_argument(
        "--trace",
        required=True,
        metavar="T.jsonl|32k|48k|64k",
        help="a trace that `dualpath replay` reads, or trajectories like those of Table 2",
    )
    load.add_argument("--format", default=AUTO, help=f"trace format: {', '.join((AUTO, *FORMATS))}")
    load.add_argument("--tokenizer", metavar="FOLDER", help="for text traces; else 4 bytes a token")
    load.add_argument(
        "--agents",
        type=int,
        metavar="N",
        help="more than the trace has are made as in §A.3 (default: its sessions, or "
        f"{DATASET_AGENTS})",
    )
    load.add_argument("--seed", type=int, default=0, help="of trajectories, sampling and arrivals")
    load.add_argument("--max-turns", type=int, metavar="N", help="turns per agent at most")
    load.add_argument(
        "--max-context-tokens", type=int, metavar="N", help="truncate trajectories at this length"
    )
    load.add_argument("--scale-append", type=float, default=1.0, metavar="X")
    load.add_argument("--scale-generate", type=float, default=1.0, metavar="X")
    load.add_argument(
        "--tool-delays", choices=("none", "recorded"), default="none", help="wait for tools or not"
    )
    load.add_argument(
        "--share-across-sessions",
        choices=("none", "parallel", "sequential"),
        nargs="?",
        const="parallel",
        default="none",
        help="sessions may hit each other's blocks: side by side, or one after the other",
    )


def load_cluster(args: argparse.Namespace) -> "ClusterSettings":
    """Return the cluster with ``--set`` applied; raises ``ConfigError`` naming key and value."""
    from dualpath.model.catalog.load import load_cluster

    return overridden(load_cluster(args.cluster), args.overrides)


def overridden(cluster: "ClusterSettings", overrides: Sequence[str]) -> "ClusterSettings":
    """Return the cluster with KEY=VALUE settings replaced and checked."""
    import msgspec

    from dualpath.model.sim.settings import ClusterSettings

    values: dict[str, Any] = msgspec.structs.asdict(cluster)
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or key not in values:
            raise ConfigError(
                f"--set {text}: {key!r} is no setting of a cluster; give KEY=VALUE with one of "
                f"{', '.join(values)}"
            )
        values[key] = _number(value)
    try:
        changed = msgspec.convert(values, ClusterSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set {' '.join(overrides)}: {error}; correct the value") from error
    changed.check()
    return changed


def _number(text: str) -> str | int | float:
    """Return what a TOML file would hold; 4e10 is accepted for whole numbers as well."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def load_model(args: argparse.Namespace, cluster: "ClusterSettings") -> "ModelCosts":
    """Return the costs of the model in this cluster; raises ``ConfigError``."""
    from dualpath.model.catalog.costs import load_model_costs

    return load_model_costs(args.model, args.gpu, cluster)


def load_weights(args: argparse.Namespace) -> "tuple[ModelGeometry, GpuRates] | None":
    """Return geometry and GPU of a catalog model, None for measured costs."""
    from dualpath.model.catalog.load import MODELS, find, load_gpu, load_model, parse

    if "attention" not in parse(find(MODELS, args.model), dict):
        return None
    return load_model(args.model), load_gpu(args.gpu)


class Trace(NamedTuple):
    """The workload read once; ``agents`` makes as many of it as asked for."""

    sessions: "Sequence[Session]"
    dataset: "Dataset | None"
    settings: "WorkloadSettings"
    encode: Callable[[str], Sequence[int]] | None

    @classmethod
    def read(
        cls, args: argparse.Namespace, cluster: "ClusterSettings", model: "ModelCosts"
    ) -> "Trace":
        """Read a trace, or name a dataset; raises ``ConfigError`` or ``TraceError``."""
        from dualpath.laboratory.workload.columns.from_sessions import WorkloadSettings
        from dualpath.laboratory.workload.columns.generator import DATASETS
        from dualpath.laboratory.workload.conversation.text_encoder import load_encoder
        from dualpath.laboratory.workload.formats import read_trace

        dataset = DATASETS.get(args.trace.upper())
        if dataset is None and not Path(args.trace).exists():
            raise ConfigError(
                f"--trace {args.trace}: there is no such file; give a trace or one of "
                f"{', '.join(name.lower() for name in DATASETS)}"
            )
        settings = WorkloadSettings(
            agents=args.agents,
            seed=args.seed,
            max_turns=args.max_turns,
            max_context_tokens=args.max_context_tokens,
            context_limit_tokens=model.context_limit_tokens,
            scale_append=args.scale_append,
            scale_generate=args.scale_generate,
            tool_delay_scale=1.0 if args.tool_delays == "recorded" else 0.0,
            block_tokens=cluster.block_tokens,
            share_across_sessions=args.share_across_sessions,
        )
        settings.check()
        sessions = read_trace(args.trace, args.format) if dataset is None else []
        encode = load_encoder(args.tokenizer) if args.tokenizer else None
        return cls(sessions, dataset, settings, encode)

    def agents(self, count: int | None = None) -> "AgentTable":
        """Return ``count`` agents, all at once; None for the number asked for."""
        import msgspec

        from dualpath.laboratory.workload.columns.from_sessions import agents_from_sessions
        from dualpath.laboratory.workload.columns.generator import generate_agents

        wanted = self.settings.agents if count is None else count
        if self.dataset is not None:
            number = DATASET_AGENTS if wanted is None else wanted
            return generate_agents(self.dataset, number, self.settings.seed, workload=self.settings)
        settings = msgspec.structs.replace(self.settings, agents=wanted)
        return agents_from_sessions(self.sessions, settings, encode=self.encode)


def arriving(agents: "AgentTable", agents_per_s: float | None, seed: int) -> "AgentTable":
    """Return the agents arriving at random at a rate, or all at once."""
    from dualpath.laboratory.workload.arrivals import poisson_times_s, with_arrivals

    if agents_per_s is None:
        return agents
    own = int((agents.start_after_round < 0).sum())
    return with_arrivals(agents, poisson_times_s(own, agents_per_s, seed))


def check_core(core: str) -> None:
    """Raise ``ConfigError`` if the compiled core cannot run here."""
    if core == "compiled" and importlib.util.find_spec("numba") is None:
        raise ConfigError(
            "the compiled core needs numba; pip install 'dualpath[simulate]' or give "
            "--core reference, which is slower and gives the same numbers"
        )


def workload_note(args: argparse.Namespace, agents: "AgentTable") -> str:
    """Return what was asked of the cluster, in one sentence."""
    arrivals = "all at once" if getattr(args, "aps", None) is None else f"at {args.aps:g} per s"
    changes = [
        f"append x{args.scale_append:g}" if args.scale_append != 1 else "",
        f"generation x{args.scale_generate:g}" if args.scale_generate != 1 else "",
        f"at most {args.max_turns} turns" if args.max_turns else "",
        f"cut at {args.max_context_tokens} tokens" if args.max_context_tokens else "",
        ""
        if args.share_across_sessions == "none"
        else f"blocks shared across sessions ({args.share_across_sessions})",
    ]
    return "; ".join(
        [
            f"Trace {args.trace}: {agents.agents:,} agents {arrivals}, {agents.rounds:,} rounds",
            *filter(None, changes),
            f"tool delays: {args.tool_delays}",
            f"seed {args.seed}.",
        ]
    )
