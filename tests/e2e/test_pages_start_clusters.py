"""Pages that start a cluster by hand, run as they stand: each command a process, then a client."""

import functools
import http.client
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.docs_blocks import ROOT, Block, blocks, commands
from tests.e2e.plain_engine import complete, tiny_model, until

from dualpath.ops.launch.commands import ENGINE_ENTRY, ENGINE_ENVIRONMENT, ROUTER_ENTRY
from dualpath.ops.launch.fork_server import ForkedProcess
from dualpath.ops.launch.ports import claim_port
from dualpath.ops.launch.process import Supervisor

pytestmark = [pytest.mark.engine, pytest.mark.timeout(580)]

START_S = 400.0
PROMPT = [10 + index % 300 for index in range(300)]
#: Ports that pages speak of; others may have them here.
PORTS = ("5700", "8000", "8001", "8002")
ENGINE_MODULE = ENGINE_ENTRY.partition(":")[0]


class Page:
    """The commands of a page, with this machine's own model, folder, addresses and ports."""

    def __init__(self, name: str, folder: Path) -> None:
        self._blocks = list(blocks(ROOT / "docs" / "how-to" / name))
        self.model = str(tiny_model())
        self._here = {port: str(claim_port()) for port in PORTS}
        self._here |= {"/mnt/kv": str(folder / "kv"), "MODEL": self.model}
        self.endpoint = f"http://127.0.0.1:{self._here['8000']}"

    def commands(self) -> list[list[str]]:
        """Return what a reader with vLLM's CPU build types."""
        typed = [words for block in self._blocks if self._is_for_cpus(block)
                 for words in commands(block)]  # fmt: skip
        return [[self._translated(word) for word in words] for words in typed]

    def _is_for_cpus(self, block: Block) -> bool:
        return block.language == "console" and "vllm serve" not in block.text

    def _translated(self, word: str) -> str:
        word = re.sub(r"\b10\.0\.0\.\d\b|0\.0\.0\.0", "127.0.0.1", word)
        pattern = "|".join(rf"(?<![\w/]){re.escape(known)}\b" for known in self._here)
        return re.sub(pattern, lambda found: self._here[found[0]], word)


def started(page: Page, folder: Path, processes: Supervisor) -> list[str]:
    """Start what the page starts; return the names, router first."""
    exported: dict[str, str] = {}
    for words in page.commands():
        match words:
            case ["export", *variables]:
                exported |= dict(variable.split("=", 1) for variable in variables)
            case ["dualpath", "router", *_]:
                start(processes, folder, "router", ROUTER_ENTRY, words[1:])
            case ["python", "-m", module, *arguments]:
                assert module == ENGINE_MODULE
                name = f"engine-{len(processes.processes)}"
                start(processes, folder, name, ENGINE_ENTRY, arguments)
    # What the fork server gives to those it starts is what the page tells a reader to set.
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


def stored(storage: Path) -> list[Path]:
    """Return the blocks of requests, without those an engine measures its reads with."""
    return [path for path in storage.rglob("*.kv") if "read-probe" not in str(path)]


@pytest.mark.parametrize(
    "name", [pytest.param("existing-vllm.md", marks=pytest.mark.long), "separate-machines.md"]
)
def test_a_cluster_that_a_page_starts_serves_and_loads_what_it_stored(
    name: str, tmp_path: Path
) -> None:
    page = Page(name, tmp_path)
    with Supervisor() as processes:
        assert started(page, tmp_path, processes) == ["router", "engine-1", "engine-2"]
        until(functools.partial(is_healthy, page.endpoint, processes), "the cluster", START_S)
        first = complete(page.endpoint, PROMPT, 20, model=page.model)
        assert len(first.token_ids) == 20
        # 319 tokens have KV: four blocks of 64, of which the same prompt can hit all.
        until(lambda: len(stored(tmp_path / "kv")) == 4, "the blocks of the first answer")
        again = complete(page.endpoint, PROMPT, 20, model=page.model)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 256)


def test_a_page_is_translated_and_not_rewritten(tmp_path: Path) -> None:
    page = Page("separate-machines.md", tmp_path)
    engines = [words for words in page.commands() if ENGINE_MODULE in words]
    transfers = [json.loads(words[words.index("--kv-transfer-config") + 1]) for words in engines]
    roles = [transfer["kv_connector_extra_config"]["role"] for transfer in transfers]
    assert roles == ["prefill", "decode"]
    assert not [word for words in engines for word in words if "10.0.0" in word or "MODEL" in word]
