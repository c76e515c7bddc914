"""Attempts between their two legs: a front end has run the prefill, another one runs the decode.

With another proxy in front of the engines, each engine is the front end of its own leg
(``router.two_legs``).  The first leg's front end *offers* its attempt under a name that both legs
know; the second leg's front end, at the decode engine, *takes* it.  Either may come first.

Names that proxies give may be used twice at a time: some proxies pass the request id of their
client on, and clients use one for all that they send.  So an offer has two names, the one that both
legs knew before, and that of its attempt, which leg 1's answer carries.  The former leads to the
last offer with it.  A first leg that is sent again has the name and the prompt of the first one,
and replaces it.

For a second leg that comes to another decode engine than the one with the KV, the KV is moved to
that engine.  If it cannot be, the offer stays: the leg's front end learns which engine has the KV,
and passes the leg on to it.  If that fails or the client leaves, this front end withdraws the
offer: the leg is over, or its prompt is prefilled again.

Nothing is left over: an offer that is not taken within ``second_leg_timeout_s`` is closed, as is
one that is withdrawn, one that has lost its DE, and one that is replaced.  A second leg that waits
learns within ``first_leg_timeout_s`` that no first leg runs under its name.  An offer belongs to no
front end: it outlives the session of the one that made it.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dualpath.core.errors import BadRequestError, DeadlineError, EngineLostError
from dualpath.router.settings import RouterSettings

if TYPE_CHECKING:
    from dualpath.router.engines import EngineInfo

logger = logging.getLogger(__name__)

#: Offers at a time; each has slots in the buffer of a decode engine, so there are far fewer.
MOST_OFFERS = 1 << 16


class Offered(Protocol):
    """An attempt as its front end offers it; ``close`` releases it with its request."""

    @property
    def attempt_id(self) -> str:
        """The attempt's own name, which no other attempt has."""
        ...

    @property
    def prompt_digest(self) -> bytes:
        """Identifies the prompt."""
        ...

    @property
    def broken(self) -> "asyncio.Future[None]":
        """Ends in an error when an engine is lost that the attempt needs."""
        ...

    @property
    def decode_engine(self) -> "EngineInfo":
        """The engine that has the prompt's KV in its buffer."""
        ...

    async def move(self, engine_id: str) -> bool:
        """Move the KV to another decode engine; return whether it is there.

        It is where it was if not.  Raises ``EngineLostError`` if one of the engines is lost.
        """
        ...

    def close(self, reason: str) -> None:
        """Release everything."""
        ...


class _Offer(NamedTuple):
    """An offer, by whatever name it is found; ``timer`` ends it."""

    name: str
    offered: Offered
    timer: asyncio.TimerHandle


