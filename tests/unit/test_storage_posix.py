"""Behaviour specific to file systems: crashes, full disks, foreign directories, stale files."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.stored_runs import read_run, stored_head

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage import posix
from dualpath.storage.posix import PosixStorage

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=8192)
NAMESPACE = StoreNamespace("org/tiny model", "float32", "NHD", GEOMETRY)
KEYS = block_keys(range(16), 4)
DATA = [memoryview(bytes([i]) * GEOMETRY.full_block_bytes) for i in range(4)]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[PosixStorage]:
    opened = PosixStorage(tmp_path, NAMESPACE)
    yield opened
    opened.close()


def visible_files(storage: PosixStorage) -> list[Path]:
    return sorted(storage.path.rglob("*.kv"))


def temporary_files(storage: PosixStorage) -> list[Path]:
    return list((storage.path / "tmp").iterdir())


def test_files_have_the_documented_paths(storage: PosixStorage, tmp_path: Path) -> None:
    storage.write(KEYS[:1], DATA[:1])
    name = KEYS[0].hex()
    folder = f"org-tiny-model_{NAMESPACE.digest()}"
    path = tmp_path / folder / name[:3] / name[3:5] / f"{name}.kv"
    assert visible_files(storage) == [path]
    assert path.stat().st_size == 4096 + GEOMETRY.full_block_bytes
    assert storage.block_path(KEYS[0]) == path
    found = msgspec.json.decode((tmp_path / folder / "namespace.json").read_bytes())
    assert found["model"] == "org/tiny model"


def test_blocks_outlive_the_storage_object(tmp_path: Path) -> None:
    with_writer = PosixStorage(tmp_path, NAMESPACE)
    with_writer.write(KEYS, DATA)
    with_writer.close()
    reopened = PosixStorage(tmp_path, NAMESPACE)
    into = [memoryview(bytearray(GEOMETRY.full_block_bytes)) for _ in KEYS]
    assert read_run(reopened, KEYS, into).good_blocks == 4
    assert into == DATA


def test_two_storages_of_one_process_write_side_by_side(
    storage: PosixStorage, tmp_path: Path
) -> None:
    second = PosixStorage(tmp_path, NAMESPACE)
    first_name = storage._directory.temporary_path()
    assert second._directory.temporary_path() != first_name
    second.close()


def test_namespaces_are_separate(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path, NAMESPACE)
    storage.write(KEYS, DATA)
    other = PosixStorage(tmp_path, msgspec.structs.replace(NAMESPACE, dtype="bfloat16"))
    assert stored_head(other, KEYS) == 0


def test_a_directory_of_another_namespace_is_refused(storage: PosixStorage, tmp_path: Path) -> None:
    foreign = msgspec.structs.replace(NAMESPACE, model="another")
    (storage.path / "namespace.json").write_bytes(msgspec.json.encode(foreign))
    with pytest.raises(ConfigError, match=r"another.*give another storage directory"):
        PosixStorage(tmp_path, NAMESPACE)


def test_an_unreadable_namespace_file_is_refused(storage: PosixStorage, tmp_path: Path) -> None:
    (storage.path / "namespace.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"namespace\.json"):
        PosixStorage(tmp_path, NAMESPACE)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{", b"[" * 100_000, b"null"])
def test_any_content_of_a_namespace_file_is_refused_with_an_error(
    storage: PosixStorage, tmp_path: Path, content: bytes
) -> None:
    (storage.path / "namespace.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"namespace\.json.*move .* away"):
        PosixStorage(tmp_path, NAMESPACE)


def test_a_namespace_file_that_is_not_a_file_is_refused(
    storage: PosixStorage, tmp_path: Path
) -> None:
    (storage.path / "namespace.json").unlink()
    os.mkfifo(storage.path / "namespace.json")
    with pytest.raises(ConfigError, match=r"cannot be used \(not a file\)"):
        PosixStorage(tmp_path, NAMESPACE)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize("direct_io", [False, "auto"])
@pytest.mark.parametrize("make", [_fifo, _folder, _link_to_nothing])
def test_a_block_name_that_is_not_a_file_does_not_block_and_is_replaced(
    tmp_path: Path, make: Callable[[Path], None], direct_io: posix.DirectIo
) -> None:
    storage = PosixStorage(tmp_path, NAMESPACE, direct_io=direct_io)
    path = storage.block_path(KEYS[0])
    path.parent.mkdir(parents=True)
    make(path)
    assert not storage.is_stored(KEYS[0])
    into = memoryview(bytearray(GEOMETRY.full_block_bytes))
    assert storage.read(KEYS[0], into).reason in ("not a file", "missing")
    if not os.path.lexists(path):
        make(path)
    assert storage.write(KEYS[:1], DATA[:1]).new == 1
    assert storage.read(KEYS[0], into).is_good
    assert into == DATA[0]


def test_a_non_empty_folder_at_a_blocks_name_is_not_removed(
    storage: PosixStorage,
) -> None:
    path = storage.block_path(KEYS[0])
    path.mkdir(parents=True)
    (path / "mine").write_bytes(b"")
    assert storage.write(KEYS[:1], DATA[:1]).new == 0
    assert (path / "mine").exists()
    assert temporary_files(storage) == []
    assert storage.write(KEYS[1:], DATA[1:]).new == 3


def test_kv_is_for_the_user_and_the_group_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        storage = PosixStorage(tmp_path, NAMESPACE)
        storage.write(KEYS[:1], DATA[:1])
    finally:
        os.umask(before)
    for path in (storage.path, *storage.path.rglob("*.kv"), storage.path / "namespace.json"):
        assert path.stat().st_mode & 0o007 == 0, path


def test_foreign_names_under_tmp_are_not_removed(storage: PosixStorage, tmp_path: Path) -> None:
    host = storage._directory._writer.rpartition("-")[0]
    names = [f"{host}-{10**30}-1", f"{host}-\u00b2-1", "x", f"{host}--1"]
    for name in names:
        (storage.path / "tmp" / name).write_bytes(b"")
    folder = storage.path / "tmp" / f"{host}-{2**31 - 1}-1"
    folder.mkdir()
    PosixStorage(tmp_path, NAMESPACE)
    assert {path.name for path in temporary_files(storage)} == {*names, folder.name}


def test_an_unusable_root_is_refused_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for root in (file, file / "below", Path("/proc/dualpath")):
        with pytest.raises(ConfigError, match=r"cannot be used.*writable directory"):
            PosixStorage(root, NAMESPACE)


def test_a_device_that_refuses_a_write_leaves_earlier_blocks_whole(storage: PosixStorage) -> None:
    storage.write(KEYS[:1], DATA[:1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(StorageError, match=r"refused.*bytes are free"):
            storage.write(KEYS, DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stored_head(storage, KEYS) == 1
    assert temporary_files(storage) == []
    assert storage.write(KEYS, DATA).new == 3


def test_a_look_up_that_fails_raises(storage: PosixStorage) -> None:
    path = storage.block_path(KEYS[0])
    path.parent.parent.mkdir()
    path.parent.symlink_to(path.parent)
    with pytest.raises(StorageError, match=r"cannot check whether .*check the file system"):
        storage.is_stored(KEYS[0])


def test_a_namespace_removed_during_writes_is_created_again(storage: PosixStorage) -> None:
    storage.write(KEYS[:1], DATA[:1])
    shutil.rmtree(storage.path)
    assert stored_head(storage, KEYS) == 0
    assert storage.write(KEYS, DATA).new == len(KEYS)
    assert stored_head(storage, KEYS) == len(KEYS)
    assert (storage.path / "namespace.json").exists()


def test_a_lost_root_is_not_created_again_and_works_when_it_is_back(tmp_path: Path) -> None:
    root, away = tmp_path / "mount", tmp_path / "away"
    storage = PosixStorage(root, NAMESPACE)
    root.rename(away)
    with pytest.raises(StorageError, match="refused"):
        storage.write(KEYS[:1], DATA[:1])
    assert not root.exists()
    away.rename(root)
    assert storage.write(KEYS[:1], DATA[:1]).new == 1


def test_another_file_system_under_the_roots_name_is_not_filled(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(storage.path)
    monkeypatch.setattr(storage._directory, "_device", -1)
    with pytest.raises(StorageError, match="the storage is not mounted any more"):
        storage.write(KEYS[:1], DATA[:1])
    assert not storage.path.exists()


def test_a_writer_killed_before_the_link_leaves_nothing_visible(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from pathlib import Path
from dualpath.storage import posix
from tests.unit.test_storage_posix import DATA, KEYS, NAMESPACE
storage = posix.PosixStorage({str(tmp_path)!r}, NAMESPACE)
storage.write(KEYS[:1], DATA[:1])
storage._directory.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
storage.write(KEYS[1:], DATA[1:])
"""
    source = Path(posix.__file__).parents[2]
    repository = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{source}:{repository}"}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert killed.returncode == -9
    assert len(list(tmp_path.rglob("tmp/*"))) == 1

    survivor = PosixStorage(tmp_path, NAMESPACE)

    assert temporary_files(survivor) == []
    assert stored_head(survivor, KEYS) == 1
    assert survivor.write(KEYS, DATA).new == 3


