"""The replay client: runs agents against an OpenAI endpoint and measures turns (§7.2, §A.3).

    result = await replay(read_trace("trace.jsonl"), "http://127.0.0.1:8000", ReplayOptions())

Each agent sends its next turn as soon as it has the last answer, or after the recorded tool delay.
A failed turn is not retried: it is recorded with its error and ends its agent; other agents
continue.  Only a request that no server can have begun is sent again (``node.http_client``).
"""

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated
from urllib.parse import quote

import aiohttp
import msgspec
import numpy as np

from dualpath.core.addresses import checked_http_url
from dualpath.core.errors import DualPathError
from dualpath.core.names import name_problem
from dualpath.core.settings import Setting
from dualpath.node.certificates import CaFile, trusting
from dualpath.node.http_client import client_session, sent
from dualpath.node.machine import this_machine
from dualpath.router.api_keys import client_headers
from dualpath.workload.arrivals import arrival_times_s
from dualpath.workload.conversation.prompts import Contents, Vocabulary, token_range
from dualpath.workload.conversation.sessions import (
    AgentSettings,
    Conversation,
    Session,
    Turn,
    make_agents,
)
from dualpath.workload.conversation.spans import StoredPrefixes, TokenIds, hit_tokens
from dualpath.workload.replay.endpoint import (
    DEFAULT_BLOCK_TOKENS,
    Clock,
    Completion,
    Status,
    complete,
    completion_body,
    counter_changes,
    served_model,
    status,
)
from dualpath.workload.replay.progress import NoProgress, Progress, ProgressState
from dualpath.workload.replay.result import (
    Isolation,
    ReplayResult,
    ReplaySetting,
    SentHints,
    SessionRecord,
    ToolDelays,
    TurnRecord,
    summarise,
    trace_shape,
)

# ------------------------------------------------------------------------------------------- hints
# Hints about sessions that agents of a replay send in addition to their turns.

#: Timeout of a hint, after which it is useless.
_JSON = {"Content-Type": "application/json"}
_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def sent_name(conversation_id: str) -> str:
    """Return the name under which a router knows a session of a trace.

    It is the session's id, or a digest of it if the router would refuse that, or if it would not
    survive as a part of a URL's path.
    """
    if conversation_id not in ("", ".", "..") and name_problem(conversation_id) is None:
        return conversation_id
    digest = hashlib.sha256(conversation_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"session-{digest[:32]}"


class HintSender:
    """Sends hints to an endpoint of dualpath's router.

    A failed hint is only logged, because it must not fail the turn.
    """

    def __init__(self, http: aiohttp.ClientSession, endpoint: str, given: SentHints) -> None:
        self._http = http
        self._sessions = f"{endpoint}/dualpath/v1/sessions"
        self._given = given

    def session_name(self, conversation_id: str) -> str | None:
        """Return the session name to send with a turn, None for none."""
        return None if self._given is SentHints.NONE else sent_name(conversation_id)

    async def tool_begins(
        self, conversation_id: str, cache_salt: str | None, runs_s: float
    ) -> None:
        """Send the hint that the next turn follows in ``runs_s`` seconds."""
        if self._given is SentHints.PAUSES:
            await self._send("POST", conversation_id, {"next_turn_s": runs_s}, cache_salt)

    async def session_ended(self, conversation_id: str, cache_salt: str | None) -> None:
        """Send the hint that the session has ended."""
        if self._given is not SentHints.NONE:
            await self._send("DELETE", conversation_id, {}, cache_salt)

    async def _send(
        self, method: str, conversation_id: str, hints: dict[str, float], cache_salt: str | None
    ) -> None:
        body: dict[str, object] = {**hints}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        url = f"{self._sessions}/{quote(sent_name(conversation_id), safe='')}"
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                sent(
                    self._http, method, url, data=msgspec.json.encode(body), headers=_JSON
                ) as answer,
            ):
                if answer.status != 200:
                    text = (await answer.text())[:200]
                    logger.warning("%s %s: status %d: %s", method, url, answer.status, text)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("%s %s: %r", method, url, error)


# ----------------------------------------------------------------------------------------- options
# Options of a replay.

ToolDelaysSetting = Annotated[ToolDelays, Setting("wait for the recorded tool times between turns")]
SentHintsSetting = Annotated[
    SentHints,
    Setting(
        "hints that agents send about their sessions: none, names and ends, or also how long each "
        "tool will run"
    ),
]


