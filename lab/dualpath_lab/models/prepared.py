"""Creates model directories atomically and only once.

A directory is built under a temporary name in the same folder and renamed when complete, so that
after a crash no engine can load an incomplete model. A stamp file in it contains its source and the
version of its converter; if the stamp differs, the directory is created again.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dualpath.core.errors import ConfigError
from dualpath.node.cache_directory import cache_directory, private_cache_directory

STAMP_FILE = "dualpath-model.json"

Stamp = Mapping[str, str | int]


def prepare(directory: Path, stamp: Stamp, build: Callable[[Path], None]) -> Path:
    """Return `directory`, created by `build` unless it already has `stamp`.

    `build` is called with an empty directory to fill. If several processes prepare the same
    directory at the same time, all build it and one result is used.

    Raises:
        ConfigError: `directory` has other contents, or cannot be written.
    """
    if read_stamp(directory) == dict(stamp):
        return directory
    try:
        _refuse_foreign(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise _cannot_write(directory, error) from error
    try:
        complete = temporary / "new"
        complete.mkdir()
        build(complete)
        (complete / STAMP_FILE).write_text(json.dumps(stamp, indent=2) + "\n")
        _share_as(complete / STAMP_FILE, complete)
        _put_in_place(complete, directory, stamp, set_aside=temporary / "old")
    except OSError as error:
        raise _cannot_write(directory, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def prepare_random(
    name: str, generator_version: int, directory: Path | None, build: Callable[[Path], None]
) -> Path:
    """Return the folder of a model with random weights, created by `build` unless it exists.

    `generator_version` must be increased when the files that `build` writes change. The default
    for `directory` is `name` in `private_cache_directory()`.

    Raises:
        ConfigError: see `prepare`.
    """
    stamp: Stamp = {"model": name, "generator_version": generator_version}
    return prepare(directory or private_cache_directory() / name, stamp, build)


def read_stamp(directory: Path) -> dict[str, str | int] | None:
    """Return the stamp of the model in `directory`, None if there is no readable stamp."""
    try:
        stamp = json.loads((directory / STAMP_FILE).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _share_as(example: Path, folder: Path) -> None:
    """Set the permissions of all files to those of `example`; safetensors sets user-only ones."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(example.stat().st_mode)


def _refuse_foreign(directory: Path) -> None:
    if directory.is_dir():
        foreign = any(directory.iterdir()) and read_stamp(directory) is None
    else:
        foreign = directory.exists()
    if foreign:
        raise ConfigError(
            f"{directory} exists and was not created by dualpath (it has no {STAMP_FILE}); "
            "a model is only written to a new or empty directory: remove it or choose another"
        )


def _put_in_place(complete: Path, directory: Path, stamp: Stamp, set_aside: Path) -> None:
    # Another process may have created the same model since the first check, and an engine may
    # already be loading it, so that one is not replaced.
    if read_stamp(directory) == dict(stamp):
        return
    if directory.exists():
        directory.rename(set_aside)
    try:
        complete.rename(directory)
    except OSError:
        if read_stamp(directory) != dict(stamp):
            raise


def _cannot_write(directory: Path, error: OSError) -> ConfigError:
    by = "DUALPATH_CACHE" if directory.is_relative_to(cache_directory()) else "--out"
    return ConfigError(
        f"cannot write a model to {directory}: {error.strerror or error}; "
        f"it needs a writable directory with 400 MB free: choose one with {by}"
    )
