"""Pages on a cluster that serves already: their commands, with emulated engines."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.e2e.emulated_reader import Reader, runs
from tests.e2e.typed_pages import TypedPages, curl, types
from tests.guard import GUARD_S

from dualpath.launch.process import Supervisor
from dualpath.storage.posix import namespaces_in
from dualpath.transport.nixl import nixl_package

pytest.importorskip(nixl_package())
pytestmark = pytest.mark.nixl

#: Values that pages leave to their readers.
SALT, SESSION = "SALT", "agent-7"


def test_an_engine_pauses_and_a_session_gets_hints(reader: Reader) -> None:
    reader.asks("-H", f"X-Session-ID: {SESSION}")
    typed = [*reader.pages.commands("sessions.md", types("curl"))]
    assert len(typed) == 4
    for words in typed:
        curl(words)
    # Those after them drain one of several schedulers (test_pages_start_emulated).
    pause, status, resume, *_ = reader.pages.commands("restart.md", types("curl"))
    curl(pause)
    paused = {e["engine_id"]: e["paused"] for e in json.loads(curl(status))["engines"]}
    assert paused == {"pe-0": ["asked"], "de-0": []}
    curl(resume)
    reader.asks()


def test_a_storage_is_counted_checked_pinned_and_emptied(
    reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    reader.asks()
    reader.asks(cache_salt=SALT)
    reader.waits_for_blocks(8)
    storage = reader.pages.folder / "kv"
    # Engines measured their reads in a namespace of its own.
    (name,) = [f.name for f, n in namespaces_in(storage) if "probe" not in n.model]
    typed = [*reader.pages.commands("storage.md", types("dualpath", "storage", "ls"))]
    assert len(typed) == 7
    for words in typed:
        runs([name if word == "MODEL_DIGEST" else word for word in words], capsys)


def test_agents_are_replayed_and_their_runs_compared(
    reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = reader.pages.folder
    rounds = [[70, 4], [10, 4]]
    lines = [json.dumps({"session_id": f"a{n}", "rounds": rounds}) for n in range(16)]
    (folder / "TRACE").write_text("\n".join(lines))
    (replay,) = reader.pages.commands("replay.md", types("dualpath", "replay"))
    runs(replay, capsys)
    assert "<svg" in (folder / "run.html").read_text()
    for mode in ("basic", "dualpath", "oracle"):
        shutil.copy(folder / "run.json", folder / f"{mode}.json")
    _, _, report = reader.pages.commands("replay.md", types("dualpath", "serve"))
    runs(report, capsys)
    assert (folder / "compare.html").exists()


def test_a_janitor_begins_before_there_is_a_storage(tmp_path: Path) -> None:
    pages = TypedPages(tmp_path)
    (words,) = pages.commands("storage.md", types("dualpath", "storage", "janitor"))
    (tmp_path / "kv").mkdir()
    with Supervisor() as processes:
        janitor = processes.add(pages.spawn("janitor", words))
        line = janitor.wait_for_line("this process is the janitor", GUARD_S)
        # It runs for weeks, so log lines need a time.
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ INFO dualpath\.", line), line
        janitor.terminate()
        assert janitor.wait(GUARD_S) == 0, janitor.log_tail()
