"""What the life of a request and the scheduler say to each other.

The life of a request belongs to a *front end* (``requests``), of which there may be many; engines,
placement and the ledger belong to the *scheduler* (``control``, ``attempts``), of which there is
one.  All that passes between them is here, and all of it is data, or a call with one answer:

    front end → scheduler   begin(RequestOrder) · attempt(AttemptOrder) · prepare · prefilled
                            · given_up · tokens_came · decoded · over · end(Answered) · suspect · …
    scheduler → front end   Placed, Staged, Recomputed, Arrived; that an attempt is broken

Names are the idempotence: a request by its id, an attempt by the name that engines know it by.
What waits for an engine has its limit at the scheduler; model work is the front end's, which calls
engines itself.  Whatever an attempt has taken, ``over`` gives back.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

import msgspec

from dualpath.core.session_hints import NO_HINTS, SessionHints
from dualpath.core.transfers import PrefillTransfer
from dualpath.router.attempts.hit_account import HitAccount
from dualpath.router.engines import EngineInfo, KnownEngines
from dualpath.router.stages import StageTime


class RequestOrder(msgspec.Struct, frozen=True):
    """A request begins: its turn in the order of arrival, and in its agent's session."""

    request_id: str
    keys: tuple[bytes, ...]
    tenant: str = ""
    hints: SessionHints = NO_HINTS


class Answered(msgspec.Struct, frozen=True):
    """A request was served to its end: ``keys`` are those of all tokens of which there is KV.

    The first ``prompt_blocks`` of them are the prompt's, the DE ``decode_engine`` has them all.
    """

    keys: tuple[bytes, ...]
    prompt_blocks: int
    decode_engine: str


class AttemptOrder(msgspec.Struct, frozen=True):
    """One attempt at a request; ``number`` counts from 1, ``attempt_id`` is its name at engines.

    ``keys`` are those of the full blocks of this attempt's prompt, which has the tokens of earlier
    attempts at its end.  ``kept`` False: hits are read from storage, whatever buffers keep.
    """

    attempt_id: str
    number: int
    prompt_tokens: int
    max_new_tokens: int
    keys: tuple[bytes, ...]
    cacheable: bool = True
    tenant: str = ""
    kept: bool = True


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The attempt has its engines."""

    prefill: EngineInfo
    decode: EngineInfo


class Staged(msgspec.Struct, frozen=True, tag=True):
    """A stage is over; times are the scheduler's."""

    stage: StageTime


class Recomputed(msgspec.Struct, frozen=True, tag=True):
    """Stored tokens are computed all the same."""

    tokens: int
    reason: str


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The DE has the prompt's KV in its HBM; the copy took ``h2d_s``."""

    h2d_s: float


AttemptEvent = Placed | Staged | Recomputed | Arrived


class AttemptListener(Protocol):
    """What hears of an attempt; must not block."""

    def heard(self, event: AttemptEvent) -> None:
        """Something happened at the scheduler."""
        ...


class Prefilled(msgspec.Struct, frozen=True):
    """The prompt's KV is complete in the DE's buffer, and its new blocks are being stored.

    ``forward_s`` and ``transfer_s`` are those of ``core.request_messages.PrefillDone``.
    """

    account: HitAccount
    forward_s: float
    transfer_s: float


class ScheduledAttempt(Protocol):
    """The scheduler's half of an attempt.

    What starts something new raises ``EngineLostError`` once ``broken`` is done, which then carries
    that error.  Each call may come again and then changes nothing.
    """

    @property
    def broken(self) -> "asyncio.Future[None]":
        """Ends in ``EngineLostError`` when an engine is lost that the attempt needs."""
        ...

    def check(self) -> None:
        """Raise ``EngineLostError`` if the attempt is broken off."""
        ...

    async def prepare(self) -> PrefillTransfer:
        """Find what is stored, the engines and their slots, and have the hits read (§4.1).

        Returns what the PE has to be told.  Raises ``EngineLostError``, ``TransportError`` or, if
        no engine can ever take the request, ``BadRequestError``.
        """
        ...

    async def prefilled(self) -> Prefilled:
        """The PE's first token is there: wait for its word that the KV arrived, let the PE go.

        Raises ``EngineLostError`` if it says nothing, ``TransportError`` if KV did not arrive.
        """
        ...

    async def given_up(self) -> None:
        """The PE has given the request up: raise ``TransportError`` if it has said why."""
        ...

    def tokens_came(self) -> None:
        """The DE generates: all of the prompt's KV has arrived there, nobody writes to it."""
        ...

    async def decoded(self) -> None:
        """The DE has generated the last token: wait for what it has said before.

        Losing it no longer matters.
        """
        ...

    def over(self, reason: str) -> None:
        """Give everything back at the engines, the ledger and the scheduler; idempotent."""
        ...


class ScheduledRequest(Protocol):
    """A request in the order of its arrival."""

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> ScheduledAttempt:
        """Begin an attempt.  Raises ``BadRequestError`` if another one has its name."""
        ...

    def end(self, answered: Answered | None = None) -> None:
        """It is over, well if ``answered`` is given; idempotent."""
        ...


class Scheduling(Protocol):
    """The scheduler, as front ends see it."""

    @property
    def engines(self) -> KnownEngines:
        """The engines there are."""
        ...

    @property
    def keeps_answers(self) -> bool:
        """Whether ``Answered`` is of any use: decode engines keep blocks for next turns."""
        ...

    async def engines_present(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for live engines; raises ``DeadlineError`` with what is missing."""
        ...

    def begin(self, order: RequestOrder) -> ScheduledRequest:
        """Take note of a request that has arrived."""
        ...

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine; ``call_failed``: a call of its HTTP server."""
        ...

    async def settled(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live."""
        ...

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Take what a client says of a session; False if nobody knows it."""
        ...
