"""Converts sessions of any format to trajectories of token counts (§A.3)."""

from collections.abc import Callable, Iterator, Sequence

from dualpath.core.request import Round, Trajectory
from dualpath.laboratory.workload.columns.walk import WalkedConversation, walk
from dualpath.laboratory.workload.conversation.contents import Contents, Vocabulary
from dualpath.laboratory.workload.conversation.session import AgentSettings, Session
from dualpath.laboratory.workload.conversation.text_encoder import approximate_encode
from dualpath.laboratory.workload.conversation.token_session import TokenSession


def as_lengths(
    sessions: Sequence[Session], encode: Callable[[str], Sequence[int]] = approximate_encode
) -> Iterator[TokenSession]:
    """Yield sessions as token counts: how much of earlier tokens every prompt retains and appends.

    Retained tokens are found from block ids or from the tokens of texts by ``encode``.  Sub-agents
    become separate sessions, so tokens that they share with their parent count as appended.
    """
    for session in sessions:
        if isinstance(session, TokenSession):
            yield session
            continue
        # One session at a time, to free the contents of each before the next.
        started = session.start(AgentSettings(), Contents(Vocabulary(encode=encode)))
        for number, walked in enumerate(walk([started])[0]):
            name = session.session_id if number == 0 else f"{session.session_id}/{number}"
            yield _lengths(name, walked)


def _lengths(name: str, walked: WalkedConversation) -> TokenSession:
    rounds: list[Round] = []
    retained_tokens: list[int | None] = []
    total = 0
    for index, (prompt, generated) in enumerate(
        zip(walked.prompt_tokens, walked.generated_tokens, strict=True)
    ):
        reuse = walked.own_reuse_tokens[index]
        # The last token of an answer is retained although it has no KV.
        continues = 0 < total == reuse + 1 <= prompt
        retained = total if continues else min(reuse, total, prompt - 1)
        retained_tokens.append(None if retained == total else retained)
        rounds.append(Round(prompt - retained, generated, walked.delay_s[index]))
        total = prompt + generated
    edited = any(retained is not None for retained in retained_tokens)
    return TokenSession(Trajectory(name, tuple(rounds)), tuple(retained_tokens) if edited else ())
