"""The interface between the life of a request and the scheduler.

The life of a request belongs to a *front end* (``requests``), of which there may be many; engines,
placement and the ledger belong to the *scheduler* (``scheduler``), of which there is one, or one
for each unit of a front end that knows several (``scheduler.units``).  Everything that passes
between them is defined here, as data or as a call with one result:

    front end → scheduler   begin(RequestOrder) · attempt(AttemptOrder) · prepare · prefilled
                            · prefill_aborted · decoding_started · close · end(Answered)
                            · suspect · call_waits · …
    scheduler → front end   Placed, Staged, Recomputed, Arrived; that an attempt is broken

Names make the calls idempotent: a request is known by its id, an attempt by the name that engines
know it by.  The scheduler limits its waits for engines; model work is the front end's, which calls
engines itself.  ``close`` releases whatever an attempt holds.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

import msgspec

from dualpath.core.session_hints import NO_HINTS, SessionHints
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer
from dualpath.router.engines import EngineInfo, KnownEngines, Membership
from dualpath.router.hit_account import HitAccount
from dualpath.router.stages import StageTime


class RequestOrder(msgspec.Struct, frozen=True):
    """A request that begins: it gets its place in the order of arrival, and in its session."""

    request_id: str
    keys: tuple[bytes, ...]
    tenant: str = ""
    hints: SessionHints = NO_HINTS


class Answered(msgspec.Struct, frozen=True):
    """The result of a request: ``keys`` are those of all tokens that have KV.

    The first ``prompt_blocks`` of them are the prompt's; ``decode_engine`` is the DE that has them.
    """

    keys: tuple[bytes, ...]
    prompt_blocks: int
    decode_engine: str


class AttemptOrder(msgspec.Struct, frozen=True):
    """One attempt at a request; ``number`` counts from 1, ``attempt_id`` is its name at engines.

    ``keys`` are those of the full blocks of this attempt's prompt, which ends with the tokens that
    earlier attempts generated.  ``use_cached`` False: hits are read from storage, even if buffers
    cache them.

    With two legs (``router.two_legs``) ``prefill_engine`` is the PE that serves it, as in
    ``core.request.Request``, and so is ``decode_engine``; ``handover`` is the name under which the
    attempt will be offered to the second leg; ``prompt_digest`` is that of transfers.

    ``max_load_tokens`` bounds the hit, None: no bound.  ``look_up``: engines of other schedulers
    may have served the session since, so that an engine has to look up what is stored.
    """

    attempt_id: str
    number: int
    prompt_tokens: int
    max_new_tokens: int
    keys: tuple[bytes, ...]
    cacheable: bool = True
    tenant: str = ""
    use_cached: bool = True
    prefill_engine: str = ""
    decode_engine: str = ""
    handover: str = ""
    prompt_digest: bytes = b""
    max_load_tokens: int | None = None
    look_up: bool = False


#: The reason of ``ScheduledAttempt.close`` if the DE has generated the last token: its request is
#: over there.
FINISHED = "finished"


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The attempt is placed on these engines, without a PE if the DE computes the append."""

    prefill: EngineInfo | None
    decode: EngineInfo


class Staged(msgspec.Struct, frozen=True, tag=True):
    """A stage has ended; times are the scheduler's."""

    stage: StageTime


class Recomputed(msgspec.Struct, frozen=True, tag=True):
    """Stored tokens are recomputed."""

    tokens: int
    reason: str


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The DE has the prompt's KV in its HBM; the copy took ``h2d_s``."""

    h2d_s: float


AttemptEvent = Placed | Staged | Recomputed | Arrived


class AttemptListener(Protocol):
    """Receives the events of an attempt; must not block."""

    def notify(self, event: AttemptEvent) -> None:
        """Take an event from the scheduler."""
        ...


class Prepared(msgspec.Struct, frozen=True):
    """All hits are in DRAM: the transfers that travel with the requests at the DE and at the PE.

    ``prefill`` is None if the DE computes the append; the hit is then complete in its buffer.
    """

    decode: DecodeTransfer
    prefill: PrefillTransfer | None


