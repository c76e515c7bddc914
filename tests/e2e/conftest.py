"""Shared fixtures: processes of a small cluster, a plain engine's answers, a reader of pages.

The plain engine takes longer to start than to answer; the reader's cluster serves already.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dualpath.transport.nixl import nixl_package

if TYPE_CHECKING:
    from tests.e2e.emulated_reader import Reader
    from tests.e2e.plain_engine import Round, Truth
    from tests.e2e.test_emulated_cluster import Processes


@pytest.fixture
def processes(tmp_path: Path) -> "Iterator[Processes]":
    """Processes of a cluster of small emulated engines in the test's folder."""
    from tests.e2e.small_costs import COSTS
    from tests.e2e.test_emulated_cluster import Processes

    from dualpath.core.modes import DEFAULT_MODE

    (tmp_path / "costs.toml").write_text(COSTS)
    with Processes(tmp_path, DEFAULT_MODE) as processes:
        yield processes


@pytest.fixture(scope="session")
def agents() -> "list[list[Round]]":
    """Five turns of four recorded agents, as tokens to append and numbers to generate."""
    pytest.importorskip("vllm")
    from tests.e2e.plain_engine import recorded_agents, tiny_model

    found = recorded_agents(tiny_model(), agents=4, turns=5)
    if not found:
        pytest.skip("the agentperf-local package, which carries real sessions, is not installed")
    return found


@pytest.fixture(scope="session")
def truth(agents: "list[list[Round]]", tmp_path_factory: pytest.TempPathFactory) -> "Truth":
    """What a plain engine generates for the agents, and for one long prompt of their text."""
    from tests.e2e.plain_engine import PlainEngine, ask_truth, tiny_model

    with PlainEngine(tiny_model(), tmp_path_factory.mktemp("plain"), 64) as plain:
        return ask_truth(plain.url, agents)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Reader]":
    """A reader in a folder with a trace; the cluster is 1P1D and its router logs its events.

    It serves all tests of a module, which run in the reader's folder.
    """
    pytest.importorskip(nixl_package())
    from tests.e2e.emulated_reader import Reader

    from dualpath.launch.process import Supervisor

    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patched, Supervisor() as processes:
        patched.chdir(folder)
        found = Reader(folder, processes)
        found.serves_one_of_each(["--event-log", "events.jsonl"])
        yield found
