"""Options of a replay."""

from typing import Annotated

from dualpath.core.settings import Setting
from dualpath.laboratory.workload.conversation.session import AgentSettings
from dualpath.laboratory.workload.replay.result import HintsGiven, Isolation, ToolDelays

WaitsForTools = Annotated[ToolDelays, Setting("wait for the recorded tool times between turns")]
GivesHints = Annotated[
    HintsGiven,
    Setting(
        "what agents say of their sessions: nothing, their names and ends, or also how long "
        "each tool will run"
    ),
]


class ReplayOptions(AgentSettings, frozen=True, kw_only=True):
    """How to replay; the defaults are the paper's offline setting (§7.3) on the whole trace.

    ``run_id`` separates this run's cache salts from others'; give the same one to repeat a run
    against what it stored.
    """

    agents_per_s: Annotated[
        float | None,
        Setting("agents arrive at random (Poisson, §7.4); none: all at once", gt=0, le=1e6),
    ] = None
    tool_delays: WaitsForTools = ToolDelays.NONE
    session_hints: GivesHints = HintsGiven.NONE
    isolation: Annotated[
        Isolation,
        Setting("who may hit whose cache: one session (as in the paper), one run, anybody"),
    ] = Isolation.SESSION
    model: Annotated[
        str | None, Setting("served model name; none: the first one served", metavar="NAME")
    ] = None
    vocab_size: Annotated[int | None, Setting("none: ask the endpoint", ge=2)] = None
    block_tokens: Annotated[
        int | None, Setting("served block size; none: ask, else 64", ge=1, le=1 << 16)
    ] = None
    read_timeout_s: Annotated[
        float, Setting("longest silence between two chunks", gt=0, le=86400)
    ] = 600.0
    run_id: Annotated[str, Setting("makes a run's cache salts", flag=False)] = ""
    label: Annotated[str, Setting("name of this run in reports")] = ""
    trace: Annotated[str, Setting("name of the trace", flag=False)] = ""
    trace_format: Annotated[str, Setting("its format", flag=False)] = ""
    broken_lines: Annotated[int, Setting("lines left out", ge=0, flag=False)] = 0
