"""The index of a node's shared DRAM that engines report to the router."""

import os
from pathlib import Path

import msgspec
from tests.unit.test_storage_node_dram import (
    FILE_BYTES,
    NAMESPACE,
    block_of,
    found,
    key_of,
    used_at,
)

from dualpath.storage.node_dram import NodeDram, SharedDramIndex

KEYS = [key_of(number) for number in range(4)]


def listening(root: Path, blocks: int = 8) -> NodeDram:
    dram = NodeDram(root, NAMESPACE, blocks * FILE_BYTES)
    dram.index.report(begin=True)
    return dram


def test_a_block_added_or_found_is_reported_once(tmp_path: Path) -> None:
    one, other = listening(tmp_path), listening(tmp_path)
    one.add(KEYS[0], block_of(KEYS[0]))
    one.add(KEYS[0], block_of(KEYS[0]))
    assert one.index.changes(8) == (KEYS[:1], [])
    assert other.index.changes(8) == ([], [])
    assert found(other, KEYS[0]) is not None
    assert other.index.changes(8) == (KEYS[:1], [])
    assert found(other, KEYS[0]) is not None
    assert other.index.changes(8) == ([], [])


def test_evictions_are_reported_also_of_blocks_of_other_engines(tmp_path: Path) -> None:
    one, other = listening(tmp_path, blocks=2), listening(tmp_path, blocks=2)
    for number, key in enumerate(KEYS[:2]):
        one.add(key, block_of(key))
        used_at(one, key, number)
    other.add(KEYS[2], block_of(KEYS[2]))
    assert one.index.changes(8) == (KEYS[:2], [])
    assert other.index.changes(8) == (KEYS[2:3], KEYS[:1])


def test_a_missing_block_is_reported_as_removed(tmp_path: Path) -> None:
    dram = listening(tmp_path)
    dram.add(KEYS[0], block_of(KEYS[0]))
    dram.index.changes(8)
    os.unlink(dram.files.block_path(KEYS[0]))
    assert found(dram, KEYS[0]) is None
    assert dram.index.changes(8) == ([], KEYS[:1])


def test_a_corrupt_block_is_reported_as_removed(tmp_path: Path) -> None:
    dram = listening(tmp_path)
    dram.add(KEYS[0], block_of(KEYS[0]))
    path = Path(dram.files.block_path(KEYS[0]))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert found(dram, KEYS[0]) is None
    assert dram.index.changes(8) == ([], KEYS[:1])


def test_an_engine_reports_existing_blocks_of_its_model_at_its_start(tmp_path: Path) -> None:
    other_model = msgspec.structs.replace(NAMESPACE, model="another")
    former = NodeDram(tmp_path, NAMESPACE, 8 * FILE_BYTES)
    former.add(KEYS[0], block_of(KEYS[0]))
    NodeDram(tmp_path, other_model, 8 * FILE_BYTES).add(KEYS[1], block_of(KEYS[1]))
    former.close()
    assert listening(tmp_path).index.changes(8) == (KEYS[:1], [])


def test_a_directory_has_one_id_under_all_paths(tmp_path: Path) -> None:
    here, there = tmp_path / "memory" / "here", tmp_path / "there"
    one = NodeDram(here, NAMESPACE, 8 * FILE_BYTES)
    # As a mount at another path of a container; the directory itself may not be a link.
    (tmp_path / "alias").symlink_to(here.parent)
    other = NodeDram(tmp_path / "alias" / "here", NAMESPACE, 8 * FILE_BYTES)
    assert other.directory_id == one.directory_id
    assert NodeDram(there, NAMESPACE, 8 * FILE_BYTES).directory_id != one.directory_id


def test_the_index_is_bounded_by_the_capacity() -> None:
    index = SharedDramIndex(2)
    for key in KEYS[:3]:
        index.add(key)
    index.add(KEYS[1])
    index.add(KEYS[3])
    index.report(begin=True)
    assert index.changes(8) == ([KEYS[1], KEYS[3]], [])


def test_changes_are_recorded_only_while_reporting_and_returned_in_parts() -> None:
    index = SharedDramIndex(8, KEYS[:2])
    index.remove(KEYS[3])
    assert index.changes(8) == ([], [])
    index.report(begin=True)
    index.add(KEYS[2])
    index.remove(KEYS[1])
    assert index.changes(2) == (KEYS[:1], KEYS[1:2])
    assert index.changes(2) == (KEYS[2:3], [])
    index.add(KEYS[3])
    index.report(begin=False)
    assert index.changes(8) == ([], [])
