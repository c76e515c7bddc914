"""`dualpath demo`: real agent sessions on a small model; compares Basic, DualPath and Oracle."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.cli.main import OutputFolder
from dualpath.cli.output import warn_if_no_plots
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.errors import ConfigError
from dualpath.core.extras import require_packages
from dualpath.report.files import write_page
from dualpath.transport.nixl import nixl_package
from dualpath_lab.demo.settings import DemoSettings

if TYPE_CHECKING:
    from dualpath.workload.replay.result import ReplayResult
    from dualpath_lab.demo.run import ChosenRate


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="compare Basic, DualPath and Oracle on real sessions, on this machine",
        allow_abbrev=False,
    )
    add_settings(parser, DemoSettings)
    parser.add_argument(
        "--out", type=OutputFolder, default="runs/demo", help="folder of table, page and results"
    )


def run(args: argparse.Namespace) -> int:
    """Run all modes and compare them; returns 1 if any turn failed.

    Raises ``ConfigError`` or ``EngineLostError``, after all processes and files are removed.
    """
    demo = flag_settings(args, DemoSettings)
    require_packages("vllm", nixl_package())
    warn_if_no_plots("report.html")
    from dualpath.launch.fork_server import preload_modules

    preload_modules()  # takes seconds, in parallel with the preparation below
    from dualpath.workload.conversation.prompts import load_encoder
    from dualpath.workload.replay.result import write_result
    from dualpath_lab.demo.run import DemoRun
    from dualpath_lab.demo.sessions import demo_agents
    from dualpath_lab.models.smollm2 import prepare_smollm2

    _say("preparing SmolLM2-135M-Instruct (converted once, then cached)")
    model = prepare_smollm2()
    encode = load_encoder(model)
    agents, trace = demo_agents(demo, encode)
    out = _writable(Path(args.out))
    results: dict[str, ReplayResult] = {}
    with DemoRun(demo, model, agents, trace, out, encode, _say) as demo_run:
        for result in demo_run.results():
            results[result.setting.label] = result
            write_result(result, out / f"{result.setting.label}.json")
    ordered = [results[mode.value] for mode in demo.mode]
    _report(ordered, out, demo_run.chosen)
    return 1 if any(result.failed for result in ordered) else 0


def _report(results: "list[ReplayResult]", out: Path, chosen: "ChosenRate | None") -> None:
    from dualpath.report.text import print_report
    from dualpath.workload.replay.report import compare

    report = compare(
        results, title="dualpath demo", further_notes=(chosen.line(),) if chosen else ()
    )
    print_report(report)
    page = out / "report.html"
    write_page(report, page)
    _say(f"report with plots: {page}; engine traces and logs are in the same folder")


def _writable(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output folder {str(path)!r} cannot be created ({error.strerror}); choose another "
            "with --out"
        ) from error
    return path


def _say(text: str) -> None:
    print(f"dualpath: {text}", flush=True)
