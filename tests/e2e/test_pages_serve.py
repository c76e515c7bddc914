"""Pages that serve with one command, and with vLLM's front ends: their commands."""

import functools
import http.client
import json
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

from tests.docs_blocks import Block
from tests.e2e.plain_engine import complete, tiny_model, until
from tests.e2e.typed_pages import TypedPages, curl, types
from tests.guard import GUARD_S

from dualpath.launch.process import Supervisor

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(580)]

START_S = 400.0
PROMPT = [10 + index % 300 for index in range(300)]
#: As the page on emulated engines asks for beside vLLM's front end: no id beyond the model's own.
VOCABULARY = ("--vocab-size", "400")


def serves(block: Block) -> bool:
    """Select every `dualpath serve`."""
    return block.language == "console" and "$ dualpath serve MODEL" in block.text


@pytest.mark.parametrize(("page", "index"), [("serve.md", 0), ("serve.md", 1), ("scale-out.md", 0)])
def test_one_command_serves_what_the_page_asks_it(page: str, index: int, tmp_path: Path) -> None:
    pages = TypedPages(tmp_path, str(tiny_model()))
    typed = [words for words in pages.commands(page, serves) if words[1] == "serve"]
    with Supervisor() as processes:
        serve = processes.add(pages.spawn("serve", typed[index]))
        assert pages.endpoint in serve.wait_for_line("endpoint", START_S)
        models, chat, status = (curl(w) for w in pages.commands("serve.md", types("curl")))
        assert json.loads(models)["data"][0]["id"] == pages.model
        assert json.loads(chat)["usage"]["completion_tokens"] > 0
        assert json.loads(status)["engines"]
        before = len(pages.stored())
        complete(pages.endpoint, PROMPT, 20, model=pages.model)
        # 319 tokens have KV: four blocks of 64, of which the same prompt can hit all.
        until(lambda: len(pages.stored()) == before + 4, "the blocks of the first answer")
        again = complete(pages.endpoint, PROMPT, 20, model=pages.model)
        assert again.cached_tokens == 256
        serve.send_signal(signal.SIGINT)
        assert serve.wait(GUARD_S) == 0, serve.log_tail()


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("first", "ports"), [("router", ["8000"]), ("scheduler", ["8000", "8002"])]
)
def test_front_ends_serve_engines_that_are_emulated(
    first: str, ports: list[str], tmp_path: Path
) -> None:
    pages = TypedPages(tmp_path, str(tiny_model()))

    def front_ends(block: Block) -> bool:
        return types("dualpath", first)(block) and "MODEL" in block.text

    _, prefill, decode, _ = pages.commands("emulate.md", types("dualpath", "emulate", "router"))
    with Supervisor() as processes:
        for words in pages.commands("scale-out.md", front_ends):
            if words[1] != "serve":
                name = f"{len(processes.processes)}-{words[1]}"
                processes.add(pages.spawn(name, words), ends_last=True)
        for words in (prefill, decode):
            processes.add(pages.spawn(words[2], [*words, *VOCABULARY]))
        answers = []
        for port in ports:
            endpoint = f"http://127.0.0.1:{pages.port(port)}"
            processes.wait_until_ready(functools.partial(missing, endpoint), START_S)
            answers.append(complete(endpoint, PROMPT, 20, model=pages.model))
            until(lambda: len(pages.stored()) == 4, "the blocks of the answer")
        answers.append(complete(endpoint, PROMPT, 20, model=pages.model))
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert [answer.cached_tokens for answer in answers[1:]] == [256] * len(ports)


def missing(endpoint: str) -> str:
    """Return why nothing is served yet; empty if it is."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=5)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return "" if response.status == 200 else response.read().decode()
    except OSError as error:
        return f"no server answers ({error})"
    finally:
        connection.close()
