"""`dualpath lab run`: agents on a lab that is made for the run and removed after it."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.cli.lab_arguments import add_lab_arguments
from dualpath.core.modes import Mode

if TYPE_CHECKING:
    from dualpath.laboratory.experiments.emulated_nodes import EmulatedNodes
    from dualpath.laboratory.experiments.report import ExperimentReport
    from dualpath.laboratory.experiments.vllm_nodes import VllmNodes
    from dualpath.laboratory.experiments.workload import WindowSettings
    from dualpath.laboratory.lab.settings import LabSettings

_DESCRIPTION = """Make a lab, run agents on it in every mode asked for, print job completion times
and the use of links, remove the lab. Engines are emulated: real scheduler, storage, buffers and
transfers; every KV block is compared where it arrives. Exit code 1 if the machine was too busy."""


def add_run_parser(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `dualpath lab run`."""
    parser = actions.add_parser(
        "run", help="make a lab, replay agents on it, remove it", description=_DESCRIPTION
    )
    parser.add_argument(
        "--modes",
        default="basic,dualpath,oracle",
        metavar="MODE,…",
        help=f"of {', '.join(mode.value for mode in Mode)}",
    )
    add_repeat_arguments(parser, repeat=1)
    add_agent_arguments(parser)
    add_vllm_argument(parser)
    add_engine_arguments(parser)
    add_lab_arguments(parser)


def add_repeat_arguments(parser: argparse.ArgumentParser, repeat: int) -> None:
    """Add what every experiment has."""
    parser.add_argument("--repeat", type=int, default=repeat, metavar="N", help="times, in turns")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and arrivals")
    parser.add_argument("--out", metavar="DIR", help="write table, plot and JSON there")


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what agents do."""
    agents = parser.add_argument_group("agents")
    agents.add_argument("--agents-per-node", type=int, default=8, metavar="N")
    agents.add_argument(
        "--trace",
        default="32K",
        help="32K, 48K or 64K (generated after Table 2), or a file of rounds",
    )
    agents.add_argument(
        "--turns", type=int, default=4, help="per agent, of a window of its trajectory"
    )
    agents.add_argument(
        "--scale", type=float, default=0.125, metavar="X", help="multiplies all token counts"
    )
    agents.add_argument("--scale-append", type=float, default=1.0, metavar="X", help="of turns")
    agents.add_argument("--scale-generate", type=float, default=1.0, metavar="X", help="of turns")
    agents.add_argument(
        "--even", action="store_true", help="generate trajectories and turns that are all alike"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what emulated engines are."""
    engines = parser.add_argument_group("emulated engines")
    engines.add_argument(
        "--model", default="qwen2.5-32b", metavar="NAME|COSTS.toml", help="whose times they take"
    )
    engines.add_argument("--speedup", type=float, default=50.0, help="compute that much faster")
    engines.add_argument("--layers", type=int, default=8)
    engines.add_argument(
        "--layer-block-bytes", type=int, default=42 << 10, metavar="N", help="of 64 tokens"
    )
    engines.add_argument(
        "--verify",
        choices=("full", "sampled", "checksum"),
        default="sampled",
        help="of every block wherever it arrives: all bytes, a word of every token and layer, or "
        "only the checksums of storage",
    )


def add_vllm_argument(parser: argparse.ArgumentParser) -> None:
    """Add the choice of real engines."""
    parser.add_argument(
        "--vllm",
        metavar="MODEL",
        help="real vLLM engines with this model's folder (`dualpath model wide` makes one) instead "
        "of emulated ones",
    )


def window_settings(args: argparse.Namespace) -> "WindowSettings":
    """Return what agents do; raises ``ConfigError``."""
    from dualpath.laboratory.experiments.workload import WindowSettings

    found = WindowSettings(
        trace=args.trace,
        turns=args.turns,
        scale=args.scale,
        scale_append=args.scale_append,
        scale_generate=args.scale_generate,
        even=args.even,
        seed=args.seed,
    )
    found.check()
    return found


def emulated_nodes(args: argparse.Namespace) -> "EmulatedNodes":
    """Return the engines; raises ``ConfigError``."""
    from dualpath.laboratory.experiments.emulated_nodes import EmulatedNodes

    found = EmulatedNodes(
        model=args.model,
        speedup=args.speedup,
        layers=args.layers,
        layer_block_bytes=args.layer_block_bytes,
        verify=args.verify,
    )
    found.check()
    return found


def vllm_nodes(args: argparse.Namespace) -> "VllmNodes | None":
    """Return real engines where asked for."""
    from dualpath.laboratory.experiments.vllm_nodes import VllmNodes

    return VllmNodes(model=args.vllm) if args.vllm else None


def parse_modes(text: str) -> tuple[Mode, ...]:
    """Return the modes of a list with commas; raises ``ConfigError`` naming an unknown one."""
    from dualpath.core.errors import ConfigError

    known = {mode.value: mode for mode in Mode}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"mode {name!r} is unknown; known are {', '.join(known)}")
    return tuple(known[name] for name in names)


def run_run(args: argparse.Namespace, lab: "LabSettings") -> int:
    """Do it; return 0, or 1 if the machine was too busy for the links.

    Raises ``ConfigError`` and ``EngineLostError`` after the lab is removed.
    """
    from dualpath.laboratory.experiments.jct import JctSettings, measure_jct

    settings = JctSettings(
        name="run",
        shapes=(lab.shape,),
        modes=parse_modes(args.modes),
        repeat=args.repeat,
        agents_per_node=args.agents_per_node,
        windows=window_settings(args),
        lab=lab,
        nodes=emulated_nodes(args),
        vllm=vllm_nodes(args),
        seed=args.seed,
    )
    report = measure_jct(settings, command_line(), say)
    return finish(report, args.out)


def finish(report: "ExperimentReport", folder: str | None) -> int:
    """Print a report, write it where asked; return 1 if the machine was too busy."""
    from dualpath.laboratory.experiments.report import as_report, write_experiment
    from dualpath.report.text import print_report

    print_report(as_report(report))
    if folder:
        for path in write_experiment(report, Path(folder)):
            say(f"wrote {path}")
    return 1 if report.too_busy else 0


def command_line() -> str:
    """Return the command as it was given, without where it writes and without absolute paths."""
    import shlex

    words = sys.argv[1:]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    named = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["dualpath", *named])


def say(text: str) -> None:
    """Tell of progress."""
    print(f"dualpath: {text}", file=sys.stderr, flush=True)
