"""Attempts between their two legs: a front end has run the prefill, another one runs the decode.

With another proxy in front of the engines, each engine is the front end of its own leg
(``router.two_legs``).  The first leg's front end *offers* its attempt under a name that both legs
know; the second leg's front end, at the decode engine, *takes* it.  Either may come first.

A second leg that comes to another decode engine than the one with the KV does not end an offer:
its front end learns which engine has the KV, and passes the leg on to it.

Nothing is left over: an offer that is not taken within ``second_leg_timeout_s`` is closed, as is
one that has lost its DE, or has a name that is offered again.  A second leg that waits learns
within ``first_leg_timeout_s`` that no first leg runs under its name.  An offer belongs to no front
end: it outlives the session of the one that made it.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

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
    def broken(self) -> "asyncio.Future[None]":
        """Ends in an error when an engine is lost that the attempt needs."""
        ...

    @property
    def decode_engine(self) -> "EngineInfo":
        """The engine that has the prompt's KV in its buffer."""
        ...

    def close(self, reason: str) -> None:
        """Release everything."""
        ...


class Handovers:
    """The offers and the waiting second legs of one scheduler, by name."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._offers: dict[str, tuple[Offered, asyncio.TimerHandle]] = {}
        #: By name: the engine at which a second leg waits, and what it waits for.
        self._waiting: dict[str, tuple[str, asyncio.Future[Offered]]] = {}
        #: Names of attempts with a running first leg, and the name of each attempt's handover.
        self._first_legs: dict[str, int] = {}
        self._handover_of: dict[str, str] = {}

    def __len__(self) -> int:
        """Return how many offers, waiting second legs and running first legs there are."""
        return len(self._offers) + len(self._waiting) + len(self._first_legs)

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
        self._withdraw(name, "another first leg has the same name")
        if name in self._waiting and not (waiter := self._waiting[name][1]).done():
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
            self._withdraw,
            name,
            f"its second leg did not come within {limit_s:g} s (second_leg_timeout_s)",
        )
        self._offers[name] = offered, timer
        offered.broken.add_done_callback(lambda broken: self._broken(name, offered, broken))

    async def take(self, name: str, engine_id: str) -> Offered:
        """Return the attempt of this name; it stays offered if its KV is at another decode engine.

        Waits for a first leg that runs or begins within ``first_leg_timeout_s``.  Raises
        ``DeadlineError`` without one, ``EngineLostError`` if the other decode engine is lost, and
        ``BadRequestError`` if another second leg waits for it.
        """
        if name in self._offers:
            offered, timer = self._offers[name]
            if offered.decode_engine.engine_id == engine_id:
                del self._offers[name]
                timer.cancel()
            return offered
        offered = await self._wait(name, engine_id)
        if offered.decode_engine.engine_id != engine_id:
            self.offer(name, offered)
        return offered

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

    def close(self) -> None:
        """Close all offers; the scheduler ends."""
        for name in list(self._offers):
            self._withdraw(name, "the scheduler ends")

    def _withdraw(self, name: str, reason: str) -> None:
        if name in self._offers:
            offered, timer = self._offers.pop(name)
            timer.cancel()
            logger.warning("request %s is given up between its legs: %s", name, reason)
            offered.close(reason)

    def _broken(self, name: str, offered: Offered, broken: "asyncio.Future[None]") -> None:
        if name in self._offers and self._offers[name][0] is offered and not broken.cancelled():
            self._withdraw(name, str(broken.exception()))
