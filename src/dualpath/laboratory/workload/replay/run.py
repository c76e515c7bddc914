"""A running replay: its agents, their turns and the measurements of each turn."""

import asyncio
import hashlib
import uuid
from collections.abc import Sequence

import aiohttp
import msgspec
import numpy as np

from dualpath.core.errors import DualPathError
from dualpath.laboratory.workload.conversation.contents import Contents, Vocabulary
from dualpath.laboratory.workload.conversation.prefixes import StoredPrefixes, hit_tokens
from dualpath.laboratory.workload.conversation.session import (
    AgentSettings,
    Conversation,
    Session,
    Turn,
)
from dualpath.laboratory.workload.conversation.spans import TokenIds
from dualpath.laboratory.workload.replay.hints import HintSender
from dualpath.laboratory.workload.replay.progress import Progress, ProgressState
from dualpath.laboratory.workload.replay.result import (
    Isolation,
    ReplaySetting,
    SessionRecord,
    ToolDelays,
    TurnRecord,
)
from dualpath.laboratory.workload.replay.stream import Clock, Completion, complete, completion_body


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
