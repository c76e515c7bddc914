"""Which agent's session a turn belongs to, and how long its tools usually run.

A session is known by the name that its client gives it, or by its keys: a prompt that begins with
all blocks of an earlier prompt, or of an earlier one and its answer, continues it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

from dualpath.core.blocks import BlockKey
from dualpath.core.session_hints import SessionHints

#: A tenant, and what its client or this module calls the session.
SessionName = tuple[str, str]

#: A pause is guessed from so many of the session's own, at least; from all sessions' without.
_OWN_PAUSES = 3
_PAUSES_KEPT = 16
_ALL_PAUSES_KEPT = 256
#: The share of pauses that are shorter than the guess: what comes back too early only takes idle
#: memory, what comes back too late is waited for.
_SHORTER = 0.25


class AgentSession:
    """``keys`` lie at ``engine_id`` since ``ended_s``; None: a turn is under way.

    ``next_s`` is when the next turn is expected, ``fetch_s`` when they are to be brought back for
    it, ``kept_until_s`` until when they are counted as kept; ``tails`` are the keys that it is
    known by.
    """

    __slots__ = (
        *("ended_s", "engine_id", "fetch_s", "hints", "kept_until_s", "keys", "name"),
        *("next_s", "pauses", "tails"),
    )

    def __init__(self, name: SessionName) -> None:
        self.name = name
        self.hints = SessionHints()
        self.keys: tuple[BlockKey, ...] = ()
        self.tails: tuple[BlockKey, ...] = ()
        self.engine_id = ""
        self.ended_s: float | None = None
        self.next_s = 0.0
        self.fetch_s: float | None = None
        self.kept_until_s: float | None = None
        self.pauses: deque[float] = deque(maxlen=_PAUSES_KEPT)


class SessionMemory:
    """The sessions used last, of at most ``most_blocks`` blocks together; one owner."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._sessions: OrderedDict[SessionName, AgentSession] = OrderedDict()
        self._by_tail: dict[BlockKey, AgentSession] = {}
        self._blocks = 0
        self._unnamed = 0
        self._pauses: deque[float] = deque(maxlen=_ALL_PAUSES_KEPT)

    def __len__(self) -> int:
        """Sessions that are remembered."""
        return len(self._sessions)

    def __iter__(self) -> Iterator[AgentSession]:
        """Go through them, from the one used least recently on."""
        return iter(self._sessions.values())

    def get(self, name: SessionName) -> AgentSession | None:
        """Return a session by its name."""
        return self._sessions.get(name)

    def find(self, tenant: str, session_id: str, keys: Sequence[BlockKey]) -> AgentSession:
        """Return the session that a turn continues, or a new one; it is the one used last then."""
        session = self._known(tenant, session_id, keys)
        self._sessions.move_to_end(session.name)
        return session

    def note_pause(self, session: AgentSession, pause_s: float) -> None:
        """Remember how long a session's tools ran."""
        session.pauses.append(pause_s)
        self._pauses.append(pause_s)

    def usual_pause_s(self, session: AgentSession) -> float | None:
        """Return a pause that few of the session's are shorter than; None while none is known."""
        own = session.pauses
        return _shorter_than_most(own if len(own) >= _OWN_PAUSES else self._pauses)

    def remember(
        self, session: AgentSession, keys: tuple[BlockKey, ...], prompt_blocks: int
    ) -> None:
        """Note a session's context: the first ``prompt_blocks`` keys are its last prompt's."""
        self._drop_tails(session)
        self._blocks += len(keys) - len(session.keys)
        session.keys = keys
        # An answer may come back in other tokens than those it was generated in.
        tails = keys[-1:], keys[max(prompt_blocks - 1, 0) : prompt_blocks]
        session.tails = tuple(dict.fromkeys(key for tail in tails for key in tail))
        self._by_tail.update(dict.fromkeys(session.tails, session))

    def too_many(self) -> AgentSession | None:
        """Return the session to be forgotten next, None while all of them have room."""
        if self._blocks <= self._most_blocks or len(self._sessions) < 2:
            return None
        return next(iter(self._sessions.values()))

    def forget(self, session: AgentSession) -> None:
        """Remember nothing of a session but its pauses among all others'."""
        self._sessions.pop(session.name, None)
        self._drop_tails(session)
        self._blocks -= len(session.keys)

    def _known(self, tenant: str, session_id: str, keys: Sequence[BlockKey]) -> AgentSession:
        if not session_id:
            for key in reversed(keys):
                if (session := self._by_tail.get(key)) is not None:
                    return session
            self._unnamed += 1
            # No client can give a name with a line end.
            session_id = f"\n{self._unnamed}"
        name = tenant, session_id
        return self._sessions.setdefault(name, AgentSession(name))

    def _drop_tails(self, session: AgentSession) -> None:
        for key in session.tails:
            if self._by_tail.get(key) is session:
                del self._by_tail[key]
        session.tails = ()


def _shorter_than_most(pauses: Iterable[float]) -> float | None:
    known = sorted(pauses)
    return known[int(len(known) * _SHORTER)] if known else None
