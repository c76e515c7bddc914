"""Inputs that `dualpath simulate` and `dualpath plan` share: machine, model, workload, files."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from dualpath.cli.output import print_skipped
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.cluster import NodesSettings, Role
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings, declared
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings
from dualpath.workload.formats import TraceSettings
from dualpath.workload.replay.result import ToolDelays
from dualpath_sim.catalog.load import CostsName, GpuName
from dualpath_sim.cli.model_options import KvDtype

if TYPE_CHECKING:
    from dualpath.workload.columns.agent_table import AgentTable
    from dualpath.workload.columns.generator import Dataset
    from dualpath.workload.conversation.sessions import Session
    from dualpath_sim.catalog.geometry import ModelGeometry
    from dualpath_sim.catalog.gpu import GpuRates
    from dualpath_sim.simulator.settings import ClusterSettings, ModelCosts

Core = Literal["auto", "compiled", "reference"]

#: Default number of agents of a generated dataset: the trajectories of §7.2.
DATASET_AGENTS = 500


class MachineSettings(Settings, frozen=True, kw_only=True):
    """The modelled machine: a cluster, changes of its settings, a model."""

    cluster: Annotated[str, Setting("cluster file or catalog name", metavar="C.toml|NAME")]
    model: CostsName
    gpu: GpuName = "hopper"
    kv_cache_dtype: KvDtype = "auto"
    hbm_from_weights: Annotated[
        bool,
        Setting("HBM for KV is the GPU's beside the model's weights, not the cluster's setting"),
    ] = False


class CoreSettings(Settings, frozen=True):
    """Which core of the simulator runs."""

    core: Annotated[
        Core,
        Setting(
            "of the simulator; both give the same numbers. compiled is for large runs of the "
            "paper's system, reference plays everything; auto: whichever is faster"
        ),
    ] = "auto"


class DelaySettings(Settings, frozen=True):
    """Whether simulated agents wait for their tool calls."""

    tool_delays: Annotated[
        ToolDelays, Setting("wait for the recorded tool times between turns")
    ] = ToolDelays.NONE


def add_machine_arguments(parser: argparse.ArgumentParser, *, nodes: bool = True) -> None:
    """Add the arguments of cluster, model and core; ``nodes``: with the cluster's shape."""
    from dualpath_sim.simulator.settings import ClusterSettings

    add_settings(parser, MachineSettings, title="machine")
    add_settings(parser, CoreSettings)
    # Values that are not given are the cluster file's.
    unset = dict.fromkeys((field.name for field in declared(ClusterSettings)), None)
    title = "settings that override the cluster file"
    if nodes:
        add_settings(parser, NodesSettings, title=title, defaults={"nodes": None})
        title = "more settings that override the cluster file"
    add_settings(parser, ClusterSettings, title=title, defaults=unset)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the agents."""
    add_settings(parser, TraceSettings, title="workload")
    add_settings(parser, WorkloadSettings, title="agents")
    add_settings(parser, DelaySettings)


def load_cluster(args: argparse.Namespace) -> "ClusterSettings":
    """Return the cluster with the given settings replaced; raises ``ConfigError``."""
    import msgspec

    from dualpath_sim.catalog.load import load_cluster
    from dualpath_sim.simulator.settings import ClusterSettings

    cluster = load_cluster(flag_settings(args, MachineSettings).cluster)
    values = msgspec.structs.asdict(cluster)
    if "nodes" in args:
        nodes = flag_settings(args, NodesSettings)
        values |= {"prefill_nodes": nodes.prefill, "decode_nodes": nodes.decode}
    cluster = flag_settings(args, ClusterSettings, defaults=values)
    return _with_hbm_left(args, cluster)


def _with_hbm_left(args: argparse.Namespace, cluster: "ClusterSettings") -> "ClusterSettings":
    """Return the cluster, with ``hbm_from_weights`` with the HBM that weights leave."""
    import msgspec

    from dualpath_sim.catalog.costs import hbm_for_kv_bytes, sharing

    if not flag_settings(args, MachineSettings).hbm_from_weights:
        return cluster
    weights = load_weights(args)
    if weights is None:
        raise ConfigError(
            f"--hbm-from-weights is given, but {args.model} has measured costs without weights; "
            "omit it"
        )
    left = {}
    for role in Role:
        shared = sharing(cluster, role)
        left[role] = hbm_for_kv_bytes(*weights, shared)
        if left[role] <= 0:
            raise ConfigError(
                f"the weights of {args.model}, over {shared.engine} GPUs per engine and "
                f"{shared.experts} for experts, leave no HBM for KV at the {role} engines; raise "
                f"--{role}-tp, or give the role larger groups"
            )
    return msgspec.structs.replace(
        cluster, prefill_hbm_bytes=left[Role.PREFILL], decode_hbm_bytes=left[Role.DECODE]
    )


def load_model(args: argparse.Namespace, cluster: "ClusterSettings") -> "ModelCosts":
    """Return the costs of the model in this cluster; raises ``ConfigError``."""
    from dualpath_sim.catalog.costs import load_model_costs

    machine = flag_settings(args, MachineSettings)
    return load_model_costs(machine.model, machine.gpu, cluster, machine.kv_cache_dtype)


def load_weights(args: argparse.Namespace) -> "tuple[ModelGeometry, GpuRates] | None":
    """Return geometry and GPU of a catalog model, None for measured costs."""
    from dualpath_sim.catalog.geometry import ModelGeometry
    from dualpath_sim.catalog.load import load_described, load_gpu

    machine = flag_settings(args, MachineSettings)
    described = load_described(machine.model, machine.kv_cache_dtype)
    return (described, load_gpu(machine.gpu)) if isinstance(described, ModelGeometry) else None


class Trace(NamedTuple):
    """The workload, read once; ``agents`` makes a given number of agents from it."""

    asked: TraceSettings
    sessions: "Sequence[Session]"
    dataset: "Dataset | None"
    settings: WorkloadSettings
    encode: Callable[[str], Sequence[int]] | None

    @classmethod
    def read(
        cls, args: argparse.Namespace, cluster: "ClusterSettings", model: "ModelCosts"
    ) -> "Trace":
        """Read a trace or select a dataset; raises ``ConfigError`` or ``TraceError``."""
        from dualpath.workload.columns.generator import DATASETS
        from dualpath.workload.conversation.prompts import load_encoder
        from dualpath.workload.formats import read_trace
        from dualpath.workload.formats.lines import SkippedLines

        asked = flag_settings(args, TraceSettings)
        dataset = DATASETS.get(asked.trace.upper())
        if dataset is None and not Path(asked.trace).exists():
            raise ConfigError(
                f"--trace {asked.trace}: there is no such file; give a trace or one of "
                f"{', '.join(name.lower() for name in DATASETS)}"
            )
        delays = flag_settings(args, DelaySettings).tool_delays
        settings = flag_settings(
            args,
            WorkloadSettings,
            context_limit_tokens=model.context_limit_tokens,
            tool_delay_scale=1.0 if delays is ToolDelays.RECORDED else 0.0,
            block_tokens=cluster.block_tokens,
        )
        skipped = SkippedLines()
        sessions: Sequence[Session] = ()
        if dataset is None:
            on_broken = skipped if asked.skip_broken else None
            sessions = read_trace(asked.trace, asked.trace_format, on_broken=on_broken)
        print_skipped(skipped)
        encode = load_encoder(asked.tokenizer) if asked.tokenizer else None
        return cls(asked, sessions, dataset, settings, encode)

    def agents(self, count: int | None = None) -> "AgentTable":
        """Return ``count`` agents, all at once; None for the number in the settings."""
        import msgspec

        from dualpath.workload.columns.generator import generate_agents
        from dualpath.workload.columns.sessions_to_columns import agents_from_sessions

        wanted = self.settings.agents if count is None else count
        if self.dataset is not None:
            number = DATASET_AGENTS if wanted is None else wanted
            return generate_agents(self.dataset, number, self.settings.seed, workload=self.settings)
        settings = msgspec.structs.replace(self.settings, agents=wanted)
        return agents_from_sessions(self.sessions, settings, encode=self.encode)

    def dropped(self) -> str:
        """Return which sessions ``max_context_tokens`` leaves out, empty if none."""
        from dualpath.workload.columns.sessions_to_columns import dropped_sessions

        names = dropped_sessions(self.sessions, self.settings, encode=self.encode)
        if not names:
            return ""
        more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
        return (
            f"{len(names):,} of {len(self.sessions[: self.settings.agents]):,} sessions dropped, "
            f"whose first prompt is longer: {', '.join(names[:_NAMES_SHOWN])}{more}"
        )


#: Names of dropped sessions in a note.
_NAMES_SHOWN = 10


def arriving(agents: "AgentTable", agents_per_s: float | None, seed: int) -> "AgentTable":
    """Return the agents arriving at random at a rate, or all at once."""
    from dualpath.workload.arrivals import poisson_times_s, with_arrivals

    if agents_per_s is None:
        return agents
    own = int((agents.start_after_round < 0).sum())
    return with_arrivals(agents, poisson_times_s(own, agents_per_s, seed))


def checked_core(args: argparse.Namespace) -> Core:
    """Return the core asked for; raises ``ConfigError`` if it cannot run here."""
    from dualpath_sim.simulator.run import check_compiled

    core = flag_settings(args, CoreSettings).core
    if core == "compiled":
        check_compiled()
    return core


def workload_note(trace: Trace, agents: "AgentTable", agents_per_s: float | None = None) -> str:
    """Describe the workload in one sentence."""
    arrivals = "all at once" if agents_per_s is None else f"at {agents_per_s:g} per s"
    asked, settings = trace.asked, trace.settings
    changes = [
        f"append x{settings.scale_append:g}" if settings.scale_append != 1 else "",
        f"generation x{settings.scale_generate:g}" if settings.scale_generate != 1 else "",
        f"at most {settings.max_turns} turns" if settings.max_turns else "",
        f"cut at {settings.max_context_tokens} tokens" if settings.max_context_tokens else "",
        trace.dropped(),
        ""
        if settings.share_across_sessions == "none"
        else f"blocks shared across sessions ({settings.share_across_sessions})",
    ]
    return "; ".join(
        [
            f"Trace {asked.trace}: {agents.agents:,} agents {arrivals}, {agents.rounds:,} rounds",
            *filter(None, changes),
            f"tool delays: {ToolDelays.RECORDED if settings.tool_delay_scale else ToolDelays.NONE}",
            f"seed {settings.seed}.",
        ]
    )
