"""`dualpath chaos fuzz`: fuzzing of the system's parsers."""

import argparse
from typing import TYPE_CHECKING

from dualpath.cli.output import add_json_argument, print_progress, require_json_writable, wrote_json
from dualpath.cli.settings import SECTIONS
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from dualpath.laboratory.chaos.fuzz.campaign import FuzzResult, Subject

_DESCRIPTION = """Send almost valid input to parsers: fields replaced or omitted, bytes flipped,
truncated, duplicated, or noise. Each input must be accepted or refused with a clear error; another
exception, an error in the log, a traceback, growing memory or a subject that stops working is a
finding. Equal seeds give equal inputs. Exit code 1 if there are findings."""
_EPILOG = """\
dualpath chaos fuzz control --count 1000000
dualpath chaos fuzz http --count 100000 --endpoint http://127.0.0.1:8000 --pid 4711
"""
_SUBJECTS = ("http", "control", "traces", "settings", "blocks", "sealed-blocks")
_EXIT_FOUND = 1


def add_action(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath chaos fuzz`."""
    parser = actions.add_parser(
        "fuzz",
        help="fuzz the cluster's parsers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "subject",
        choices=_SUBJECTS,
        metavar="SUBJECT",
        help="http: requests to an endpoint; control: frames to a control address; traces, "
        "settings, blocks and sealed-blocks: files",
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
        "--pid", type=int, metavar="PID", help="http: the process whose memory must not grow"
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

    from dualpath.laboratory.chaos.fuzz.campaign import Campaign

    at_once = args.at_once if args.subject == "http" else 1
    campaign = Campaign(
        args.subject,
        _subject(args),
        args.seed,
        args.count,
        at_once=at_once,
        progress=print_progress,
    )
    require_json_writable(args)
    result = asyncio.run(campaign.run())
    if not wrote_json(args, result):
        _print(result)
    return 0 if result.is_clean else _EXIT_FOUND


def _subject(args: argparse.Namespace) -> "Subject":
    if args.subject == "http":
        return _http(args)
    if args.subject == "control":
        from dualpath.laboratory.chaos.fuzz.control import ControlSubject

        return ControlSubject()
    from dualpath.laboratory.chaos.fuzz import files

    if args.subject == "settings":
        return files.SettingsSubject(SECTIONS)
    if args.subject == "traces":
        return files.TraceSubject()
    if args.subject == "blocks":
        from dualpath.laboratory.chaos.fuzz.stored_blocks import BlockSubject

        return BlockSubject()
    from dualpath.laboratory.chaos.fuzz.sealed_blocks import SealedBlockSubject

    return SealedBlockSubject()


def _http(args: argparse.Namespace) -> "Subject":
    from dualpath.laboratory.chaos.fuzz.http import BODIES, HttpSubject

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
