"""The programs of examples/ do what they say, each run as it stands."""

import asyncio
import importlib.util
import json
import re
import runpy
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from tests.emulated_cluster import cluster
from tests.guard import GUARD_S

from dualpath.core.modes import Mode

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="needs numpy")
def test_simulating_takes_five_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "simulate_in_five_lines.py").read_text()
    program = [line for line in text.splitlines() if re.match(r"\w+ = |print", line)]
    assert len(program) == 5
    runpy.run_path(str(EXAMPLES / "simulate_in_five_lines.py"))
    assert re.match(r"simulated: JCT \d+ s, mean TTFT \d+\.\d+ s", capsys.readouterr().out)


async def test_a_trace_is_replayed_from_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"session_id": "a", "rounds": [[40, 4], [8, 4]]}) + "\n")
    program = runpy.run_path(str(EXAMPLES / "replay_from_python.py"))
    async with cluster(tmp_path / "kv", Mode.DUALPATH) as there, asyncio.timeout(GUARD_S):
        await asyncio.to_thread(program["main"], str(trace), there.endpoint)
    printed = capsys.readouterr().out
    # Four agents: the trajectory of the trace, and three that begin with a round of their own.
    assert re.search(r"^JCT \d+\.\d s, 11 turns, 0 failed$", printed, re.MULTILINE)
    assert re.search(r"^hit rate \d+\.\d% of at most \d+\.\d%$", printed, re.MULTILINE)


class OneModel(BaseHTTPRequestHandler):
    """Answers as an endpoint does that has stored every prompt but the first."""

    prompts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": "model", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.prompts.append(body["prompt"])
        cached = 64 * (len(self.prompts) - 1)
        usage = {"prompt_tokens": 70, "prompt_tokens_details": {"cached_tokens": cached}}
        self.answer({"object": "text_completion", "choices": [], "usage": usage})

    def answer(self, body: dict[str, object]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_a_prompt_is_sent_twice(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    program = runpy.run_path(str(EXAMPLES / "ask_twice.py"))
    program["main"].__globals__["STORED_S"] = 0
    with HTTPServer(("127.0.0.1", 0), OneModel) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        program["main"](f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert OneModel.prompts == 2 * [program["TEXT"]]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("first: prompt_tokens 70, cached_tokens 0, ")
    assert second.startswith("second: prompt_tokens 70, cached_tokens 64, ")


def test_every_example_is_run_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    here = Path(__file__).read_text(encoding="utf-8")
    assert names == set(re.findall(r'EXAMPLES / "(\w+\.py)"', here))
