"""DRAM shared by the engines of a node: bounded, consistent after crashes, optional."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from dualpath.core.blocks import (
    UNKNOWN_ORIGIN,
    BlockGeometry,
    BlockKey,
    BlockOrigin,
    Protection,
    StoreNamespace,
)
from dualpath.core.errors import ConfigError
from dualpath.storage.contract import DeclinedError, WriteOutcome
from dualpath.storage.memory import MemoryStorage
from dualpath.storage.node_dram import NodeDram, NodeDramStorage
from dualpath.storage.sealed_blocks import KeyRing

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=2048)
NAMESPACE = StoreNamespace("org/tiny model", "float32", "NHD", GEOMETRY)
#: Of a file in pages: header and payload.
FILE_BYTES = 4096 + GEOMETRY.full_block_bytes


def key_of(number: int, first_byte: int = 0) -> BlockKey:
    return bytes([first_byte]) + number.to_bytes(31)


def content_of(key: BlockKey) -> bytes:
    return key * (GEOMETRY.full_block_bytes // len(key))


def block_of(key: BlockKey) -> memoryview:
    return memoryview(content_of(key))


def found(dram: NodeDram, key: BlockKey) -> bytes | None:
    into = memoryview(bytearray(GEOMETRY.full_block_bytes))
    return None if dram.read(key, into, whole=True) is None else bytes(into)


def lying(root: Path) -> set[str]:
    return {path.stem for path in root.rglob("*.kv")}


def used_at(dram: NodeDram, key: BlockKey, time_ns: int) -> None:
    os.utime(dram.files.block_path(key), ns=(time_ns, time_ns))


def test_a_block_added_by_one_engine_is_found_by_another(tmp_path: Path) -> None:
    one, other = (NodeDram(tmp_path, NAMESPACE, 8 * FILE_BYTES) for _ in range(2))
    key = key_of(1)
    assert found(other, key) is None
    one.add(key, block_of(key))
    one.close()
    assert found(other, key) == content_of(key)


def test_a_block_read_from_storage_by_one_engine_is_a_hit_for_all(tmp_path: Path) -> None:
    storage, key = MemoryStorage(NAMESPACE), key_of(1)
    storage.write([key], [block_of(key)])
    one, other = (
        NodeDramStorage(storage, NodeDram(tmp_path, NAMESPACE, 8 * FILE_BYTES)) for _ in range(2)
    )
    into = memoryview(bytearray(GEOMETRY.full_block_bytes))
    first, second = one.read(key, into), other.read(key, into)
    assert (first.storage_bytes, first.from_dram) == (GEOMETRY.full_block_bytes, False)
    assert (second.storage_bytes, second.from_dram) == (0, True)
    assert into == content_of(key)


def test_a_block_read_without_its_window_layers_is_added_when_it_is_read_whole(
    tmp_path: Path,
) -> None:
    geometry = BlockGeometry(4, ((2048,), (2048,)), (0, 6))
    namespace = msgspec.structs.replace(NAMESPACE, geometry=geometry)
    storage, key = MemoryStorage(namespace), key_of(1)
    storage.write([key], [block_of(key)])
    behind = NodeDramStorage(storage, NodeDram(tmp_path, namespace, 8 * FILE_BYTES))
    into = memoryview(bytearray(geometry.full_block_bytes))
    assert behind.read(key, into, whole=False).storage_bytes == 2048
    assert lying(tmp_path) == set()
    assert behind.read(key, into).storage_bytes == geometry.full_block_bytes
    assert lying(tmp_path) == {key.hex()}
    again = memoryview(bytearray(geometry.full_block_bytes))
    assert behind.read(key, again).from_dram
    assert again == content_of(key)


def test_declined_and_missing_blocks_are_not_cached_in_dram(tmp_path: Path) -> None:
    class Declines(MemoryStorage):
        def write(
            self,
            keys: Sequence[BlockKey],
            sources: Sequence[memoryview],
            origin: BlockOrigin = UNKNOWN_ORIGIN,
        ) -> WriteOutcome:
            raise DeclinedError("quota", super().write(keys[:1], sources[:1], origin))

    storage = NodeDramStorage(Declines(NAMESPACE), NodeDram(tmp_path, NAMESPACE, 8 * FILE_BYTES))
    keys = [key_of(number) for number in range(3)]
    with pytest.raises(DeclinedError):
        storage.write(keys, [block_of(key) for key in keys])
    assert lying(tmp_path) == {keys[0].hex()}
    assert not storage.is_stored(keys[1])


def test_the_least_recently_used_block_is_evicted(tmp_path: Path) -> None:
    dram = NodeDram(tmp_path, NAMESPACE, 3 * FILE_BYTES)
    keys = [key_of(number, first_byte=number * 60) for number in range(4)]
    for number, key in enumerate(keys[:3]):
        dram.add(key, block_of(key))
        used_at(dram, key, number)
    found(dram, keys[0])
    dram.add(keys[3], block_of(keys[3]))
    assert lying(tmp_path) == {keys[number].hex() for number in (0, 2, 3)}
    assert dram.evicted == 1


def test_after_the_clock_was_stepped_back_files_of_before_are_evicted_first(
    tmp_path: Path,
) -> None:
    """Their times are in the future; those that are used again count as used now."""
    dram = NodeDram(tmp_path, NAMESPACE, 3 * FILE_BYTES)
    keys = [key_of(number) for number in range(6)]
    day_ns = 86_400 * 10**9
    for number, key in enumerate(keys[:3]):
        dram.add(key, block_of(key))
        used_at(dram, key, time.time_ns() + (1 + number) * day_ns)
    found(dram, keys[0])
    for key in keys[3:5]:
        dram.add(key, block_of(key))
    assert lying(tmp_path) == {keys[number].hex() for number in (0, 3, 4)}
    dram.add(keys[5], block_of(keys[5]))
    assert lying(tmp_path) == {keys[number].hex() for number in (3, 4, 5)}


def test_adding_a_block_again_counts_as_a_use(tmp_path: Path) -> None:
    dram = NodeDram(tmp_path, NAMESPACE, 2 * FILE_BYTES)
    keys = [key_of(number) for number in range(3)]
    for number, key in enumerate(keys[:2]):
        dram.add(key, block_of(key))
        used_at(dram, key, number)
    dram.add(keys[0], block_of(keys[0]))
    dram.add(keys[2], block_of(keys[2]))
    assert lying(tmp_path) == {keys[0].hex(), keys[2].hex()}


def test_all_sets_together_hold_no_more_than_the_bound(tmp_path: Path) -> None:
    blocks = 64
    drams = [NodeDram(tmp_path, NAMESPACE, blocks * FILE_BYTES) for _ in range(2)]
    for number in range(4 * blocks):
        # Two sets of equal size: of the lower and of the upper half of all keys.
        key = key_of(number, first_byte=0x80 if number % 2 else 0)
        drams[number % 3 % 2].add(key, block_of(key))
    assert len(lying(tmp_path)) == blocks
    assert sum(dram.evicted for dram in drams) == 3 * blocks


def test_blocks_of_an_unused_model_are_evicted(tmp_path: Path) -> None:
    former = NodeDram(tmp_path, msgspec.structs.replace(NAMESPACE, model="old"), 2 * FILE_BYTES)
    for number in range(2):
        former.add(key_of(number), block_of(key_of(number)))
        used_at(former, key_of(number), number)
    dram = NodeDram(tmp_path, NAMESPACE, 2 * FILE_BYTES)
    dram.add(key_of(2), block_of(key_of(2)))
    assert found(former, key_of(0)) is None
    assert found(former, key_of(1)) is not None


@pytest.mark.parametrize("step", ["write", "link", "unlink"])
def test_an_engine_killed_while_it_adds_leaves_a_whole_block_or_none(
    tmp_path: Path, step: str
) -> None:
    ending = subprocess.run(
        [sys.executable, "-c", _KILLED_AT.format(step=step, root=str(tmp_path))], check=False
    )
    assert ending.returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("tmp/*"))) == 1
    dram = NodeDram(tmp_path, NAMESPACE, 8 * FILE_BYTES)
    assert list(tmp_path.rglob("tmp/*")) == []
    assert found(dram, key_of(1)) == (content_of(key_of(1)) if step == "unlink" else None)
    dram.add(key_of(1), block_of(key_of(1)))
    assert found(dram, key_of(1)) == content_of(key_of(1))


_KILLED_AT = """
import os, signal
from pathlib import Path
from tests.unit.test_storage_node_dram import FILE_BYTES, NAMESPACE, NodeDram, block_of, key_of

