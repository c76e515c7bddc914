"""Steps are retried while the kernel reports a device as busy; other errors end them."""

from pathlib import Path

import pytest

from dualpath.core.errors import ConfigError
from dualpath_lab.nodes.runner import Runner
from dualpath_lab.nodes.steps import AttachLoop

ATTACH = AttachLoop("/dev/loop-of-nobody", "an.img")


def losetup_says(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> Path:
    """Put a `losetup` first that fails with ``what`` until it is called a third time."""
    calls, tool = folder / "calls", folder / "losetup"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        f'test "$(wc -l < {calls})" -ge 3 || {{ echo "{what}" >&2; exit 1; }}\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return calls


def test_attaching_to_a_busy_loop_device_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = losetup_says(tmp_path, monkeypatch, "Device or resource busy")
    Runner().do(ATTACH)
    assert calls.read_text().splitlines() == ["/dev/loop-of-nobody an.img"] * 3


def test_other_messages_of_losetup_are_errors_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = losetup_says(tmp_path, monkeypatch, "Permission denied")
    with pytest.raises(ConfigError, match="Permission denied"):
        Runner().do(ATTACH)
    assert len(calls.read_text().splitlines()) == 1
