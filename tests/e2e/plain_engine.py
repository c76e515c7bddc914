"""A plain vLLM engine, agents that send it requests, and a client with token ids."""

import functools
import http.client
import importlib.util
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.guard import GUARD_S

from dualpath.launch.commands import ENGINE_ENTRY
from dualpath.launch.fork_server import ForkedProcess
from dualpath.launch.ports import claim_port
from dualpath.workload.conversation.prompts import load_encoder
from dualpath.workload.conversation.text_session import TextSession
from dualpath.workload.formats import read_trace
from dualpath_lab.models.random_models import make_tiny_model

MAX_MODEL_LEN = 4096

HBM_BYTES = 64 << 20

START_S = 240.0


NAME = "tiny"


class Answer(NamedTuple):
    """The answer to a completion request."""

    token_ids: list[int]
    cached_tokens: int


class Round(NamedTuple):
    """A turn of an agent: the tokens it appends and how many it has generated."""

    append: list[int]
    generate: int


class Truth(NamedTuple):
    """A plain engine's tokens: by agent and turn, and for one long prompt."""

    turns: list[list[list[int]]]
    long_prompt: list[int]
    long_answer: list[int]


LONG_PROMPT_TOKENS = 3000

LONG_ANSWER_TOKENS = 400


def until(true: Callable[[], Any], what: str, timeout_s: float = GUARD_S) -> Any:
    """Wait for a condition by polling, as other processes send no notification."""
    end_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := true()):
        assert time.monotonic() < end_s, f"{what}: not within {timeout_s:g} s"
        pause.wait(0.02)
    return value


class Completion:
    """A streamed ``/v1/completions`` request with token ids in and out; greedy, no stop.

    ``hints`` are session hints for the router.
    """

    def __init__(
        self,
        url: str,
        prompt: Sequence[int],
        generate: int,
        salt: str = "",
        model: str = NAME,
        hints: Mapping[str, object] | None = None,
    ) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": generate,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if salt:
            body["cache_salt"] = salt
        if hints:
            body["vllm_xargs"] = dict(hints)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.cached_tokens = 0

    def pieces(self) -> Iterator[list[int]]:
        """Yield the new tokens of each event; raises ``AssertionError`` with an error's text."""
        response = self._connection.getresponse()
        assert response.status == 200, response.read().decode()
        for line in response:
            if not line.startswith(b"data:") or b"[DONE]" in line:
                continue
            event = json.loads(line[5:])
            assert "error" not in event, event
            if usage := event.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                self.cached_tokens = details.get("cached_tokens") or 0
            if event["choices"]:
                yield event["choices"][0].get("token_ids") or []

    def answer(self) -> Answer:
        """Read to the end."""
        tokens = [token for piece in self.pieces() for token in piece]
        self.close()
        return Answer(tokens, self.cached_tokens)

    def close(self) -> None:
        """Close the connection, also in the middle."""
        if (sock := self._connection.sock) is not None:
            sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def complete(
    url: str,
    prompt: Sequence[int],
    generate: int,
    salt: str = "",
    model: str = NAME,
    hints: Mapping[str, object] | None = None,
) -> Answer:
    """Return the answer to one request."""
    return Completion(url, prompt, generate, salt, model, hints).answer()


def in_parallel(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at once; return the results in order, raise the first failure."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def recorded_agents(model: Path, agents: int, turns: int) -> list[list[Round]] | None:
    """Return real agent sessions, cut to a tiny model's context; None where there are none."""
    package = importlib.util.find_spec("agentperf_local")
    if package is None or not package.submodule_search_locations:
        return None
    data = Path(package.submodule_search_locations[0]) / "data" / "replays"
    if not (folder := data / "agentperf-default-v1").is_dir():
        return None
    encode = load_encoder(model)
    sessions = [s for s in read_trace(folder) if isinstance(s, TextSession) and s.turns >= turns]
    return [_rounds(session, turns, encode) for session in sessions[:agents]]


def _rounds(
    session: TextSession, turns: int, encode: Callable[[str], Sequence[int]]
) -> list[Round]:
    rounds = []
    seen = 0
    for turn in session.text_turns[:turns]:
        texts = [m.text for m in turn.messages[seen:] if m.role != "assistant"]
        seen = len(turn.messages)
        append = [token for text in texts for token in encode(text[:3000])[: 240 + len(text) % 90]]
        rounds.append(Round(append, 20 + (turn.generate_tokens or 0) % 60))
    return rounds


class PlainEngine:
    """One vLLM server without connector; a context manager."""

    def __init__(self, model: Path, folder: Path, block_tokens: int, *vllm_args: str) -> None:
        port = claim_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            "--model", str(model), "--served-model-name", NAME, "--host", "127.0.0.1",
            "--port", str(port), "--dtype", "float32", "--block-size", str(block_tokens),
            "--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(2 * HBM_BYTES),
            "--no-enable-prefix-caching", "--enforce-eager", "--disable-uvicorn-access-log",
            *vllm_args,
        ]  # fmt: skip
        self.process = ForkedProcess("plain", ENGINE_ENTRY, command, folder / "plain.log")

    def __enter__(self) -> "PlainEngine":
        until(self._healthy, "plain engine", START_S)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.end(20)

    def _healthy(self) -> bool:
        assert self.process.alive, self.process.log_tail()
        try:
            connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def play_plain(
    url: str, rounds: Sequence[Round], model: str = NAME, salt: str = ""
) -> list[list[int]]:
    """Play an agent against a plain engine; return the generated tokens of each turn."""
    context: list[int] = []
    answers = []
    for append, generate in rounds:
        context += append
        answers.append(complete(url, context, generate, salt, model).token_ids)
        context += answers[-1]
    return answers


def ask_truth(url: str, agents: Sequence[Sequence[Round]]) -> Truth:
    """Play all agents at once against a plain engine, then ask the long prompt."""
    turns = in_parallel([functools.partial(play_plain, url, rounds) for rounds in agents])
    text = [token for rounds in agents for turn in rounds for token in turn.append]
    prompt = text[-LONG_PROMPT_TOKENS:]
    assert len(prompt) == LONG_PROMPT_TOKENS
    return Truth(turns, prompt, complete(url, prompt, LONG_ANSWER_TOKENS).token_ids)


def tiny_model() -> Path:
    """Return the grouped-attention test model."""
    return make_tiny_model("qwen2")
