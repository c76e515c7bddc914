"""`dualpath chaos simulate`: a cluster on virtual time, with faults that a seed decides."""

import argparse
import os
import sys
import time

from dualpath.cli.output import add_json_argument, print_progress, wrote_json

_DESCRIPTION = """Run clusters of emulated engines in one process, on virtual time, under faults:
processes are killed, stopped and restarted, connections reset and stalled; storage is slow, failing
or full, and corrupts blocks; transfers stall and fail; clients disconnect. Router and data plane of
the engines are the real code, and every byte of KV is compared. A seed decides everything, so equal
seeds give equal runs."""
_EPILOG = """\
dualpath chaos simulate --seeds 2000
dualpath chaos simulate --story 1234
dualpath chaos simulate --seeds 1000 --plant checksum-ignored
"""
_REPORT_EVERY_S = 10.0


def add_action(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath chaos simulate`."""
    parser = actions.add_parser(
        "simulate",
        help="run clusters under faults on virtual time, one per seed",
        description=_DESCRIPTION,
        epilog=_EPILOG,
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
    from dualpath.laboratory.chaos.simulation.plants import PLANTED_BUGS, planted

    if args.plant == "list":
        for name, bug in PLANTED_BUGS.items():
            print(f"{name:<24} {bug.what}")
        return 0
    with planted(args.plant):
        if args.story is not None:
            return _print_story(args.story)
    return _campaign(args)


def _print_story(seed: int) -> int:
    from dualpath.laboratory.chaos.simulation.play import run_seed

    outcome = run_seed(seed, story=True)
    print("\n".join(outcome.story))
    print(f"seed {seed}: digest {outcome.digest}, {len(outcome.problems)} problems")
    return 1 if outcome.problems else 0


def _campaign(args: argparse.Namespace) -> int:
    from dualpath.laboratory.chaos.simulation.campaign import Totals, outcomes

    totals, begun_s = Totals(), time.monotonic()
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
