"""A scheduler's place among those that take turns, whatever store decides whose turn it is.

One alone has the turn.  It is over when its holder ends; where the store only knows that by time,
the holder stops before the store lets another begin, by its own clock: it counts from the moment
at which it *asked* for the time that it was granted, and no two clocks are compared.

That is enough, as nothing can go wrong with two of them but confusion: an engine has one session
with one scheduler, and drops what any other says (``core.sessions``).
"""

import asyncio
import functools
import logging
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

from dualpath.core.errors import ConfigError

logger = logging.getLogger(__name__)

#: What a scheduler says that has everything loaded and waits.
STANDS_BY = "dualpath router: everything is loaded; it serves at its turn"

POLL_S = 0.05
#: A process that is killed frees its turn before the last of its sockets.
_SOCKETS_FREED_S = 2.0

T = TypeVar("T")
_interrupt = functools.partial(signal.raise_signal, signal.SIGINT)


class Turn(Protocol):
    """One scheduler's place; ``taken`` is called once, ``over`` at the end."""

    @property
    def others(self) -> bool:
        """Whether there may be other schedulers of this address."""
        ...

    @property
    def held(self) -> bool:
        """Whether it is this scheduler's turn now; asked before anything is placed."""
        ...

    async def taken(self) -> None:
        """Return when it is this scheduler's turn."""
        ...

    async def lost(self) -> str:
        """Return, once the turn has ended though nobody gave it up, why."""
        ...

    async def over(self) -> None:
        """Let the next one; idempotent."""
        ...


class OnlyOne:
    """The ``Turn`` of a scheduler that has no others to wait for."""

    others = False
    held = True

    async def taken(self) -> None:
        """It always is."""

    async def lost(self) -> str:
        """Wait for ever."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def over(self) -> None:
        """Nobody waits."""


async def ended_when_lost(
    turn: Turn,
    stack: AsyncExitStack,
    stop: Callable[[], Awaitable[None]],
    end: Callable[[], None] = _interrupt,
) -> None:
    """Let the service ``stop`` and this process ``end``, as at SIGINT, when its turn is over.

    Until the stack's end.
    """

    async def watch() -> None:
        logger.critical("this scheduler ends: %s", await turn.lost())
        # The service first: a process that ends waits some seconds for its clients' connections, in
        # which front ends would ask it as often as they may, and be turned away each time.
        try:
            await stop()
        finally:
            end()

    watching = asyncio.create_task(watch(), name="standby turn")
    stack.callback(watching.cancel)


async def bound(turn: Turn, bind: Callable[[], Awaitable[T]]) -> T:
    """Return what ``bind`` does, once the sockets of the one before are free.

    Raises its ``ConfigError`` if an address stays taken.
    """
    tries = round(_SOCKETS_FREED_S / POLL_S) if turn.others else 0
    for _ in range(tries):
        try:
            return await bind()
        except ConfigError:
            await asyncio.sleep(POLL_S)
    return await bind()
