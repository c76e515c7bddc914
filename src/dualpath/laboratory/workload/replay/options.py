"""Options of a replay."""

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.conversation.session import AgentSettings, require
from dualpath.laboratory.workload.replay.result import Isolation, ToolDelays


class ReplayOptions(AgentSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to replay; the defaults are the paper's offline setting (§7.3) on the whole trace.

    ``agents_per_s`` None: all at once (JCT), else Poisson arrivals (§7.4).  ``model``,
    ``block_tokens`` and ``vocab_size`` None: ask the endpoint.  ``max_context_tokens`` None: the
    served model's limit.  ``read_timeout_s`` bounds the silence between two chunks.  ``run_id``
    separates this run's cache salts from others'; give the same one to repeat a run against what
    it stored.  ``label`` names the run in reports.
    """

    agents_per_s: float | None = None
    tool_delays: ToolDelays = ToolDelays.NONE
    isolation: Isolation = Isolation.SESSION
    model: str | None = None
    vocab_size: int | None = None
    block_tokens: int | None = None
    read_timeout_s: float = 600.0
    run_id: str = ""
    label: str = ""
    trace: str = ""
    trace_format: str = ""
    broken_lines: int = 0

    def check(self) -> None:
        """Raise ``ConfigError`` for the first option out of range."""
        super().check()
        if not 0 < self.read_timeout_s <= 86400:
            raise ConfigError(
                f"timeout is {self.read_timeout_s} s, must be above 0 and at most 86400"
            )
        require("block_tokens", self.block_tokens, 1, 1 << 16)
