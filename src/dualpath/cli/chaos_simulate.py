"""`dualpath chaos simulate`: a cluster on virtual time under faults that a seed decides."""

import argparse
import os
import sys
import time

from dualpath.cli.output import add_json_argument, say, wrote_json

_DESCRIPTION = """Play clusters of emulated engines in one process, on virtual time, under faults:
processes killed, stopped and restarted, connections reset and stalled, storage slow, failing, full
and rotting, transfers stalled and broken, clients that leave. The router and the engines' data
plane are the real ones, and every byte of KV is compared. A seed decides everything, so it gives
the same run again."""
_EPILOG = """\
dualpath chaos simulate --seeds 2000
dualpath chaos simulate --story 1234
dualpath chaos simulate --seeds 1000 --plant checksum-ignored
"""
_SAY_EVERY_S = 10.0


def add_action(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath chaos simulate`."""
    parser = actions.add_parser(
        "simulate",
        help="play clusters under faults on virtual time, a seed each",
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
        help="processes that play; 0, the default, for one per processor core",
    )
    parser.add_argument("--story", type=int, metavar="SEED", help="tell the run of one seed")
    parser.add_argument(
        "--plant",
        default="",
        metavar="NAME",
        help="plant a bug, stop at the first seed that finds it; `list` names them",
    )
    add_json_argument(parser)
    parser.set_defaults(act=simulate)


def simulate(args: argparse.Namespace) -> int:
    """Play; return 1 if something is wrong that nobody planted, or a planted bug is not found.

    Raises:
        ConfigError: for a bug of an unknown name.
    """
    from dualpath.laboratory.chaos.simulation.plants import PLANTS, planted

    if args.plant == "list":
        for name, plant in PLANTS.items():
            print(f"{name:<22} {plant.what}")
        return 0
    with planted(args.plant):
        if args.story is not None:
            return _tell(args.story)
    return _campaign(args)


def _tell(seed: int) -> int:
    from dualpath.laboratory.chaos.simulation.play import play

    outcome = play(seed, story=True)
    print("\n".join(outcome.story))
    print(f"seed {seed}: digest {outcome.digest}, {len(outcome.problems)} problems")
    return 1 if outcome.problems else 0


def _campaign(args: argparse.Namespace) -> int:
    from dualpath.laboratory.chaos.simulation.campaign import Totals, outcomes

    totals, begun_s = Totals(), time.monotonic()
    said_s = begun_s
    for outcome in outcomes(args.first, args.seeds, args.jobs or os.cpu_count() or 1, args.plant):
        totals.add(outcome)
        if outcome.problems:
            _complain(outcome.seed, outcome.problems)
            if args.plant:
                break
        if time.monotonic() - said_s > _SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"{totals.seeds} of {args.seeds} seeds, {len(totals.failing)} with problems")
    if not wrote_json(args, totals):
        took_s = time.monotonic() - begun_s
        print(
            f"{totals.seeds} seeds in {took_s:.0f} s: {totals.faults} faults, "
            f"{totals.requests} requests, {totals.answered} answered in full, "
            f"{totals.virtual_s / 3600:.1f} h of virtual time; "
            f"{len(totals.failing)} seeds with problems"
        )
        if totals.failing:
            print(f"tell a seed's story: dualpath chaos simulate --story {totals.failing[0]}")
    return 1 if bool(totals.failing) is not bool(args.plant) else 0


def _complain(seed: int, problems: tuple[str, ...]) -> None:
    for problem in problems[:5]:
        print(f"seed {seed}: {problem}", file=sys.stderr)
