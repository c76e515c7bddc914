"""`dualpath lab run` and `dualpath lab bench`: experiments on labs that are made for them."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpath.cli.output import say
from dualpath.cli.settings import (
    LAB,
    Part,
    add_parts,
    add_settings,
    configuration,
    flag_settings,
)
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.settings import (
    BENCH_LAB,
    EmulatedNodes,
    JctSettings,
    OnlineSettings,
    VllmNodes,
    WindowSettings,
)
from dualpath.laboratory.lab.settings import LabSettings

if TYPE_CHECKING:
    from dualpath.laboratory.experiments.report import ExperimentReport

_BENCH = {
    name: getattr(BENCH_LAB, name)
    for name in ("name", "snic_bytes_per_s", "cnic_bytes_per_s", "image_bytes")
}
#: The lab of `run`, whose nodes and name are asked for, and that of the experiments.
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
#: Settings of `isolation` and `data-plane` that experimenters change; the rest is what it is.
_ISOLATION = ("nodes", "link_bytes_per_s", "message_bytes", "load", "rounds", "legs", "repeat")
_DATA_PLANE = ("storage", "repeat")

_DESCRIPTION = """Make a lab, run agents on it in every mode asked for, print job completion times
and the use of links, remove the lab. Engines are emulated: real scheduler, storage, buffers and
transfers; every KV block is compared where it arrives. Exit code 1 if the machine was too busy."""


def add_run_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dualpath lab run`."""
    parser = actions.add_parser(
        "run", help="make a lab, replay agents on it, remove it", description=_DESCRIPTION
    )
    _add_out(parser)
    _add_vllm(parser)
    add_settings(parser, JctSettings, without=("name", "nodes"), defaults=_RUN)
    _add_common(parser, _RUN_LAB)


def add_bench_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dualpath lab bench`."""
    from dualpath.laboratory.experiments.data_plane_settings import DataPlaneSettings
    from dualpath.laboratory.experiments.isolation_settings import IsolationSettings

    parser = actions.add_parser(
        "bench",
        help="experiments on labs made for them",
        description="Experiments on labs made for them; each prints a report and, with --out, "
        "writes it as Markdown, PNG and JSON. Let the machine do nothing else meanwhile.",
    )
    experiments = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    jct = experiments.add_parser(
        "jct",
        help="job completion time of every mode, use and balance of links",
        description="Job completion time of all modes on several clusters, in turns.",
    )
    _add_vllm(jct)
    online = experiments.add_parser(
        "online",
        help="latencies against the arrival rate of agents, capacity under an SLO",
        description="TTFT, TTST and TPOT against agents per second, and capacity under an SLO.",
    )
    simulator = experiments.add_parser(
        "simulator",
        help="job completion times measured beside those the simulator predicts",
        description="The same cluster and agents through lab and simulator.",
    )
    isolation = experiments.add_parser(
        "isolation",
        help="latency of model communication beside KV bulk, with and without QoS",
        description="An exchange between all nodes in the inference lane: alone, beside KV bulk in "
        "the same lane, and beside KV bulk in its own (§5.1, §A.1).",
    )
    data_plane = experiments.add_parser(
        "data-plane",
        help="storage reads and transfers beside fio and raw NIXL, processor time per GB",
        description="Storage to DRAM beside fio and raw NIXL; Layer Blocks between two engines "
        "beside raw NIXL; cost of a descriptor.",
    )
    for parser in (jct, online, simulator, isolation, data_plane):
        _add_out(parser)
    add_settings(online, OnlineSettings)
    defaults: tuple[Mapping[str, Any], ...] = ({}, _ONLINE, _SIMULATOR)
    for parser, own in zip((jct, online, simulator), defaults, strict=True):
        add_settings(parser, JctSettings, defaults=own)
        _add_common(parser, _BENCH_LAB)
    add_settings(isolation, IsolationSettings, only=_ISOLATION)
    add_settings(data_plane, DataPlaneSettings, only=_DATA_PLANE)


def _add_common(parser: argparse.ArgumentParser, lab: Part) -> None:
    add_settings(parser, WindowSettings, title="agents")
    add_settings(parser, EmulatedNodes, title="emulated engines")
    add_parts(parser, (lab,))


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", help="write table, plot and JSON there")


def _add_vllm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm",
        metavar="MODEL",
        help="real vLLM engines with this model's folder (`dualpath model wide` makes one) instead "
        "of emulated ones",
    )


def run_experiment(args: argparse.Namespace) -> int:
    """Run `lab run` or an experiment; return 0, or 1 if the machine was too busy for the links.

    Raises ``ConfigError`` and ``EngineLostError`` after the lab is removed.
    """
    from dualpath.laboratory.experiments.report import as_report, write_experiment
    from dualpath.report.files import require_extra
    from dualpath.report.text import print_report

    if args.out:
        require_extra("--out")
    report = _measured(args)
    print_report(as_report(report))
    if args.out:
        for path in write_experiment(report, Path(args.out)):
            say(f"wrote {path}")
    return 1 if report.too_busy else 0


def _measured(args: argparse.Namespace) -> "ExperimentReport":
    from dualpath.laboratory.experiments.against_simulator import compare_with_simulator
    from dualpath.laboratory.experiments.data_plane import measure_data_plane
    from dualpath.laboratory.experiments.data_plane_settings import DataPlaneSettings
    from dualpath.laboratory.experiments.isolation import measure_isolation
    from dualpath.laboratory.experiments.isolation_settings import IsolationSettings
    from dualpath.laboratory.experiments.jct import measure_jct
    from dualpath.laboratory.experiments.online import measure_online

    command = command_line()
    match "run" if args.action == "run" else args.experiment:
        case "run":
            return measure_jct(_jct_settings(args, _RUN_LAB, _RUN), command, say)
        case "jct":
            return measure_jct(_jct_settings(args, _BENCH_LAB, {}), command, say)
        case "simulator":
            settings = _jct_settings(args, _BENCH_LAB, _SIMULATOR)
            return compare_with_simulator(settings, command, say)
        case "online":
            jct = _jct_settings(args, _BENCH_LAB, _ONLINE)
            return measure_online(flag_settings(args, OnlineSettings, jct=jct), command, say)
        case "isolation":
            return measure_isolation(flag_settings(args, IsolationSettings), say)
        case _:
            return measure_data_plane(flag_settings(args, DataPlaneSettings), command)


def _jct_settings(args: argparse.Namespace, part: Part, defaults: Mapping[str, Any]) -> JctSettings:
    lab = configuration(args, (part,)).settings(LAB, LabSettings)
    windows = flag_settings(args, WindowSettings)
    own = {"name": defaults["name"], "nodes": (lab.nodes,)} if part is _RUN_LAB else {}
    return flag_settings(
        args,
        JctSettings,
        defaults=defaults,
        windows=windows,
        lab=lab,
        emulated=flag_settings(args, EmulatedNodes),
        vllm=VllmNodes(model=args.vllm) if getattr(args, "vllm", None) else None,
        **own,
    )


def command_line() -> str:
    """Return the command as it was given, without where it writes and without absolute paths."""
    import shlex

    words = sys.argv[1:]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    named = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["dualpath", *named])
