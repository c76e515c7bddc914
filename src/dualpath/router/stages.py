"""Stages of a request's life, on the clock of whoever measures them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec


class Stage(StrEnum):
    """Where a request's time goes, in the order of a request's life."""

    ADMISSION = "admission"
    """Waiting for ``max_concurrent_requests`` and for a live engine of each role."""
    LOOKUP = "lookup"
    QUEUE = "queue"
    """Waiting for the scheduler's assignment."""
    BUFFER_WAIT = "buffer_wait"
    READ = "read"
    """The storage read with its wait in the engine's read queue."""
    READ_QUEUE = "read_queue"
    """The wait alone, as the engine measured it."""
    STORAGE_READ = "storage_read"
    """The rest of the read, as the engine measured it."""
    PREFILL = "prefill"
    FORWARD = "forward"
    """The PE's forward passes, without the wait for the first and for the PE's answer."""
    TRANSFER = "transfer"
    """What the forward passes waited for KV transfers: those that computation did not hide."""
    HANDOVER = "handover"
    """From the call of the DE until it has the prompt's KV in its HBM."""
    H2D = "h2d"
    """The copy to HBM alone, as the DE measured it."""
    DECODE = "decode"


class StageTime(msgspec.Struct, frozen=True):
    """One stage of one attempt, on the router's clock; ``where`` names the engine, if any."""

    stage: Stage
    attempt: int
    start_s: float
    end_s: float
    where: str = ""


class Stages:
    """Measures stages of attempt number ``attempts``; ``noted`` gets each as it ends."""

    def __init__(
        self, clock: Callable[[], float], noted: Callable[[StageTime], None], attempts: int = 0
    ) -> None:
        self.attempts = attempts
        self._clock = clock
        self._noted = noted

    @contextmanager
    def stage(self, stage: Stage, where: str = "") -> Iterator[None]:
        """Measure a block of the life as a stage, also if it ends in an exception."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.add(stage, start_s, where)

    def add(
        self, stage: Stage, start_s: float, where: str = "", end_s: float | None = None
    ) -> None:
        """Note a stage; without ``end_s`` it ends now."""
        self._noted(
            StageTime(
                stage=stage,
                attempt=self.attempts,
                start_s=start_s,
                end_s=self._clock() if end_s is None else end_s,
                where=where,
            )
        )
