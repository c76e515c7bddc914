"""Tests leave nothing in the user's cache but a directory of their own."""

from pathlib import Path

import pytest
from tests.own_cache import use_own_cache

from dualpath.node.cache_directory import cache_directory
from dualpath_lab.models.prepared import STAMP_FILE, read_stamp


def test_the_users_models_are_used_and_costs_of_earlier_runs_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DUALPATH_CACHE", str(tmp_path))
    for folder in ("model", "weights"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / STAMP_FILE).write_text('{"converter": 1}')
    (tmp_path / "costs-1.json").write_text("{}")
    own = use_own_cache()
    assert cache_directory() == own == tmp_path / "tests"
    assert [made.name for made in own.iterdir()] == ["model"]
    assert read_stamp(own / "model") == {"converter": 1}
    (own / "costs-2.json").write_text("{}")
    monkeypatch.setenv("DUALPATH_CACHE", str(tmp_path))
    assert use_own_cache() == use_own_cache() == own
    assert [made.name for made in own.iterdir()] == ["model"]
    assert (tmp_path / "costs-1.json").exists()
