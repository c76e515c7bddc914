"""`dualpath lab`: an emulated cluster on this machine, with shaped links per node."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpath.cli.main import OutputFolder
from dualpath.cli.output import add_json_argument, print_progress, warn_if_no_plots, wrote_json
from dualpath.cli.settings import (
    Part,
    add_parts,
    add_settings,
    configuration,
    flag_settings,
)
from dualpath.cli.signals import sigterm_as_interrupt
from dualpath.core.modes import Mode
from dualpath.core.settings import Settings, declared
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.report.model import Notes, Table
from dualpath_lab.cli import LAB
from dualpath_lab.experiments.settings import (
    BENCH_LAB,
    EmulatedNodes,
    JctSettings,
    OnlineSettings,
    RoleShiftSettings,
    TierSettings,
    VllmNodes,
    WindowSettings,
)
from dualpath_lab.nodes.settings import LabSettings

if TYPE_CHECKING:
    from dualpath_lab.experiments.report import ExperimentReport
    from dualpath_lab.nodes.cluster import LabState

# --------------------------------------------------------------------------------- lab experiments
# `dualpath lab run` and `dualpath lab bench`: experiments on temporary labs.

_BENCH = {
    name: getattr(BENCH_LAB, name)
    for name in ("name", "snic_bytes_per_s", "cnic_bytes_per_s", "image_bytes")
}
#: The lab of `run`, with flags for nodes and name, and that of the experiments.
_RUN_LAB = Part(LAB, "lab", defaults=_BENCH)
_BENCH_LAB = Part(LAB, "lab", without=("name", "nodes"), defaults=_BENCH)

_RUN = {"name": "run", "mode": (Mode.BASIC, Mode.DUALPATH, Mode.ORACLE), "repeat": 1}
_ONLINE = {
    name: getattr(OnlineSettings().jct, name) for name in ("name", "nodes", "mode", "repeat")
}
_SIMULATOR = {
    "name": "simulator",
    "nodes": ("1P1D", "1P2D"),
    "mode": (Mode.BASIC, Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE),
}
_SEALED = {"name": "sealed", "nodes": ("1P2D",), "mode": (Mode.DUALPATH,)}
#: Settings of `isolation` and `data-plane` that have flags; the others are fixed.
_ISOLATION = (
    *("nodes", "link_bytes_per_s", "message_bytes", "load", "rounds", "legs", "repeat"),
    "most_busy",
)
_DATA_PLANE = ("storage", "repeat")
#: Settings of the role policy without flags: objectives that only the simulator's policy has, and
#: a measured one.
_NOT_ASKED = ("ttft_slo_s", "tpot_slo_s", "switch_s")

_RUN_DESCRIPTION = """Create a lab, run agents on it in each of the modes, print job completion
times
and link utilization, remove the lab. Engines are emulated: real scheduler, storage, buffers and
transfers; every KV block is verified at its destination. Exit code 1: the machine was too busy."""


def add_run_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dualpath lab run`."""
    parser = actions.add_parser(
        "run", help="create a lab, replay agents on it, remove it", description=_RUN_DESCRIPTION
    )
    _add_out(parser)
    _add_vllm(parser)
    add_settings(parser, JctSettings, without=("name", "nodes"), defaults=_RUN)
    _add_common(parser, _RUN_LAB)


