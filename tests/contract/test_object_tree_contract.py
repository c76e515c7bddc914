"""Every object tree keeps ``dualpath.storage.objects``; one suite, all of them."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.s3_servers import RCLONE, FaultyS3, rclone_s3

from dualpath.storage.memory_objects import MemoryObjects
from dualpath.storage.objects import ObjectTree
from dualpath.storage.posix_objects import PosixObjects
from dualpath.storage.s3_client import S3Client
from dualpath.storage.s3_connection import Patience
from dualpath.storage.s3_objects import S3Objects

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
                yield S3Objects(S3Client(server.location, Patience()))
            case _:
                location = servers.enter_context(rclone_s3(tmp_path))
                yield S3Objects(S3Client(location, Patience()))


def names(tree: ObjectTree, prefix: str = "") -> list[str]:
    return sorted(info.name for info in tree.objects(prefix))


def test_an_empty_tree_has_nothing(tree: ObjectTree) -> None:
    assert names(tree) == names(tree, "janitor/") == tree.folders("") == []
    assert tree.get("janitor/status") is None
    tree.remove(["janitor/status"])


def test_an_object_is_created_once_and_replaced_at_will(tree: ObjectTree) -> None:
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
    # Half-written files have a folder of their own.
    assert [name for name in tree.folders("") if name != "janitor"] == ["model_1", "model_10"]
    assert tree.folders("model_1/") == [f"{n:03x}" for n in range(7)]
    assert tree.folders("model_10/") == []
    assert {info.name: info.bytes for info in tree.objects("model_1/")} == {
        name: number for number, name in enumerate(written[:7])
    }
    assert all(info.written_s > 0 for info in tree.objects(""))


def test_what_is_removed_is_gone(tree: ObjectTree) -> None:
    for name in ("a/1", "a/2", "b/1"):
        tree.replace(name, b"x")
    assert tree.remove(["a/1", "b/1", "b/2"]) in (2, 3)
    assert names(tree) == ["a/2"]
    assert tree.create("a/1", b"again")


@pytest.mark.parametrize("tree", ["memory", "posix", "s3"], indirect=True)
def test_of_many_who_create_one_succeeds(tree: ObjectTree) -> None:
    """Unless the server knows no conditional writes, as rclone's does not."""
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: tree.create("janitor/lease/1", b"%d" % n), range(4)))
    assert sum(made) == 1
    assert tree.get("janitor/lease/1") == b"%d" % made.index(True)
