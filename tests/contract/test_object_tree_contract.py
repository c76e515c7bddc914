"""Contract of ``dualpath.storage.objects``, for all object trees."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.maintained_storage import BLOCK_BYTES, DIGEST, PAYLOAD, PLACE, chain
from tests.s3_servers import RCLONE, FaultyS3, rclone_s3

from dualpath.core.blocks import BlockOrigin, chain_root
from dualpath.storage.block_file import Sections, encode_header
from dualpath.storage.contract import run_origins
from dualpath.storage.janitor import Janitor
from dualpath.storage.journal import Journal
from dualpath.storage.objects import MemoryObjects, ObjectTree, PosixObjects
from dualpath.storage.posix import object_name
from dualpath.storage.quotas import StorageLimits
from dualpath.storage.s3 import S3Objects
from dualpath.storage.s3_client import RetryPolicy, S3Client

TREES = [
    *("memory", "posix", "s3"),
    pytest.param("s3-rclone", marks=pytest.mark.skipif(not RCLONE, reason="rclone is not here")),
]


@pytest.fixture(params=TREES)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectTree]:
    with contextlib.ExitStack() as servers:
        match request.param:
            case "memory":
                yield MemoryObjects(lambda: 1000.0)
            case "posix":
                yield PosixObjects(tmp_path / "kv")
            case "s3":
                server = FaultyS3()
                server.page_names = 3
                servers.callback(server.close)
                yield S3Objects(S3Client(server.location, RetryPolicy()))
            case _:
                location = servers.enter_context(rclone_s3(tmp_path))
                yield S3Objects(S3Client(location, RetryPolicy()))


def names(tree: ObjectTree, prefix: str = "") -> list[str]:
    return sorted(info.name for info in tree.objects(prefix))


def test_an_empty_tree_has_nothing(tree: ObjectTree) -> None:
    assert names(tree) == names(tree, "janitor/") == tree.folders("") == []
    assert tree.get("janitor/status") is None
    tree.remove(["janitor/status"])


def test_an_object_is_created_once_and_can_be_replaced(tree: ObjectTree) -> None:
    assert tree.create("janitor/lease/00000001", b"first")
    assert not tree.create("janitor/lease/00000001", b"second")
    assert tree.get("janitor/lease/00000001") == b"first"
    tree.replace("janitor/lease/00000001", b"third")
    tree.replace("janitor/status", b"")
    assert tree.get("janitor/lease/00000001") == b"third"
    assert tree.get("janitor/lease/00000001", 2) == b"th"
    assert tree.get("janitor/status") == b""


def test_objects_and_folders_are_listed_below_a_folder(tree: ObjectTree) -> None:
    written = [f"model_1/{n:03x}/aa/{n:064x}.kv" for n in range(7)] + ["model_10/namespace.json"]
    for number, name in enumerate(written):
        tree.replace(name, bytes(number))
    assert names(tree) == sorted(written)
    assert names(tree, "model_1/") == sorted(written[:7])
    assert names(tree, "model_1/003/") == [written[3]]
    # Half-written files are in a separate folder.
    assert [name for name in tree.folders("") if name != "janitor"] == ["model_1", "model_10"]
    assert tree.folders("model_1/") == [f"{n:03x}" for n in range(7)]
    assert tree.folders("model_10/") == []
    assert {info.name: info.bytes for info in tree.objects("model_1/")} == {
        name: number for number, name in enumerate(written[:7])
    }
    assert all(info.written_s > 0 for info in tree.objects(""))


def test_removed_objects_no_longer_exist(tree: ObjectTree) -> None:
    for name in ("a/1", "a/2", "b/1"):
        tree.replace(name, b"x")
    assert tree.remove(["a/1", "b/1", "b/2"]) in (2, 3)
    assert names(tree) == ["a/2"]
    assert tree.create("a/1", b"again")


@pytest.mark.parametrize("tree", ["memory", "posix", "s3"], indirect=True)
def test_of_concurrent_creates_one_succeeds(tree: ObjectTree) -> None:
    """Unless the server does not support conditional writes, as rclone's does not."""
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: tree.create("janitor/lease/1", b"%d" % n), range(4)))
    assert sum(made) == 1
    assert tree.get("janitor/lease/1") == b"%d" % made.index(True)


def test_a_janitor_keeps_any_tree_within_its_quota_and_releases_its_lease(tree: ObjectTree) -> None:
    """With blocks that were not journaled, blocks of an engine, and two candidates in sequence."""
    now_s = [4e9]  # later than any object's own time

    def clock() -> float:
        return now_s[0]

    def serve(number: int, journal: Journal | None) -> None:
        keys = chain(number, 4)
        origins = run_origins(keys, BlockOrigin(chain_root(), "a" * 16))
        for key, own in zip(keys, origins, strict=True):
            content = encode_header(key, DIGEST, Sections([PAYLOAD]), own) + PAYLOAD
            tree.replace(object_name(PLACE, key), content)
        if journal is not None:
            journal.written(keys, origins, [BLOCK_BYTES] * len(keys), clock())
            journal.flush()

    def lying() -> list[int]:
        stored = {info.name for info in tree.objects(f"{PLACE}/")}
        return [
            sum(object_name(PLACE, key) in stored for key in chain(number, 4))
            for number in range(4)
        ]

    limits = StorageLimits(quota_bytes=7 * BLOCK_BYTES, high=1.0, low=1.0, protect_s=0.0)
    first = Janitor(tree, "first", limits, clock, clock)
    second = Janitor(tree, "second", limits, clock, clock)
    serve(0, None)
    assert [first.step(), second.step()] == [True, False]
    journal = Journal(tree, PLACE, "engine")
    for number in (1, 2):
        now_s[0] += 10
        serve(number, journal)
    now_s[0] += 10
    assert first.step()
    assert lying() == [0, 3, 4, 0]
    assert first.index is not None
    assert first.index.used_by_tenant() == {"a" * 16: 7 * BLOCK_BYTES}
    first.close()
    now_s[0] += 10
    serve(3, journal)
    now_s[0] += 10
    assert second.step()
    assert lying() == [0, 0, 3, 4]
    assert not first.step()
