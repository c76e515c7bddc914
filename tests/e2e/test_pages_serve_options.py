"""Every page's own `dualpath serve` command: the effect of its option is checked."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.docs_blocks import ROOT, Block, blocks
from tests.e2e.emulated_reader import runs
from tests.e2e.plain_engine import complete, tiny_model, until
from tests.e2e.test_engines_groups import MENDED
from tests.e2e.test_pages_serve import PROMPT, START_S
from tests.e2e.typed_pages import TypedPages, curl
from tests.guard import GUARD_S
from tests.ray_cluster import RayCluster

from dualpath.launch.process import Supervisor
from dualpath.node.cluster_secret import SECRET_VARIABLE
from dualpath_lab.models.random_models import make_tiny_adapter, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(580)]

HOW_TO = ROOT / "docs" / "how-to"
TRACE = '{"session_id": "a", "rounds": [[256, 20], [30, 10]]}\n'


def shows_serve(block: Block) -> bool:
    """Select blocks with a `dualpath serve`."""
    return block.language == "console" and "$ dualpath serve" in block.text


def exports(block: Block) -> bool:
    """Select the block that exports the cluster's secret."""
    return block.language == "console" and f"export {SECRET_VARIABLE}" in block.text


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TypedPages:
    """A reader in a folder with a trace."""
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(TRACE)
    return TypedPages(tmp_path, str(tiny_model()), {"examples/agents.jsonl": "trace.jsonl"})


@contextlib.contextmanager
def serving(pages: TypedPages, page: str, more: Sequence[str] = ()) -> Iterator[list[list[str]]]:
    """Run the page's first `dualpath serve`, and end it after the block; yields the later commands.

    ``more`` is appended: what a machine without GPUs needs.
    """
    typed = [*pages.commands(page, shows_serve)]
    first = next(n for n, words in enumerate(typed) if words[:2] == ["dualpath", "serve"])
    with Supervisor() as processes:
        serve = processes.add(pages.spawn("serve", [*typed[first], *more]))
        assert pages.endpoint in serve.wait_for_line("endpoint", START_S)
        yield typed[first + 1 :]
        serve.send_signal(signal.SIGINT)
        assert serve.wait(GUARD_S) == 0, serve.log_tail()


def hits_what_it_stored(pages: TypedPages, prompt: Sequence[int] = PROMPT, model: str = "") -> None:
    """Ask twice: the second request hits the blocks that the first one stored."""
    before = len(pages.stored())
    first = complete(pages.endpoint, prompt, 20, model=model or pages.model)
    # 319 tokens have KV: four blocks of 64, of which the same prompt can hit all.
    until(lambda: len(pages.stored()) == before + 4, "the blocks of the first answer")
    again = complete(pages.endpoint, prompt, 20, model=model or pages.model)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 256)


def engines(pages: TypedPages) -> list[str]:
    """Return the names of the live engines."""
    status = json.loads(curl(["curl", f"{pages.endpoint}/dualpath/v1/status"]))
    return sorted(engine["engine_id"] for engine in status["engines"] if engine["alive"])


def test_engines_share_dram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory = Path(tempfile.mkdtemp(prefix="dualpath-pages-", dir="/dev/shm"))
    try:
        also = {"/dev/shm/kv": str(memory / "kv")}
        with serving(pages := TypedPages(tmp_path, str(tiny_model()), also), "dram.md"):
            assert engines(pages) == ["de-0", "de-1", "pe-0", "pe-1"]
            hits_what_it_stored(pages)
        # It is taken until it is removed.
        assert [*(memory / "kv").rglob("*.kv")]
    finally:
        shutil.rmtree(memory)


def test_stored_blocks_are_sealed(pages: TypedPages, capsys: pytest.CaptureFixture[str]) -> None:
    for words in pages.commands("security.md", shows_serve):
        if words[0] in ("openssl", "chmod"):
            subprocess.run(" ".join(words), shell=True, check=True, timeout=GUARD_S)
    with serving(pages, "security.md"):
        hits_what_it_stored(pages)
    assert "encrypted" in runs(["dualpath", "storage", "ls", "kv"], capsys)


