"""A model with compressed KV (MLA) on real engines, and the trace that its prefill engine wrote."""

import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import Answer, PlainEngine, Round, in_parallel, play_plain

from dualpath.core.cluster import Role
from dualpath_lab.models.random_models import (
    DEFAULT_LAYERS,
    MLA_COMPILATION_CONFIG,
    make_tiny_model,
)

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAYERS = DEFAULT_LAYERS["deepseek_v2"]
BLOCK_TOKENS = 16
#: On a CPU with AMX vLLM would choose a backend that takes no float32.
VLLM_ARGS = (
    *("--compilation-config", json.dumps(MLA_COMPILATION_CONFIG)),
    *("--attention-backend", "CPU_MLA"),
)


LONE_REQUESTS = 3


class Played(NamedTuple):
    """Answers to two agents, the expected answers, and the PE's trace.

    Its last passes are those of ``LONE_REQUESTS`` requests with ``lone_hits``, one at a time.
    """

    answers: list[list[Answer]]
    without_hits: Answer
    tokens: list[list[list[int]]]
    hits: list[list[int]]
    lone_hits: list[int]
    trace: list[dict[str, float | str]]


@pytest.fixture(scope="module")
def played(agents: list[list[Round]], tmp_path_factory: pytest.TempPathFactory) -> Played:
    model, folder = make_tiny_model("deepseek_v2"), tmp_path_factory.mktemp("mla")
    few = [agent[:3] for agent in agents[:2]]
    settings = tiny_cluster_settings(
        model,
        folder / "storage",
        block_tokens=BLOCK_TOKENS,
        compute_quota_s=0.0,  # Not every CPU supports chunked prefill with compressed KV.
        trace_dir=str(folder),
        vllm_args=VLLM_ARGS,
    )
    plain = PlainEngine(model, folder, BLOCK_TOKENS, *VLLM_ARGS)
    with EngineCluster(settings, folder) as cluster:
        # All three start at the same time.
        names = [cluster.start_engine(role, 0) for role in (Role.PREFILL, Role.DECODE)]
        with plain:
            tokens = in_parallel([partial(play_plain, plain.url, agent) for agent in few])
        cluster.wait_for(*names)
        answers = in_parallel(
            [partial(cluster.replay, agent, str(n)) for n, agent in enumerate(few)]
        )
        hits = [cluster.expected_hits(agent) for agent in few]
        known = few[0][0].append + answers[0][0].token_ids + few[0][1].append
        without_hits = cluster.ask_without_hits(few[0], tokens[0])
        lone_hits = []
        for index in range(LONE_REQUESTS):
            cluster.wait_idle()
            prompt = known + few[1][index].append
            lone_hits.append(cluster.ask(prompt, 1, "0").cached_tokens)
    return Played(answers, without_hits, tokens, hits, lone_hits, _events(folder / "pe-0.json"))


def _events(path: Path) -> list[dict[str, float | str]]:
    """Complete events by time of start; engines write them when they end."""
    events: list[dict[str, float | str]] = json.loads(path.read_text())["traceEvents"]
    return sorted(events, key=lambda event: event["ts"])


def test_agents_of_an_mla_model_get_a_plain_engines_tokens(played: Played) -> None:
    assert [[a.token_ids for a in agent] for agent in played.answers] == played.tokens
    assert [[a.cached_tokens for a in agent] for agent in played.answers] == played.hits
    assert played.hits[0][-1] > 0
    assert played.without_hits == (played.tokens[0][-1], 0)


def passes(trace: list[dict[str, float | str]]) -> list[dict[str, tuple[float, float]]]:
    """Return the forward passes: event name → (start, end) in microseconds."""
    found: list[dict[str, tuple[float, float]]] = []
    for event in trace:
        if event["tid"] not in ("load", "compute", "send"):
            continue
        # A pass is over before the next one begins, and has every event name once.
        name, start = str(event["name"]), float(event["ts"])
        if not found or name in found[-1]:
            found.append({})
        found[-1][name] = (start, start + float(event["dur"]))
    return found


def test_each_layer_is_loaded_while_the_one_before_is_computed(played: Played) -> None:
    assert all(hits > 0 for hits in played.lone_hits)
    traced = passes(played.trace)[-LONE_REQUESTS:]
    for each in traced:
        assert len(each) == 3 * LAYERS
        for layer in range(LAYERS):
            # No layer is computed before it is loaded, none is sent before it is computed.
            assert each[f"load L{layer}"][1] <= each[f"compute L{layer}"][1]
            assert each[f"send L{layer}"][0] >= each[f"compute L{layer}"][1]
    # Transfers may begin late on a busy machine, but one pass must overlap in full.
    assert any(overlaps(each) for each in traced)


def overlaps(each: dict[str, tuple[float, float]]) -> bool:
    """Whether every load begins before the computation of the layer before has ended."""
    return all(
        each[f"load L{layer + 1}"][0] < each[f"compute L{layer}"][1] for layer in range(LAYERS - 1)
    )
