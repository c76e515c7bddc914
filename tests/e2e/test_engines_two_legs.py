"""Plain `vllm serve` engines behind a proxy that knows nothing of dualpath, and a scheduler.

Nothing of our router runs.  The engines are started by their usual commands with one argument.
"""

import http.client
import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

import msgspec
from tests.e2e.plain_engine import (
    NAME,
    Answer,
    Round,
    complete,
    in_parallel,
    play_plain,
    until,
)
from tests.e2e.test_existing_vllm import post
from tests.e2e.two_leg_cluster import BLOCK_TOKENS, Served, served_engines
from tests.e2e.two_leg_proxy import TwoLegProxy
from tests.guard import GUARD_S
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from dualpath.core.blocks import block_keys
from dualpath.vllm.two_leg_server import PREFILL_HEADER

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROUNDS = [Round([3 + (i * i + 7 * turn) % 337 for i in range(150)], 24) for turn in range(4)]
WORDS = " ".join(f"the agent reads file {number} and finds a line" for number in range(30))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_engines(tmp_path_factory.mktemp("legs")) as found:
        yield found


@pytest.fixture
def proxy(served: Served) -> Iterator[TwoLegProxy]:
    with TwoLegProxy([served.url("prefill")], [served.url("decode")]) as proxy:
        yield proxy


def chat(url: str, text: str) -> dict[str, Any]:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    status, answer = post(int(urlsplit(url).port or 0), "/v1/chat/completions", body)
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


def leg(
    url: str, prompt: list[int], params: dict[str, Any] | None, **more: Any
) -> tuple[list[int], str, dict[str, Any]]:
    """Send one request to an engine; return its tokens, where its KV came from, and its answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "kv_transfer_params": params, **more,
    }  # fmt: skip
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    found = json.loads(answer.read())
    assert answer.status == 200, found
    origin = answer.getheader(PREFILL_HEADER) or ""
    connection.close()
    return found["choices"][0]["token_ids"], origin, found


def test_agents_get_a_plain_engines_tokens_and_hits_from_storage_on_both_paths(
    served: Served, proxy: TwoLegProxy
) -> None:
    truth = play_plain(served.plain.url, ROUNDS)
    context: list[int] = []
    for turn, (append, generate) in enumerate(ROUNDS):
        # The last token was sampled, not computed: it has no KV.
        stored = max(len(context) - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        context += append

        def hit(
            context: list[int] = context,
            turn: int = turn,
            stored: int = stored,
            generate: int = generate,
        ) -> bool:
            answer: Answer = complete(proxy.url, context, generate)
            assert answer.token_ids == truth[turn]
            return answer.cached_tokens >= stored

        until(hit, f"a hit of {stored} tokens")
        context += truth[turn]
    until(lambda: min(served.read_bytes().values()) > 0, "reads of both engines from storage")
    for log in ("prefill.log", "decode.log"):
        assert "is not the one of" not in served.log(log), "both engines make the same tokens"
    assert all(params["do_remote_prefill"] for params in proxy.passed_on)
    placed = served.status()["assignments"]
    assert {one["pe_reason"] for one in placed} == {"given"}
    until(served.idle, "engines idle with free buffers")


def test_chats_and_parallel_requests_get_a_plain_engines_answers(
    served: Served, proxy: TwoLegProxy
) -> None:
    texts = [f"{number}: {WORDS}" for number in range(3)]
    urls = [served.plain.url, proxy.url]
    plain, ours = (in_parallel([partial(chat, url, text) for text in texts]) for url in urls)
    for one, other in zip(plain, ours, strict=True):
        assert one["choices"][0]["message"] == other["choices"][0]["message"]
        assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    until(served.idle, "engines idle with free buffers")


def test_a_proxy_may_send_both_legs_at_once(served: Served) -> None:
    prompt = [5 + 3 * index % 331 for index in range(500)]
    truth = complete(served.plain.url, prompt, 24).token_ids
    with TwoLegProxy([served.url("prefill")], [served.url("decode")], at_once=True) as proxy:
        assert complete(proxy.url, prompt, 24).token_ids == truth
        found, origin, _ = leg(proxy.url, prompt, None)
    assert (found, origin.split(";")[0]) == (truth, "transferred")
    until(served.idle, "engines idle with free buffers")


def test_second_legs_without_their_first_leg_get_a_plain_engines_tokens(served: Served) -> None:
    prompt = [7 + 5 * index % 331 for index in range(300)]
    other = [8 + 5 * index % 331 for index in range(300)]
    truth, others = (complete(served.plain.url, one, 24).token_ids for one in (prompt, other))
    decode, prefill = served.url("decode"), served.url("prefill")
    # No parameters, second legs alone, and one for several answers.
    assert leg(decode, prompt, None)[:2] == (truth, "here; the request is no second leg")
    for hits in (0, 256):
        alone = {"do_remote_prefill": True, "transfer_id": f"no-first-leg-{hits}"}
        found, origin, answer = leg(decode, prompt, alone)
        assert (found, origin) == (truth, "prefilled by prefill again")
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == hits, "the second time its blocks are stored"
        until(served.idle, "engines idle with free buffers")
    first = {"do_remote_decode": True}
    params = leg(prefill, prompt, first)[2]["kv_transfer_params"]
    # Greedy by another name: vLLM allows one greedy answer only.
    several = leg(decode, prompt, params, n=2, temperature=1, top_k=1)[2]
    assert [choice["token_ids"] for choice in several["choices"]] == [truth, truth]
    # KV of another prompt is not used, even one of the same length.
    params = leg(prefill, prompt, first)[2]["kv_transfer_params"]
    assert leg(decode, other, params)[0] == others
    assert "its prompt of 300 tokens is not the one of 300 tokens" in served.log("decode.log")
    # A first leg without a second one is released.
    leg(prefill, [9, *prompt], first)
    until(served.idle, "engines idle with free buffers")


def test_vllm_publishes_which_blocks_are_in_storage(served: Served) -> None:
    prompt = [11 + 7 * index % 331 for index in range(200)]
    params = leg(served.url("prefill"), prompt, {"do_remote_decode": True})[2]["kv_transfer_params"]
    leg(served.url("decode"), prompt, params)
    wanted = {int.from_bytes(key[-8:], "big") for key in block_keys(prompt, BLOCK_TOKENS)}
    found: set[int] = set()

    def announced() -> bool:
        # An idle engine has no steps, with which events are published.
        leg(served.url("decode"), [1, 2, 3], None)
        while served.events.poll(100):
            batch = msgspec.msgpack.decode(served.events.recv_multipart()[-1], type=KVEventBatch)
            for event in batch.events:
                if isinstance(event, BlockStored) and event.medium == "STORAGE":
                    found.update(int(name) for name in event.block_hashes)
        return wanted <= found

    until(announced, "events of three stored blocks")


def test_a_prefill_engine_refuses_what_is_no_first_leg(served: Served) -> None:
    port = served.ports["prefill"]
    body = {"model": NAME, "prompt": [1, 2, 3]}
    status, text = post(port, "/v1/completions", body)
    assert (status, "to a decode engine" in text) == (421, True)
    first = {"kv_transfer_params": {"do_remote_decode": True}}
    for wrong in ({"prompt": [[1, 2], [3]]}, {"prompt": ""}, {"model": "unknown"}):
        status, text = post(port, "/v1/completions", {**body, **first, **wrong})
        assert 400 <= status < 500, text
    until(served.idle, "engines idle with free buffers")