def add_bench_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dualpath lab bench`."""
    from dualpath_lab.experiments.isolation_settings import IsolationSettings
    from dualpath_lab.experiments.settings import DataPlaneSettings

    parser = actions.add_parser(
        "bench",
        help="run experiments on temporary labs",
        description="Experiments on temporary labs; each prints a report and, with --out, "
        "writes it as Markdown, PNG and JSON. The machine must be otherwise idle.",
    )
    experiments = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    jct = experiments.add_parser(
        "jct",
        help="job completion time, link utilization and balance of every mode",
        description="Job completion time of all modes on several clusters, interleaved.",
    )
    _add_vllm(jct)
    online = experiments.add_parser(
        "online",
        help="the highest arrival rate of agents under an SLO, by bisection, and latencies",
        description="The highest arrival rate of agents under an SLO in every mode, found by "
        "bisection, and TTFT, TTST and TPOT at every tried rate.",
    )
    simulator = experiments.add_parser(
        "simulator",
        help="measured job completion times compared with the simulator's",
        description="The same cluster and agents in lab and simulator.",
    )
    isolation = experiments.add_parser(
        "isolation",
        help="latency of model communication during KV transfers, with and without QoS",
        description="An exchange between all nodes in the inference lane: alone, with KV transfers "
        "in the same lane, and with KV transfers in their own lane (§5.1, §A.1).",
    )
    data_plane = experiments.add_parser(
        "data-plane",
        help="storage reads and transfers compared with fio and raw NIXL, CPU time per GB",
        description="Storage to DRAM compared with fio and raw NIXL; Layer Blocks between two "
        "engines compared with raw NIXL; cost of a descriptor.",
    )
    dram = experiments.add_parser(
        "dram",
        help="job completion time without and with a DRAM cache, by its size",
        description="Job completion time and TTFT without and with a DRAM tier and in Oracle, by "
        "the share of the working set that fits.",
    )
    sealed = experiments.add_parser(
        "sealed",
        help="job completion time with plain, authenticated and encrypted blocks",
        description="Job completion time and CPU time with plain, authenticated and "
        "encrypted blocks.",
    )
    roles = experiments.add_parser(
        "roles",
        help="role changes under a load that shifts from prefill to decode, measured and simulated",
        description="Emulated engines that change their role by the simulator's policy, engines "
        "that do not, and both simulated: JCT, and the times of role changes. Creates no lab.",
    )
    for parser in (jct, online, simulator, dram, sealed, roles, isolation, data_plane):
        _add_out(parser)
    add_settings(online, OnlineSettings)
    defaults: tuple[Mapping[str, Any], ...] = ({}, _ONLINE, _SIMULATOR, _SEALED)
    for parser, own in zip((jct, online, simulator, sealed), defaults, strict=True):
        unused = ("repeat",) if parser is online else ()
        add_settings(parser, JctSettings, without=unused, defaults=own)
        compared = ("storage_protection",) if parser is sealed else ()
        _add_common(parser, _BENCH_LAB, compared)
    _add_dram(dram)
    add_settings(roles, RoleShiftSettings)
    defaults_of_policy = _values(RoleShiftSettings().rebalancing)
    add_settings(
        *(roles, RebalanceSettings), title="policy", without=_NOT_ASKED, defaults=defaults_of_policy
    )
    add_settings(isolation, IsolationSettings, only=_ISOLATION)
    add_settings(data_plane, DataPlaneSettings, only=_DATA_PLANE)


def _add_dram(parser: argparse.ArgumentParser) -> None:
    base = _dram_base()
    add_settings(parser, TierSettings)
    add_settings(parser, JctSettings, defaults=_values(base))
    add_settings(parser, WindowSettings, title="agents", defaults=_values(base.windows))
    sizes = ("dram_bytes", "dram_tier")
    defaults = _values(base.emulated)
    add_settings(parser, EmulatedNodes, title="emulated engines", without=sizes, defaults=defaults)
    add_parts(parser, (_dram_lab(),))


def _dram_base() -> JctSettings:
    return TierSettings().jct


def _dram_lab() -> Part:
    defaults = {name: getattr(_dram_base().lab, name) for name in _BENCH}
    return Part(LAB, "lab", without=("name", "nodes"), defaults=defaults)


def _values(settings: Settings) -> dict[str, Any]:
    """Return all settings by name, as an experiment's own defaults."""
    return {field.name: getattr(settings, field.name) for field in declared(type(settings))}


def _add_common(parser: argparse.ArgumentParser, lab: Part, compared: Sequence[str] = ()) -> None:
    """Add the flags of most experiments; ``compared`` settings of engines have no flags."""
    add_settings(parser, WindowSettings, title="agents")
    add_settings(parser, EmulatedNodes, title="emulated engines", without=compared)
    add_parts(parser, (lab,))


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=OutputFolder, metavar="DIR", help="write table, plot and JSON there"
    )


def _add_vllm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm",
        metavar="MODEL",
        help="use vLLM engines with this model folder (`dualpath model wide` creates one) instead "
        "of emulated engines",
    )


def run_experiment(args: argparse.Namespace) -> int:
    """Run `lab run` or an experiment; return 0, or 1 if the machine was too busy for the links.

    Raises ``ConfigError`` and ``EngineLostError`` after the lab is removed.
    """
    from dualpath.report.text import print_report
    from dualpath_lab.experiments.report import as_report, write_experiment

    warn_if_no_plots(args.out)
    report = _measured(args)
    print_report(as_report(report))
    if args.out:
        for path in write_experiment(report, Path(args.out)):
            print_progress(f"wrote {path}")
    return 1 if report.too_busy else 0


def _measured(args: argparse.Namespace) -> "ExperimentReport":
    from dualpath_lab.experiments.data_plane import measure_data_plane
    from dualpath_lab.experiments.dram_tier import measure_dram_tier
    from dualpath_lab.experiments.isolation import measure_isolation
    from dualpath_lab.experiments.isolation_settings import IsolationSettings
    from dualpath_lab.experiments.jct import measure_jct
    from dualpath_lab.experiments.online import measure_online
    from dualpath_lab.experiments.roles import measure_roles
    from dualpath_lab.experiments.sealed_blocks import measure_sealed_blocks
    from dualpath_lab.experiments.settings import DataPlaneSettings
    from dualpath_lab.experiments.simulator_comparison import compare_with_simulator

    command = command_line()
    match "run" if args.action == "run" else args.experiment:
        case "run":
            return measure_jct(_jct_settings(args, _RUN_LAB, _RUN), command, print_progress)
        case "jct":
            return measure_jct(_jct_settings(args, _BENCH_LAB, {}), command, print_progress)
        case "dram":
            base = _dram_base()
            jct = _jct_settings(
                args,
                _dram_lab(),
                _values(base),
                windows=_values(base.windows),
                emulated=_values(base.emulated),
            )
            return measure_dram_tier(
                flag_settings(args, TierSettings, jct=jct), command, print_progress
            )
        case "sealed":
            settings = _jct_settings(args, _BENCH_LAB, _SEALED)
            return measure_sealed_blocks(settings, command, print_progress)
        case "simulator":
            settings = _jct_settings(args, _BENCH_LAB, _SIMULATOR)
            return compare_with_simulator(settings, command, print_progress)
        case "online":
            jct = _jct_settings(args, _BENCH_LAB, _ONLINE)
            return measure_online(
                flag_settings(args, OnlineSettings, jct=jct), command, print_progress
            )
        case "roles":
            defaults = _values(RoleShiftSettings().rebalancing)
            policy = flag_settings(args, RebalanceSettings, defaults=defaults)
            roles = flag_settings(args, RoleShiftSettings, rebalancing=policy)
            return measure_roles(roles, command, print_progress)
        case "isolation":
            return measure_isolation(flag_settings(args, IsolationSettings), print_progress)
        case _:
            return measure_data_plane(flag_settings(args, DataPlaneSettings), command)


def _jct_settings(
    args: argparse.Namespace,
    part: Part,
    defaults: Mapping[str, Any],
    *,
    windows: Mapping[str, Any] = {},
    emulated: Mapping[str, Any] = {},
) -> JctSettings:
    """Return the settings; ``windows`` and ``emulated`` are the experiment's own defaults."""
    lab = configuration(args, (part,)).settings(LAB, LabSettings)
    own = {"name": defaults["name"], "nodes": (lab.nodes,)} if part is _RUN_LAB else {}
    return flag_settings(
        args,
        JctSettings,
        defaults=defaults,
        windows=flag_settings(args, WindowSettings, defaults=windows),
        lab=lab,
        emulated=flag_settings(args, EmulatedNodes, defaults=emulated),
        vllm=VllmNodes(model=args.vllm) if getattr(args, "vllm", None) else None,
        **own,
    )


def command_line() -> str:
    """Return the command line, without --out and without absolute paths."""
    import shlex

    arguments = sys.argv[1:]
    if "--out" in arguments:
        place = arguments.index("--out")
        del arguments[place : place + 2]
    named = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return shlex.join(["dualpath", *named])


PARTS = (Part(LAB),)

_DESCRIPTION = """An emulated cluster on this machine: nodes are network namespaces, their compute
NICs share a switch; every link is shaped to its rate, with a lane for inference and one for KV, and
storage reads are throttled per node. `run` and `bench` create their own lab and remove it."""
_EPILOG = """\
dualpath lab up --nodes 1P2D --cnic-bytes-per-s 1Gbit --snic-bytes-per-s 50MB
dualpath lab down
dualpath lab run --nodes 1P2D --mode basic,dualpath,oracle
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `dualpath lab`."""
    parser = subparsers.add_parser(
        "lab",
        help="emulate a cluster on this machine: nodes with shaped compute and storage NICs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser(
        "up", help="create a lab", description="Create a lab and print its nodes and links."
    )
    status = actions.add_parser(
        "status",
        help="print nodes and links of a lab",
        description="Print nodes and links of a lab.",
    )
    down = actions.add_parser(
        "down",
        help="remove a lab",
        description="Remove everything of a lab, including leftovers of a crash, and kill the "
        "processes on its nodes.",
    )
    up.add_argument("--dry-run", action="store_true", help="print the steps and exit")
    for action in (up, status):
        add_json_argument(action)
    add_parts(up, PARTS)
    for action in (status, down):
        add_settings(action, LabSettings, only=("name",))
    add_run_parser(actions)
    add_bench_parser(actions)


def run(args: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        ConfigError: invalid settings, a lab of that name that exists already or does not exist,
            or a step that the kernel refuses.
    """
    if args.action in ("run", "bench"):
        return run_experiment(args)

    from dualpath_lab.nodes.cluster import lab_down, lab_status

    if args.action == "up":
        return _up(configuration(args, PARTS).settings(LAB, LabSettings), args)
    name = flag_settings(args, LabSettings).name
    if args.action == "status":
        _print(lab_status(name), args)
        return 0
    removed = lab_down(name)
    print_progress(f"lab {name!r} removed: {removed or 'nothing to remove'}")
    return 0


def _up(settings: LabSettings, args: argparse.Namespace) -> int:
    from dualpath_lab.nodes.cluster import lab_up
    from dualpath_lab.nodes.machine import find_machine
    from dualpath_lab.nodes.runner import describe
    from dualpath_lab.nodes.steps import make_steps

    if args.dry_run:
        for step in make_steps(settings, find_machine(settings)):
            print(describe(step))
        return 0
    # SIGTERM raises an exception, which removes the partly created lab.
    with sigterm_as_interrupt():
        state = lab_up(settings)
    _print(state, args)
    return 0


def _print(state: "LabState", args: argparse.Namespace) -> None:
    from dualpath_lab.nodes.cluster import lab_nodes, link_reports, storage_url

    settings, machine = state.settings, state.machine
    found = {
        "settings": settings,
        "shaping": machine.shaping,
        "storage": storage_url(state),
        "nodes": lab_nodes(state),
        "links": link_reports(state),
    }
    if wrote_json(args, found):
        return
    from dualpath.report.text import print_blocks

    head = (
        f"lab {settings.name}: {settings.nodes}, shaping {machine.shaping.value}",
        f"storage {storage_url(state)}",
    )
    nodes = tuple((node.name, node.address) for node in lab_nodes(state))
    links = tuple(
        (link.link, _rate(link.bytes_per_s), "yes" if link.shaped else "NO", link.how)
        for link in link_reports(state)
    )
    print_blocks(
        Notes(head),
        Table("", ("node", "address"), nodes),
        Table("", ("link", "rate per node", "shaped", "how"), links),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s = {bytes_per_s * 8 / 1e9:g} Gbit/s"
