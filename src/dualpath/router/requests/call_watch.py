"""Calls of model work that fall silent: is the engine's HTTP server alive, and does it have them?

A call may be silent for a good reason: its prompt waits in a queue, or a long pass computes it.  So
silence alone never ends a call.  It leads to an *inquiry*: the engine's HTTP server is asked for
the calls that it serves.  One inquiry of an engine covers all of its silent calls.

* No answer: the server is silent, and its silent calls are broken off.  A call that has received
  something meanwhile proves that the server is alive.
* An answer without the call, or one that has sent more of it than arrived here: the request or the
  response is lost, and the call is broken off once the next inquiry finds the same.  vLLM's servers
  leave out calls whose request their core has lost (``vllm.core_requests``).
* An answer with the call: it goes on.  The scheduler is notified, which judges by the engine's
  reports whether the engine's core still makes steps (``scheduler.pauses``).

Time counts in ticks of this process's event loop.  So a loop that was late, or a process that was
stopped, counts as one tick: what has arrived meanwhile is still unread.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.router.engine_calls import OpenCalls
from dualpath.router.engines import EngineInfo
from dualpath.router.waits import within_own_time

#: Ticks in the silence that leads to a call's first inquiry.
_TICKS = 4
#: The interval between inquiries about one call grows to this many times the first one.
_LONGEST_INTERVAL = 4
#: Inquiries in a row that find a call missing, since its last bytes may still be under way.
_MISSING = 2


class OpenCall:
    """A call to ``engine`` under the name ``call_id``; ``broken`` ends it with an error."""

    def __init__(self, engine: EngineInfo, call_id: str) -> None:
        self.engine = engine
        self.call_id = call_id
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.silent_ticks = 0
        #: Number of silent ticks at which the next inquiry is due, and the interval after it.
        self.due_ticks = self.interval_ticks = _TICKS
        self.missing = 0

    def heard(self) -> None:
        """A part of the answer has arrived."""
        self.silent_ticks = self.missing = 0
        self.due_ticks = self.interval_ticks = _TICKS

    def break_off(self, reason: str) -> None:
        """End the call; the first reason counts."""
        if not self.broken.done():
            self.broken.set_exception(EngineLostError(reason))
            self.broken.exception()  # Marks it as seen: the call may have ended already.


class CallWatch:
    """The calls of one front end that are open.

    ``silence_s`` without a byte leads to an inquiry, which has to be answered within ``answer_s``:
    ``open_calls`` returns the calls that an engine's server has, None if it does not report them.
    ``call_waits`` gets the engine of a silent call that its server has, and for how many seconds
    the call has been silent; ``broken_off`` is called for each call that ends.
    """

    def __init__(
        self,
        open_calls: Callable[[EngineInfo], Awaitable[OpenCalls | None]],
        silence_s: float,
        answer_s: float,
        call_waits: Callable[[EngineInfo, float], None],
        broken_off: Callable[[], None],
    ) -> None:
        self._open_calls = open_calls
        self._tick_s = silence_s / _TICKS
        self._answer_s = answer_s
        self._call_waits = call_waits
        self._broken_off = broken_off
        self._open: dict[tuple[str, str], dict[OpenCall, None]] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._inquiries: dict[tuple[str, str], asyncio.Task[None]] = {}

    @contextlib.contextmanager
    def watch(self, engine: EngineInfo, call_id: str) -> Iterator[OpenCall]:
        """Watch a call until the context ends."""
        call, writer = OpenCall(engine, call_id), engine.writer.id
        self._open.setdefault(writer, {})[call] = None
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick(), name="silent calls")
        try:
            yield call
        finally:
            calls = self._open[writer]
            del calls[call]
            if not calls:
                del self._open[writer]

    async def stop(self) -> None:
        """End all inquiries; idempotent."""
        tasks = [*self._inquiries.values(), *([self._ticking] if self._ticking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        try:
            while self._open:
                await asyncio.sleep(self._tick_s)
                for writer, calls in list(self._open.items()):
                    due = False
                    for call in calls:
                        call.silent_ticks += 1
                        due = due or call.silent_ticks >= call.due_ticks
                    if due and writer not in self._inquiries:
                        engine = next(iter(calls)).engine
                        self._inquiries[writer] = asyncio.create_task(
                            self._inquire(writer, engine), name=f"inquiry {engine.engine_id}"
                        )
        finally:
            self._ticking = None

    async def _inquire(self, writer: tuple[str, str], engine: EngineInfo) -> None:
        silent = [call for call in self._open.get(writer, ()) if call.silent_ticks >= _TICKS]
        before = {call: call.silent_ticks for call in self._open.get(writer, ())}
        try:
            served = await within_own_time(self._open_calls(engine), self._answer_s)
        except (DualPathError, TimeoutError) as error:
            now = self._open.get(writer, {})
            if all(call.silent_ticks >= ticks for call, ticks in before.items() if call in now):
                answer = str(error) or f"no answer within {self._answer_s:g} s"
                self._silent_server(engine, silent, answer)
        else:
            for call in silent:
                if call.silent_ticks >= _TICKS:
                    self._judge(call, served)
        finally:
            del self._inquiries[writer]

    def _silent_server(self, engine: EngineInfo, silent: list[OpenCall], answer: str) -> None:
        for call in silent:
            self._end(
                call,
                f"the HTTP server of engine {engine.engine_id} at {engine.api_url} is silent: no "
                f"byte of call {call.call_id} for {self.silent_s(call):g} s, and to the question "
                f"for its calls: {answer}; see the engine's log, and whether its port can be "
                "reached from here",
            )

    def _judge(self, call: OpenCall, served: OpenCalls | None) -> None:
        silent_s = self.silent_s(call)
        if served is not None and self._is_missing(call, served):
            call.missing += 1
            if call.missing >= _MISSING:
                how = (
                    "or its core does not have it any more or never got it"
                    if call.call_id not in served
                    else "has sent more of its answer than arrived"
                )
                self._end(
                    call,
                    f"call {call.call_id} to engine {call.engine.engine_id} at "
                    f"{call.engine.api_url} is lost: no byte of it for {silent_s:g} s, and the "
                    f"engine's HTTP server {how}",
                )
            call.due_ticks = call.silent_ticks + 1
            return
        call.missing = 0
        call.interval_ticks = min(2 * call.interval_ticks, _LONGEST_INTERVAL * _TICKS)
        call.due_ticks = call.silent_ticks + call.interval_ticks
        self._call_waits(call.engine, silent_s)

    def _is_missing(self, call: OpenCall, served: OpenCalls) -> bool:
        if call.call_id not in served:
            return True
        sent_s = served[call.call_id]
        return sent_s is not None and self.silent_s(call) - sent_s > _TICKS * self._tick_s

    def silent_s(self, call: OpenCall) -> float:
        """Return for how many seconds nothing of a call's answer has arrived."""
        return call.silent_ticks * self._tick_s

    def _end(self, call: OpenCall, reason: str) -> None:
        if not call.broken.done():
            self._broken_off()
            call.break_off(reason)
