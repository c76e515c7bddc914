"""`dualpath storage` lists, verifies, pins and removes blocks in a real directory."""

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from dualpath.cli.main import main
from dualpath.core.blocks import (
    BlockGeometry,
    BlockKey,
    BlockOrigin,
    Protection,
    StoreNamespace,
    block_keys,
    chain_root,
    tenant_tag,
)
from dualpath.engine.io.storage_maintenance import load_storage_keys
from dualpath.storage.janitor import read_status
from dualpath.storage.objects import PosixObjects
from dualpath.storage.posix import PosixStorage
from dualpath.storage.sealed_blocks import STORAGE_KEY_VARIABLE

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=1, layer_block_bytes=2048)
NAMESPACE = StoreNamespace("org/tiny", "float32", "NHD", GEOMETRY)
OTHER = StoreNamespace("org/other", "float32", "NHD", GEOMETRY)
BLOCK_BYTES = 4096 + GEOMETRY.full_block_bytes
OLD_S = 10 * 86400.0


def chain(number: int) -> list[BlockKey]:
    return block_keys([number] * 4, 1)


class Storage:
    """Three chains of four blocks in one namespace, one of them old; one chain in another."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.tiny = PosixStorage(root, NAMESPACE)
        self.other = PosixStorage(root, OTHER)
        for number, salt in ((1, "mine"), (2, "mine"), (3, "")):
            self.write(self.tiny, number, salt)
        self.write(self.other, 1, "")
        long_ago_s = time.time() - OLD_S
        for key in chain(1):
            os.utime(self.tiny.block_path(key), (long_ago_s, long_ago_s))

    def write(self, storage: PosixStorage, number: int, salt: str) -> None:
        content = memoryview(bytes(GEOMETRY.full_block_bytes))
        origin = BlockOrigin(chain_root(), tenant_tag(salt))
        storage.write(chain(number), [content] * 4, origin)

    def head(self, number: int) -> int:
        return sum(self.tiny.is_stored(key) for key in chain(number))

    @property
    def place(self) -> str:
        return self.tiny.path.name


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "kv")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["storage", *arguments]) == code, capsys.readouterr()
    return capsys.readouterr().out


def test_namespaces_tenants_and_ages_are_counted(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = json.loads(run(capsys, "ls", storage.root, "--json", "-"))
    assert [(share["name"], share["model"], share["blocks"]) for share in listed] == [
        (storage.place, "org/tiny", 12),
        (storage.other.path.name, "org/other", 4),
    ]
    assert listed[0]["bytes"] == 12 * BLOCK_BYTES
    tenants = json.loads(run(capsys, "du", storage.root, "--by", "tenant", "--json", "-"))
    assert {share["name"]: share["blocks"] for share in tenants} == {
        tenant_tag("mine"): 8,
        "(none)": 8,
    }
    ages = json.loads(run(capsys, "du", storage.root, "--by", "age", "--json", "-"))
    assert [(share["name"], share["blocks"]) for share in ages] == [("an hour", 12), ("30 days", 4)]
    table = run(capsys, "ls", storage.root)
    assert table == run(capsys, "du", storage.root)
    assert "org/tiny" in table
    assert table.splitlines()[-1].startswith("all")


def test_every_block_is_verified_and_a_corrupt_one_is_reported_and_removed(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "16 blocks" in run(capsys, "verify", storage.root, "--rate", "1GB")
    path = storage.tiny.block_path(chain(2)[1])
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = run(capsys, "verify", storage.root, "--rate", "0", code=1)
    assert f"{storage.place}/{chain(2)[1].hex()}: checksum" in found
    assert storage.head(2) == 4
    assert "1 corrupt and removed" in run(
        capsys, "verify", storage.root, "--rate", "0", "--remove", code=1
    )
    assert storage.head(2) == 3
    assert "15 blocks" in run(capsys, "verify", storage.root, "--rate", "0")


def test_selected_blocks_are_removed_after_confirmation(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("--cache-salt", "mine", "--unused-for", "7d")
    assert run(capsys, "rm", storage.root, *chosen).startswith("4 blocks")
    assert storage.head(1) == 4
    run(capsys, "rm", storage.root, *chosen, "--yes")
    assert [storage.head(number) for number in (1, 2, 3)] == [0, 4, 4]
    run(capsys, "rm", storage.root, "--namespace", storage.place, "--yes")
    assert [storage.head(number) for number in (1, 2, 3)] == [0, 0, 0]
    assert all(storage.other.is_stored(key) for key in chain(1))


def test_removing_a_tenant_includes_blocks_that_inherit_it(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older engines did not record the tenant of generated blocks; there is no saved index."""
    answer = block_keys([1, 1, 1, 1, *range(20)], 1)
    content = memoryview(bytes(GEOMETRY.full_block_bytes))
    storage.tiny.write(answer[4:], [content] * 20, BlockOrigin(answer[3]))
    run(capsys, "rm", storage.root, "--cache-salt", "mine", "--yes")
    assert not any(storage.tiny.is_stored(key) for key in answer)
    assert [storage.head(number) for number in (1, 2, 3)] == [0, 0, 4]
    (left,) = json.loads(run(capsys, "du", storage.root, "--by", "tenant", "--json", "-"))
    assert left["name"] == "(none)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rm", "."), "no blocks are selected"),
        (("rm", ".", "--namespace", "wrong_0123456789abcdef"), "has no blocks in this storage"),
        (("rm", ".", "--unused-for", "soon"), "--unused-for is 'soon'; give a time such as"),
        (("pin", ".", "--chain", "ab"), "--chain needs --namespace"),
        (("pin", ".", "--tenant", "../x"), "cannot be pinned"),
        (("janitor", ".", "--once"), "no limit is given"),
        (("verify", ".", "--rate", "fast"), "--rate is 'fast'"),
        (("ls", "./nowhere"), "there is no storage at"),
    ],
)
def test_invalid_arguments_are_refused_with_a_remedy(
    storage: Storage,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(storage.root)
    assert main(["storage", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert storage.head(1) == 4


def test_a_janitor_that_runs_once_evicts_no_pinned_block_and_saves_its_index(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = chain(1)[2].hex()
    pins = run(capsys, "pin", storage.root, "--namespace", storage.place, "--chain", pinned)
    assert pins == f"chain/{storage.place}/{pinned}\n"
    limits = ("--once", "--storage-quota", "1", "--storage-protect-s", "0")
    assert run(capsys, "janitor", storage.root, *limits).startswith("13 blocks")
    assert [storage.head(number) for number in (1, 2, 3)] == [3, 0, 0]
    status = read_status(PosixObjects(storage.root))
    assert status is not None
    assert (status.blocks, status.used_bytes) == (3, 3 * BLOCK_BYTES)
    undone = ("--namespace", storage.place, "--chain", pinned, "--undo")
    assert run(capsys, "pin", storage.root, *undone) == ""
    assert run(capsys, "janitor", storage.root, *limits).startswith("3 blocks")
    assert "janitor alone-" in run(capsys, "ls", storage.root)


def test_sealed_blocks_are_listed_as_such_and_verified_with_their_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STORAGE_KEY_VARIABLE, raising=False)
    root, file, new = tmp_path / "kv", tmp_path / "storage.key", "1" * 64
    file.write_text("0" * 64)
    namespace = msgspec.structs.replace(NAMESPACE, protection=Protection.ENCRYPTED)
    sealed = PosixStorage(root, namespace, keys=load_storage_keys(str(file)))
    sealed.write(chain(1), [memoryview(bytes(GEOMETRY.full_block_bytes))] * 4)
    place, verify = sealed.path.name, ("verify", str(root), "--rate", "0")
    assert "encrypted" in run(capsys, "ls", str(root))
    (listed,) = json.loads(run(capsys, "ls", str(root), "--json", "-"))
    assert (listed["name"], listed["protection"]) == (place, "encrypted")

    assert "4 blocks" in run(capsys, *verify, "--storage-key-file", str(file))
    damaged = sealed.block_path(chain(1)[3])
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    found = run(capsys, *verify, "--storage-key-file", str(file), "--remove", code=1)
    assert f"{chain(1)[3].hex()}: not authentic" in found
    file.write_text(new)
    for keys in ((), ("--storage-key-file", str(file))):
        found = run(capsys, *verify, *keys, "--remove", code=1)
        assert found.count(": storage key\n") == 3
    assert [sealed.is_stored(key) for key in chain(1)] == [True, True, True, False]
    monkeypatch.setenv(STORAGE_KEY_VARIABLE, f"{new}\n{'0' * 64}\n")
    assert "3 blocks" in run(capsys, *verify)
