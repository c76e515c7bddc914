"""The agents of the demo."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from dualpath.core.errors import ConfigError
from dualpath.laboratory.demo.settings import DemoSettings
from dualpath.laboratory.workload.conversation.midway import MidSessionAgent, mid_session_agents
from dualpath.laboratory.workload.conversation.session import Session
from dualpath.laboratory.workload.formats import read_trace

SESSIONS_PACKAGE = "agentperf_local"


def sessions_of(trace: str) -> tuple[list[Session], str]:
    """Return the sessions to replay, of the trace or else of the package, and their source."""
    if trace:
        return read_trace(trace), trace
    spec = importlib.util.find_spec(SESSIONS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the sessions of the package agentperf-local are not installed; run `make install` or "
            "give other sessions with --trace"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data" / "replays"
    return read_trace(folder), SESSIONS_PACKAGE


def demo_agents(
    demo: DemoSettings, encode: Callable[[str], Sequence[int]]
) -> tuple[list[MidSessionAgent], str]:
    """Return the agents of the demo, and the source of their sessions."""
    sessions, name = sessions_of(demo.trace)
    return mid_session_agents(
        sessions, demo.agents, demo.max_turns, demo.history_tokens, encode
    ), name
