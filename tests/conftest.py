"""Settings of all tests."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import Scheduling

from dualpath.laboratory.chaos.virtual_time import VirtualTimeLoop
from tests import long_tests
from tests.own_cache import use_own_cache
from tests.ray_cluster import RayCluster
from tests.workers import OneMachine

# The same examples in every run, and no verdict on how fast a machine is.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# Before anything is imported that asks for it, and for every process that tests start.
use_own_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run say which of the tests marked `long` it has."""
    parser.addoption(
        "--long",
        default=long_tests.NONE,
        metavar="none|all|HEX",
        help="tests marked `long` to run: none of them (the default), all, or the one that a "
        "hexadecimal number such as a commit chooses",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, but those that were asked for."""
    long = [item for item in items if item.get_closest_marker("long")]
    try:
        asked = long_tests.chosen(long, config.getoption("--long"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    left_out = [item for item in long if item not in asked]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Keep together what may not run at once (`make test` has two workers)."""
    return OneMachine(config, log)


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


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Two raylets for all tests: starting them takes seconds."""
    pytest.importorskip("ray")
    cluster = RayCluster()
    yield cluster
    cluster.close()
