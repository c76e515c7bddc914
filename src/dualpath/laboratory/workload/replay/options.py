"""Options of a replay."""

from typing import Annotated

from dualpath.core.settings import Setting
from dualpath.laboratory.workload.conversation.session import AgentSettings
from dualpath.laboratory.workload.replay.result import Isolation, SentHints, ToolDelays

ToolDelaysSetting = Annotated[ToolDelays, Setting("wait for the recorded tool times between turns")]
SentHintsSetting = Annotated[
    SentHints,
    Setting(
        "hints that agents send about their sessions: none, names and ends, or also how long each "
        "tool will run"
    ),
]


class ReplayOptions(AgentSettings, frozen=True, kw_only=True):
    """Options of a replay; the defaults are the paper's offline setting (§7.3) on the whole trace.

    ``run_id`` makes the cache salts of this run different from those of others; use the same one to
    repeat a run that hits what an earlier run stored.
    """

    agents_per_s: Annotated[
        float | None,
        Setting("rate of random arrivals (Poisson, §7.4); none: all at once", gt=0, le=1e6),
    ] = None
    tool_delays: ToolDelaysSetting = ToolDelays.NONE
    session_hints: SentHintsSetting = SentHints.NONE
    isolation: Annotated[
        Isolation,
        Setting("share cached blocks within a session (as in the paper), a run, or with all"),
    ] = Isolation.SESSION
    model: Annotated[
        str | None, Setting("served model name; none: the first one served", metavar="NAME")
    ] = None
    vocab_size: Annotated[
        int | None, Setting("size of the vocabulary; none: the endpoint's", ge=2)
    ] = None
    block_tokens: Annotated[
        int | None,
        Setting("block size of the engines; none: the endpoint's, else 64", ge=1, le=1 << 16),
    ] = None
    read_timeout_s: Annotated[
        float, Setting("longest time between two chunks of a stream", gt=0, le=86400)
    ] = 600.0
    run_id: Annotated[str, Setting("id from which cache salts are derived", flag=False)] = ""
    label: Annotated[str, Setting("name of this run in reports")] = ""
    trace: Annotated[str, Setting("name of the trace", flag=False)] = ""
    trace_format: Annotated[str, Setting("format of the trace", flag=False)] = ""
    broken_lines: Annotated[
        int, Setting("broken lines of the trace that were left out", ge=0, flag=False)
    ] = 0
