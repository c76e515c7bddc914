"""`dualpath chaos`: fault injection."""

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from dualpath.cli.output import (
    add_json_argument,
    print_progress,
    wrote_json,
)
from dualpath.cli.settings import SECTIONS
from dualpath.core.errors import ConfigError
from dualpath_sim.cli.experiments import Entry, Group, LazyParser

if TYPE_CHECKING:
    from dualpath_lab.faults.fuzz.campaign import FuzzResult, Subject

# -------------------------------------------------------------------------------------- chaos fuzz
# `dualpath chaos fuzz`: fuzzing of the system's parsers.

_FUZZ_DESCRIPTION = """Send almost valid input to parsers: fields replaced or omitted, bytes
flipped,
truncated, duplicated, or noise. Each input must be accepted or refused with a clear error; another
exception, an error in the log, a traceback, growing memory or a subject that stops working is a
finding. Equal seeds give equal inputs. Exit code 1 if there are findings."""
_FUZZ_EPILOG = """\
dualpath chaos fuzz control --count 1000000
dualpath chaos fuzz http --count 100000 --endpoint http://127.0.0.1:8000 --pid 4711
"""
_SUBJECTS = (
    "http",
    "control",
    "traces",
    "settings",
    "blocks",
    "compressed-blocks",
    "sealed-blocks",
)
_EXIT_FOUND = 1


def add_fuzz(actions: "argparse._SubParsersAction[LazyParser]") -> None:
    """Add the parser of `dualpath chaos fuzz`."""
    parser = actions.add_parser(
        "fuzz",
        help="fuzz the cluster's parsers",
        description=_FUZZ_DESCRIPTION,
        epilog=_FUZZ_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "subject",
        choices=_SUBJECTS,
        metavar="SUBJECT",
        help="http: requests to an endpoint; control: frames to a control address; traces, "
        "settings, blocks, compressed-blocks and sealed-blocks: files",
    )
    parser.add_argument("--count", type=int, default=10_000, metavar="N", help="number of inputs")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the inputs")
    parser.add_argument("--endpoint", default="", metavar="URL", help="http: URL of the endpoint")
    parser.add_argument("--model", default="", metavar="NAME", help="http: the served model's name")
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="PATH",
        help="http: only this path; may be given several times",
    )
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="http: the memory of this process must not grow"
    )
    parser.add_argument(
        "--at-once", type=int, default=8, metavar="N", help="http: concurrent requests"
    )
    add_json_argument(parser)
    parser.set_defaults(act=fuzz)


def fuzz(args: argparse.Namespace) -> int:
    """Run all inputs and print the findings.

    Raises:
        ConfigError: http without an endpoint, or an unknown path.
    """
    import asyncio

    from dualpath_lab.faults.fuzz.campaign import Campaign

    at_once = args.at_once if args.subject == "http" else 1
    campaign = Campaign(
        args.subject,
        _subject(args),
        args.seed,
        args.count,
        at_once=at_once,
        progress=print_progress,
    )
    result = asyncio.run(campaign.run())
    if not wrote_json(args, result):
        _print(result)
    return 0 if result.is_clean else _EXIT_FOUND


def _subject(args: argparse.Namespace) -> "Subject":
    if args.subject == "http":
        return _http(args)
    if args.subject == "control":
        from dualpath_lab.faults.fuzz.control import ControlSubject

        return ControlSubject()
    from dualpath_lab.faults.fuzz import files

    if args.subject == "settings":
        return files.SettingsSubject(SECTIONS)
    if args.subject == "traces":
        return files.TraceSubject()
    if args.subject == "blocks":
        from dualpath_lab.faults.fuzz.files import BlockSubject

        return BlockSubject()
    if args.subject == "compressed-blocks":
        from dualpath_lab.faults.fuzz.compressed_blocks import CompressedBlockSubject

        return CompressedBlockSubject()
    from dualpath_lab.faults.fuzz.sealed_blocks import SealedBlockSubject

    return SealedBlockSubject()


def _http(args: argparse.Namespace) -> "Subject":
    from dualpath_lab.faults.fuzz.http import BODIES, HttpSubject

    if not args.endpoint:
        raise ConfigError(
            "http needs a running endpoint; start `dualpath serve` or `dualpath emulate` and give "
            "--endpoint http://HOST:PORT"
        )
    if unknown := set(args.path) - set(BODIES):
        raise ConfigError(
            f"--path {', '.join(sorted(unknown))} is none of {', '.join(sorted(BODIES))}"
        )
    return HttpSubject(args.endpoint, args.model, args.pid, tuple(args.path))


def _print(result: "FuzzResult") -> None:
    came = ", ".join(f"{number} {name}" for name, number in result.outcomes.items())
    print_progress(f"{result.subject}, seed {result.seed}: {result.count} inputs: {came}")
    mebibyte = 1 << 20
    print_progress(
        f"memory {result.warm_bytes / mebibyte:.0f} MiB after the warm-up, "
        f"{result.end_bytes / mebibyte:.0f} MiB at the end"
    )
    for finding in result.findings:
        print_progress(f"input {finding.number}: {finding.what}\n    {finding.given}")
    print_progress(f"{result.findings_total} findings")


# --------------------------------------------------------------------------------------- chaos run
# `dualpath chaos run`: faults on the real processes of a cluster under load.

