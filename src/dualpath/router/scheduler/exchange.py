"""Routes answers of engines to the attempts and calls that wait for them."""

import asyncio
import itertools
from collections.abc import Collection
from typing import TypeVar

from dualpath.core import control
from dualpath.core import control as request_messages
from dualpath.core.errors import BadRequestError, EngineLostError
from dualpath.router.engines import EngineInfo

Answer = (
    request_messages.ReservationWaits
    | request_messages.Reserved
    | request_messages.ThirdRefused
    | request_messages.ReadDone
    | request_messages.FetchDone
    | request_messages.PrefillDone
    | request_messages.Released
)
AttemptNote = request_messages.KvInHbm | request_messages.RequestOver | request_messages.Failed
CallAnswer = control.LookupDone | control.Synced
T = TypeVar("T")


class AttemptChannel:
    """Messages between one attempt and its engines; ``attempt_id`` is its name everywhere.

    ``broken`` ends in ``EngineLostError`` when an engine is lost that the attempt needs, or reports
    ``Failed``: that ends the attempt in whatever state it is.
    """

    def __init__(self, attempt_id: str) -> None:
        self.attempt_id = attempt_id
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Losing one of these engines breaks the attempt.
        self.engines: set[str] = set()
        #: Third DEs that may hold slots for it, by id.
        self.thirds: dict[str, EngineInfo] = {}
        self._expected: dict[tuple[type, str], asyncio.Future[Answer]] = {}

    def kv_in_hbm(self, arrived: request_messages.KvInHbm) -> None:
        """The DE has the prompt's KV in its HBM."""

    def over_at_decode(self) -> None:
        """The request has ended at the DE, which has released it."""

    def check(self) -> None:
        """Raise ``EngineLostError`` if the attempt is broken.

        Its task may have been about to run when that happened; it must not start anything more,
        in particular not at the next process of a restarted engine.
        """
        if self.broken.done():
            self.broken.result()

    def expect(self, kind: type[T], engine_id: str) -> "asyncio.Future[T]":
        """Return a future of the engine's next answer of a kind; call it before asking."""
        future = asyncio.get_running_loop().create_future()
        self._expected[kind, engine_id] = future
        return future

    def deliver(self, engine_id: str, message: control.EngineMessage) -> None:
        """Take a message about this attempt; an unexpected one is dropped."""
        if isinstance(message, request_messages.Failed):
            self.break_off(f"engine {engine_id} could not serve it: {message.reason}")
        elif isinstance(message, request_messages.KvInHbm):
            self.kv_in_hbm(message)
        elif isinstance(message, request_messages.RequestOver):
            self.over_at_decode()
        elif isinstance(message, Answer):
            future = self._expected.pop((type(message), engine_id), None)
            if future is not None and not future.done():
                future.set_result(message)

    def engine_lost(self, engine_id: str, reason: str) -> None:
        """An engine is gone."""
        if engine_id in self.engines:
            self.break_off(f"engine {engine_id} is lost: {reason}")

    def break_off(self, reason: str) -> None:
        """End the attempt; the first reason counts."""
        if not self.broken.done():
            self.broken.set_exception(EngineLostError(reason))
            self.broken.exception()  # Marks it as seen: the attempt may have ended already.


class Exchange:
    """All channels, and all calls (``Lookup``, ``Sync``) that wait for their answer."""

    def __init__(self) -> None:
        self._channels: dict[str, AttemptChannel] = {}
        self._calls: dict[int, tuple[str, asyncio.Future[CallAnswer | None]]] = {}
        self._call_ids = itertools.count(1)

    def __len__(self) -> int:
        """Return how many attempts are open."""
        return len(self._channels)

    def open(self, channel: AttemptChannel) -> None:
        """Route messages about an attempt.

        Raises ``BadRequestError`` if another attempt has that name: messages would be mixed up.
        """
        if channel.attempt_id in self._channels:
            raise BadRequestError(
                f"request id {channel.attempt_id!r} is in use by a running request; send it "
                "under another id"
            )
        self._channels[channel.attempt_id] = channel

    def close(self, attempt_id: str) -> None:
        """Stop it; later messages about the attempt are dropped."""
        self._channels.pop(attempt_id, None)

    def all(self) -> Collection[AttemptChannel]:
        """Return all open channels."""
        return self._channels.values()

    def get(self, attempt_id: str) -> AttemptChannel | None:
        """Return an open channel."""
        return self._channels.get(attempt_id)

    def depends_on(self, engine_id: str) -> bool:
        """Whether an attempt needs an engine, or a call waits for its answer."""
        asked = any(engine_id == name for name, _ in self._calls.values())
        return asked or any(engine_id in channel.engines for channel in self._channels.values())

    def call(self, engine_id: str) -> tuple[int, "asyncio.Future[CallAnswer | None]"]:
        """Return a call id and the future of its answer, None if the engine is lost."""
        call_id = next(self._call_ids)
        future: asyncio.Future[CallAnswer | None] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (engine_id, future)
        future.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return call_id, future

    def deliver(self, engine_id: str, message: control.EngineMessage) -> None:
        """Take an engine's message."""
        if isinstance(message, CallAnswer):
            asked, future = self._calls.get(message.call_id, ("", None))
            if future is not None and asked == engine_id and not future.done():
                future.set_result(message)
        elif isinstance(message, Answer | AttemptNote):
            channel = self._channels.get(message.request_id)
            if channel is not None:
                channel.deliver(engine_id, message)

    def engine_lost(self, engine_id: str, reason: str) -> None:
        """Break what depends on an engine."""
        for asked, future in list(self._calls.values()):
            if asked == engine_id and not future.done():
                future.set_result(None)
        for channel in list(self._channels.values()):
            channel.engine_lost(engine_id, reason)
