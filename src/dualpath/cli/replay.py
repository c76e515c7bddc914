"""``dualpath replay TRACE --endpoint URL``: replay agents and report what they saw."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.laboratory.workload.formats import AUTO, FORMATS

if TYPE_CHECKING:
    from dualpath.core.errors import TraceError
    from dualpath.laboratory.workload.conversation.session import Session
    from dualpath.laboratory.workload.replay.options import ReplayOptions
    from dualpath.laboratory.workload.replay.result import ReplayResult

_BROKEN_SHOWN = 5
_DESCRIPTION = """Replay recorded agents against an OpenAI endpoint (§7, §A.3): every prompt is the
context really sent and generated so far plus what the trace appends, and exactly the recorded
number of tokens is generated. Random tokens (for traces of lengths or block ids) are drawn below
the server's vocab_size, or from 1000 to 30000 where it is unknown. Exit code 1 if a turn failed."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``replay`` command."""
    parser = subparsers.add_parser(
        "replay", help="replay an agent trace against an endpoint", description=_DESCRIPTION
    )
    parser.add_argument("trace", help="trace file, folder or archive; .xz and .gz are read as is")
    parser.add_argument("--endpoint", required=True, help="http://host:port of the server")
    parser.add_argument("--format", choices=(AUTO, *FORMATS), default=AUTO, help="trace format")
    parser.add_argument(
        "--skip-broken", action="store_true", help="leave broken trace lines out and count them"
    )
    _add_load(parser)
    _add_lengths(parser)
    _add_server(parser)
    parser.add_argument("--label", default="", help="name of this run in reports")
    parser.add_argument("--out", metavar="FILE.json", help="write the result as JSON")
    parser.add_argument("--html", metavar="FILE.html", help="write a page with plots")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--agents",
        type=int,
        metavar="N",
        help="number of agents, all at once unless --aps; more than the trace has are made by "
        "sampling and a synthetic first round (default: the trace's sessions)",
    )
    load.add_argument(
        "--aps", type=float, metavar="R", help="agents arrive at R per second (Poisson)"
    )
    load.add_argument("--seed", type=int, default=0, help="of tokens, sampling and arrivals")
    load.add_argument(
        "--tool-delays",
        choices=("none", "recorded"),
        default="none",
        help="wait for the recorded tool times between turns, or not (default)",
    )
    load.add_argument(
        "--isolate",
        choices=("session", "run", "none"),
        default="session",
        help="who may hit whose cache: one session (default, as in the paper), one run, anybody",
    )


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    lengths = parser.add_argument_group("lengths")
    lengths.add_argument("--max-turns", type=int, metavar="N", help="turns per agent at most")
    lengths.add_argument(
        "--max-context",
        type=int,
        metavar="TOKENS",
        help="cut trajectories at this context length (default: the served model's)",
    )
    lengths.add_argument("--scale-append", type=float, default=1.0, metavar="X")
    lengths.add_argument("--scale-generate", type=float, default=1.0, metavar="X")


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--model", help="served model name (default: the first one served)")
    server.add_argument(
        "--tokenizer", metavar="FOLDER", help="tokenizer of the model, needed for text traces"
    )
    server.add_argument("--vocab-size", type=int, metavar="N", help="default: ask the endpoint")
    server.add_argument(
        "--block-tokens", type=int, metavar="N", help="served block size (default: ask, else 64)"
    )
    server.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="longest silence of the server"
    )


def run(args: argparse.Namespace) -> int:
    """Replay, print the table, write what was asked for.

    Returns 0, or 1 if a turn failed or nothing was replayed.  Raises ``DualPathError`` for a
    trace, setting or endpoint that cannot be used.
    """
    import asyncio

    from dualpath.laboratory.workload.formats import detect_format
    from dualpath.laboratory.workload.replay.report import compare
    from dualpath.laboratory.workload.replay.result import write_result
    from dualpath.report.files import require_extra, require_writable, write_page
    from dualpath.report.text import print_report

    if args.html:
        require_extra("--html")
    require_writable("--html", args.html)
    require_writable("--out", args.out)
    if args.format == AUTO:
        args.format = detect_format(args.trace)
    broken: list[TraceError] = []
    sessions = _read(args, broken)
    encode = _encoder(args, sessions)
    result = asyncio.run(_replay(args, sessions, _options(args, len(broken)), encode))
    if args.out:
        write_result(result, args.out)
    report = compare([result])
    if args.html:
        write_page(report, args.html)
    print_report(report)
    return 1 if result.failed else 0


def _read(args: argparse.Namespace, broken: "list[TraceError]") -> "list[Session]":
    from dualpath.laboratory.workload.formats import read_trace

    sessions = read_trace(
        args.trace,
        args.format,
        on_broken=broken.append if args.skip_broken else None,
        limit=args.agents,
    )
    for error in broken[:_BROKEN_SHOWN]:
        print(f"left out: {error}", file=sys.stderr)
    if len(broken) > _BROKEN_SHOWN:
        print(f"left out: {len(broken) - _BROKEN_SHOWN} more broken lines", file=sys.stderr)
    return sessions


def _encoder(
    args: argparse.Namespace, sessions: "Sequence[Session]"
) -> Callable[[str], Sequence[int]] | None:
    from dualpath.core.errors import ConfigError
    from dualpath.laboratory.workload.conversation.text_session import TextSession

    if not any(isinstance(session, TextSession) for session in sessions):
        return None
    if args.tokenizer is None:
        raise ConfigError(
            f"{args.trace} is text and has to be tokenised; pass --tokenizer with the served "
            "model's folder"
        )
    from dualpath.laboratory.workload.conversation.text_encoder import load_encoder

    return load_encoder(args.tokenizer)


def _options(args: argparse.Namespace, broken_lines: int) -> "ReplayOptions":
    from dualpath.laboratory.workload.replay.options import ReplayOptions
    from dualpath.laboratory.workload.replay.result import Isolation, ToolDelays

    return ReplayOptions(
        agents=args.agents,
        agents_per_s=args.aps,
        seed=args.seed,
        tool_delays=ToolDelays(args.tool_delays),
        isolation=Isolation(args.isolate),
        max_turns=args.max_turns,
        max_context_tokens=args.max_context,
        scale_append=args.scale_append,
        scale_generate=args.scale_generate,
        model=args.model,
        vocab_size=args.vocab_size,
        block_tokens=args.block_tokens,
        read_timeout_s=args.timeout,
        label=args.label,
        trace=Path(args.trace).name,
        trace_format=args.format,
        broken_lines=broken_lines,
    )


async def _replay(
    args: argparse.Namespace,
    sessions: "Sequence[Session]",
    options: "ReplayOptions",
    encode: Callable[[str], Sequence[int]] | None,
) -> "ReplayResult":
    from dualpath.laboratory.workload.replay.client import replay
    from dualpath.laboratory.workload.replay.progress import ConsoleProgress

    if args.quiet:
        return await replay(sessions, args.endpoint, options, encode=encode)
    with ConsoleProgress(args.label) as progress:
        return await replay(sessions, args.endpoint, options, encode=encode, progress=progress)
