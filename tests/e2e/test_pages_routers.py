"""Pages on options of vLLM's front end: their commands, with emulated engines."""

import functools
import http.client
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dualpath.transport.nixl import nixl_package

pytest.importorskip("vllm")
pytest.importorskip(nixl_package())

from tests.docs_blocks import ROOT, Block, blocks
from tests.e2e.plain_engine import complete, tiny_model, until
from tests.e2e.test_pages_serve import PROMPT, START_S, missing
from tests.e2e.typed_pages import TypedPages, types
from tests.guard import GUARD_S

from dualpath.launch.ports import claim_port
from dualpath.launch.process import Supervisor

pytestmark = [pytest.mark.engine, pytest.mark.nixl, pytest.mark.long, pytest.mark.timeout(580)]

HOW_TO = ROOT / "docs" / "how-to"
#: The model's own context length, which chats use in full.
VOCABULARY = ("--vocab-size", "512")


def listens(endpoint: str) -> bool:
    """Whether a server answers there, with any status."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=GUARD_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status > 0
    except OSError:
        return False
    finally:
        connection.close()


def starts_engines(pages: TypedPages, processes: Supervisor) -> None:
    """Start 1P1D as the page on emulated engines does, and wait until it serves."""
    _, prefill, decode, _ = pages.commands("emulate.md", types("dualpath", "emulate", "router"))
    for words in (prefill, decode):
        processes.add(pages.spawn(words[2], [*words, *VOCABULARY]))
    processes.wait_until_ready(functools.partial(missing, pages.endpoint), START_S)


def test_a_second_router_stands_by_and_an_agent_sends_hints(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    pages = TypedPages(tmp_path, str(tiny_model()))
    first, second = pages.commands("restart.md", types("dualpath", "router"))
    with Supervisor() as processes:
        serving = processes.add(pages.spawn("first", first), ends_last=True)
        until(functools.partial(listens, pages.endpoint), "the first router", START_S)
        standby = processes.add(pages.spawn("second", second), ends_last=True)
        standby.wait_for_line("everything is loaded; it serves when it becomes the leader", START_S)
        starts_engines(pages, processes)
        answer = complete(pages.endpoint, PROMPT, 20, model=pages.model)

        (says,) = (b for b in blocks(HOW_TO / "sessions.md") if b.language == "python")
        names = {
            "client": openai.OpenAI(base_url=f"{pages.endpoint}/v1", api_key="none"),
            "messages": [{"role": "user", "content": "What next?"}],
        }
        exec(says.text.replace('model="m"', f"model={pages.model!r}, max_tokens=4"), names)

        serving.kill()
        until(lambda: not missing(pages.endpoint), "the second router")
        assert complete(pages.endpoint, PROMPT, 20, model=pages.model).token_ids == answer.token_ids
        assert standby.alive


def sends_traces(block: Block) -> bool:
    """Want the router that traces."""
    return "--otlp-traces-endpoint" in block.text and block.language == "bash"


def test_a_router_sends_the_spans_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    from tests.e2e.span_server import span_server

    port = str(claim_port())
    pages = TypedPages(tmp_path, str(tiny_model()), {"4317": port})
    (router,) = pages.commands("monitor.md", sends_traces)
    (tree,) = (b for b in blocks(HOW_TO / "monitor.md") if b.text.startswith("request "))
    # Before the remarks; what is in brackets is an engine's own, and emulated ones trace nothing.
    names = re.findall(r"^[│├└─ ]*([a-z]\w+(?:, [a-z]\w+)*)", tree.text, re.MULTILINE)
    listed = set(", ".join(names).split(", "))
    assert {"request", "schedule", "storage_read", "h2d"} <= listed
    with span_server(port) as spans, Supervisor() as processes:
        # Blocks cached in DRAM are not read.
        traced = pages.spawn("router", [*router, "--no-dram-tier"])
        processes.add(traced, ends_last=True)
        starts_engines(pages, processes)
        complete(pages.endpoint, PROMPT, 20, model=pages.model)
        until(lambda: len(pages.stored()) == 4, "the blocks of the answer")
        # Reads are of stored blocks.
        complete(pages.endpoint, PROMPT, 20, model=pages.model)
        # The root span ends last.
        until(lambda: spans.names.count("request") == 2, "the spans of both requests")
        assert {*spans.names} == listed
