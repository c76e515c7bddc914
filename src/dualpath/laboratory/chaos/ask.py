"""One request under faults: its outcome, with every token compared with the expected one."""

import enum
from collections.abc import Callable, Iterator

import aiohttp
import msgspec

from dualpath.laboratory.workload.replay.stream import CompletionBody
from dualpath.router.token_api.wire import EventLines

_DETAIL_CHARACTERS = 300
#: Statuses by which a router reports that the failure is not the client's.
_CLEAR_STATUSES = frozenset({429, 503, 504})


class Outcome(enum.StrEnum):
    """How a request ended."""

    WELL = "well"
    """All tokens arrived and all are right."""
    CLEAR_ERROR = "clear error"
    """A status or an event with an error message."""
    CUT = "cut"
    """The connection was lost: what a client sees of a router that dies."""
    LEFT = "left"
    """Its client disconnected."""
    UNCLEAR = "unclear"
    """An answer that blames the client, ends without an error, or cannot be decoded."""
    LATE = "late"
    """It did not end within its deadline."""
    WRONG = "wrong"
    """A wrong token, or too few tokens."""


class Answer(msgspec.Struct, frozen=True):
    """The outcome of a request; ``cached_tokens`` of its prompt came from storage.

    ``first_token_s`` is when its first token arrived, None if none did.
    """

    outcome: Outcome
    detail: str = ""
    token_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    first_token_s: float | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def has_error(self) -> bool:
        """Whether it contains an error."""
        return bytes(self.error) not in (b"", b"null")


class AnswerChecker:
    """Compares the events of one stream with ``expected``, which yields the right tokens.

    ``now_s`` is the clock.
    """

    def __init__(self, tokens: int, expected: Iterator[int], now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._first_token_s: float | None = None
        self._tokens = tokens
        self._expected = expected
        self._lines = EventLines()
        self._error = ""
        self._wrong = ""
        self._cached_tokens = 0
        self.token_ids: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether the stream is complete or already wrong."""
        return self._lines.ended or bool(self._wrong)

    def feed(self, received: bytes) -> None:
        """Take bytes of the stream; raises ``msgspec.DecodeError`` for a malformed event."""
        for payload in self._lines.feed(received):
            event = msgspec.json.decode(payload, type=_Event)
            if event.has_error:
                self._error = bytes(event.error).decode(errors="replace")
            if event.usage is not None and event.usage.prompt_tokens_details is not None:
                self._cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
            for choice in event.choices:
                self._compare(choice.token_ids)

    def answer(self) -> Answer:
        """Return the result of the request after the end of its stream."""
        if self._wrong:
            return self._as(Outcome.WRONG, self._wrong)
        if self._error:
            return self._as(Outcome.CLEAR_ERROR, self._error)
        if not self._lines.ended:
            return self._as(Outcome.CUT, "the stream ended without [DONE]")
        if len(self.token_ids) < self._tokens:
            return self._as(
                Outcome.WRONG, f"{len(self.token_ids)} of {self._tokens} tokens, and no error"
            )
        return self._as(Outcome.WELL, "")

    def broken(self, outcome: Outcome, why: str) -> Answer:
        """Return the result of the request after its connection was lost."""
        return self._as(Outcome.WRONG, self._wrong) if self._wrong else self._as(outcome, why)

    def _compare(self, token_ids: list[int]) -> None:
        for token in token_ids:
            expected = next(self._expected)
            place = len(self.token_ids)
            if self._first_token_s is None:
                self._first_token_s = self._now_s()
            if place >= self._tokens or token != expected:
                self._wrong = self._wrong or f"token {place} is {token}, not {expected}"
                return
            self.token_ids.append(token)

    def _as(self, outcome: Outcome, detail: str) -> Answer:
        tokens = tuple(self.token_ids)
        return Answer(
            outcome, detail[:_DETAIL_CHARACTERS], tokens, self._cached_tokens, self._first_token_s
        )


async def send_request(
    http: aiohttp.ClientSession,
    url: str,
    body: CompletionBody,
    expected: Iterator[int],
    now_s: Callable[[], float],
) -> Answer:
    """Send a request and return its result; no response of a server makes it raise.

    It has no deadline of its own.
    """
    checker = AnswerChecker(body.max_tokens, expected, now_s)
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                return _refused(response.status, await response.text())
            async for received in response.content.iter_any():
                checker.feed(received)
                if checker.ended:
                    break
            return checker.answer()
    except (aiohttp.ClientError, OSError) as error:
        return checker.broken(Outcome.CUT, f"{type(error).__name__}: {error}")
    except msgspec.DecodeError as error:
        return checker.broken(Outcome.UNCLEAR, f"an event that cannot be decoded: {error}")


def _refused(status: int, text: str) -> Answer:
    try:
        has_error = msgspec.json.decode(text, type=_Event).has_error
    except msgspec.DecodeError:
        has_error = False
    clear = has_error and status in _CLEAR_STATUSES
    outcome = Outcome.CLEAR_ERROR if clear else Outcome.UNCLEAR
    return Answer(outcome, f"HTTP {status}: {text}"[:_DETAIL_CHARACTERS])
