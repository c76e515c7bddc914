"""A trainer changes the weights of real engines between rollouts; answers are those of the weights.

The trainer is a stub that lets engines reload another random model's weights, by vLLM's routes.
"""

import http.client
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import START_S, Completion, PlainEngine, complete, until

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.weights import weights_version
from dualpath.router.scheduler.role_calls import call_roles
from dualpath.router.scheduler.weights import WEIGHTS_PATH
from dualpath.storage.posix import namespaces_in
from dualpath_lab.models.random_models import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

#: Of the training run.
NONCE = secrets.token_hex(8)
PROMPT = [10 + 7 * i % 300 for i in range(300)]
GENERATED = 100


def models() -> tuple[Path, Path]:
    """The model before the first training step and after it."""
    before, after = (make_tiny_model("qwen2", seed=seed) for seed in (0, 1))
    return before, after


def post(
    url: str, path: str, query: Mapping[str, str] = {}, body: object = None
) -> Mapping[str, object]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=START_S)
    sent = b"" if body is None else json.dumps(body).encode()
    try:
        where = f"{path}?{urlencode(query)}" if query else path
        connection.request("POST", where, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, f"{path}: {answer.status} {text}"
        found: dict[str, object] = json.loads(text or "{}")
        return found
    finally:
        connection.close()


class Trainer:
    """Changes the weights of engines that it calls directly."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls

    def step(self, weights: Path, version: str) -> None:
        for url in self.urls:
            post(url, "/pause", {"mode": "wait"})
        for url in self.urls:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
            post(url, "/collective_rpc", body=body)
            post(url, "/update_weight_version", body={"new_version": version})
        for url in self.urls:
            post(url, "/resume")


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What plain engines with the weights before and after the step generate."""
    folder, found = tmp_path_factory.mktemp("plain"), []
    for model in models():
        with PlainEngine(model, folder, 64) as plain:
            found.append(complete(plain.url, PROMPT, GENERATED).token_ids)
    return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCluster]:
    """1P1D with caches everywhere: in HBM, in DRAM and in storage."""
    folder = tmp_path_factory.mktemp("rollouts")
    settings = tiny_cluster_settings(
        models()[0],
        folder / "storage",
        rollouts=True,
        dram_tier=True,
        decode_prefix_caching=True,
    )
    with EngineCluster(settings, folder) as cluster:
        cluster.wait_for(
            cluster.start_engine(Role.PREFILL, 0), cluster.start_engine(Role.DECODE, 0)
        )
        yield cluster


def namespaces(engines: EngineCluster) -> dict[str, int]:
    """Stored blocks by the version of the weights."""

    def of(namespace: StoreNamespace) -> str:
        return namespace.weights or "loaded"

    found = namespaces_in(Path(engines.settings.storage))
    return {of(namespace): len(list(folder.rglob("*.kv"))) for folder, namespace in found}


def test_answers_after_a_step_are_those_of_the_new_weights(
    engines: EngineCluster, truth: list[list[int]]
) -> None:
    before, after = truth
    assert before != after
    first = engines.ask(PROMPT, GENERATED)
    assert (first.token_ids, first.cached_tokens) == (before, 0)
    context = [*PROMPT, *before[:-1]]
    engines.wait_stored(context)
    again = engines.ask(PROMPT, GENERATED)
    assert (again.token_ids, again.cached_tokens) == (before, 256)
    stored = namespaces(engines)["loaded"]

    trainer = Trainer([info.api_url for info in engines.service.registry.alive()])
    version = weights_version("step-1", NONCE)
    trainer.step(models()[1], version)
    engines.wait_for("pe-0", "de-0")
    engines.__dict__.pop("storage", None)  # It is that of the former namespace.

    updated = engines.ask(PROMPT, GENERATED)
    assert (updated.token_ids, updated.cached_tokens) == (after, 0)
    engines.wait_stored([*PROMPT, *after[:-1]])
    again = engines.ask(PROMPT, GENERATED)
    assert (again.token_ids, again.cached_tokens) == (after, 256)
    assert engines.service.registry.weights == version
    until(lambda: namespaces(engines).get(version, 0) == stored, "as many blocks as before")
    assert namespaces(engines)["loaded"] == stored
    assert engines.total("transfer_failures") == 0


