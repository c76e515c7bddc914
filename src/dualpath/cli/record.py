"""``dualpath record --endpoint URL --out FILE``: records live traffic as a trace."""

import argparse
import sys
from typing import TYPE_CHECKING, Annotated

from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.node.certificates import CaFile
from dualpath.workload.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath.workload.conversation.sessions import Session
    from dualpath.workload.record.recording_proxy import Recorder

_WRITTEN = tuple(name for name, kind in FORMATS.items() if kind is not None)
_DESCRIPTION = """A proxy between clients and an OpenAI endpoint that returns token ids (dualpath,
vLLM); it records completions as a trace: lengths, times and numbered blocks, without texts and
hashes. Responses are passed to clients unchanged. Ctrl-C stops it; the trace is written then and
every few seconds before."""


class RecordSettings(Settings, frozen=True, kw_only=True):
    """The endpoint to record, and the trace to write."""

    endpoint: Annotated[str, Setting("http://host:port of the server", metavar="URL")]
    ca_file: CaFile = ""
    out: Annotated[str, Setting("the trace; replaced if it exists", metavar="FILE.jsonl")]
    format: Annotated[str, Setting("format of the trace", choices=_WRITTEN)] = "weka"
    text: Annotated[
        bool, Setting("record texts of users (formats lmcache and agentperf; sensitive data)")
    ] = False
    block_tokens: Annotated[int, Setting("tokens of a block in the trace", ge=1, le=1 << 16)] = 64
    host: Annotated[str, Setting("address to listen on", host=True)] = "127.0.0.1"
    port: Annotated[int, Setting("port to listen on", ge=1, le=65535)] = 8001
    save_every_s: Annotated[float, Setting("interval of writing the trace", ge=0.1, le=1e6)] = 30


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``record`` command."""
    parser = subparsers.add_parser(
        "record", help="write live traffic as a trace", description=_DESCRIPTION
    )
    add_settings(parser, RecordSettings)


def run(args: argparse.Namespace) -> int:
    """Record until interrupted; return 0, or 1 if nothing was recorded.

    Raises ``ConfigError`` for contradictory settings and an address in use.
    """
    import asyncio

    from dualpath.report.files import require_writable

    settings = flag_settings(args, RecordSettings)
    require_writable("--out", settings.out)
    if (FORMATS[settings.format] == "text") is not settings.text:
        raise ConfigError(
            f"--format {settings.format} contains texts; give --text to record them"
            if not settings.text
            else f"--text is given and --format {settings.format} has no texts; omit it, or give "
            f"{' or '.join(name for name, kind in FORMATS.items() if kind == 'text')}"
        )
    recorded = asyncio.run(_record(settings))
    return 0 if recorded else 1


async def _record(settings: RecordSettings) -> int:
    import asyncio
    import contextlib
    import signal
    import time

    from dualpath.core.addresses import http_url
    from dualpath.node.certificates import trusting
    from dualpath.workload.record.recording_proxy import Recorder, RecordingProxy

    recorder = Recorder(settings.block_tokens)
    proxy = RecordingProxy(
        settings.endpoint,
        recorder.add,
        time.monotonic,
        texts=settings.text,
        tls=trusting(settings.ca_file),
    )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    written = 0

    async def save() -> None:
        nonlocal written
        if proxy.recorded > written:
            written = proxy.recorded
            await asyncio.to_thread(_save, _sessions(recorder, settings), settings)

    async with proxy.serving(settings.host, settings.port) as port:
        print(f"recording at {http_url(settings.host, port)}", file=sys.stderr, flush=True)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), settings.save_every_s)
            await save()
    await save()
    print(
        f"{proxy.recorded} requests recorded, {proxy.not_recorded} forwarded only",
        file=sys.stderr,
    )
    return proxy.recorded


def _sessions(recorder: "Recorder", settings: RecordSettings) -> "Sequence[Session]":
    """Return the sessions recorded so far, in the kind that the format stores."""
    from dualpath.workload.columns.sessions_to_columns import as_lengths

    match FORMATS[settings.format]:
        case "text":
            return recorder.text_sessions()
        case "lengths":
            return list(as_lengths(recorder.block_sessions()))
    return recorder.block_sessions()


def _save(sessions: "Sequence[Session]", settings: RecordSettings) -> None:
    from dualpath.workload.formats import write_trace

    write_trace(sessions, settings.out, settings.format)