class Handovers:
    """The offers and the waiting second legs of one scheduler, by name."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        #: By the attempt's name, and which of them is the last one with a name of a proxy.
        self._offers: dict[str, _Offer] = {}
        self._last: dict[str, str] = {}
        #: By name: the engine at which a second leg waits, and what it waits for.
        self._waiting: dict[str, tuple[str, asyncio.Future[Offered]]] = {}
        #: Attempts of which the KV is being moved, and to which engine, by their own names.
        self._moving: dict[str, tuple[Offered, str]] = {}
        #: Names of attempts with a running first leg, and the name of each attempt's handover.
        self._first_legs: dict[str, int] = {}
        self._handover_of: dict[str, str] = {}

    def __len__(self) -> int:
        """Return how many offers, moves, waiting second legs and running first legs there are."""
        offered = len(self._offers) + len(self._moving)
        return offered + len(self._waiting) + len(self._first_legs)

    @property
    def offered(self) -> list[Offered]:
        """The attempts that wait for their second legs."""
        return [offer.offered for offer in self._offers.values()]

    @property
    def moves(self) -> list[tuple[str, str]]:
        """The moves under way: the decode engines from which and to which KV is moved."""
        moving = self._moving.values()
        return [(offered.decode_engine.engine_id, target) for offered, target in moving]

    def first_leg_began(self, name: str, attempt_id: str) -> None:
        """An attempt begins that will be offered under this name."""
        self._first_legs[name] = self._first_legs.get(name, 0) + 1
        self._handover_of[attempt_id] = name

    def first_leg_ended(self, attempt_id: str) -> None:
        """An attempt was offered or has ended; unknown attempts are ignored."""
        name = self._handover_of.pop(attempt_id, None)
        if name is None:
            return
        self._first_legs[name] -= 1
        if not self._first_legs[name]:
            del self._first_legs[name]

    def waits_at(self, name: str) -> str:
        """Return the engine at which the second leg of this name waits; empty if none does."""
        return self._waiting[name][0] if name in self._waiting else ""

    def offer(self, name: str, offered: Offered) -> None:
        """Hand an attempt over to its second leg, which may come later.

        Raises ``EngineLostError`` if the attempt's engine is lost by now or there are too many
        offers; the attempt is then closed.
        """
        former = self._offers.get(self._last.get(name, name))
        if former is not None and former.offered.prompt_digest == offered.prompt_digest:
            self.withdraw(former.offered.attempt_id, "its first leg was sent again")
        self._put(name, offered)

    def _put(self, name: str, offered: Offered) -> None:
        """Let an attempt wait for its second leg; raises as ``offer``."""
        for known_by in (name, offered.attempt_id):
            if known_by in self._waiting and not (waiter := self._waiting[known_by][1]).done():
                waiter.set_result(offered)
                return
        if offered.broken.done() or len(self._offers) >= MOST_OFFERS:
            reason = f"{MOST_OFFERS} requests wait for their second leg, the most at a time"
            if offered.broken.done():
                reason = str(offered.broken.exception())
            offered.close(reason)
            raise EngineLostError(f"{reason}; send the request again")
        limit_s = self._settings.second_leg_timeout_s
        timer = asyncio.get_running_loop().call_later(
            limit_s,
            self.withdraw,
            offered.attempt_id,
            f"its second leg did not come within {limit_s:g} s (second_leg_timeout_s)",
        )
        self._offers[offered.attempt_id] = _Offer(name, offered, timer)
        self._last[name] = offered.attempt_id
        offered.broken.add_done_callback(lambda broken: self._broken(offered, broken))

    async def take(self, name: str, engine_id: str, *, moves: bool = True) -> Offered:
        """Return the attempt of this name, with its KV at this decode engine.

        If its KV is at another one and cannot be moved, or if not ``moves``, the attempt stays
        offered.  Waits for a first leg that runs or begins within ``first_leg_timeout_s``.  Raises
        ``DeadlineError`` without one, ``EngineLostError`` if a decode engine is lost, and
        ``BadRequestError`` if another second leg waits for it.
        """
        found = self._offers.get(self._last.get(name, name))
        if found is None:
            offered = await self._wait(name, engine_id)
        else:
            self._remove(found)
            name, offered = found.name, found.offered
        if offered.decode_engine.engine_id != engine_id:
            if moves:
                await self._move(name, offered, engine_id)
            else:
                self._put(name, offered)
        return offered

    async def _move(self, name: str, offered: Offered, engine_id: str) -> None:
        """Move the KV of an attempt to a decode engine; it stays offered if that is not possible.

        If the move is cancelled or an engine is lost, the attempt is closed.
        """
        self._moving[offered.attempt_id] = offered, engine_id
        moved, reason = False, f"its second leg at engine {engine_id} was cancelled"
        try:
            moved = await offered.move(engine_id)
            reason = ""
        except EngineLostError as error:
            reason = str(error)
            raise
        finally:
            del self._moving[offered.attempt_id]
            if reason:
                logger.warning("request %s is given up between its legs: %s", name, reason)
                offered.close(reason)
        if not moved:
            self._put(name, offered)

    async def _wait(self, name: str, engine_id: str) -> Offered:
        if name in self._waiting:
            raise BadRequestError(f"another second leg waits for {name!r}; send each leg once")
        waiter: asyncio.Future[Offered] = asyncio.get_running_loop().create_future()
        self._waiting[name] = engine_id, waiter
        limit_s = self._settings.first_leg_timeout_s
        try:
            async with asyncio.timeout(self._settings.request_deadline_s):
                while not waiter.done():
                    await asyncio.wait([waiter], timeout=limit_s)
                    if name not in self._first_legs and not waiter.done():
                        break
            if waiter.done():
                return waiter.result()
        except TimeoutError:
            limit_s = self._settings.request_deadline_s
        except asyncio.CancelledError:
            if waiter.done():
                waiter.result().close("its second leg was cancelled")
            raise
        finally:
            del self._waiting[name]
        if waiter.done():
            waiter.result().close("its second leg has waited too long")
        raise DeadlineError(
            f"no first leg {name!r} has ended within {limit_s:g} s; send the first leg to a "
            "prefill engine of this cluster, before the second leg or at once with it"
        )

    def withdraw(self, attempt_id: str, reason: str) -> None:
        """Close an offer; does nothing if it was taken, withdrawn or never made."""
        offer = self._offers.get(attempt_id)
        if offer is not None:
            self._remove(offer)
            logger.warning("request %s is given up between its legs: %s", offer.name, reason)
            offer.offered.close(reason)

    def close(self) -> None:
        """Close all offers; the scheduler ends."""
        for name in list(self._offers):
            self.withdraw(name, "the scheduler ends")

    def _remove(self, offer: _Offer) -> None:
        offer.timer.cancel()
        attempt_id = offer.offered.attempt_id
        del self._offers[attempt_id]
        if self._last.get(offer.name) == attempt_id:
            del self._last[offer.name]

    def _broken(self, offered: Offered, broken: "asyncio.Future[None]") -> None:
        offer = self._offers.get(offered.attempt_id)
        if offer is not None and offer.offered is offered and not broken.cancelled():
            self.withdraw(offered.attempt_id, str(broken.exception()))
