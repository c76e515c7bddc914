"""Options of a replay."""

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.replay.result import Isolation, ToolDelays


class ReplayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to replay; the defaults are the paper's offline setting (§7.3) on the whole trace.

    ``agents`` None: as many as the trace has.  ``agents_per_s`` None: all at once (JCT), else
    Poisson arrivals (§7.4).  ``model``, ``block_tokens`` and ``vocab_size`` None: ask the
    endpoint.  ``max_context_tokens`` None: the served model's limit.  ``read_timeout_s`` bounds
    the silence between two chunks.  ``run_id`` separates this run's cache salts from others';
    give the same one to repeat a run against what it stored.  ``label`` names the run in reports.
    """

    agents: int | None = None
    agents_per_s: float | None = None
    seed: int = 0
    tool_delays: ToolDelays = ToolDelays.NONE
    isolation: Isolation = Isolation.SESSION
    max_turns: int | None = None
    max_context_tokens: int | None = None
    scale_append: float = 1.0
    scale_generate: float = 1.0
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
        """Raise ``ConfigError`` where an option is out of range."""
        if not 0 < self.read_timeout_s <= 86400:
            raise ConfigError(
                f"timeout is {self.read_timeout_s} s, must be above 0 and at most 86400"
            )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed is {self.seed}, must be 0 to 2**63 - 1")
        if self.block_tokens is not None and not 1 <= self.block_tokens <= 1 << 16:
            raise ConfigError(f"block_tokens is {self.block_tokens}, must be 1 to 65536")
