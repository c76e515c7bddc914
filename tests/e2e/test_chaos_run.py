"""A small campaign on real processes: the command, its report, and the errors that it finds."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualpath.cli.main import main
from dualpath.transport.nixl import nixl_package
from dualpath_lab.faults.matrix import Fault

pytest.importorskip(nixl_package())
pytestmark = pytest.mark.nixl

CAMPAIGN = ("chaos", "run", "--agents", "4", "--seed", "1")
#: Faults of one part of an engine, and of connections.
PARTS = (
    "SIGKILL of one process,SIGSTOP of one process,hanging thread,reset control,"
    "silent HTTP,silent control,dropped HTTP,dropped control"
)
#: All faults of processes and connections except SIGKILL and other roles.
WITHOUT = f"SIGTERM,SIGSTOP,{PARTS}"


def result(folder: Path) -> dict[str, Any]:
    """Return the recorded result of a campaign."""
    document = msgspec.json.decode((folder / "chaos-run.json").read_bytes())
    found: dict[str, Any] = document["data"]["runs"][0]["result"]
    return found


def test_corrupted_blocks_are_detected_and_all_tokens_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = "full,EIO,slow,read-only,removed"
    arguments = (*CAMPAIGN, "--components", "storage", "--without", without, "--faults", "20")
    assert main([*arguments, "--out", str(tmp_path), "--leave-share", "0"]) == 0
    found = result(tmp_path)
    assert found["faults"] == 20
    assert set(found["outcomes"]) == {"well"}
    assert found["loaded_blocks"] > 0 < found["damaged_blocks"]
    assert "wrong KV on arrival" in (tmp_path / "chaos-run.md").read_text()
    assert "Requests and blocks" in capsys.readouterr().out


def test_engines_are_killed_and_stopped_and_all_tokens_are_right(
    tmp_path: Path,
) -> None:
    """The prefill engines are a data-parallel group: when one is killed, the other ends too.

    A decode engine ends with its rank.  All engines share DRAM, which outlives them.
    """
    arguments = ("--components", "PE,DE,DE rank", "--without", f"SIGTERM,{PARTS}", "--faults", "4")
    group = ("--prefill", "2", "--prefill-dp", "2", "--decode-tp", "2")
    shared = ("--shared-blocks", "200", "--logs", str(tmp_path / "logs"))
    assert main([*CAMPAIGN, *arguments, *group, *shared, "--out", str(tmp_path)]) == 0
    found = result(tmp_path)
    assert sum(cell["made"] for cell in found["matrix"]) == 4
    assert found["outcomes"]["well"] > 0
    # Engines that write at the same moment exceed the bound by a block each until the next write.
    engines = 3
    assert 0 < len(list(tmp_path.glob("logs/kv-dram/*/???/*.kv"))) <= 200 + engines


def test_front_ends_are_killed_and_engines_change_their_role_and_all_tokens_are_right(
    tmp_path: Path,
) -> None:
    """Faults hit the only front end when its second request ends, and a DE at a release."""
    arguments = ("--components", "front end,DE", "--without", WITHOUT, "--faults", "2")
    campaign = (*CAMPAIGN[:-1], "116", *arguments, "--front-ends", "1")
    assert main([*campaign, "--out", str(tmp_path)]) == 0
    found = result(tmp_path)
    made = {(cell["component"], cell["fault"]) for cell in found["matrix"] if cell["made"]}
    assert made == {("front end", "SIGKILL"), ("DE", "other role")}
    assert found["outcomes"]["well"] > 0


def test_a_process_a_thread_or_a_port_of_an_engine_fails_and_all_tokens_are_right(
    tmp_path: Path,
) -> None:
    """A DE's thread hangs, a PE's process is killed, packets to two ports are dropped."""
    kinds = {Fault.KILL_ONE, Fault.HANG, Fault.DROP_CONTROL, Fault.DROP_HTTP}
    without = ",".join(fault.value for fault in Fault if fault not in kinds)
    arguments = ("--components", "PE,DE,connection", "--without", without, "--faults", "4")
    campaign = (*CAMPAIGN[:-1], "1457", *arguments, "--decode-tp", "2")
    assert main([*campaign, "--out", str(tmp_path)]) == 0
    found = result(tmp_path)
    made = {cell["fault"] for cell in found["matrix"] if cell["made"]}
    assert made == {kind.value for kind in kinds}
    parts = {part for cell in found["matrix"] for part in cell["parts"]}
    assert any(part.startswith("thread ") for part in parts)
    assert parts & {"first rank", "rank"}
    assert found["outcomes"]["well"] > 0