class ReplayOptions(AgentSettings, frozen=True, kw_only=True):
    """Options of a replay; the defaults are the paper's offline setting (§7.3) on the whole trace.

    ``run_id`` makes the cache salts of this run different from those of others; use the same one to
    repeat a run that hits what an earlier run stored.
    """

    agents_per_s: Annotated[
        float | None,
        Setting("rate of random arrivals (Poisson, §7.4); none: all at once", gt=0, le=1e6),
    ] = None
    tool_delays: ToolDelaysSetting = ToolDelays.NONE
    session_hints: SentHintsSetting = SentHints.NONE
    isolation: Annotated[
        Isolation,
        Setting("share cached blocks within a session (as in the paper), a run, or with all"),
    ] = Isolation.SESSION
    model: Annotated[
        str | None, Setting("served model name; none: the first one served", metavar="NAME")
    ] = None
    vocab_size: Annotated[
        int | None, Setting("size of the vocabulary; none: the endpoint's", ge=2)
    ] = None
    block_tokens: Annotated[
        int | None,
        Setting("block size of the engines; none: the endpoint's, else 64", ge=1, le=1 << 16),
    ] = None
    read_timeout_s: Annotated[
        float, Setting("longest time between two chunks of a stream", gt=0, le=86400)
    ] = 600.0
    ca_file: CaFile = ""
    run_id: Annotated[str, Setting("id from which cache salts are derived", flag=False)] = ""
    label: Annotated[str, Setting("name of this run in reports")] = ""
    trace: Annotated[str, Setting("name of the trace", flag=False)] = ""
    trace_format: Annotated[str, Setting("format of the trace", flag=False)] = ""
    broken_lines: Annotated[
        int, Setting("broken lines of the trace that were left out", ge=0, flag=False)
    ] = 0


# --------------------------------------------------------------------------------------------- run
# A running replay: its agents, their turns and the measurements of each turn.


class _Agent(msgspec.Struct):
    """A running session: the state that it shares with its sub-agents."""

    session_id: str
    cache_salt: str | None
    stored: StoredPrefixes[TokenIds]
    turns_done: int = 0
    failed: bool = False
    truncated: bool = False


