"""Stages of a request's life and its record: the source of metrics and traces."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

import msgspec

from dualpath.router.hit_account import HitPlace


class Stage(StrEnum):
    """Where a request's time goes, in the order of a request's life."""

    ADMISSION = "admission"
    """Waiting in the front end's queue, and for a live engine of each role."""
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
    """From the call of the DE until its first token, for which it has the prompt's KV in HBM."""
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


#: Outcomes of a request.
OUTCOMES = (
    *("finished", "bad_request", "deadline", "engine_lost", "cancelled", "refused", "error"),
)


class RequestRecord(Stages):
    """Filled in while a request lives; complete when ``outcome`` is set.

    ``hit_tokens`` were loaded, ``hit_sources`` are those by source, ``recomputed`` maps a reason to
    stored tokens that were not loaded.
    Times of tokens are those at which the router streamed them.
    """

    def __init__(self, request_id: str, prompt_tokens: int, clock: Callable[[], float]) -> None:
        self.stages: list[StageTime] = []
        super().__init__(clock, self.stages.append)
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.hit_tokens = 0
        self.hit_sources: Mapping[HitPlace, int] = {}
        self.recomputed: dict[str, int] = {}
        self.generated_tokens = 0
        self.failures: list[str] = []
        self.prefilled = False
        self.start_s = clock()
        self.first_token_s: float | None = None
        self.second_token_s: float | None = None
        self.last_token_s: float | None = None
        self.end_s: float | None = None
        self.outcome: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.start_s

    @property
    def ttst_s(self) -> float | None:
        """Time from the first token to the second; None with fewer."""
        if self.first_token_s is None or self.second_token_s is None:
            return None
        return self.second_token_s - self.first_token_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens after the second; None with fewer than 3 tokens."""
        if self.last_token_s is None or self.second_token_s is None or self.generated_tokens < 3:
            return None
        return (self.last_token_s - self.second_token_s) / (self.generated_tokens - 2)

    @property
    def latency_s(self) -> float | None:
        """Time to the request's end; None before."""
        return None if self.end_s is None else self.end_s - self.start_s

    def streamed(self, tokens: int) -> None:
        """Note that ``tokens`` go to the client now."""
        self.last_token_s = now_s = self._clock()
        self.generated_tokens += tokens
        if self.first_token_s is None:
            self.first_token_s = now_s
        if self.second_token_s is None and self.generated_tokens >= 2:
            self.second_token_s = now_s

    def close(self, outcome: str) -> None:
        """The request is over."""
        self.outcome = outcome
        self.end_s = self._clock()
