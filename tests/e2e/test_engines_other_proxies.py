"""Proxies of others, as they are installed, before plain `vllm serve` engines and a scheduler."""

import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

from tests.e2e.other_proxies import PROXIES, OtherProxy, command, running
from tests.e2e.plain_engine import NAME, Completion, in_parallel, until
from tests.e2e.two_leg_cluster import BLOCK_TOKENS, Served, served_engines
from tests.guard import GUARD_S

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

WORDS = [f"the agent reads file {number} and finds a line" for number in range(12)]


class Completed(NamedTuple):
    """An answer; ``token_ids`` and ``prompt_tokens`` are empty if the proxy drops them."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int

    def equals(self, other: "Completed") -> bool:
        """Whether both have the same text, and the same tokens as far as these are known."""
        tokens_differ = self.token_ids and other.token_ids and self.token_ids != other.token_ids
        return self.text == other.text and not tokens_differ


def ask(url: str, prompt: str | Sequence[int], tokens: int, *, stream: bool = False) -> Completed:
    """Return the answer to a completion, greedy and without a stop."""
    body: dict[str, Any] = {
        "model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": stream, "return_token_ids": True,
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    return _sent(url, "/v1/completions", body)


def chat(url: str, text: str, *, stream: bool = False) -> Completed:
    """Return the answer to a chat with one message."""
    body: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": text}], "stream": stream,
        "max_completion_tokens": 16, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    return _sent(url, "/v1/chat/completions", body)


def _sent(url: str, path: str, body: dict[str, Any]) -> Completed:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content
    if not body["stream"]:
        return _completed([json.loads(content)])
    lines = [line[5:].strip() for line in content.splitlines() if line.startswith(b"data:")]
    assert lines[-1] == b"[DONE]"
    return _completed([json.loads(line) for line in lines[:-1]])


def _completed(events: Sequence[dict[str, Any]]) -> Completed:
    text, prompt_tokens = "", 0
    token_ids: list[int] = []
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            part = choice.get("message") or choice.get("delta") or {}
            text += choice.get("text") or part.get("content") or ""
            token_ids += choice.get("token_ids") or []
        if usage := event.get("usage"):
            prompt_tokens = usage["prompt_tokens"]
    return Completed(text, tuple(token_ids), prompt_tokens)


def play(served: Served, url: str, proxy: OtherProxy) -> None:
    """Send requests of all kinds through a proxy, and compare them with a plain engine's."""
    began, began_read = served.status()["counters"], served.read_bytes()
    prompt_tokens = 0

    def compared(send: Callable[[str], Completed]) -> Completed:
        nonlocal prompt_tokens
        plain, ours = (send(one) for one in (served.plain.url, url))
        assert ours.equals(plain), (ours, plain)
        prompt_tokens += plain.prompt_tokens
        return plain

    def counted(name: str) -> int:
        found: int = served.status()["counters"][name] - began[name]
        return found

    # An agent of four turns: each one finds what the turns before it have stored.
    context = f"{proxy.name} is asked. "
    stored = 0
    for turn in range(4):
        context += " ".join(WORDS[3 * turn : 3 * turn + 3])

        def hit(context: str = context, turn: int = turn, stored: int = stored) -> Completed | None:
            before = counted("hit_tokens")
            answer = compared(partial(ask, prompt=context, tokens=24, stream=turn % 2 == 1))
            return answer if counted("hit_tokens") - before >= stored else None

        answer = until(hit, f"a hit of {stored} tokens")
        context += answer.text
        stored = answer.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS

    def both_paths_read() -> bool:
        read = {name: served.read_bytes()[name] - before for name, before in began_read.items()}
        return min(read.pop("prefill"), sum(read.values())) > 0

    until(both_paths_read, "reads from storage on both paths")
    if proxy.token_ids:
        prompt = [5 + 3 * index % 331 for index in range(300)]
        for stream in (False, True):
            compared(partial(ask, prompt=prompt, tokens=24, stream=stream))
        # A client that leaves while its answer is streamed.
        left = Completion(url, [7, *prompt], 400)
        next(left.pieces())
        left.close()
        prompt_tokens += len(prompt) + 1
    for stream in (False, True):
        compared(partial(chat, text=" ".join(WORDS), stream=stream))

    def texts(at: str) -> list[Completed]:
        calls = [partial(ask, at, f"{number}: {' '.join(WORDS)}", 24) for number in range(4)]
        found: list[Completed] = in_parallel(calls)
        return found

    for ours, plain in zip(texts(url), texts(served.plain.url), strict=True):
        assert ours.equals(plain)
        prompt_tokens += plain.prompt_tokens
    until(served.idle, "engines idle with free buffers")
    read = {name: served.read_bytes()[name] - before for name, before in began_read.items()}
    print(f"{proxy.name}: {prompt_tokens} prompt tokens, {counted('hit_tokens')} hits,", read)
    assert counted("prompt_tokens") == prompt_tokens, "each prompt was prefilled once"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_engines(tmp_path_factory.mktemp("others"), decode=2) as found:
        yield found


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
def test_agents_behind_a_proxy_get_a_plain_engines_answers_and_hits_from_storage(
    proxy: OtherProxy, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    command(proxy)
    served: Served = request.getfixturevalue("served")
    decode = [served.url("decode"), served.url("decode-1")]
    with running(proxy, [served.url("prefill")], decode, tmp_path / "proxy.log") as url:
        play(served, url, proxy)
