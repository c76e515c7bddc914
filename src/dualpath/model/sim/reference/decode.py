"""A decode unit: engines whose requests get one token each per step, in virtual token time."""

import heapq
from collections.abc import Callable

from dualpath.model.sim.reference.events import EventQueue
from dualpath.model.sim.rules import (
    decode_context_tokens,
    decode_step_ns,
    joining_step,
    seen_tokens,
    steps_ns,
)
from dualpath.model.sim.settings import DecodeCosts

Finished = Callable[[int], None]


class DecodeUnit:
    """Lock-step decoding of ``engines`` engines.

    ``_tokens`` is the virtual time: how many tokens a request there from the beginning would
    have got.  A request that joins waits for the end of the current step.  The step time follows
    from the unit's requests and their contexts and is constant between joins and leaves.
    """

    def __init__(
        self, events: EventQueue, engines: int, costs: DecodeCosts, finished: Finished
    ) -> None:
        self._events = events
        self._engines = engines
        self._costs = costs
        self._finished = finished
        self._tokens = 0.0
        self._since_ns = 0
        self._step_ns = 1
        self._ends: list[tuple[float, int, int, int]] = []
        self._joined = 0
        self._version = 0
        self._context_tokens = 0
        self._window_tokens = 0

    def join(self, round_index: int, prompt_tokens: int, generated_tokens: int) -> int:
        """Let a request decode its second token onwards; return when the second is due."""
        self._advance()
        first = joining_step(self._tokens)
        context = decode_context_tokens(prompt_tokens, generated_tokens)
        self._count(context)
        end = float(first + generated_tokens - 1)
        heapq.heappush(self._ends, (end, self._joined, round_index, context))
        self._joined += 1
        self._expect_next()
        return self._events.now_ns + steps_ns(first + 1 - self._tokens, self._step_ns)

    def leave(self, engines: int) -> None:
        """So many engines without requests are gone; the steps of the others take longer."""
        self._advance()
        self._engines -= engines
        if self._engines:
            self._expect_next()

    def _advance(self) -> None:
        now_ns = self._events.now_ns
        if self._ends:
            self._tokens += (now_ns - self._since_ns) / self._step_ns
        self._since_ns = now_ns

    def _count(self, context_tokens: int, sign: int = 1) -> None:
        self._context_tokens += sign * context_tokens
        self._window_tokens += sign * seen_tokens(context_tokens, self._costs.window_tokens)

    def _expect_next(self) -> None:
        costs = self._costs
        self._version += 1
        self._step_ns = decode_step_ns(
            len(self._ends),
            self._window_tokens,
            self._context_tokens,
            self._engines,
            costs.step_s,
            costs.request_s,
            costs.pair_s,
            costs.index_pair_s,
        )
        if self._ends:
            wait_ns = steps_ns(self._ends[0][0] - self._tokens, self._step_ns)
            self._events.at(self._events.now_ns + wait_ns, self._end_next, self._version)

    def _end_next(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._tokens = max(self._tokens, self._ends[0][0])
        ended = []
        while self._ends and self._ends[0][0] <= self._tokens:
            _, _, round_index, context = heapq.heappop(self._ends)
            self._count(context, -1)
            ended.append(round_index)
        self._expect_next()
        for round_index in ended:
            self._finished(round_index)
