"""Settings of all tests."""

import asyncio
import gc
import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import Scheduling

from dualpath_lab.faults.virtual_time import VirtualTimeLoop
from tests import long_tests
from tests.own_cache import use_own_cache
from tests.ray_cluster import RayCluster
from tests.workers import OneMachine

# The same examples in every run, and no verdict on how fast a machine is.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# Before modules that read it are imported, and for every process that tests start.
use_own_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects tests marked `long`."""
    parser.addoption(
        "--long",
        default=long_tests.NONE,
        metavar="none|all|HEX",
        help="tests marked `long` to run: none of them (the default), all, or the one that a "
        "hexadecimal number such as a commit chooses",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector: it would look at all of vLLM 7,000 times.

    What has been imported stays; later runs of the garbage collector skip it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long tests that the option does not select."""
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
    """Group tests that may not run at the same time (`make test` has two workers)."""
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
    """Enable our logger again after vLLM's import or an earlier test has disabled it."""
    for package in ("dualpath", "dualpath_sim", "dualpath_lab"):
        ours = logging.getLogger(package)
        ours.handlers, ours.propagate, ours.disabled = [], True, False
        ours.setLevel(logging.INFO)  # Not the root logger: other libraries set its level.


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Two raylets for all tests: starting them takes seconds."""
    pytest.importorskip("ray")
    cluster = RayCluster()
    yield cluster
    cluster.close()