def by_router(engines: EngineCluster, action: str, **fields: object) -> Mapping[str, object]:
    """Let the router do something at all engines, and wait until it is over."""
    call = partial(call_roles, engines.url, {}, path=WEIGHTS_PATH)
    call({"action": action, **fields})
    until(lambda: not call()["under_way"], action, START_S)
    report = call()
    assert report["error"] is None, report
    return report


def updated(engines: EngineCluster, weights: Path, **fields: object) -> Mapping[str, object]:
    """Let all engines load these weights, by the router."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    calls = [{"path": "/collective_rpc", "body": body}]
    report = by_router(engines, "update", calls=calls, **fields)
    engines.__dict__.pop("storage", None)  # It is that of the former namespace.
    return report


def test_the_router_updates_all_engines_and_those_that_were_restarted(
    engines: EngineCluster, truth: list[list[int]]
) -> None:
    before, _ = truth
    report = updated(engines, models()[0], label="step-2")
    assert report["state"] == "serving"
    # The weights of the start: without their name nothing of them is found.
    first = engines.ask(PROMPT, GENERATED)
    assert (first.token_ids, first.cached_tokens) == (before, 0)
    engines.wait_stored([*PROMPT, *before[:-1]])

    engines.kill("de-0")
    engines.start_engine(Role.DECODE, 0)
    registry = engines.service.registry
    until(lambda: "de-0" in registry.outdated, "the restarted engine is refused", START_S)
    report = updated(engines, models()[0], version=report["version"])
    assert (report["state"], report["outdated"]) == ("serving", {})
    again = engines.ask(PROMPT, GENERATED)
    assert (again.token_ids, again.cached_tokens) == (before, 256)


def test_a_stream_that_spans_an_update_goes_on_with_the_new_weights(
    engines: EngineCluster,
) -> None:
    count = 600
    with_old_weights = engines.ask(PROMPT, count, "old").token_ids
    pieces = Completion(engines.url, PROMPT, count, "spans").pieces()
    tokens = list(next(pieces))
    report = updated(engines, models()[1], label="step-3", running="keep")
    assert report["state"] == "serving"
    for piece in pieces:
        tokens += piece
    assert len(tokens) == count
    both = zip(tokens, with_old_weights, strict=True)
    switch = next(at for at, (one, other) in enumerate(both) if one != other)
    # What follows is what these weights compute, without any KV of the request and with it.
    rest = [*PROMPT, *tokens[:switch]], count - switch
    without = engines.ask(*rest, "other")
    assert (without.token_ids, without.cached_tokens) == (tokens[switch:], 0)
    engines.wait_stored([*PROMPT, *tokens[:-1]], "spans")
    again = engines.ask(*rest, "spans")
    assert again.token_ids == tokens[switch:]
    assert again.cached_tokens >= 256


def test_engines_that_have_slept_find_what_they_had_stored(
    engines: EngineCluster, truth: list[list[int]]
) -> None:
    _, after = truth
    updated(engines, models()[1], label="step-4")
    first = engines.ask(PROMPT, GENERATED, "sleeps")
    assert (first.token_ids, first.cached_tokens) == (after, 0)
    engines.wait_stored([*PROMPT, *after[:-1]], "sleeps")
    assert by_router(engines, "sleep", level=1)["state"] == "asleep"
    assert engines.alive() == set()
    assert by_router(engines, "wake_up")["state"] == "serving"
    again = engines.ask(PROMPT, GENERATED, "sleeps")
    assert (again.token_ids, again.cached_tokens) == (after, 256)