_RUN_DESCRIPTION = """Start a cluster of emulated engines, send requests of agents continuously, and
kill, stop and restart its processes, reset its connections, make its storage fail and corrupt
stored blocks, each fault at a step of a request. Every token is compared with the expected one,
every byte of KV at its destination. Exit code 1 if a request was late, wrong or ended without a
clear error, or if anything was left behind."""
_RUN = Entry(
    "kill, stop and disconnect real processes, make storage fail",
    "dualpath_lab.faults.report:FAULTS",
)
CHAOS = Group({"run": _RUN})


def add_run(actions: "argparse._SubParsersAction[LazyParser]") -> None:
    """Add `dualpath chaos run`."""
    parser = actions.add_parser("run", help=_RUN.help, description=_RUN_DESCRIPTION)
    parser.add_arguments = lambda made: CHAOS.add_arguments(made, _RUN.load())
    parser.set_defaults(act=lambda args: CHAOS.run_experiment(args, _RUN.load()))


# ---------------------------------------------------------------------------------- chaos simulate
# `dualpath chaos simulate`: a cluster on virtual time, with faults that a seed decides.

_SIMULATE_DESCRIPTION = """Run clusters of emulated engines in one process, on virtual time, under
faults:
processes are killed, stopped and restarted, connections reset and stalled; storage is slow, failing
or full, and corrupts blocks; transfers stall and fail; clients disconnect. Router and data plane of
the engines are the real code, and every byte of KV is compared. A seed decides everything, so equal
seeds give equal runs."""
_SIMULATE_EPILOG = """\
dualpath chaos simulate --seeds 2000
dualpath chaos simulate --story 1234
dualpath chaos simulate --seeds 1000 --plant checksum-ignored
"""
_REPORT_EVERY_S = 10.0


def add_simulate(actions: "argparse._SubParsersAction[LazyParser]") -> None:
    """Add the parser of `dualpath chaos simulate`."""
    parser = actions.add_parser(
        "simulate",
        help="run clusters under faults on virtual time, one per seed",
        description=_SIMULATE_DESCRIPTION,
        epilog=_SIMULATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=2000, metavar="N", help="runs (default 2000)")
    parser.add_argument(
        "--first", type=int, default=0, metavar="SEED", help="seed of the first run (default 0)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="worker processes; 0, the default, for one per CPU core",
    )
    parser.add_argument("--story", type=int, metavar="SEED", help="print the log of one seed")
    parser.add_argument(
        "--plant",
        default="",
        metavar="NAME",
        help="plant a bug, stop at the first seed that finds it; `list` prints the names",
    )
    add_json_argument(parser)
    parser.set_defaults(act=simulate)


def simulate(args: argparse.Namespace) -> int:
    """Run the seeds; return 1 for a problem without a planted bug, or a planted bug not found.

    Raises:
        ConfigError: for an unknown bug.
    """
    from dualpath_lab.faults.simulation.planted_bugs import PLANTED_BUGS, planted

    if args.plant == "list":
        for name, bug in PLANTED_BUGS.items():
            print(f"{name:<24} {bug.what}")
        return 0
    with planted(args.plant):
        if args.story is not None:
            return _print_story(args.story)
    return _campaign(args)


def _print_story(seed: int) -> int:
    from dualpath_lab.faults.simulation.run import run_seed

    outcome = run_seed(seed, story=True)
    print("\n".join(outcome.story))
    print(f"seed {seed}: digest {outcome.digest}, {len(outcome.problems)} problems")
    return 1 if outcome.problems else 0


def _campaign(args: argparse.Namespace) -> int:
    from dualpath_lab.faults.simulation.run import Totals, outcomes

    totals, begun_s = Totals(first=args.first), time.monotonic()
    reported_s = begun_s
    for outcome in outcomes(args.first, args.seeds, args.jobs or os.cpu_count() or 1, args.plant):
        totals.add(outcome)
        if outcome.problems:
            _print_problems(outcome.seed, outcome.problems)
            if args.plant:
                break
        if time.monotonic() - reported_s > _REPORT_EVERY_S:
            reported_s = time.monotonic()
            print_progress(
                f"{totals.seeds} of {args.seeds} seeds, {len(totals.failing)} with problems"
            )
    if not wrote_json(args, totals):
        took_s = time.monotonic() - begun_s
        print(
            f"{totals.seeds} seeds in {took_s:.0f} s: {totals.faults} faults, "
            f"{totals.requests} requests, {totals.answered} answered in full, "
            f"{totals.virtual_s / 3600:.1f} h of virtual time; "
            f"{len(totals.failing)} seeds with problems"
        )
        if totals.failing:
            print(f"print the log of a seed: dualpath chaos simulate --story {totals.failing[0]}")
    return 1 if bool(totals.failing) is not bool(args.plant) else 0


def _print_problems(seed: int, problems: tuple[str, ...]) -> None:
    for problem in problems[:5]:
        print(f"seed {seed}: {problem}", file=sys.stderr)


_DESCRIPTION = """Fault injection: checks that no request is lost or hangs and that all KV is
correct."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `dualpath chaos`."""
    parser = subparsers.add_parser(
        "chaos",
        help="inject faults and check that nothing is lost, late or wrong",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=LazyParser
    )
    add_fuzz(actions)
    add_run(actions)
    add_simulate(actions)


def run(args: argparse.Namespace) -> int:
    """Run the action; return its exit code."""
    exit_code: int = args.act(args)
    return exit_code
