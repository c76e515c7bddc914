"""vLLM's front ends with real engines: turns go to either, adapters too, and one is killed."""

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import tiny_cluster_settings
from tests.e2e.plain_engine import NAME, START_S, Answer, PlainEngine, Round, play_plain, until
from tests.guard import GUARD_S

from dualpath.launch.local_cluster import LocalCluster
from dualpath.vllm.engine_arguments import lora_arguments
from dualpath_lab.models.random_models import make_tiny_adapter, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

BLOCK_TOKENS, GENERATE = 32, 24
ROUNDS = [Round([3 + (i * i + 7 * turn) % 337 for i in range(150)], GENERATE) for turn in range(4)]
ADAPTER = "adapter"
#: Changes nothing: vLLM's own CPU kernels would apply the other adapter to the base model.
NOTHING = "nothing"


class FrontEndClient:
    """A connection to one front end: its name and its process."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
        status = self._call("GET", "/dualpath/v1/status")
        self.name, self.pid = str(status["front_end"]), int(status["pid"])

    def ask(self, model: str, prompt: list[int]) -> Answer:
        reply = self._call(
            "POST",
            "/v1/completions",
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": GENERATE,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        details = reply["usage"]["prompt_tokens_details"] or {}
        return Answer(reply["choices"][0]["token_ids"], details.get("cached_tokens") or 0)

    def _call(
        self, method: str, path: str, body: dict[str, object] | None = None
    ) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        text = None if body is None else json.dumps(body)
        self._connection.request(method, path, text, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        found: dict[str, Any] = json.loads(content)
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    model = make_tiny_model("qwen2", layers=4)
    settings = tiny_cluster_settings(
        model,
        tmp_path / "kv",
        block_tokens=BLOCK_TOKENS,
        lora_modules={ADAPTER: str(make_tiny_adapter(model, 1))},
        front_ends=2,
        port=0,
        log_dir=str(tmp_path / "logs"),
    )
    with LocalCluster(settings) as cluster:
        yield cluster


@pytest.fixture
def truth(cluster: LocalCluster, tmp_path: Path) -> dict[str, list[list[int]]]:
    """A plain engine's answers to the agents of the model and of the adapter."""
    model = Path(cluster.settings.model)
    adapters = {**cluster.settings.lora_modules, NOTHING: str(make_tiny_adapter(model, 0, scale=0))}
    with PlainEngine(model, tmp_path, BLOCK_TOKENS, *lora_arguments(adapters)) as plain:
        return {
            NAME: play_plain(plain.url, ROUNDS, NOTHING),
            ADAPTER: play_plain(plain.url, ROUNDS, ADAPTER),
        }


def front_ends(cluster: LocalCluster) -> list[FrontEndClient]:
    """Connect until both front ends have a connection."""
    found: dict[str, FrontEndClient] = {}

    def both() -> bool:
        # One that has just been started again may refuse.
        with contextlib.suppress(OSError, http.client.HTTPException):
            one = FrontEndClient(cluster.endpoint)
            found.setdefault(one.name, one)
        return len(found) == 2

    until(both, "a connection to each front end", START_S)
    return [found[name] for name in sorted(found)]


def test_the_turns_of_an_agent_may_go_to_any_front_end_and_one_may_die(
    cluster: LocalCluster, truth: dict[str, list[list[int]]]
) -> None:
    agents = Agents(truth)
    first, second = front_ends(cluster)
    agents.take_turn(first)
    agents.take_turn(second)
    os.kill(second.pid, signal.SIGKILL)
    agents.take_turn(first)
    _, successor = front_ends(cluster)
    assert (successor.name, successor.pid != second.pid) == (second.name, True)
    agents.take_turn(successor)
    assert cluster.status()["counters"]["retries"] == 0


class Agents:
    """An agent of the model and one of the adapter, which must get a plain engine's answers."""

    def __init__(self, truth: dict[str, list[list[int]]]) -> None:
        self._truth = truth
        self._contexts: dict[str, list[int]] = {model: [] for model in truth}
        self._turn = 0

    def take_turn(self, front_end: FrontEndClient) -> None:
        """Ask again and again until the whole earlier conversation is a hit."""
        for model, context in self._contexts.items():
            # The last token was sampled, not computed: it has no KV.
            stored = max(len(context) - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
            context += ROUNDS[self._turn].append

            def reported(
                model: str = model, context: list[int] = context, all_: int = stored
            ) -> bool:
                answer = front_end.ask(model, context)
                assert answer.token_ids == self._truth[model][self._turn]
                return answer.cached_tokens >= all_

            until(reported, f"hits of {stored} tokens")
            context += self._truth[model][self._turn]
        self._turn += 1