class Prefilled(msgspec.Struct, frozen=True):
    """The prompt's KV is complete in the DE's buffer, and its new blocks are being stored.

    If the DE computes the append, only its hit is complete.  ``forward_s`` and ``transfer_s`` are
    those of ``core.control.PrefillDone``, 0 without a PE.
    """

    account: HitAccount
    forward_s: float
    transfer_s: float


class HandedOver(msgspec.Struct, frozen=True):
    """An attempt that has ended its first leg, for the front end of the second one.

    If ``decode`` is not that front end's engine, the attempt stays offered: that engine has to take
    it.  ``note`` is a text about a move of the KV: from where, or why there is none; else empty.
    """

    request_id: str
    decode: EngineInfo
    transfer: DecodeTransfer
    note: str = ""


class ScheduledAttempt(Protocol):
    """The scheduler's side of an attempt.

    Calls that start something raise ``EngineLostError`` once ``broken`` is done, which then has
    that error.  ``prepare`` is called once; each other call may be repeated and then changes
    nothing.
    """

    @property
    def broken(self) -> "asyncio.Future[None]":
        """Ends in ``EngineLostError`` when an engine is lost that the attempt needs."""
        ...

    def check(self) -> None:
        """Raise ``EngineLostError`` if the attempt is broken."""
        ...

    async def prepare(self) -> Prepared:
        """Find what is stored, the engines and their slots, and have the hits read (§4.1).

        Raises ``EngineLostError``, ``TransportError`` (``HitLostError`` if the next attempt does
        without what failed) or ``BadRequestError``, if no engine can ever take the request or an
        attempt of another front end has its name.
        """
        ...

    async def prefilled(self) -> Prefilled:
        """The PE's first token is there: wait for its report that the KV arrived.

        Without a PE it waits for nothing and is called before the DE's request.  Raises
        ``EngineLostError`` without a report, ``TransportError`` if KV did not arrive.
        """
        ...

    async def prefill_aborted(self) -> None:
        """The PE has aborted the request: raise ``TransportError`` if it has reported why."""
        ...

    def decoding_started(self) -> None:
        """The DE generates: all of the prompt's KV has arrived, no PE writes there any more."""
        ...

    def close(self, reason: str) -> None:
        """Release everything at the engines, the ledger and the scheduler; idempotent.

        ``reason`` is ``FINISHED`` or a text.
        """
        ...


class ScheduledRequest(Protocol):
    """A request in the order of its arrival."""

    def attempt(self, order: AttemptOrder, listener: AttemptListener) -> ScheduledAttempt:
        """Begin an attempt.

        Raises ``BadRequestError`` if another one of this front end has its name.
        """
        ...

    async def ends_aborted(self) -> bool:
        """Return whether the request ends with the tokens it has, now that an attempt has failed.

        That is so while a trainer has the running requests aborted.  Does not raise.
        """
        ...

    def end(self, answered: Answered | None = None) -> None:
        """The request has ended, with an answer if ``answered`` is given; idempotent."""
        ...


class Scheduling(Protocol):
    """The scheduler, as front ends see it."""

    @property
    def engines(self) -> KnownEngines:
        """The engines of the cluster."""
        ...

    @property
    def membership(self) -> Membership:
        """Notifies of engines that join or are lost."""
        ...

    @property
    def caches_answers(self) -> bool:
        """Whether ``Answered`` is used: decode engines cache blocks for next turns."""
        ...

    async def wait_for_engines(self, prefill: int, decode: int, timeout_s: float) -> None:
        """Wait for live engines; raises ``DeadlineError`` with what is missing."""
        ...

    def begin(self, order: RequestOrder) -> ScheduledRequest:
        """Register a request that has arrived."""
        ...

    def suspect(self, engine: EngineInfo, why: str, *, call_failed: bool = False) -> None:
        """Something failed on an engine; ``call_failed``: a call of its HTTP server."""
        ...

    def call_waits(self, engine: EngineInfo, silent_s: float) -> None:
        """An engine's HTTP server has a call and has sent nothing of its answer for a while."""
        ...

    async def await_liveness(self, engines: Iterable[EngineInfo]) -> None:
        """Wait until it is known which of these engines live."""
        ...

    async def hint_session(self, tenant: str, session_id: str, hints: SessionHints) -> bool:
        """Apply a client's hints on a session; False if the session is unknown."""
        ...
