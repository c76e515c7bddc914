"""Pages on traces, decisions and checks of a cluster: their commands, with emulated engines."""

import json
import re
import signal
from pathlib import Path

import pytest
from tests.docs_blocks import ROOT, Block, blocks
from tests.e2e.emulated_reader import Reader, runs
from tests.e2e.typed_pages import types
from tests.guard import GUARD_S

from dualpath.cli.main import main
from dualpath.transport.nixl import nixl_package

pytest.importorskip(nixl_package())
pytestmark = pytest.mark.nixl

HOW_TO = ROOT / "docs" / "how-to"
SESSION = ("-H", "X-Session-ID: agent-7")
#: Checks that `dualpath doctor` makes only where the machine has something of that kind.
SOMETIMES = {"NIC of each GPU", "Shaping"}


def runs_python(block: Block) -> None:
    """Run what a reader pastes into Python."""
    exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"})


def test_traffic_that_passes_a_recorder_is_a_trace(
    reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    (record,) = reader.pages.commands("replay.md", types("dualpath", "record"))
    recorder = reader.types(record)
    recorder.wait_for_line("recording at", GUARD_S)
    for tokens in (256, 400):
        reader.asks(*SESSION, port="8001", prompt=list(range(1, tokens + 1)))
    recorder.send_signal(signal.SIGINT)
    assert recorder.wait(GUARD_S) == 0, recorder.log_tail()
    trace = Path(record[record.index("--out") + 1])
    turns = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [turn["input_length"] for turn in turns] == [256, 400]
    runs(["dualpath", "replay", str(trace), "--endpoint", reader.pages.endpoint], capsys)
    cluster = ("--cluster", "paper-660b", "--model", "ds-v3.2", "--core", "reference")
    runs(["dualpath", "simulate", "--trace", str(trace), *cluster], capsys)


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param("", marks=[pytest.mark.engine, pytest.mark.long], id="all"),
        pytest.param("vllm,nixl", id="without imports"),
    ],
)
def test_a_node_is_checked_for_what_the_page_says(
    left_out: str, reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (HOW_TO / "troubleshoot.md").read_text().partition("\n## Check a node")[2]
    (doctor,) = reader.pages.commands("troubleshoot.md", types("dualpath", "doctor"))
    skip = ("--skip", left_out) if left_out else ()
    assert f"`--skip {left_out}" in page
    ended = main([*doctor[1:], *skip, "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    # Failed checks depend on the machine; the report must show them.
    assert ended == any(finding["status"] == "error" for finding in found)
    rows = {*re.findall(r"^\| ([^|`]+?) \|", page, re.MULTILINE)} - {"check"}
    # "Storage reads" is a row's "Storage", "vLLM plugin" has a row of its own.
    made = {max((r for r in rows if f["check"].startswith(r)), key=len) for f in found}
    if not left_out:
        assert rows - made <= SOMETIMES


def test_a_router_is_given_bad_requests(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    blocks, requests = reader.pages.commands("chaos.md", types("dualpath", "chaos", "fuzz"))
    small = ([*blocks, "--count", "100"], [*requests, "--count", "40"])
    for words in small:
        process = ["--pid", str(reader.router_pid())] if "--pid" in words else []
        assert main([*words[1:], *process]) == 0
        assert "dualpath: 0 findings" in capsys.readouterr().err


def test_what_the_scheduler_decided_is_asked_again(
    reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    reader.asks()
    reader.ends()  # It reads the log of the whole cluster, so this test is the last one.
    found = blocks(HOW_TO / "record-decisions.md")
    (again,) = (block for block in found if block.language == "python")
    runs_python(again)
    assert capsys.readouterr().out == "every decision came out the same\n"
