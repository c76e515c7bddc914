"""An engine requests permission for AMX tile registers before its first forward pass."""

import logging

import pytest

pytest.importorskip("vllm")

import torch

from dualpath.vllm.kernel_patches import enable_amx_tiles


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Number of permission requests to the operating system, on a CPU with AMX."""
    times: list[str] = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)

    def lend() -> bool:
        times.append("once")
        return True

    monkeypatch.setattr(torch.cpu, "_init_amx", lend)
    return times


def test_tiles_are_requested_if_the_cpu_has_them(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_amx_tiles(torch.device("cpu"))
    assert asked == ["once"]
    enable_amx_tiles(torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    enable_amx_tiles(torch.device("cpu"))
    assert asked == ["once"]


def test_refused_tiles_are_logged_with_the_remedy(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    with caplog.at_level(logging.WARNING):
        enable_amx_tiles(torch.device("cpu"))
    assert "--dtype float32" in caplog.text
