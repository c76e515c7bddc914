"""Settings of all tests."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.virtual_time import VirtualTimeLoop

#: Share the fork server that has imported vLLM, and clusters of engines.
ENGINES = "engines"
#: Have the machine's network namespaces to themselves.
LAB = "lab"

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
    """Choose what pytest-xdist keeps on one worker: files, and files that share what is slow.

    Engines come first, so that no worker is left alone with them in the end.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_worker_group(item)))
    items.sort(key=lambda item: _named_group(item) != ENGINES)


def _worker_group(item: pytest.Item) -> str:
    if item.get_closest_marker("engine"):
        return ENGINES
    return LAB if item.path.name.startswith("test_lab_") else item.path.name


def _named_group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])
