"""Plain `vllm serve` decode engines that move a prompt's KV from one to the other.

A proxy that knows nothing of dualpath sends each second leg to the decode engine that its first leg
has not filled.
"""

import http.client
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

from tests.e2e.plain_engine import NAME, complete, in_parallel, until
from tests.e2e.two_leg_cluster import BLOCK_TOKENS, Served, served_engines
from tests.guard import GUARD_S

from dualpath.vllm.two_leg_server import PREFILL_HEADER

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

#: Two full blocks and a part of one.
PROMPT = [3 + (i * i) % 337 for i in range(2 * BLOCK_TOKENS + 22)]
FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": "decode"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_engines(tmp_path_factory.mktemp("moves"), decode=2) as found:
        yield found


def leg(url: str, prompt: list[int], params: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Send a leg to an engine; return its answer, and where its KV came from."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "kv_transfer_params": params,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    assert answer.status == 200, found
    origin = answer.getheader(PREFILL_HEADER) or ""
    connection.close()
    return found, origin


def both(served: Served, prompt: list[int]) -> tuple[list[int], str]:
    """Have `decode` receive a prompt and `decode-1` decode it; return tokens and their origin."""
    first, _ = leg(served.url("prefill"), prompt, FIRST)
    params = first["kv_transfer_params"]
    assert params["remote_engine_id"] == "decode"
    found, origin = leg(served.url("decode-1"), prompt, params)
    return found["choices"][0]["token_ids"], origin


def moved_bytes(served: Served) -> dict[str, float]:
    """Return the bytes that each decode engine has moved from the other one."""
    text = served.metrics()
    rows = re.findall(r"^dualpath:kv_bytes_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    moves = [(labels, float(value)) for labels, value in rows if 'step="move"' in labels]
    return {re.findall(r'engine="([^"]*)"', labels)[0]: value for labels, value in moves}


def test_a_prompt_is_decoded_by_the_engine_that_has_got_the_second_leg(served: Served) -> None:
    truth = complete(served.plain.url, PROMPT, 24).token_ids
    before = moved_bytes(served)
    tokens, origin = both(served, PROMPT)
    assert (tokens, origin.split("; ")[-1]) == (truth, "moved from decode")
    until(served.idle, "engines idle with free buffers")

    def moved() -> bool:
        return moved_bytes(served)["decode-1"] > before["decode-1"]

    until(moved, "bytes moved between the decode engines")
    assert moved_bytes(served)["decode"] == before["decode"] == 0


def test_many_prompts_are_moved_at_once_and_later_turns_hit_what_was_stored(
    served: Served,
) -> None:
    prompts = [[5 + number, *PROMPT] for number in range(6)]
    truths = [complete(served.plain.url, prompt, 24).token_ids for prompt in prompts]
    found = in_parallel([partial(both, served, prompt) for prompt in prompts])
    assert [tokens for tokens, _ in found] == truths
    assert all(origin.startswith("transferred; ") for _, origin in found)
    assert any(origin.endswith("moved from decode") for _, origin in found)
    turn = [*prompts[0], *truths[0], 7, 8, 9]
    truth = complete(served.plain.url, turn, 24).token_ids

    def hit() -> bool:
        first, _ = leg(served.url("prefill"), turn, FIRST)
        tokens, _ = leg(served.url("decode-1"), turn, first["kv_transfer_params"])
        assert tokens["choices"][0]["token_ids"] == truth
        stored = (len(turn) - 4) // BLOCK_TOKENS * BLOCK_TOKENS
        cached: int = first["kv_transfer_params"]["remote_prefill_cached_tokens"]
        return cached >= stored

    until(hit, "a hit of all blocks of the turn before")
    until(served.idle, "engines idle with free buffers")
