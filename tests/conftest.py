"""Settings of all tests."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.virtual_time import VirtualTimeLoop

#: Tests that start engines, share memory between processes or make network devices.  They also look
#: at what is left of such things on the whole machine, so no two of them may run at once.
MACHINE = "machine"

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose what pytest-xdist keeps on one worker: ``MACHINE``, and every other file by itself.

    ``MACHINE`` comes first, so that no worker is left alone with it in the end.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_worker_group(item)))
    items.sort(key=lambda item: _named_group(item) != MACHINE)


def _worker_group(item: pytest.Item) -> str:
    marked = item.get_closest_marker("engine") or item.get_closest_marker("nixl")
    return MACHINE if marked or item.path.name.startswith("test_lab_") else item.path.name


def _named_group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])
