"""A model directory appears complete or not at all, and is written once."""

from pathlib import Path

import pytest

from dualpath.core.errors import ConfigError
from dualpath.node.cache_directory import cache_directory
from dualpath_lab.models.prepared import STAMP_FILE, prepare, read_stamp

STAMP: dict[str, str | int] = {"model": "a", "version": 1}


def write_weights(directory: Path) -> None:
    (directory / "weights").write_text("1 2 3")


def never_called(directory: Path) -> None:
    raise AssertionError(f"{directory} was built again")


def test_a_model_is_built_once_and_found_afterwards(tmp_path):
    target = tmp_path / "cache" / "model"
    assert prepare(target, STAMP, write_weights) == target
    assert (target / "weights").read_text() == "1 2 3"
    assert read_stamp(target) == STAMP
    assert prepare(target, STAMP, never_called) == target


def test_others_may_read_what_was_written_for_its_user_alone(tmp_path):
    def write_private(directory: Path) -> None:
        (directory / "weights").touch(mode=0o600)

    target = prepare(tmp_path / "model", STAMP, write_private)
    (tmp_path / "any").touch()
    assert (target / "weights").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_changed_converter_replaces_the_whole_directory(tmp_path):
    target = tmp_path / "model"
    prepare(target, STAMP, write_weights)
    newer = {**STAMP, "version": 2}
    prepare(target, newer, lambda empty: (empty / "other").touch())
    assert sorted(file.name for file in target.iterdir()) == [STAMP_FILE, "other"]
    assert read_stamp(target) == newer


def test_an_empty_directory_may_be_filled(tmp_path):
    prepare(tmp_path / "model", STAMP, write_weights)
    (tmp_path / "empty").mkdir()
    prepare(tmp_path / "empty", STAMP, write_weights)
    assert read_stamp(tmp_path / "empty") == STAMP


def test_a_failed_build_leaves_no_files(tmp_path):
    def fail_half_way(directory: Path) -> None:
        write_weights(directory)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        prepare(tmp_path / "model", STAMP, fail_half_way)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rebuild_preserves_the_old_model(tmp_path):
    target = tmp_path / "model"
    prepare(target, STAMP, write_weights)

    def fail(directory: Path) -> None:
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        prepare(target, {**STAMP, "version": 2}, fail)
    assert read_stamp(target) == STAMP
    assert (target / "weights").exists()


def test_of_two_processes_the_slower_uses_the_model_of_the_faster(tmp_path):
    target = tmp_path / "model"

    def overtaken(directory: Path) -> None:
        write_weights(directory)
        prepare(target, STAMP, lambda empty: (empty / "faster").touch())

    assert prepare(target, STAMP, overtaken) == target
    assert sorted(file.name for file in target.iterdir()) == [STAMP_FILE, "faster"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_with_foreign_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="was not created by dualpath"):
        prepare(tmp_path, STAMP, never_called)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_existing_file_is_named(tmp_path):
    (tmp_path / "model").write_text("not a directory")
    with pytest.raises(ConfigError, match=str(tmp_path / "model")):
        prepare(tmp_path / "model", STAMP, never_called)


def test_a_place_that_cannot_be_written_is_named_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write a model to .*choose one with --out"):
        prepare(tmp_path / "file" / "model", STAMP, never_called)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DUALPATH_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/dualpath")),
        ({"DUALPATH_CACHE": "", "XDG_CACHE_HOME": ""}, Path.home() / ".cache" / "dualpath"),
    ],
)
def test_the_cache_directory_follows_the_environment(environment, expected):
    assert cache_directory(environment) == expected
