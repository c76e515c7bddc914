"""A storage setting becomes the backend it names, or a clear refusal."""

from pathlib import Path

import pytest
from tests.stored_runs import read_run, stored_head

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.modes import Mode
from dualpath.storage.factory import open_storage
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.posix import LengthOnlyStorage, PosixStorage
from dualpath.storage.wrapping import ThrottledStorage

GEOMETRY = BlockGeometry.uniform(layers=1, block_tokens=1, layer_block_bytes=64)
NAMESPACE = StoreNamespace("m", "float32", "NHD", GEOMETRY)
KEYS = block_keys(range(3), 1)
DATA = [memoryview(bytes([i + 1]) * 64) for i in range(3)]


def test_paths_and_file_urls_are_directories(tmp_path: Path) -> None:
    for location in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        storage = open_storage(location, NAMESPACE)
        assert isinstance(storage, PosixStorage)
        assert storage.path.parent == tmp_path


def test_a_memory_name_is_one_storage_per_namespace() -> None:
    first = open_storage("memory://factory-test", NAMESPACE)
    assert open_storage("memory://factory-test", NAMESPACE) is first
    assert open_storage("memory://factory-other", NAMESPACE) is not first


def test_a_rate_wraps_the_backend(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, NAMESPACE, read_bytes_per_s=1e6)
    assert isinstance(storage, ThrottledStorage)
    assert isinstance(storage.inner, PosixStorage)


def test_oracle_stores_lengths_apart_from_blocks(tmp_path: Path) -> None:
    real = open_storage(tmp_path, NAMESPACE)
    oracle = open_storage(tmp_path, NAMESPACE, mode=Mode.ORACLE, read_bytes_per_s=1.0)
    assert isinstance(oracle, LengthOnlyStorage)
    oracle.write(KEYS, DATA)
    assert stored_head(real, KEYS) == 0
    assert stored_head(open_storage(tmp_path, NAMESPACE, mode=Mode.ORACLE), KEYS) == 3


def test_an_oracle_read_touches_nothing(tmp_path: Path) -> None:
    oracle = open_storage(tmp_path, NAMESPACE, mode=Mode.ORACLE)
    oracle.write(KEYS[:2], DATA[:2])
    into = [memoryview(bytearray(b"\x05" * 64)) for _ in KEYS]
    outcome = read_run(oracle, KEYS, into)
    assert (outcome.good_blocks, outcome.bytes_read, outcome.reason) == (2, 0, "missing")
    assert {bytes(view) for view in into} == {b"\x05" * 64}
    assert all(path.stat().st_size == 0 for path in tmp_path.rglob("*.length"))


def test_real_blocks_cannot_be_length_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="oracle"):
        LengthOnlyStorage(tmp_path, NAMESPACE)


@pytest.mark.parametrize("location", ["gs://bucket", "s3://", "file://", "memory://", ""])
def test_unknown_locations_are_refused(location: str) -> None:
    with pytest.raises(ConfigError, match="s3://BUCKET/PREFIX"):
        open_storage(location, NAMESPACE)


@pytest.mark.parametrize(
    ("location", "instead"),
    [
        ("nixl+posix:///mnt/kv", "file:///mnt/kv"),
        ("nixl+hf3fs:///mnt/kv", "file:///mnt/kv"),
        ("nixl+obj://bucket/kv?region=x", r"s3://bucket/kv\?region=x"),
    ],
)
def test_removed_schemes_name_the_one_with_the_same_blocks(location: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"no longer supported; give {instead}, which"):
        open_storage(location, NAMESPACE)


def test_memory_has_no_oracle_mode() -> None:
    with pytest.raises(ConfigError, match="directory"):
        open_storage("memory://x", NAMESPACE, mode=Mode.ORACLE)


def test_memory_storage_models_full_and_failing_devices() -> None:
    def fail(key: bytes) -> None:
        raise OSError("device gone")

    storage = MemoryStorage(NAMESPACE, capacity_blocks=2)
    with pytest.raises(StorageError, match="full at 2"):
        storage.write(KEYS, DATA)
    assert stored_head(storage, KEYS) == 2
    storage.before_read = fail
    outcome = read_run(storage, KEYS[:1], [memoryview(bytearray(64))])
    assert outcome.reason == "read error: device gone"
    storage.before_read = None
    storage.drop(KEYS[0])
    assert stored_head(storage, KEYS) == 0