def test_a_storage_has_a_quota(pages: TypedPages, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(pages, "storage.md"):
        hits_what_it_stored(pages)
        until((pages.folder / "kv" / "janitor").exists, "a janitor")
    assert runs(["dualpath", "storage", "du", "kv", "--by", "tenant"], capsys)


def test_decisions_are_recorded(pages: TypedPages, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(pages, "record-decisions.md"):
        hits_what_it_stored(pages)
    found = blocks(HOW_TO / "record-decisions.md")
    (again,) = (block.text for block in found if block.language == "python")
    exec(compile(again, "record-decisions.md", "exec"), {})
    assert capsys.readouterr().out == "every decision came out the same\n"


def test_engines_leave_traces_with_the_events_of_the_page(pages: TypedPages) -> None:
    with serving(pages, "read-a-trace.md"):
        # Of 399 tokens with KV a block and a half are generated.
        complete(pages.endpoint, PROMPT, 100, model=pages.model)
        until(lambda: len(pages.stored()) == 6, "the blocks of the first answer")
        hits_what_it_stored(pages, PROMPT[::-1])
    text = (HOW_TO / "read-a-trace.md").read_text()
    listed = {*re.findall(r"^\| `[\w-]+`[^|]*\| `(\w+)", text, re.MULTILINE)}
    files = [*(pages.folder / "traces").iterdir()]
    assert len(files) == 2
    events = [event for file in files for event in json.loads(file.read_text())["traceEvents"]]
    seen = {event["name"].split()[0] for event in events if event["ph"] == "X"}
    # Hits are still in DRAM.
    assert seen == listed - {"read"}


def test_a_mode_is_replayed(pages: TypedPages, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(pages, "replay.md") as (replay, _):
        runs(replay, capsys)
        assert json.loads(Path("basic.json").read_text())["setting"]["mode"] == "basic"


def test_engines_take_a_setting_of_ucx(pages: TypedPages) -> None:
    pages = TypedPages(pages.folder, pages.model, {"DIR": "kv"})
    with serving(pages, "qos.md"):
        hits_what_it_stored(pages)


def test_adapters_are_models(pages: TypedPages) -> None:
    model, folder = make_tiny_model("qwen2", layers=4), pages.folder / "adapters"
    for seed, name in enumerate(("sql", "chat"), 1):
        make_tiny_adapter(model, seed, folder / name)
    pages = TypedPages(pages.folder, str(model), {"/mnt/adapters": str(folder)})
    with serving(pages, "request-kinds.md"):
        models = json.loads(curl(["curl", f"{pages.endpoint}/v1/models"]))["data"]
        assert {entry["id"] for entry in models} == {pages.model, "sql", "chat"}
        for name in ("sql", "chat"):
            hits_what_it_stored(pages, model=name)


def test_groups_of_engines_share_experts(pages: TypedPages) -> None:
    pages = TypedPages(pages.folder, str(make_tiny_model("qwen3_moe")))
    with serving(pages, "groups.md", ("--vllm-args", *MENDED)):
        assert engines(pages) == ["de-0-dp0", "de-0-dp1", "pe-0-dp0", "pe-0-dp1"]
        hits_what_it_stored(pages)


def test_engines_run_on_nodes_of_ray(pages: TypedPages, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    (export,) = (w for w in pages.commands("ray.md", exports) if w[0] == "export")
    printed = subprocess.run(
        ["bash", "-c", f"{' '.join(export)} && printenv {SECRET_VARIABLE}"],
        capture_output=True, check=True, timeout=GUARD_S, text=True,
    )  # fmt: skip
    monkeypatch.setenv(SECRET_VARIABLE, printed.stdout.strip())
    # `ray start` would be seen by every Ray of this machine; it has no five CPUs either.
    cluster = RayCluster(cpus=4)
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with serving(pages, "ray.md"):
            assert engines(pages) == ["de-0", "de-1", "pe-0", "pe-1"]
            hits_what_it_stored(pages)
    finally:
        cluster.close()