class ReplayRun:
    """A running replay; it owns the records."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        setting: ReplaySetting,
        run_id: str,
        clock: Clock,
        progress: Progress,
        each_turn: Callable[[TurnRecord], object] | None = None,
    ) -> None:
        """Prepare a run without sending anything; an empty ``run_id`` becomes a random one."""
        self.turns: list[TurnRecord] = []
        self.sessions: list[SessionRecord] = []
        self.last_answer_s = 0.0
        self._http = http
        self._setting = setting
        self._url = f"{setting.endpoint}/v1/completions"
        self._hints = HintSender(http, setting.endpoint, setting.session_hints)
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._clock = clock
        self._progress = progress
        self._each_turn = each_turn
        self._start_s = 0.0
        self._totals = (0, 0)
        self._turns_failed = 0
        self._reported_prompt_tokens = 0
        self._reported_hit_tokens: int | None = None

    async def all_agents(
        self,
        agents: Sequence[Session],
        arrivals_s: Sequence[float],
        settings: AgentSettings,
        vocabulary: Vocabulary,
        histories: Sequence[Session] = (),
    ) -> None:
        """Run every agent to its end; the prompts of ``histories`` were stored before."""
        before = {history.session_id: history for history in histories}
        # An agent and its history use the same contents, so that equal texts are equal tokens.
        contents = [Contents(vocabulary) for _ in agents]
        conversations = [
            agent.start(settings, own) for agent, own in zip(agents, contents, strict=True)
        ]
        stored = [
            _stored(before.get(agent.session_id), settings, own)
            for agent, own in zip(agents, contents, strict=True)
        ]
        most = settings.max_turns
        turns = sum(agent.turns if most is None else min(agent.turns, most) for agent in agents)
        self._totals = (len(agents), turns)
        self._start_s = self._clock.now()
        async with asyncio.TaskGroup() as group:
            for agent in zip(conversations, stored, arrivals_s, strict=True):
                group.create_task(self._one_agent(*agent))

    def jct_s(self, *, interrupted: bool) -> float:
        """Return the time from the start to the last answer, or until now if interrupted."""
        return self._since_start() if interrupted else self.last_answer_s

    async def _one_agent(
        self, conversation: Conversation, stored: StoredPrefixes[TokenIds], arrival_s: float
    ) -> None:
        if arrival_s > 0:
            await self._clock.sleep(arrival_s)
        agent = _Agent(
            session_id=conversation.session_id,
            cache_salt=self._cache_salt(conversation.session_id),
            stored=stored,
        )
        start_s = self._since_start()
        await self._converse(agent, conversation)
        end_s = self._since_start()
        self.last_answer_s = max(self.last_answer_s, end_s)
        self.sessions.append(
            SessionRecord(
                session_id=agent.session_id,
                start_s=start_s,
                end_s=end_s,
                turns=agent.turns_done,
                truncated=agent.truncated,
                failed=agent.failed,
            )
        )
        self._show()

    async def _converse(self, agent: _Agent, conversation: Conversation) -> None:
        """Run a conversation and, in parallel, its sub-agents, until all have ended."""
        index = 0
        async with asyncio.TaskGroup() as tasks:
            while not agent.failed and (turn := conversation.next_turn()) is not None:
                waits = self._setting.tool_delays is ToolDelays.RECORDED and turn.delay_s > 0
                if waits:
                    salt, name = agent.cache_salt, conversation.session_id
                    tasks.create_task(self._hints.tool_begins(name, salt, turn.delay_s))
                    await self._clock.sleep(turn.delay_s)
                generated = await self._one_turn(agent, conversation, index, turn)
                index += 1
                if generated is None:
                    agent.failed = True
                    return
                agent.stored.add(conversation.tokens(conversation.record(generated)))
                for sub_agent in conversation.spawned():
                    tasks.create_task(self._converse(agent, sub_agent))
            agent.truncated = agent.truncated or conversation.truncated
        if index:
            await self._hints.session_ended(conversation.session_id, agent.cache_salt)

    async def _one_turn(
        self, agent: _Agent, conversation: Conversation, index: int, turn: Turn
    ) -> list[int] | None:
        """Send one turn and record it; return the generated tokens, None if it failed."""
        prompt = conversation.tokens(turn.prompt)
        stored_tokens = agent.stored.common_tokens(prompt)
        body = completion_body(
            self._setting.model,
            prompt.listed(),
            turn.generate_tokens,
            agent.cache_salt,
            self._hints.session_name(conversation.session_id),
        )
        sent_s = self._clock.now()
        record = TurnRecord(
            session_id=agent.session_id,
            conversation_id=conversation.session_id,
            turn=index,
            start_s=sent_s - self._start_s,
            delay_s=turn.delay_s,
            prompt_tokens=prompt.tokens,
            context_tokens=turn.context_tokens,
            ideal_hit_tokens=hit_tokens(stored_tokens, prompt.tokens, self._setting.block_tokens),
            generated_tokens=turn.generate_tokens,
        )
        agent.turns_done += 1
        try:
            completion = await complete(self._http, self._url, body, self._clock)
        except DualPathError as error:
            self._turn_over(msgspec.structs.replace(record, generated_tokens=0, error=str(error)))
            return None
        self._turn_over(_measured(record, completion, sent_s))
        return completion.token_ids

    def _cache_salt(self, session_id: str) -> str | None:
        match self._setting.isolation:
            case Isolation.SESSION:
                # Hashed, because session ids may be longer than vLLM's limit for salts.
                name = f"{self._run_id}/{session_id}"
                return hashlib.sha256(name.encode()).hexdigest()[:32]
            case Isolation.RUN:
                return self._run_id
            case Isolation.NONE:
                return None

    def _since_start(self) -> float:
        return self._clock.now() - self._start_s

    def _turn_over(self, record: TurnRecord) -> None:
        self.turns.append(record)
        if self._each_turn is not None:
            self._each_turn(record)
        self._turns_failed += record.error is not None
        if record.hit_tokens is not None:
            self._reported_prompt_tokens += record.prompt_tokens
            self._reported_hit_tokens = (self._reported_hit_tokens or 0) + record.hit_tokens
        self._show()

    def _show(self) -> None:
        sessions_total, turns_total = self._totals
        self._progress.update(
            ProgressState(
                elapsed_s=self._since_start(),
                sessions_done=len(self.sessions),
                sessions_total=sessions_total,
                turns_done=len(self.turns),
                turns_total=turns_total,
                turns_failed=self._turns_failed,
                prompt_tokens=self._reported_prompt_tokens,
                hit_tokens=self._reported_hit_tokens,
            )
        )


def _stored(
    history: Session | None, settings: AgentSettings, contents: Contents
) -> StoredPrefixes[TokenIds]:
    """Return the stored prefixes that an agent can hit in its first turn."""
    stored = StoredPrefixes[TokenIds]()
    if history is not None:
        conversation = history.start(settings, contents)
        if (turn := conversation.next_turn()) is not None:
            stored.add(conversation.tokens(turn.prompt))
    return stored


def _measured(record: TurnRecord, completion: Completion, sent_s: float) -> TurnRecord:
    """Set the times defined in ``TurnRecord``."""
    arrivals_s = completion.arrivals_s
    count = len(arrivals_s)
    ids = np.asarray(completion.token_ids, dtype="<u4").tobytes()
    return msgspec.structs.replace(
        record,
        generated_tokens=count,
        hit_tokens=completion.cached_tokens,
        ttft_s=arrivals_s[0] - sent_s,
        ttst_s=arrivals_s[1] - arrivals_s[0] if count >= 2 else None,
        tpot_s=(arrivals_s[-1] - arrivals_s[1]) / (count - 2) if count >= 3 else None,
        latency_s=arrivals_s[-1] - sent_s,
        generated_digest=hashlib.sha256(ids).hexdigest()[:16],
    )


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
    cluster_endpoint: str = "",
    partial: bool = False,
    each_turn: Callable[[TurnRecord], object] | None = None,
) -> ReplayResult:
    """Replay ``sessions`` against ``endpoint`` (``http://host:port``) and return the measurements.

    ``encode`` converts text to token ids; only text sessions need it.  ``histories`` are sessions
    of one prompt that an earlier run with the same ``run_id`` has stored, so that the agent with
    the same id can hit it.  ``cluster_endpoint`` has the counters of engines if front ends are
    processes of their own.  Failed turns are in the result and raise no error.  ``partial``: if
    this task is cancelled while agents run, return what has been measured.  ``each_turn`` is called
    with the record of each turn when the turn is over.  Requests carry the
    environment's ``VLLM_API_KEY``.  Raises ``ConfigError`` for invalid settings and
    ``EngineLostError`` if the endpoint does not answer at the start.
    """
    endpoint = checked_http_url(endpoint, "endpoint").removesuffix("/v1")
    agents = make_agents(sessions, options.agents, options.seed)
    arrivals_s = arrival_times_s(len(agents), options.agents_per_s, options.seed)
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=options.read_timeout_s
    )
    keys = client_headers()
    async with client_session(timeout=timeout, headers=keys, tls=trusting(options.ca_file)) as http:
        model, model_limit = await served_model(http, endpoint, options.model)
        cluster = cluster_endpoint.rstrip("/") or endpoint
        before = await status(http, cluster)
        _warn_without_bytes(before, cluster_endpoint)
        setting = _setting(options, endpoint, model, model_limit, before, len(agents))
        run = ReplayRun(
            http,
            setting,
            options.run_id,
            clock or RealClock(),
            progress or NoProgress(),
            each_turn,
        )
        vocabulary = Vocabulary(options.seed, setting.token_low, setting.token_high, encode)
        vocabulary.check()
        settings = msgspec.structs.replace(options, max_context_tokens=setting.max_context_tokens)
        interrupted = False
        try:
            await run.all_agents(agents, arrivals_s, settings, vocabulary, histories)
        except asyncio.CancelledError:
            if not partial:
                raise
            interrupted = True
        after = await _status_after(http, cluster)
    return ReplayResult(
        setting=setting,
        machine=this_machine(),
        summary=summarise(run.turns, run.sessions, run.jct_s(interrupted=interrupted)),
        trace=trace_shape(run.turns),
        server=counter_changes(before, after),
        sessions=run.sessions,
        turns=run.turns,
        interrupted=interrupted,
    )


def _warn_without_bytes(served: Status | None, cluster_endpoint: str) -> None:
    """Warn if a front end answers, which does not know what engines move."""
    if served is not None and served.front_end and not cluster_endpoint:
        logging.getLogger(__name__).warning(
            "a front end serves the endpoint, so bytes and hits of engines are not reported; give "
            "the scheduler's HTTP address, which `dualpath router` prints as cluster, with "
            "--cluster-endpoint"
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
