"""Sessions of any format as trajectories of token counts (§A.3)."""

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
    """Yield token counts of sessions: how much every prompt keeps of what was sent, and appends.

    What is kept comes from block ids or from the tokens of texts, which ``encode`` makes.
    Sub-agents become sessions of their own; what they share with their parent is then appended.
    """
    for session in sessions:
        if isinstance(session, TokenSession):
            yield session
            continue
        # One at a time: contents of a session are not kept for the next.
        started = session.start(AgentSettings(), Contents(Vocabulary(encode=encode)))
        for number, walked in enumerate(walk([started])[0]):
            name = session.session_id if number == 0 else f"{session.session_id}/{number}"
            yield _lengths(name, walked)


def _lengths(name: str, walked: WalkedConversation) -> TokenSession:
    rounds: list[Round] = []
    kept_tokens: list[int | None] = []
    total = 0
    for index, (prompt, generated) in enumerate(
        zip(walked.prompt_tokens, walked.generated_tokens, strict=True)
    ):
        reuse = walked.own_reuse_tokens[index]
        # The last token of an answer has no KV, and is kept all the same.
        goes_on = 0 < total == reuse + 1 <= prompt
        kept = total if goes_on else min(reuse, total, prompt - 1)
        kept_tokens.append(None if kept == total else kept)
        rounds.append(Round(prompt - kept, generated, walked.delay_s[index]))
        total = prompt + generated
    edited = any(kept is not None for kept in kept_tokens)
    return TokenSession(Trajectory(name, tuple(rounds)), tuple(kept_tokens) if edited else ())
