"""What a lab may be asked to be."""

from pathlib import Path
from typing import Any

import pytest

from dualpath.cli import main
from dualpath.core.errors import ConfigError
from dualpath.laboratory.lab.settings import LabSettings, Shaping, load_settings, parse_shape


def test_a_file_is_changed_by_flags(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text('prefill = 2\ndecode = 4\nsnic_bytes_per_s = 100e6\nshaping = "root"\n')
    settings = load_settings(str(file), {"decode": 1})
    assert settings.shape == "2P1D"
    assert settings.snic_bytes_per_s == 100e6
    assert settings.shaping is Shaping.ROOT


def test_without_a_rate_of_its_own_the_loopback_leg_is_as_fast_as_the_cnic() -> None:
    assert LabSettings(cnic_bytes_per_s=2e8).loopback_rate_bytes_per_s == 2e8
    assert LabSettings(loopback_bytes_per_s=3e8).loopback_rate_bytes_per_s == 3e8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "Lab"}, "name is 'Lab'"),
        ({"name": "a-b"}, "small letters and digits"),
        ({"name": "../x"}, "small letters and digits"),
        ({"prefill": 0}, "prefill is 0, must be between 1"),
        ({"decode": 64}, "decode is 64"),
        ({"prefill": 40, "decode": 40}, "40P40D has 80 nodes, must be at most 64"),
        ({"cnic_bytes_per_s": 1.0}, "cnic_bytes_per_s is 1, must be between"),
        ({"snic_bytes_per_s": float("nan")}, "snic_bytes_per_s is nan"),
        ({"loopback_bytes_per_s": -1.0}, "loopback_bytes_per_s is -1"),
        ({"image_bytes": 5}, "image_bytes is 5"),
        ({"mtu_bytes": 100}, "mtu_bytes is 100"),
        ({"ratio": "1:99"}, "ratio 1:99"),
        ({"kv_ports": "1-2"}, "KV ports 1-2"),
    ],
)
def test_settings_no_lab_can_have_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings("", changes)


def test_unknown_keys_and_wrong_types_name_what_is_known(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text("nodes = 3\n")
    with pytest.raises(ConfigError, match="known keys are name, prefill, decode"):
        load_settings(str(file))
    with pytest.raises(ConfigError, match="prefill"):
        load_settings("", {"prefill": "two"})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(str(tmp_path / "none.toml"))


def test_shapes_are_written_as_in_the_paper() -> None:
    assert parse_shape("2P4D") == (2, 4)
    for text in ("2P", "4", "P4D", "1D2P", "-1P2D", ""):
        with pytest.raises(ConfigError, match="1P2D"):
            parse_shape(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--nodes", "0P1D"], "prefill is 0"),
        (["up", "--name", "X"], "name is 'X'"),
        (["run", "--modes", "basic,fast"], "mode 'fast'"),
        (["run", "--turns", "0"], "turns is 0"),
        (["bench", "jct", "--nodes", "2P"], "nodes are '2P'"),
        (["status", "--name", "neverwas"], "no lab 'neverwas' is up"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main.main(["lab", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