def test_temporary_files_of_live_and_foreign_writers_are_not_removed(
    storage: PosixStorage, tmp_path: Path
) -> None:
    mine = Path(storage._directory.temporary_path())
    foreign = storage.path / "tmp" / "otherhost-1-999999-0"
    for path in (mine, foreign):
        path.write_bytes(b"half")
    PosixStorage(tmp_path, NAMESPACE)
    assert sorted(temporary_files(storage)) == sorted([mine, foreign])


def test_without_hard_links_a_block_still_appears_whole(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_hard_links(source: str, target: str) -> None:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_hard_links)
    assert storage.write(KEYS, DATA).new == 4
    assert storage.write(KEYS, DATA).new == 0
    assert temporary_files(storage) == []


def test_a_temporary_file_that_could_not_be_removed_is_removed_later(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", refusing)
        assert storage.write(KEYS[:1], DATA[:1]).new == 1
        broken.setattr(os, "write", refusing)
        with pytest.raises(StorageError, match="Input/output error"):
            storage.write(KEYS[1:2], DATA[1:2])
    assert stored_head(storage, KEYS) == 1
    assert len(temporary_files(storage)) == 2
    assert storage.write(KEYS, DATA).new == 3
    assert temporary_files(storage) == []


def test_an_unknown_state_of_a_block_leaves_no_temporary_file(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine wrote the block meanwhile, and the disk fails when this one checks."""
    real_stat, failing = os.stat, [False]

    def taken(*_: object) -> None:
        failing[0] = True
        raise FileExistsError(17, "File exists")

    def stat(path: str, *rest: object, **more: object) -> os.stat_result:
        if failing[0] and str(path).endswith(".kv"):
            raise OSError(5, "Input/output error")
        return real_stat(path, *rest, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as broken:
        broken.setattr(os, "link", taken)
        broken.setattr(os, "stat", stat)
        with pytest.raises(StorageError, match="cannot check whether"):
            storage.write(KEYS[:1], DATA[:1])
    assert temporary_files(storage) == []


def test_a_read_error_ends_the_run_and_leaves_the_file(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write(KEYS, DATA)

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    into = [memoryview(bytearray(GEOMETRY.full_block_bytes)) for _ in KEYS]
    outcome = read_run(storage, KEYS, into)
    assert (outcome.good_blocks, outcome.reason) == (0, "read error: Input/output error")
    assert stored_head(storage, KEYS) == 4


def test_a_file_system_without_direct_io_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_without_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_without_direct)
    with pytest.raises(ConfigError, match="O_DIRECT"):
        PosixStorage(tmp_path, NAMESPACE, direct_io=True)
    storage = PosixStorage(tmp_path, NAMESPACE, direct_io="auto")
    assert not storage.uses_direct_io
    storage.write(KEYS, DATA)
    into = [memoryview(bytearray(GEOMETRY.full_block_bytes)) for _ in KEYS]
    assert read_run(storage, KEYS, into).good_blocks == 4
