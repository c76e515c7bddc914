"""The replay client: runs agents against an OpenAI endpoint and measures turns (§7.2, §A.3).

    result = await replay(read_trace("trace.jsonl"), "http://127.0.0.1:8000", ReplayOptions())

Each agent sends its next turn as soon as it has the last answer, or after the recorded tool delay.
A failed turn is not retried: it is recorded with its error and ends its agent; other agents
continue.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from dualpath.core.errors import ConfigError, DualPathError
from dualpath.laboratory.workload.arrivals import arrival_times_s
from dualpath.laboratory.workload.conversation.agents import make_agents
from dualpath.laboratory.workload.conversation.contents import Vocabulary, token_range
from dualpath.laboratory.workload.conversation.session import Session
from dualpath.laboratory.workload.replay.machine import this_machine
from dualpath.laboratory.workload.replay.metrics import summarise, trace_shape
from dualpath.laboratory.workload.replay.options import ReplayOptions
from dualpath.laboratory.workload.replay.progress import NoProgress, Progress
from dualpath.laboratory.workload.replay.result import ReplayResult, ReplaySetting
from dualpath.laboratory.workload.replay.run import ReplayRun
from dualpath.laboratory.workload.replay.server import (
    DEFAULT_BLOCK_TOKENS,
    Status,
    counter_changes,
    served_model,
    status,
)
from dualpath.laboratory.workload.replay.stream import Clock
from dualpath.router.api_keys import client_headers

_CONNECT_TIMEOUT_S = 10.0


class RealClock:
    """The monotonic clock and asyncio's sleep."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Wait for ``delay_s`` seconds."""
        await asyncio.sleep(delay_s)


async def replay(
    sessions: Sequence[Session],
    endpoint: str,
    options: ReplayOptions,
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
    histories: Sequence[Session] = (),
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> ReplayResult:
    """Replay ``sessions`` against ``endpoint`` (``http://host:port``) and return the measurements.

    ``encode`` converts text to token ids; only text sessions need it.  ``histories`` are sessions
    of one prompt that an earlier run with the same ``run_id`` has stored, so that the agent with
    the same id can hit it.  Failed turns are in the result and raise no error.  Requests carry the
    environment's ``VLLM_API_KEY``.  Raises ``ConfigError`` for invalid settings and
    ``EngineLostError`` if the endpoint does not answer at the start.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"endpoint {endpoint!r} is not an http:// or https:// URL")
    endpoint = endpoint.rstrip("/").removesuffix("/v1")
    agents = make_agents(sessions, options.agents, options.seed)
    arrivals_s = arrival_times_s(len(agents), options.agents_per_s, options.seed)
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=options.read_timeout_s
    )
    # No connection limit, because requests must queue at the server, not at the client.
    connector = aiohttp.TCPConnector(limit=0)
    keys = client_headers()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=keys) as http:
        model, model_limit = await served_model(http, endpoint, options.model)
        before = await status(http, endpoint)
        setting = _setting(options, endpoint, model, model_limit, before, len(agents))
        run = ReplayRun(
            http, setting, options.run_id, clock or RealClock(), progress or NoProgress()
        )
        vocabulary = Vocabulary(options.seed, setting.token_low, setting.token_high, encode)
        vocabulary.check()
        settings = msgspec.structs.replace(options, max_context_tokens=setting.max_context_tokens)
        await run.all_agents(agents, arrivals_s, settings, vocabulary, histories)
        after = await _status_after(http, endpoint)
    return ReplayResult(
        setting=setting,
        machine=this_machine(),
        summary=summarise(run.turns, run.sessions, run.last_answer_s),
        trace=trace_shape(run.turns),
        server=counter_changes(before, after),
        sessions=run.sessions,
        turns=run.turns,
    )


async def _status_after(http: aiohttp.ClientSession, endpoint: str) -> Status | None:
    """Return the status, None with a warning if the server fails: the result is still valid."""
    try:
        return await status(http, endpoint)
    except DualPathError as error:
        logging.getLogger(__name__).warning("counters after the run are missing: %s", error)
        return None


def _setting(
    options: ReplayOptions,
    endpoint: str,
    model: str,
    model_limit: int | None,
    served: Status | None,
    agents: int,
) -> ReplaySetting:
    served = served or Status()
    token_low, token_high = token_range(options.vocab_size or served.vocab_size)
    limits = [t for t in (options.max_context_tokens, model_limit) if t is not None]
    return ReplaySetting(
        label=options.label or served.mode or model,
        endpoint=endpoint,
        trace=options.trace,
        trace_format=options.trace_format,
        broken_lines=options.broken_lines,
        mode=served.mode,
        mode_note=served.mode_note,
        model=model,
        block_tokens=options.block_tokens or served.block_tokens or DEFAULT_BLOCK_TOKENS,
        snic_bytes_per_s=served.snic_bytes_per_s,
        agents=agents,
        agents_per_s=options.agents_per_s,
        seed=options.seed,
        tool_delays=options.tool_delays,
        isolation=options.isolation,
        session_hints=options.session_hints,
        max_context_tokens=min(limits) if limits else None,
        max_turns=options.max_turns,
        scale_append=options.scale_append,
        scale_generate=options.scale_generate,
        token_low=token_low,
        token_high=token_high,
    )
