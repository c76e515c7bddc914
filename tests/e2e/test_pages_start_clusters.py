"""The page that starts router and engines by themselves, run as it stands, then a client."""

import functools
import http.client
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.docs_blocks import Block
from tests.e2e.plain_engine import complete, tiny_model, until
from tests.e2e.typed_pages import TypedPages

from dualpath.launch.commands import ENGINE_ENTRY, ENGINE_ENVIRONMENT, ROUTER_ENTRY
from dualpath.launch.fork_server import ForkedProcess
from dualpath.launch.process import Supervisor

pytestmark = [pytest.mark.engine, pytest.mark.timeout(580)]

PAGE = "separate-machines.md"
START_S = 400.0
PROMPT = [10 + index % 300 for index in range(300)]
ENGINE_MODULE = ENGINE_ENTRY.partition(":")[0]


def is_for_cpus(block: Block) -> bool:
    """Select the commands for vLLM's CPU build."""
    return block.language == "console" and "vllm serve" not in block.text


def started(name: str, pages: TypedPages, processes: Supervisor) -> list[str]:
    """Start the processes of the page; return their names, router first."""
    exported: dict[str, str] = {}
    for words in pages.commands(name, is_for_cpus):
        match words:
            case ["export", *variables]:
                exported |= dict(variable.split("=", 1) for variable in variables)
            case ["dualpath", "router", *_]:
                start(processes, pages.folder, "router", ROUTER_ENTRY, words[1:])
            case ["python", "-m", module, *arguments]:
                assert module == ENGINE_MODULE
                engine = f"engine-{len(processes.processes)}"
                start(processes, pages.folder, engine, ENGINE_ENTRY, arguments)
    # The fork server passes on the variables that the page asks a reader to set.
    assert exported == ENGINE_ENVIRONMENT
    return [process.name for process in processes.processes]


def start(processes: Supervisor, folder: Path, name: str, entry: str, words: Sequence[str]) -> None:
    process = ForkedProcess(name, entry, list(words), folder / f"{name}.log")
    processes.add(process, ends_last=name == "router")


def is_healthy(endpoint: str, processes: Supervisor) -> bool:
    """Ask as the page does; fails with the log of a process that has ended."""
    processes.check_alive()
    connection = http.client.HTTPConnection(endpoint.partition("//")[2], timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.long
def test_a_cluster_that_the_page_starts_serves_and_loads_what_it_stored(tmp_path: Path) -> None:
    page = TypedPages(tmp_path, str(tiny_model()))
    with Supervisor() as processes:
        assert started(PAGE, page, processes) == ["router", "engine-1", "engine-2"]
        until(functools.partial(is_healthy, page.endpoint, processes), "the cluster", START_S)
        first = complete(page.endpoint, PROMPT, 20, model=page.model)
        assert len(first.token_ids) == 20
        # 319 tokens have KV: four blocks of 64, of which the same prompt can hit all.
        until(lambda: len(page.stored()) == 4, "the blocks of the first answer")
        again = complete(page.endpoint, PROMPT, 20, model=page.model)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 256)


def test_a_page_is_translated_and_not_rewritten(tmp_path: Path) -> None:
    typed = TypedPages(tmp_path, str(tiny_model())).commands(PAGE, is_for_cpus)
    engines = [words for words in typed if ENGINE_MODULE in words]
    transfers = [json.loads(words[words.index("--kv-transfer-config") + 1]) for words in engines]
    roles = [transfer["kv_connector_extra_config"]["role"] for transfer in transfers]
    assert roles == ["prefill", "decode"]
    assert not [word for words in engines for word in words if "10.0.0" in word or "MODEL" in word]
