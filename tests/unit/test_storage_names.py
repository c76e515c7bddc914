"""Names that are read from a storage become paths: none of them leads out of it."""

import os
from pathlib import Path

import pytest
from tests.s3_servers import FaultyS3

from dualpath.core.blocks import BlockOrigin, tenant_tag
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage.block_file import Sections, decode_header, encode_header
from dualpath.storage.chain_index import ChainIndex
from dualpath.storage.inventory import load_or_survey
from dualpath.storage.janitor import (
    SAVED,
    Janitor,
    Progress,
    decode,
    encode,
    pin_name,
    remove_stale_temporaries,
)
from dualpath.storage.journal import (
    JOURNAL,
    Journal,
    Segment,
    Used,
    Written,
    decode_segment,
    encode_segment,
    segments,
)
from dualpath.storage.objects import MemoryObjects, ObjectTree, PosixObjects
from dualpath.storage.posix import (
    NamespaceDirectory,
    is_namespace,
    is_object_name,
    object_name,
)
from dualpath.storage.quotas import StorageLimits
from dualpath.storage.s3 import S3Objects
from dualpath.storage.s3_client import RetryPolicy, S3Client

KEY = bytes(range(32))
NAMESPACE = "m_0123456789abcdef"
OUTSIDE = (
    *("..", ".", "", "/", "../other", "../other/m_0123456789abcdef", "m_0123456789abcdef/.."),
    *("/etc", "a//b", "a/../b", "a/./b", "a\0b", "a\nb", "a b", "\x1b[2J", "ä", "a\\b", "%2e%2e"),
    "x" * 300,
)
LIMITS = StorageLimits(quota_bytes=1000)
STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's links need root")


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_no_engine_writes_is_decoded_as_damage(name):
    assert not is_namespace(name)
    assert decode_segment(encode_segment(Segment(name, (Used(1.0, KEY),)))) is None
    index = ChainIndex()
    index.add(name, KEY, b"", "", 10, 1.0)
    assert decode(encode(index, Progress())) is None
    with pytest.raises(ConfigError, match="cannot be pinned"):
        pin_name("namespace", name)


def test_what_engines_write_is_decoded():
    written = Written(1.0, KEY, bytes(32), tenant_tag("salt"), 1 << 30)
    for name in (NAMESPACE, "place", "a.b-c_0123456789abcdef_oracle", "..."):
        segment = Segment(name, (written, Used(2.0, KEY)))
        assert decode_segment(encode_segment(segment)) == segment
    assert is_namespace(NAMESPACE)


def test_a_process_of_any_name_writes_a_journal_that_the_janitor_reads():
    tree = MemoryObjects(lambda: 1000.0)
    journal = Journal(tree, NAMESPACE, "de-0#1 ä/x")
    journal.used(KEY, 1.0)
    assert journal.flush()
    assert [writer for writer, _, _ in segments(tree)] == [journal.writer] == ["de-0_1___x"]


@pytest.mark.parametrize(
    "written",
    [
        Written(1.0, KEY, b"short", "", 10),
        Written(1.0, KEY, b"", "../../etc/passwd", 10),
        Written(1.0, KEY, b"", "\x1b[2J 3456789012", 10),
        Written(1.0, KEY, b"", "", -1),
        Written(1.0, KEY, b"", "", 1 << 62),
    ],
)
def test_other_fields_of_an_entry_that_no_engine_writes(written):
    assert decode_segment(encode_segment(Segment(NAMESPACE, (written,)))) is None


def test_a_tenant_in_a_block_is_a_tag_or_unknown():
    def tenant(text: str) -> str:
        payload = Sections([memoryview(bytearray(512))], [])
        raw = encode_header(KEY, "0" * 16, payload, BlockOrigin(b"", text))
        header = decode_header(raw)
        assert header is not None
        return header.origin.tenant

    assert tenant(tenant_tag("salt")) == tenant_tag("salt")
    assert tenant("../../etc/passwd") == tenant("\x1b[2J 34567890123"[:16]) == ""


# ---------------------------------------------------------------------- trees


