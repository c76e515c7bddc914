"""Ports for processes that are about to start."""

import socket
from pathlib import Path

import pytest

from dualpath.core.errors import ConfigError
from dualpath.launch import ports
from dualpath.launch.ports import LOOPBACK, claim_port


def connections_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lowest: int) -> None:
    """Emulate a machine with ephemeral ports from ``lowest`` on."""
    stated = tmp_path / "ip_local_port_range"
    stated.write_text(f"{lowest}\t60999\n")
    monkeypatch.setattr(ports, "_RANGE_OF_CONNECTIONS", stated)


def test_ports_are_distinct_and_neither_ephemeral_nor_in_the_kv_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connections_from(monkeypatch, tmp_path, 32768)
    claimed = [claim_port() for _ in range(100)]
    assert len(set(claimed)) == 100
    assert all(10240 <= port < 20480 for port in claimed)


def test_a_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = claim_port()
    monkeypatch.setattr(ports, "_LOWEST", first)
    connections_from(monkeypatch, tmp_path, first + 2)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, first))
        taken.listen()
        assert [claim_port() for _ in range(3)] == [first + 1] * 3


def test_any_free_port_is_used_if_all_ports_are_ephemeral(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connections_from(monkeypatch, tmp_path, 1024)
    assert claim_port() > 0


def test_a_requested_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another with --port"):
            claim_port(port=taken.getsockname()[1])