dram = NodeDram(Path("{root}"), NAMESPACE, 8 * FILE_BYTES)
os.{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
dram.add(key_of(1), block_of(key_of(1)))
"""


def test_a_corrupt_block_is_not_served_and_is_cached_again(tmp_path: Path) -> None:
    dram, key = NodeDram(tmp_path, NAMESPACE, 8 * FILE_BYTES), key_of(1)
    dram.add(key, block_of(key))
    path = dram.files.block_path(key)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert found(dram, key) is None
    dram.add(key, block_of(key))
    assert found(dram, key) == content_of(key)


def before_and_after_a_new_key(root: Path) -> list[NodeDram]:
    """Return two engines' views of one directory; each can open only its own blocks."""
    sealed = msgspec.structs.replace(NAMESPACE, protection=Protection.ENCRYPTED)
    return [
        NodeDram(root, sealed, 8 * FILE_BYTES, keys=KeyRing(text * 4, "a test"))
        for text in ("0123456789abcdef", "fedcba9876543210")
    ]


def test_blocks_sealed_with_an_old_key_are_evicted(
    tmp_path: Path,
) -> None:
    former, present = before_and_after_a_new_key(tmp_path)
    key = key_of(1)
    former.add(key, block_of(key))
    assert content_of(key)[:64] not in former.files.block_path(key).read_bytes()
    assert found(present, key) is None
    present.add(key, block_of(key))
    assert found(present, key) == content_of(key)


def test_an_unreadable_block_that_cannot_be_removed_costs_storage_reads_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, present = before_and_after_a_new_key(tmp_path)
    key = key_of(1)
    former.add(key, block_of(key))

    def refuse(path: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    with caplog.at_level(logging.WARNING):
        assert [found(present, key) for _ in range(2)] == [None, None]
    assert caplog.text.count("cannot remove an unreadable block") == 1


@pytest.mark.parametrize("removed", ["the namespace", "the directory", "both, made again empty"])
def test_a_directory_removed_under_engines_is_created_again(tmp_path: Path, removed: str) -> None:
    root = tmp_path / "dram"
    one, other = (NodeDram(root, NAMESPACE, 8 * FILE_BYTES) for _ in range(2))
    one.add(key_of(1), block_of(key_of(1)))
    shutil.rmtree(one.files.path if removed == "the namespace" else root)
    if removed == "both, made again empty":
        root.mkdir()
    assert found(other, key_of(1)) is None
    for number in (2, 3):
        one.add(key_of(number), block_of(key_of(number)))
        assert found(other, key_of(number)) == content_of(key_of(number))
    assert root.stat().st_mode & 0o077 == 0 or removed == "both, made again empty"


def test_a_directory_that_cannot_be_created_again_costs_storage_reads_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, storage, key = tmp_path / "dram", MemoryStorage(NAMESPACE), key_of(1)
    dram = NodeDram(root, NAMESPACE, 8 * FILE_BYTES)
    shutil.rmtree(root)
    root.write_text("not a directory")
    behind = NodeDramStorage(storage, dram)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            behind.write([key_of(number)], [block_of(key_of(number))])
    into = memoryview(bytearray(GEOMETRY.full_block_bytes))
    assert behind.read(key, into).storage_bytes == GEOMETRY.full_block_bytes
    assert caplog.text.count("cannot cache a block") == 1


def test_nothing_is_found_or_added_while_disabled(tmp_path: Path) -> None:
    dram = NodeDram(tmp_path, NAMESPACE, 8 * FILE_BYTES)
    dram.add(key_of(1), block_of(key_of(1)))
    dram.enabled = False
    assert found(dram, key_of(1)) is None
    dram.add(key_of(2), block_of(key_of(2)))
    assert lying(tmp_path) == {key_of(1).hex()}


def test_a_world_writable_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"dram_dir .* is world-writable .* of your own"):
        NodeDram(tmp_path, NAMESPACE, 8 * FILE_BYTES)


def test_a_bound_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dram_bytes is 100, and one block takes 8192"):
        NodeDram(tmp_path, NAMESPACE, 100)
