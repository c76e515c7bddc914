"""LoRA adapters with speculative decoding at DEs: a plain engine's tokens, KV per adapter.

The tokens of the plain engine, which neither stores nor speculates, are the reference.
"""

import http.client
import json
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import NAME, Answer, PlainEngine, Round, in_parallel, play_plain
from tests.guard import GUARD_S

from dualpath.core.blocks import KeyExtras, block_keys
from dualpath.core.cluster import Role
from dualpath.core.key_cache import KeyCache
from dualpath.vllm.engine_arguments import lora_arguments
from dualpath_lab.models.random_models import make_tiny_adapter, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
#: A prompt that repeats itself, so that n-grams find something to propose.
PROMPT = [3 + (index * index) % 37 for index in range(333)]
APPENDED = [5, 6, 7] * 9
GENERATE = 48
ROUNDS = [Round(PROMPT, GENERATE), Round(APPENDED, GENERATE)]
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
               "prompt_lookup_min": 1}  # fmt: skip
MODELS = (NAME, "first", "second")
#: An adapter that changes nothing.
NOTHING = "nothing"


class Turns(NamedTuple):
    """Two turns of one agent on a model or adapter."""

    first: Answer
    second: Answer


class Served(NamedTuple):
    """The cluster, and its and a plain engine's answers to each model's agent."""

    cluster: EngineCluster
    turns: dict[str, Turns]
    plain: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, folder = make_tiny_model("qwen2", layers=4), tmp_path_factory.mktemp("adapters")
    adapters = {
        name: str(make_tiny_adapter(model, seed)) for seed, name in enumerate(MODELS[1:], 1)
    }
    settings = tiny_cluster_settings(
        model, folder / "storage", block_tokens=BLOCK_TOKENS, lora_modules=adapters
    )
    # vLLM's own CPU kernels would apply the last adapter to the base model (`cpu_adapters`).
    nothing = {NOTHING: str(make_tiny_adapter(model, 0, scale=0.0))}
    plain = PlainEngine(model, folder, BLOCK_TOKENS, *lora_arguments(adapters | nothing))
    with EngineCluster(settings, folder) as cluster:
        names = [
            cluster.start_engine(Role.PREFILL, 0),
            cluster.start_engine(
                Role.DECODE, 0, vllm_args=("--speculative-config", json.dumps(SPECULATION))
            ),
        ]
        with plain:
            answers = {name: play_plain(plain.url, ROUNDS, name) for name in MODELS[1:]}
            answers[NAME] = play_plain(plain.url, ROUNDS, NOTHING)
        cluster.wait_for(*names)
        turns = in_parallel([partial(play, cluster, name) for name in MODELS])
        yield Served(cluster, dict(zip(MODELS, turns, strict=True)), answers)


def play(cluster: EngineCluster, model: str) -> Turns:
    first = cluster.ask(PROMPT, GENERATE, model=model)
    context = [*PROMPT, *first.token_ids]
    # The last token was sampled, not computed: it has no KV.
    keys = KeyCache(BLOCK_TOKENS).keys(context[:-1], extras_of(cluster, model))
    cluster.wait_stored_keys(keys)
    return Turns(first, cluster.ask([*context, *APPENDED], GENERATE, model=model))


def extras_of(cluster: EngineCluster, model: str) -> KeyExtras:
    if model == NAME:
        return KeyExtras()
    path = cluster.settings.lora_modules[model]
    return cluster.service.registry.adapters.adapter(model, path).extras(None)


def test_each_adapter_answers_as_on_a_plain_engine(served: Served) -> None:
    answers = {name: [t.token_ids for t in turns] for name, turns in served.turns.items()}
    assert answers == served.plain
    assert len({tuple(turns[0]) for turns in served.plain.values()}) == len(MODELS)


def test_without_hits_each_adapter_answers_the_same(served: Served) -> None:
    for model, answers in served.plain.items():
        computed = served.cluster.ask_without_hits(ROUNDS, answers, model)
        assert computed == (answers[-1], 0)
        assert served.turns[model].second.cached_tokens > 0


def test_an_adapter_hits_its_own_kv_only(served: Served) -> None:
    stored = (len(PROMPT) + GENERATE - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for turns in served.turns.values():
        # All began with the same tokens, and at the same time.
        assert (turns.first.cached_tokens, turns.second.cached_tokens) == (0, stored)
    again = served.cluster.ask(PROMPT, 1, model="second")
    assert again.cached_tokens == (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert served.cluster.ask(PROMPT, 1, "tenant", model="second").cached_tokens == 0
    plain_chain = block_keys(PROMPT, BLOCK_TOKENS, extra_keys=())
    assert not set(plain_chain) & set(
        KeyCache(BLOCK_TOKENS).keys(PROMPT, extras_of(served.cluster, "first"))
    )


def test_the_decode_engine_took_tokens_that_it_had_guessed(served: Served) -> None:
    """Else its rejected drafts' KV would not have been tried."""
    (engine,) = [e for e in served.cluster.service.registry.alive() if e.role is Role.DECODE]
    text = get(f"{engine.api_url}/metrics")
    counted = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:spec_decode_num_")
    }
    drafted = counted["vllm:spec_decode_num_draft_tokens_total"]
    assert 0 < counted["vllm:spec_decode_num_accepted_tokens_total"] < drafted


def test_clients_see_the_adapters_and_unknown_names_are_errors(served: Served) -> None:
    cards = {
        card["id"]: card for card in json.loads(get(f"{served.cluster.url}/v1/models"))["data"]
    }
    assert set(cards) == set(MODELS)
    assert cards["first"]["parent"] == NAME
    with pytest.raises(AssertionError, match=r"The model `third` does not exist") as refused:
        served.cluster.ask(PROMPT, 1, model="third")
    assert "NotFoundError" in str(refused.value)


def get(url: str) -> str:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=GUARD_S)
    connection.request("GET", parts.path)
    return connection.getresponse().read().decode()
