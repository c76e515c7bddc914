"""Bodies while they arrive: how large one may become, how long it may take, and all together.

A body is held until it is whole, and nothing can be said of it before.  So what has arrived of all
unfinished bodies has one bound; a body that would pass it is refused, and the others go on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from dualpath.router.token_api.statuses import TIMED_OUT_BODY, TOO_LARGE, TOO_MANY

_T = TypeVar("_T")


class BodyRefusedError(Exception):
    """Ends the reading of a body: whatever the application says, the answer is ``status``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyLimits(Protocol):
    """``RouterSettings``, as far as they speak of bodies."""

    @property
    def max_body_bytes(self) -> int:
        """Of one."""
        ...

    @property
    def max_arriving_bytes(self) -> int:
        """Of all that are not whole."""
        ...

    @property
    def body_timeout_s(self) -> float:
        """Until one has to be whole."""
        ...


class ArrivingBodies:
    """All bodies of one server that have begun to arrive and are not whole."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.held_bytes = 0

    @contextmanager
    def one(self) -> "Iterator[ArrivingBody]":
        """A body, until the end of the block at the latest."""
        body = ArrivingBody(self)
        try:
            yield body
        finally:
            body.end()


class ArrivingBody:
    """One body; ``read`` pieces until it is whole, then ``end``."""

    def __init__(self, bodies: ArrivingBodies) -> None:
        self._bodies = bodies
        self._bytes = 0
        self._whole = False
        self._deadline_s: float | None = None

    @property
    def arriving(self) -> bool:
        """Whether more of it is to come."""
        return not self._whole

    async def read(self, piece: Callable[[], Awaitable[_T]], size: Callable[[_T], int]) -> _T:
        """Return the next piece.  Raises ``BodyRefusedError`` if it is one too many, or late."""
        limit_s = self._bodies.limits.body_timeout_s
        if self._deadline_s is None:
            self._deadline_s = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                found = await piece()
        except TimeoutError as error:
            raise BodyRefusedError(
                TIMED_OUT_BODY,
                f"the body did not arrive within {limit_s:g} s; send it faster or raise "
                "--body-timeout-s",
            ) from error
        self._took(size(found))
        return found

    def _took(self, count: int) -> None:
        limits = self._bodies.limits
        self._bytes += count
        self._bodies.held_bytes += count
        if self._bytes > limits.max_body_bytes:
            raise BodyRefusedError(TOO_LARGE, too_large(limits.max_body_bytes))
        if self._bodies.held_bytes > max(limits.max_arriving_bytes, limits.max_body_bytes):
            raise BodyRefusedError(
                TOO_MANY,
                f"bodies of {self._bodies.held_bytes} bytes are arriving, at most "
                f"{limits.max_arriving_bytes} do at once; try again or raise "
                "--max-arriving-bytes",
            )

    def end(self) -> None:
        """It is whole, or nobody waits for it any more; idempotent."""
        if not self._whole:
            self._whole = True
            self._bodies.held_bytes -= self._bytes


def too_large(limit_bytes: int) -> str:
    """Return the message for a body that is too large."""
    return (
        f"the body has more than {limit_bytes} bytes, the most this router takes; send less or "
        "raise --max-body-bytes"
    )
