"""Pairs what engines answer with who waits for it.

A ``Conversation`` is one attempt of one request: it knows which engines the attempt depends on and
turns their loss, or a ``Failed``, into one future, ``broken``, that ends the attempt wherever it
stands.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dualpath.core import control
from dualpath.core.errors import BadRequestError, EngineLostError

Answer = control.Reserved | control.ReadDone | control.Sent
T = TypeVar("T")


class Conversation:
    """What is said about one attempt; ``attempt_id`` is its name at engines and scheduler.

    ``handed`` is called with the DE's ``Handed``.
    """

    def __init__(self, attempt_id: str, handed: Callable[[control.Handed], None]) -> None:
        self.attempt_id = attempt_id
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engines: set[str] = set()
        self._expected: dict[tuple[type, str], asyncio.Future[Answer]] = {}
        self._handed = handed

    def depends_on(self, *engine_ids: str) -> None:
        """Losing one of these engines breaks the attempt."""
        self._engines.update(engine_ids)

    def done_with(self, engine_id: str) -> None:
        """Losing this engine no longer matters."""
        self._engines.discard(engine_id)

    def check(self) -> None:
        """Raise ``EngineLostError`` if the attempt is broken off.

        Its task may have been about to run when that happened; it must not start anything more,
        least of all at the next process of a restarted engine.
        """
        if self.broken.done():
            self.broken.result()

    def expect(self, kind: type[T], engine_id: str) -> "asyncio.Future[T]":
        """Return a future of the engine's next answer of a kind; call it before asking."""
        future = asyncio.get_running_loop().create_future()
        self._expected[kind, engine_id] = future
        return future

    def deliver(self, engine_id: str, message: control.EngineMessage) -> None:
        """Take a message about this attempt; one nobody expects is dropped."""
        if isinstance(message, control.Failed):
            self.break_off(f"engine {engine_id} could not serve it: {message.reason}")
        elif isinstance(message, control.Handed):
            self._handed(message)
        elif isinstance(message, Answer):
            future = self._expected.pop((type(message), engine_id), None)
            if future is not None and not future.done():
                future.set_result(message)

    def engine_lost(self, engine_id: str, reason: str) -> None:
        """An engine is gone."""
        if engine_id in self._engines:
            self.break_off(f"engine {engine_id} is lost: {reason}")

    def break_off(self, reason: str) -> None:
        """End the attempt; the first reason counts."""
        if not self.broken.done():
            self.broken.set_exception(EngineLostError(reason))
            self.broken.exception()  # Marks it as seen: the attempt may have ended already.


class Exchange:
    """All conversations and look-ups under way."""

    def __init__(self) -> None:
        self._conversations: dict[str, Conversation] = {}
        self._lookups: dict[int, tuple[str, asyncio.Future[int | None]]] = {}
        self._call_ids = itertools.count(1)

    def open(self, conversation: Conversation) -> None:
        """Route messages about an attempt.

        Raises ``BadRequestError`` if another attempt has that name: neither may hear of the other.
        """
        if conversation.attempt_id in self._conversations:
            raise BadRequestError(
                f"request id {conversation.attempt_id!r} is in use by a running request; send it "
                "under another id"
            )
        self._conversations[conversation.attempt_id] = conversation

    def close(self, attempt_id: str) -> None:
        """Stop it; later messages about the attempt are dropped."""
        self._conversations.pop(attempt_id, None)

    def get(self, attempt_id: str) -> Conversation | None:
        """Return an open conversation."""
        return self._conversations.get(attempt_id)

    def lookup(self, engine_id: str) -> tuple[int, "asyncio.Future[int | None]"]:
        """Return a call id and the future of its answer, None if the engine is lost."""
        call_id = next(self._call_ids)
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._lookups[call_id] = (engine_id, future)
        future.add_done_callback(lambda _: self._lookups.pop(call_id, None))
        return call_id, future

    def deliver(self, engine_id: str, message: control.EngineMessage) -> None:
        """Take an engine's message."""
        if isinstance(message, control.LookupDone):
            asked, future = self._lookups.get(message.call_id, ("", None))
            if future is not None and asked == engine_id and not future.done():
                future.set_result(message.hit_blocks)
        elif isinstance(message, Answer | control.Handed | control.Failed):
            conversation = self._conversations.get(message.request_id)
            if conversation is not None:
                conversation.deliver(engine_id, message)

    def engine_lost(self, engine_id: str, reason: str) -> None:
        """Break what depends on an engine."""
        for asked, future in list(self._lookups.values()):
            if asked == engine_id and not future.done():
                future.set_result(None)
        for conversation in list(self._conversations.values()):
            conversation.engine_lost(engine_id, reason)


async def unless_broken(work: Awaitable[T], broken: "asyncio.Future[None]") -> T:
    """Return what ``work`` returns, or cancel it and raise what ``broken`` carries.

    The cancelled work has ended when this returns, so that nothing of it is left to answer.
    """
    task = asyncio.ensure_future(work)
    watched: set[asyncio.Future[Any]] = {task, broken}
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # Marks it as seen: whoever cancels us does not want it.
    if task.cancelled() and broken.done():
        broken.result()
    return task.result()


async def together(*works: Awaitable[T]) -> list[T]:
    """Return all results; if one fails the others are cancelled, so that none is left behind."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
