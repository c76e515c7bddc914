"""`dualpath chaos fuzz`: bad input in large numbers."""

import argparse
from typing import TYPE_CHECKING

from dualpath.cli.output import add_json_argument, require_json_writable, say, wrote_json
from dualpath.cli.settings import SECTIONS
from dualpath.core.errors import ConfigError

if TYPE_CHECKING:
    from dualpath.laboratory.chaos.fuzz.campaign import FuzzResult, Subject

_DESCRIPTION = """Give what reads input, input that is almost right: a field replaced or left out,
bytes turned over, cut off, doubled, or noise. Each is taken or refused with a clear error; another
exception, an error in the log, a traceback, memory that grows or a subject that no longer works is
a finding. Equal seeds give equal inputs. Exit code 1 if anything was found."""
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
        help="give the cluster's readers bad input",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "subject",
        choices=_SUBJECTS,
        metavar="SUBJECT",
        help="http, an endpoint's requests; control, frames at the control address; traces, "
        "settings, blocks and sealed-blocks, files",
    )
    parser.add_argument("--count", type=int, default=10_000, metavar="N", help="inputs")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides the inputs")
    parser.add_argument("--endpoint", default="", metavar="URL", help="of http: where it is")
    parser.add_argument(
        "--model", default="", metavar="NAME", help="of http: as vLLM's front end wants it"
    )
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="PATH",
        help="of http: only this path; may be given several times",
    )
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="of http: the process whose memory may not grow"
    )
    parser.add_argument(
        "--at-once", type=int, default=8, metavar="N", help="of http: requests at the same time"
    )
    add_json_argument(parser)
    parser.set_defaults(act=fuzz)


def fuzz(args: argparse.Namespace) -> int:
    """Give all inputs and print what was found.

    Raises:
        ConfigError: http without an endpoint, or a path that it has no body for.
    """
    import asyncio

    from dualpath.laboratory.chaos.fuzz.campaign import Campaign

    at_once = args.at_once if args.subject == "http" else 1
    campaign = Campaign(
        args.subject, _subject(args), args.seed, args.count, at_once=at_once, say=say
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
            "its address as --endpoint http://HOST:PORT"
        )
    if unknown := set(args.path) - set(BODIES):
        raise ConfigError(
            f"--path {', '.join(sorted(unknown))} is none of {', '.join(sorted(BODIES))}"
        )
    return HttpSubject(args.endpoint, args.model, args.pid, tuple(args.path))


def _print(result: "FuzzResult") -> None:
    came = ", ".join(f"{number} {name}" for name, number in result.outcomes.items())
    say(f"{result.subject}, seed {result.seed}: {result.count} inputs: {came}")
    mebibyte = 1 << 20
    say(
        f"memory {result.warm_bytes / mebibyte:.0f} MiB after the warm-up, "
        f"{result.end_bytes / mebibyte:.0f} MiB at the end"
    )
    for finding in result.findings:
        say(f"input {finding.number}: {finding.what}\n    {finding.given}")
    say(f"{result.findings_total} findings")
