"""EAGLE and MTP at both engines: the draft's KV moves with the model's; tokens are the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import Answer, PlainEngine, Round, play_plain

from dualpath.core.cluster import Role
from dualpath_lab.models.random_models import make_tiny_draft, make_tiny_model, make_tiny_mtp_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(400)]

LAYERS = 4
BLOCK_TOKENS = 32
#: More than one, so that the draft's layer is computed several times in a pass.
PROPOSED = 3
ROUNDS = [
    Round([3 + (index * index) % 487 for index in range(300)], 40),
    Round([5 + (7 * index) % 480 for index in range(90)], 40),
]


class Served(NamedTuple):
    """The cluster, its answers, and a plain engine's without a draft."""

    cluster: EngineCluster
    answers: list[Answer]
    plain: list[list[int]]


def eagle() -> tuple[Path, dict[str, Any]]:
    """A model and a separate draft model."""
    model = make_tiny_model("qwen2", layers=LAYERS)
    return model, {"method": "eagle", "model": str(make_tiny_draft(model))}


def mtp() -> tuple[Path, dict[str, Any]]:
    """A model with a last layer that is its own draft."""
    return make_tiny_mtp_model(LAYERS), {"method": "mtp"}


@pytest.fixture(scope="module", params=[eagle, mtp])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("draft")
    model, speculation = request.param()
    speculation["num_speculative_tokens"] = PROPOSED
    settings = tiny_cluster_settings(model, folder / "storage", block_tokens=BLOCK_TOKENS)
    draft = {"vllm_args": ("--speculative-config", json.dumps(speculation))}
    with EngineCluster(settings, folder) as cluster:
        names = [cluster.start_engine(role, 0, **draft) for role in Role]
        with PlainEngine(model, folder, BLOCK_TOKENS) as plain:
            generated = play_plain(plain.url, ROUNDS)
        cluster.wait_for(*names)
        yield Served(cluster, cluster.replay(ROUNDS, ""), generated)


def test_two_turns_with_a_draft_get_a_plain_engines_tokens(served: Served) -> None:
    assert [answer.token_ids for answer in served.answers] == served.plain
    hits = served.cluster.expected_hits(ROUNDS)
    assert [answer.cached_tokens for answer in served.answers] == hits
    assert hits[1] > 0


def test_the_drafts_layer_is_one_of_the_block_and_is_sent_once(served: Served) -> None:
    cluster = served.cluster
    assert cluster.storage.geometry.layers == LAYERS + 1
    cluster.wait_idle()
    sent = cluster.total("pe_to_de_bytes") / cluster.storage.geometry.full_block_bytes
    # Hits of the second turn were read from storage at one of the two sides.
    computed = [len(ROUNDS[0].append), sum(len(r.append) for r in ROUNDS) + ROUNDS[0].generate]
    blocks = [-(-tokens // BLOCK_TOKENS) for tokens in computed]
    hits = [hit // BLOCK_TOKENS for hit in cluster.expected_hits(ROUNDS)]
    assert sum(blocks) - sum(hits) <= sent <= sum(blocks)
    assert sent == int(sent)


def test_without_hits_the_tokens_are_the_same(served: Served) -> None:
    """The last test of its cluster: bytes that it sends would count in the tests above."""
    assert served.cluster.ask_without_hits(ROUNDS, served.plain) == (served.plain[-1], 0)
