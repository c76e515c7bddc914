"""`dualpath lab bench`: the experiments, each writing table, plot and JSON."""

import argparse
from typing import TYPE_CHECKING

from dualpath.cli.lab_arguments import add_lab_arguments, bench_lab
from dualpath.cli.lab_run import (
    add_agent_arguments,
    add_engine_arguments,
    add_repeat_arguments,
    add_vllm_argument,
    command_line,
    emulated_nodes,
    finish,
    parse_modes,
    say,
    vllm_nodes,
    window_settings,
)
from dualpath.core.modes import Mode

if TYPE_CHECKING:
    from dualpath.laboratory.experiments.jct import JctSettings

_SHAPES = "1P1D,2P1D,1P2D,2P4D"


def add_bench_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dualpath lab bench`."""
    parser = actions.add_parser(
        "bench",
        help="experiments on labs made for them",
        description="Experiments on labs made for them; each prints a report and, with --out, "
        "writes it as Markdown, PNG and JSON. Let the machine do nothing else meanwhile.",
    )
    experiments = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    _add_jct(experiments)
    _add_online(experiments)
    _add_simulator(experiments)
    _add_isolation(experiments)
    _add_data_plane(experiments)


def run_bench(args: argparse.Namespace) -> int:
    """Run an experiment; return 0, or 1 if the machine was too busy.

    Raises ``ConfigError`` and ``EngineLostError`` after the lab is removed.
    """
    experiments = {
        "jct": _run_jct,
        "online": _run_online,
        "simulator": _run_simulator,
        "isolation": _run_isolation,
        "data-plane": _run_data_plane,
    }
    return experiments[args.experiment](args)


def _add_jct(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = experiments.add_parser(
        "jct",
        help="job completion time of every mode, use and balance of links",
        description="Job completion time of all modes on several clusters, in turns.",
    )
    parser.add_argument("--name", default="jct", help="of the files")
    parser.add_argument("--nodes", default=_SHAPES, metavar="xPyD,…", dest="shapes")
    parser.add_argument(
        "--modes",
        default=",".join(mode.value for mode in Mode),
        metavar="MODE,…",
        help="which, in this order",
    )
    add_vllm_argument(parser)
    _add_common(parser)


def _add_online(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = experiments.add_parser(
        "online",
        help="latencies against the arrival rate of agents, capacity under an SLO",
        description="TTFT, TTST and TPOT against agents per second, and capacity under an SLO.",
    )
    parser.add_argument("--name", default="online", help="of the files")
    parser.add_argument("--nodes", default="1P2D", metavar="xPyD", dest="shapes")
    parser.add_argument("--modes", default="basic,dualpath", metavar="MODE,…", help="in this order")
    parser.add_argument(
        "--aps", default="0.1,0.2,0.3,0.4,0.6,0.8", metavar="R,…", help="agents per second, rising"
    )
    parser.add_argument("--arrive-s", type=float, default=60.0, help="how long agents arrive")
    parser.add_argument("--ttft-slo-s", type=float, default=2.0, help="of the mean")
    parser.add_argument("--tpot-slo-s", type=float, default=0.05, help="of the mean")
    _add_common(parser, repeat=1)


def _add_simulator(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = experiments.add_parser(
        "simulator",
        help="job completion times measured beside those the simulator predicts",
        description="The same cluster and agents through lab and simulator.",
    )
    parser.add_argument("--name", default="simulator", help="of the files")
    parser.add_argument("--nodes", default="1P1D,1P2D", metavar="xPyD,…", dest="shapes")
    parser.add_argument(
        "--modes", default="basic,dualpath,split,oracle", metavar="MODE,…", help="in this order"
    )
    _add_common(parser)


def _add_isolation(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = experiments.add_parser(
        "isolation",
        help="latency of model communication beside KV bulk, with and without QoS",
        description="An exchange between all nodes in the inference lane: alone, beside KV bulk in "
        "the same lane, and beside KV bulk in its own (§5.1, §A.1).",
    )
    parser.add_argument("--nodes", default="2P2D", metavar="xPyD")
    parser.add_argument("--link-gbit-per-s", type=float, default=1.0, metavar="N")
    parser.add_argument("--message-kib", default="64,256,1024", metavar="N,…", help="to each peer")
    parser.add_argument("--load", type=float, default=0.33, help="of the links, by the exchange")
    parser.add_argument("--rounds", type=int, default=84, help="of every node in a run")
    parser.add_argument("--legs", default="CNIC,loopback", metavar="LEG,…")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times, in turns")
    parser.add_argument("--out", metavar="DIR", help="write table, plot and JSON there")


def _add_data_plane(experiments: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = experiments.add_parser(
        "data-plane",
        help="storage reads and transfers beside fio and raw NIXL, processor time per GB",
        description="Storage to DRAM beside fio and raw NIXL; Layer Blocks between two engines "
        "beside raw NIXL; cost of a descriptor.",
    )
    parser.add_argument("--storage", required=True, metavar="DIR", help="on the disk to measure")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times, in turns")
    parser.add_argument("--out", metavar="DIR", help="write table, plot and JSON there")


def _add_common(parser: argparse.ArgumentParser, repeat: int = 3) -> None:
    add_repeat_arguments(parser, repeat)
    add_agent_arguments(parser)
    add_engine_arguments(parser)
    add_lab_arguments(parser, named=False)


def _jct_settings(args: argparse.Namespace) -> "JctSettings":
    from dualpath.laboratory.experiments.jct import JctSettings

    return JctSettings(
        name=args.name,
        shapes=tuple(args.shapes.split(",")),
        modes=parse_modes(args.modes),
        repeat=args.repeat,
        agents_per_node=args.agents_per_node,
        windows=window_settings(args),
        lab=bench_lab(args),
        nodes=emulated_nodes(args),
        vllm=vllm_nodes(args) if "vllm" in args else None,
        seed=args.seed,
    )


def _run_jct(args: argparse.Namespace) -> int:
    from dualpath.laboratory.experiments.jct import measure_jct

    return finish(measure_jct(_jct_settings(args), command_line(), say), args.out)


def _run_online(args: argparse.Namespace) -> int:
    from dualpath.laboratory.experiments.online import OnlineSettings, measure_online

    settings = OnlineSettings(
        name=args.name,
        jct=_jct_settings(args),
        agents_per_s=parse_numbers(args.aps),
        arrive_s=args.arrive_s,
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
    )
    return finish(measure_online(settings, command_line(), say), args.out)


def _run_simulator(args: argparse.Namespace) -> int:
    from dualpath.laboratory.experiments.against_simulator import compare_with_simulator

    report = compare_with_simulator(_jct_settings(args), command_line(), say)
    return finish(report, args.out)


def parse_numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas; raises ``ConfigError``."""
    from dualpath.core.errors import ConfigError

    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of numbers ({error}); write 0.1,0.2") from error


def _run_isolation(args: argparse.Namespace) -> int:
    from dualpath.laboratory.experiments.isolation import measure_isolation
    from dualpath.laboratory.experiments.isolation_settings import IsolationSettings, Leg
    from dualpath.laboratory.lab.settings import parse_shape

    prefill, decode = parse_shape(args.nodes)
    settings = IsolationSettings(
        prefill=prefill,
        decode=decode,
        link_bytes_per_s=args.link_gbit_per_s * 1e9 / 8,
        message_bytes=tuple(round(size * 1024) for size in parse_numbers(args.message_kib)),
        load=args.load,
        rounds=args.rounds,
        repetitions=args.repeat,
        legs=tuple(Leg(leg) for leg in args.legs.split(",")),
    )
    return finish(measure_isolation(settings, say), args.out)


def _run_data_plane(args: argparse.Namespace) -> int:
    from dualpath.laboratory.experiments.data_plane import measure_data_plane
    from dualpath.laboratory.experiments.data_plane_settings import DataPlaneSettings

    settings = DataPlaneSettings(storage=args.storage, rounds=args.repeat)
    return finish(measure_data_plane(settings, command_line()), args.out)
