"""Plain `vllm serve` engines behind a proxy that knows nothing of dualpath, and a scheduler.

Nothing of our router runs.  The engines are started by their usual commands with one argument.
"""

import http.client
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

import msgspec
import zmq
from tests.e2e.plain_engine import (
    NAME,
    START_S,
    Answer,
    PlainEngine,
    Round,
    complete,
    in_parallel,
    play_plain,
    tiny_model,
    until,
)
from tests.e2e.test_existing_vllm import ENTRY_POINT, existing_command, post
from tests.e2e.two_leg_proxy import TwoLegProxy
from tests.guard import GUARD_S
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from dualpath.core.blocks import block_keys
from dualpath.launch.commands import ENGINE_ENTRY
from dualpath.launch.fork_server import ForkedProcess
from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor
from dualpath.vllm.two_leg_server import PREFILL_HEADER

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

BLOCK_TOKENS = 64
ROUNDS = [Round([3 + (i * i + 7 * turn) % 337 for i in range(150)], 24) for turn in range(4)]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
WORDS = " ".join(f"the agent reads file {number} and finds a line" for number in range(30))


class Served:
    """A scheduler, one engine of each role, and a plain engine with the same model."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        #: KV events of the decode engine, as vLLM publishes them.
        self.events = stack.enter_context(zmq.Context()).socket(zmq.SUB)
        stack.callback(self.events.close, 0)
        self._started = stack.enter_context(Supervisor())
        (folder / "chat.jinja").write_text(TEMPLATE)
        command = ("scheduler", "--port", "0", "--mode", "split", "--no-dram-tier")
        ports = ("--control-port", "0", "--front-ends-port", "0", "--second-leg-timeout-s", "5")
        scheduler = SpawnedProcess(
            "scheduler",
            (sys.executable, "-m", "dualpath.cli.main", *command, *ports),
            folder / "scheduler.log",
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._started.add(scheduler)
        line = scheduler.wait_for_line("dualpath scheduler: cluster at", GUARD_S)
        (self._cluster,) = re.findall(r"cluster at (http://[\d.:]+)", line)
        control, front_ends = re.findall(r"tcp://[\d.:]+", line)
        self.ports = {
            role: self._engine(role, control, front_ends) for role in ("prefill", "decode")
        }
        self.plain = stack.enter_context(
            PlainEngine(tiny_model(), folder, BLOCK_TOKENS, *self._chat())
        )
        until(self._complete, "an engine of each role", START_S)

    def _chat(self) -> tuple[str, str]:
        return "--chat-template", str(self._folder / "chat.jinja")

    def _engine(self, role: str, control: str, front_ends: str) -> int:
        port = claim_port()
        extra = {
            "role": role,
            "engine_id": role,
            "router": control,
            "two_leg_scheduler": front_ends,
            "storage": str(self._folder / "storage"),
            "mode": "split",
            "buffer_bytes": 96 << 20,
            "profile": "off",
        }
        config = {
            "kv_connector": "DualPathConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        command = [
            *existing_command(tiny_model(), port),
            *("--kv-transfer-config", json.dumps(config), *self._chat()),
            "--enable-prompt-tokens-details",
        ]
        if role == "decode":
            events_port = claim_port()
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events_port}"}
            command += ["--kv-events-config", json.dumps(events)]
            self.events.setsockopt(zmq.SUBSCRIBE, b"")
            self.events.connect(f"tcp://127.0.0.1:{events_port}")
        log = self._folder / f"{role}.log"
        self._started.add(ForkedProcess(role, ENGINE_ENTRY, command, log))
        return port

    def _complete(self) -> bool:
        for process in self._started.processes:
            assert process.alive, process.log_tail()
        return {e["engine_id"] for e in self.status()["engines"] if e["alive"]} == set(self.ports)

    def status(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection(urlsplit(self._cluster).netloc, timeout=GUARD_S)
        connection.request("GET", "/dualpath/v1/status")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def read_bytes(self) -> dict[str, int]:
        """Bytes that each engine has read from storage."""
        found: dict[str, int] = self.status()["counters"]["snic_read_bytes"]
        return found

    def idle(self) -> bool:
        """Whether no engine counts a request or holds any of its buffer."""
        status = self.status()
        engines = status["engines"]
        free = {engine["engine_id"]: engine["free_buffer_tokens"] for engine in engines}
        counts = status["waiting"], status["running"], sum(engine["seq"] for engine in engines)
        return counts == (0, 0, 0) and free == self._buffers

    def note_buffers(self) -> None:
        self._buffers = {e["engine_id"]: e["free_buffer_tokens"] for e in self.status()["engines"]}

    def log(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")

    def url(self, role: str) -> str:
        return f"http://127.0.0.1:{self.ports[role]}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("legs")
    metadata = folder / "site" / "dualpath-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dualpath\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.syspath_prepend(str(metadata.parent))
        found = Served(folder, stack)
        found.note_buffers()
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
    assert min(served.read_bytes().values()) > 0, "both engines have read from storage"
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
