"""``dualpath replay TRACE --endpoint URL``: replays agents and reports their latencies."""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dualpath.cli.main import EXIT_INTERRUPTED, OutputPath
from dualpath.cli.output import (
    add_json_argument,
    print_skipped,
    warn_if_no_plots,
    wrote_json,
)
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.settings import Setting, Settings
from dualpath.workload.formats import AUTO, TraceSettings
from dualpath.workload.replay.client import ReplayOptions

if TYPE_CHECKING:
    from dualpath.workload.conversation.sessions import Session
    from dualpath.workload.replay.result import ReplayResult

_DESCRIPTION = """Replay recorded agents against an OpenAI endpoint (§7, §A.3): every prompt is the
context actually sent and generated so far plus the tokens that the trace appends, and exactly the
recorded number of tokens is generated. Random tokens (for traces of lengths or block ids) are below
the server's vocab_size, or from 1000 to 30000 if it is unknown. Exit code 1 if a turn failed."""


class ReplaySettings(Settings, frozen=True, kw_only=True):
    """The endpoint."""

    endpoint: Annotated[str, Setting("http://host:port of the server", metavar="URL")]
    cluster_endpoint: Annotated[
        str,
        Setting(
            "http://host:port of the scheduler, for its counters, if front ends are processes of "
            "their own; empty: {endpoint}",
            metavar="URL",
        ),
    ] = ""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``replay`` command."""
    parser = subparsers.add_parser(
        "replay", help="replay an agent trace against an endpoint", description=_DESCRIPTION
    )
    add_settings(parser, ReplaySettings)
    add_settings(parser, TraceSettings, title="trace", positional=("trace",))
    add_settings(parser, ReplayOptions, title="agents and server")
    add_json_argument(parser, "the result")
    parser.add_argument(
        "--html", type=OutputPath, metavar="FILE.html", help="write a page with plots"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Replay, print the table, write the requested files.

    Returns 0, 1 if a turn failed or nothing was replayed, or 130 if Ctrl-C ended the replay: what
    was measured until then is printed and written all the same.  Raises ``DualPathError`` for a
    trace, setting or endpoint that cannot be used.
    """
    import asyncio

    import msgspec

    from dualpath.report.files import write_page
    from dualpath.report.text import print_report
    from dualpath.workload.formats import detect_format, read_trace
    from dualpath.workload.formats.lines import SkippedLines
    from dualpath.workload.replay.report import compare

    asked = flag_settings(args, ReplaySettings)
    trace = flag_settings(args, TraceSettings, positional=("trace",))
    warn_if_no_plots(args.html)
    form = detect_format(trace.trace) if trace.trace_format == AUTO else trace.trace_format
    options = flag_settings(args, ReplayOptions, trace=Path(trace.trace).name, trace_format=form)
    skipped = SkippedLines()
    sessions = read_trace(
        trace.trace,
        form,
        on_broken=skipped if trace.skip_broken else None,
        limit=options.agents,
    )
    print_skipped(skipped)
    encode = _encoder(trace, sessions)
    options = msgspec.structs.replace(options, broken_lines=skipped.count)
    result = asyncio.run(_replay(asked, sessions, options, encode, quiet=args.quiet))
    code = EXIT_INTERRUPTED if result.interrupted else 1 if result.failed else 0
    if wrote_json(args, result):
        return code
    report = compare([result])
    if args.html:
        write_page(report, args.html)
    print_report(report)
    return code


def _encoder(
    trace: TraceSettings, sessions: "Sequence[Session]"
) -> Callable[[str], Sequence[int]] | None:
    from dualpath.core.errors import ConfigError
    from dualpath.workload.conversation.text_session import TextSession

    if not any(isinstance(session, TextSession) for session in sessions):
        return None
    if not trace.tokenizer:
        raise ConfigError(
            f"{trace.trace} is a text trace and must be tokenised; give --tokenizer with the "
            "served model's folder"
        )
    from dualpath.workload.conversation.prompts import load_encoder

    return load_encoder(trace.tokenizer)


async def _replay(
    asked: ReplaySettings,
    sessions: "Sequence[Session]",
    options: "ReplayOptions",
    encode: Callable[[str], Sequence[int]] | None,
    *,
    quiet: bool,
) -> "ReplayResult":
    from dualpath.workload.replay.client import replay
    from dualpath.workload.replay.progress import ConsoleProgress

    # Ctrl-C cancels the replay, and what has been measured is still printed and written.
    play = functools.partial(
        replay,
        sessions,
        asked.endpoint,
        options,
        encode=encode,
        cluster_endpoint=asked.cluster_endpoint,
        partial=True,
    )
    if quiet:
        return await play()
    with ConsoleProgress(options.label) as progress:
        return await play(progress=progress)
