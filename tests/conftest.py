"""Settings of all tests."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from hypothesis import settings

from dualpath.laboratory.chaos.virtual_time import VirtualTimeLoop

# The same examples in every run, and no verdict on how fast a machine is.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the event loop of a test by its mark."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual time": VirtualTimeLoop}
    return {"real time": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def own_logging() -> None:
    """Let our logger be heard, whatever vLLM's import or an earlier test has made of it."""
    ours = logging.getLogger("dualpath")
    ours.handlers, ours.propagate, ours.disabled = [], True, False
    ours.setLevel(logging.INFO)  # Not left to the root logger, whose level others choose.