@pytest.fixture(params=["memory", "posix", "s3"])
def tree(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "memory":
        yield MemoryObjects(lambda: 1000.0)
    elif request.param == "posix":
        yield PosixObjects(tmp_path / "kv")
    else:
        server = FaultyS3()
        yield S3Objects(S3Client(server.location, RetryPolicy()))
        server.close()


@pytest.mark.parametrize("name", [name for name in OUTSIDE if name])
def test_no_tree_follows_a_name_out_of_its_root(tree: ObjectTree, name: str) -> None:
    assert not is_object_name(name)
    for call in (
        lambda: tree.create(name, b""),
        lambda: tree.replace(name, b""),
        lambda: tree.get(name),
        lambda: tree.remove([name]),
        lambda: tree.folders(f"{name}/"),
        lambda: list(tree.objects(f"{name}/")),
        lambda: tree.remove([object_name(name, KEY)]),
    ):
        with pytest.raises(StorageError, match="is not the name of an object in a storage"):
            call()


def test_keys_that_a_proxy_would_resolve_elsewhere_are_not_listed():
    server = FaultyS3()
    try:
        tree = S3Objects(S3Client(server.location, RetryPolicy()))
        tree.replace("janitor/journal/w/000000000001", b"")
        prefix = next(iter(server.objects)).removesuffix("janitor/journal/w/000000000001")
        for name in ("janitor/journal/../../../other/x", "janitor/journal/a b/1", "janitor//x"):
            server.objects[f"{prefix}{name}"] = b""
        assert [info.name for info in tree.objects("")] == ["janitor/journal/w/000000000001"]
        assert [name for _, _, name in segments(tree)] == ["janitor/journal/w/000000000001"]
    finally:
        server.close()


# ---------------------------------------------------------------------- the janitor


class Story:
    """Two storages in one folder; the janitor looks after one of them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.other = folder / "mine", folder / "other"
        self.victim = self.other / object_name(NAMESPACE, KEY)
        self.victim.parent.mkdir(parents=True)
        self.victim.write_bytes(b"another storage's block")
        self.root.mkdir()
        self.tree = PosixObjects(self.root)
        self.steady_s = 0.0
        self.janitor = Janitor(self.tree, "j", LIMITS, lambda: 1e9, lambda: self.steady_s)

    def entry(self, namespace: str, number: int = 1) -> None:
        event = Written(1.0, KEY, b"", "", 1 << 30)
        name = f"{JOURNAL}w/{number:012}"
        self.tree.replace(name, encode_segment(Segment(namespace, (event,))))

    def own_block(self) -> Path:
        """Store a block of this storage; return its file."""
        block = self.root / object_name(NAMESPACE, KEY)
        block.parent.mkdir(parents=True)
        block.touch()
        return block

    def steps(self) -> None:
        for _ in range(4):
            self.steady_s += 40
            assert self.janitor.step()


@pytest.mark.parametrize(
    "namespace",
    ["../other/m_0123456789abcdef", "x/../../other/m_0123456789abcdef", "/../other/m_0123456789ab"],
)
def test_an_entry_of_the_journal_does_not_lead_the_janitor_out_of_its_storage(tmp_path, namespace):
    story = Story(tmp_path)
    story.entry(namespace)
    story.entry(NAMESPACE, 2)  # what others write is still applied
    own = story.own_block()
    story.steps()
    assert story.victim.exists()
    assert not own.exists()
    assert story.janitor.totals.evicted_blocks == 1


def test_an_absolute_namespace_does_not_either(tmp_path):
    story = Story(tmp_path)
    story.entry(str(story.other / NAMESPACE))
    story.steps()
    assert story.victim.exists()


def test_a_saved_index_does_not_either(tmp_path):
    story = Story(tmp_path)
    index = ChainIndex()
    index.add("../other/m_0123456789abcdef", KEY, b"", "", 1 << 30, 1.0)
    story.tree.replace(f"{SAVED}00000001-00000001", encode(index, Progress({}, 1e9)))
    story.steps()
    assert story.victim.exists()
    load_or_survey(story.tree, lambda: 1e9, lambda share: None)


def test_a_file_with_an_odd_name_does_not_stop_the_janitor(tmp_path):
    story = Story(tmp_path)
    for folder in ("janitor/journal/a b", "janitor/lease", "janitor/index", f"{NAMESPACE}/tmp"):
        (story.root / folder).mkdir(parents=True)
        for name in ("a b", "\x1b[2J", "ä", "١٢"):
            (story.root / folder / name).touch()
    story.entry(NAMESPACE)
    own = story.own_block()
    story.steps()
    assert not own.exists()
    assert story.janitor.totals.evicted_blocks == 1


@as_root
@pytest.mark.parametrize("place", [NAMESPACE, f"{NAMESPACE}/000", f"{NAMESPACE}/000/10"])
def test_a_strangers_link_does_not_lead_the_janitor_out_of_its_storage(tmp_path, place):
    story = Story(tmp_path)
    link = story.root / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(story.other / place)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    story.entry(NAMESPACE)
    story.steps()
    assert story.victim.exists()
    assert story.janitor.lease.is_held()


@as_root
def test_a_strangers_link_does_not_make_the_janitor_clean_up_elsewhere(tmp_path):
    tree = PosixObjects(tmp_path / "mine")
    elsewhere = tmp_path / "home"
    elsewhere.mkdir()
    (elsewhere / "letter").touch()
    (tmp_path / "mine" / NAMESPACE).mkdir(parents=True)
    link = tmp_path / "mine" / NAMESPACE / "tmp"
    link.symlink_to(elsewhere)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert remove_stale_temporaries(tree, 1e12) == 0
    assert (elsewhere / "letter").exists()
    # A link of the operator is theirs to make.
    os.chown(link, os.geteuid(), os.getegid(), follow_symlinks=False)
    assert remove_stale_temporaries(tree, 1e12) == 1


@as_root
def test_a_strangers_link_does_not_make_an_engine_remove_blocks_of_another_storage(
    tmp_path, caplog
):
    root, other = tmp_path / "mine", tmp_path / "other"
    place = root / NAMESPACE
    place.mkdir(parents=True)
    (other / "000").mkdir(parents=True)
    block = other / "000" / f"{KEY.hex()}.kv"
    block.write_bytes(b"another storage's block")
    link = place / "000"
    link.symlink_to(other / "000")
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    directory = NamespaceDirectory.__new__(NamespaceDirectory)
    directory.path, directory._calls = place, os
    directory.discard(str(link / block.name), "checksum")
    assert block.exists()
    assert "is a link of another user; remove that" in caplog.text
