"""A request that an engine's core has lost is retried, while the core computes others."""

import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.forgetful_worker import LOST
from tests.e2e.plain_engine import tiny_model

from dualpath.core.cluster import Role

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPT = [LOST, *(10 + index % 300 for index in range(200))]
FORGETFUL = ("--worker-extension-cls", "tests.e2e.forgetful_worker.Forgetful")


@pytest.mark.parametrize("forgetful", Role)
def test_a_request_that_a_core_has_lost_is_answered(forgetful: Role, tmp_path: Path) -> None:
    settings = tiny_cluster_settings(tiny_model(), tmp_path / "storage")
    with EngineCluster(settings, tmp_path) as cluster:
        names = [
            cluster.start_engine(role, 0, vllm_args=FORGETFUL if role is forgetful else ())
            for role in Role
        ]
        cluster.wait_for(*names)
        over = threading.Event()

        def compute_others() -> None:
            while not over.is_set():
                cluster.ask(PROMPT[1:], 40)

        others = threading.Thread(target=compute_others)
        others.start()
        try:
            # Its deadline is longer than a client of this test waits.
            answer = cluster.ask(PROMPT, 20)
        finally:
            over.set()
            others.join()
        assert cluster.service.status()["counters"]["retries"] == 1
        (retried,) = [r for r in cluster.service.records if r.failures]
        assert "or its core does not have it any more" in retried.failures[0]
        assert cluster.ask(PROMPT, 20, "again").token_ids == answer.token_ids
        cluster.wait_idle()
