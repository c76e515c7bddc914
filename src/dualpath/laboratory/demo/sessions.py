"""Which agents the demo has."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from dualpath.core.errors import ConfigError
from dualpath.laboratory.demo.settings import DemoSettings
from dualpath.laboratory.workload.conversation.midway import Midway, met_midway
from dualpath.laboratory.workload.conversation.session import Session
from dualpath.laboratory.workload.formats import read_trace

SESSIONS_PACKAGE = "agentperf_local"


def sessions_of(trace: str) -> tuple[list[Session], str]:
    """Return the sessions to replay and where they come from: the package's, or a named trace's."""
    if trace:
        return read_trace(trace), trace
    spec = importlib.util.find_spec(SESSIONS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the sessions of the package agentperf-local are not installed; run `make install` or "
            "name other sessions with --trace"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data" / "replays"
    return read_trace(folder), SESSIONS_PACKAGE


def demo_agents(
    demo: DemoSettings, encode: Callable[[str], Sequence[int]]
) -> tuple[list[Midway], str]:
    """Return the agents of the demo, and where their sessions come from."""
    sessions, name = sessions_of(demo.trace)
    return met_midway(sessions, demo.agents, demo.max_turns, demo.history_tokens, encode), name
