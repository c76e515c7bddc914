"""Pages on measuring, faults and traffic shaping: their commands, with smaller sizes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.docs_blocks import ROOT, blocks
from tests.e2e.typed_pages import TypedPages, types

from dualpath.cli.main import main
from dualpath.core.errors import ConfigError
from dualpath.transport.nixl import nixl_package
from dualpath_lab.models.random_models import make_tiny_model
from dualpath_lab.nodes.cluster import lab_down
from dualpath_lab.nodes.machine import find_machine, find_remains
from dualpath_lab.nodes.settings import LabSettings, Shaping

HOW_TO = ROOT / "docs" / "how-to"
#: Others may have the page's lab here.
LAB = f"pages{os.getpid()}"
#: Arguments that make a campaign or a run small.
FEW_FAULTS = ("--faults", "1", "--agents", "4")
SMALL_RUN = ("--agents-per-node", "1", "--turns", "2", "--scale", "0.03", "--busy-limit", "1")


def campaigns() -> list[object]:
    """Return each `dualpath chaos run` of the page as a parameter."""
    pages = TypedPages(Path())
    typed = [*pages.commands("chaos.md", types("dualpath", "chaos", "run"))]
    assert len(typed) == 7
    return [
        pytest.param(
            words,
            id=" ".join(words[3:5]),
            marks=[pytest.mark.engine, pytest.mark.timeout(580)] if "vllm" in words else [],
        )
        for words in typed
    ]


@pytest.mark.nixl
@pytest.mark.long
@pytest.mark.parametrize("words", campaigns())
def test_a_cluster_is_broken_as_the_page_says(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(nixl_package())
    monkeypatch.chdir(tmp_path)
    assert main([*words[1:], *FEW_FAULTS]) == 0
    if "--out" in words:
        (run,) = msgspec.json.decode(Path("report/chaos-run.json").read_bytes())["data"]["runs"]
        assert sum(row["made"] for row in run["result"]["matrix"]) == 1
        assert [*Path("logs").iterdir()]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(580)
def test_what_a_profile_measured_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    pages = TypedPages(tmp_path, str(make_tiny_model("qwen2")))
    shutil.copytree(ROOT / "examples", "examples")
    profile, simulate = [*pages.commands("profile.md", types("dualpath", "profile"))][:2]
    timed = pages.spawn("profile", profile)
    assert timed.wait(500) == 0, timed.log_tail()
    assert main(simulate[1:]) == 0
    assert "JCT" in capsys.readouterr().out


def no_lab() -> str:
    """Why this machine cannot have a lab with everything shaped; empty if it can."""
    try:
        shaping = find_machine(LabSettings(name=LAB)).shaping
    except ConfigError as error:
        return str(error)
    return "" if shaping is Shaping.ROOT else f"only {shaping.value} is allowed here"


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[TypedPages]:
    """A reader who may create labs; none may be left."""
    if why := no_lab():
        pytest.skip(f"lab: {why}")
    yield TypedPages(tmp_path)
    lab_down(LAB)
    assert find_remains(LAB).is_empty


def test_a_lab_is_made_looked_at_and_removed(
    pages: TypedPages, capsys: pytest.CaptureFixture[str]
) -> None:
    up, status, down = [*pages.commands("lab.md", types("dualpath", "lab", "up"))][:3]
    assert main([*up[1:], "--name", LAB]) == 0
    capsys.readouterr()
    assert main([*status[1:], "--name", LAB]) == 0
    assert "de1" in capsys.readouterr().out
    (enters,) = (b.text for b in blocks(HOW_TO / "lab.md") if b.language == "python")
    exec(compile(enters.replace('"lab"', repr(LAB)), "lab.md", "exec"), {})
    assert capsys.readouterr().out.startswith("pe0 ")
    assert main([*down[1:], "--name", LAB]) == 0


def test_a_lab_has_a_storage_server(pages: TypedPages, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, _, _, up = pages.commands("lab.md", types("dualpath", "lab", "up"))
    assert main([*up[1:], "--name", LAB]) == 0
    assert main(["lab", "status", "--name", LAB]) == 0
    assert "s3" in capsys.readouterr().out


@pytest.mark.nixl
@pytest.mark.long
def test_agents_run_on_a_lab(pages: TypedPages, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(nixl_package())
    (run,) = pages.commands("lab.md", types("dualpath", "lab", "run"))
    ended = main([*run[1:], "--name", LAB, *SMALL_RUN])
    output = capsys.readouterr().out
    # As on the page: a busy machine spoils the figures, which are not asserted here.
    assert ended == ("TOO BUSY" in output)
    assert "Layer Blocks compared on arrival, none wrong" in output
    assert {"basic", "dualpath", "oracle"} <= set(output.split())
