"""Real vLLM engines on two raylets: a request loads the blocks that an earlier one stored."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

from tests.e2e.engine_cluster import tiny_cluster_settings
from tests.e2e.plain_engine import complete, tiny_model, until
from tests.ray_cluster import RayCluster

from dualpath.launch.local_cluster import LocalCluster
from dualpath.node.cluster_secret import SECRET_VARIABLE, new_secret

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

PROMPT = [10 + index % 300 for index in range(300)]


def test_engines_on_nodes_of_ray_serve_and_load_what_they_stored(
    ray_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, new_secret())
    storage = tmp_path / "kv"
    settings = tiny_cluster_settings(
        tiny_model(), storage, port=0, executor="ray", ray_address=ray_cluster.address
    )
    with LocalCluster(settings) as cluster:
        first = complete(cluster.endpoint, PROMPT, 20)
        assert len(first.token_ids) == 20

        def stored() -> bool:
            return len([p for p in storage.rglob("*.kv") if "read-probe" not in str(p)]) == 4

        # 319 tokens have KV: four blocks of 64, of which the same prompt can hit all.
        until(stored, "the blocks of the first answer")
        again = complete(cluster.endpoint, PROMPT, 20)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 256)
