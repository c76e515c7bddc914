"""What happened to a request, stage by stage: the source of metrics and traces."""

from collections.abc import Callable

from dualpath.router.stages import Stages, StageTime

#: What can become of a request.
OUTCOMES = ("finished", "bad_request", "deadline", "engine_lost", "cancelled", "error")


class RequestRecord(Stages):
    """Filled in while a request lives; complete when ``outcome`` is set.

    ``hit_tokens`` were loaded, ``recomputed`` maps a reason to stored tokens that were not.
    Times of tokens are those at which the router streamed them.
    """

    def __init__(self, request_id: str, prompt_tokens: int, clock: Callable[[], float]) -> None:
        self.stages: list[StageTime] = []
        super().__init__(clock, self.stages.append)
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.hit_tokens = 0
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
