"""Valid and invalid settings of a lab."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualpath.cli import main
from dualpath.cli.settings import configuration
from dualpath.core.cluster import parse_nodes
from dualpath.core.errors import ConfigError
from dualpath_lab.cli import LAB, lab
from dualpath_lab.nodes.cluster import LabState
from dualpath_lab.nodes.machine import LabMachine, state_file
from dualpath_lab.nodes.settings import LabSettings, Shaping


def lab_settings(*words: str) -> LabSettings:
    """Parse the arguments of `dualpath lab up`."""
    parser = argparse.ArgumentParser()
    lab.add_parser(parser.add_subparsers())
    args = parser.parse_args(["lab", "up", *words])
    return configuration(args, lab.PARTS).settings(LAB, LabSettings)


def test_flags_override_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text('[lab]\nnodes = "2P4D"\nsnic_bytes_per_s = 100e6\nshaping = "root"\n')
    settings = lab_settings("--config", str(file), "--nodes", "2P1D")
    assert (settings.nodes, settings.prefill, settings.decode) == ("2P1D", 2, 1)
    assert settings.snic_bytes_per_s == 100e6
    assert settings.shaping is Shaping.ROOT


def test_by_default_the_loopback_has_the_rate_of_the_cnic() -> None:
    assert LabSettings(cnic_bytes_per_s=2e8).loopback_rate_bytes_per_s == 2e8
    assert LabSettings(loopback_bytes_per_s=3e8).loopback_rate_bytes_per_s == 3e8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Lab"}, "name is 'Lab'"),
        ({"name": "a-b"}, "lower-case letters and digits"),
        ({"name": "../x"}, "lower-case letters and digits"),
        ({"nodes": "0P1D"}, "nodes is '0P1D'; it must be at least one prefill"),
        ({"nodes": "1P64D"}, "nodes is 1P64D, 65 nodes"),
        ({"nodes": "40P40D"}, "40P40D, 80 nodes; it must be at most 64"),
        ({"cnic_bytes_per_s": 1.0}, "cnic_bytes_per_s is 1.0; it must be between 1MB and 12500MB"),
        ({"snic_bytes_per_s": float("nan")}, "snic_bytes_per_s is nan"),
        ({"loopback_bytes_per_s": -1.0}, "loopback_bytes_per_s is -1"),
        ({"image_bytes": 5}, "image_bytes is 5"),
        ({"mtu_bytes": 100}, "mtu_bytes is 100"),
        ({"ratio": "1:99"}, "ratio 1:99"),
        ({"kv_ports": "1-2"}, "KV ports 1-2"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LabSettings(**changes)


def test_unknown_keys_and_wrong_types_name_what_is_known(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text("[lab]\nnode = 3\n")
    with pytest.raises(ConfigError, match=r"did you mean nodes\?"):
        lab_settings("--config", str(file))
    with pytest.raises(ConfigError, match="--nodes is 'two'"):
        lab_settings("--nodes", "two")
    with pytest.raises(ConfigError, match="cannot be read"):
        lab_settings("--config", str(tmp_path / "none.toml"))


def test_nodes_are_written_as_in_the_paper() -> None:
    assert parse_nodes("2P4D") == (2, 4)
    for text in ("2P", "4", "P4D", "1D2P", "-1P2D", ""):
        with pytest.raises(ConfigError, match="1P2D"):
            parse_nodes(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "--nodes", "0P1D"], "--nodes is '0P1D'"),
        (["up", "--name", "X"], "--name is 'X'"),
        (["run", "--mode", "basic,fast"], "--mode is 'basic,fast'; it must be of basic, layerwise"),
        (["run", "--turns", "0"], "--turns is 0"),
        (["bench", "jct", "--nodes", "2P"], "--nodes is '2P'"),
        (["status", "--name", "neverwas"], "no lab 'neverwas' is up"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main.main(["lab", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_dry_run_refuses_a_second_lab_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dualpath_lab.nodes.cluster.lab_folder", lambda: tmp_path)
    settings = LabSettings(name="twice", shaping=Shaping.TOKEN_BUCKETS)
    machine = LabMachine(
        shaping=settings.shaping, folder=str(tmp_path), storage=str(tmp_path / "kv")
    )
    record = LabState(settings=settings, machine=machine, maker=1, maker_ticks=1, complete=True)
    words = ["lab", "up", "--dry-run", "--name", "twice", "--shaping", "token-buckets"]
    assert main.main(words) == 0
    assert capsys.readouterr().out
    state_file("twice", tmp_path).write_bytes(msgspec.json.encode(record))
    assert main.main(words) == 2
    assert "lab 'twice' is up" in capsys.readouterr().err
