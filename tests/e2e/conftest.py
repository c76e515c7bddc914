"""Engines that several files of tests share: they take longer to start than to test."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from dualpath.core.cluster import Role

if TYPE_CHECKING:
    from tests.e2e.engine_cluster import EngineCluster
    from tests.e2e.plain_engine import Round, Truth


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


@pytest.fixture(scope="session")
def engines(truth: "Truth", tmp_path_factory: pytest.TempPathFactory) -> "Iterator[EngineCluster]":
    """2P2D in mode split; the prefill engines hold two layers of KV, and one.

    Needs ``truth`` only in order to start after the plain engine has ended.
    """
    from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
    from tests.e2e.plain_engine import tiny_model

    folder = tmp_path_factory.mktemp("engines")
    settings = tiny_cluster_settings(tiny_model(), folder / "storage")
    with EngineCluster(settings, folder) as cluster:
        cluster.start_engine(Role.PREFILL, 0, layer_buffers=2)
        cluster.start_engine(Role.PREFILL, 1, layer_buffers=1)
        cluster.start_engine(Role.DECODE, 0)
        cluster.start_engine(Role.DECODE, 1)
        cluster.wait_for("pe-0", "pe-1", "de-0", "de-1")
        yield cluster
