"""Folders of shared DRAM, caches and logs belong to this user, whoever was there first."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.errors import ConfigError
from dualpath.launch.process import SpawnedProcess
from dualpath.node.cache_directory import private_cache_directory
from dualpath.node.private_folder import (
    file_system,
    log_folder,
    open_log,
    private_folder,
    warn_if_on_disk,
)
from dualpath.router.scheduler.event_recorder import EventLogWriter
from dualpath.router.scheduler.leadership import FileLeadership
from dualpath.storage.node_dram import NodeDram

STRANGER = 65534
NAMESPACE = StoreNamespace("m", "float32", "NHD", BlockGeometry.uniform(2, 4, 2048))
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user need root")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder where everybody may create names, as /dev/shm and /tmp are."""
    place = tmp_path / "shm"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_new_folder_is_for_its_user_alone(shared):
    private_folder(shared / "a" / "kv", "dram_dir")
    assert mode(shared / "a" / "kv") == 0o700
    private_folder(shared / "a" / "kv", "dram_dir")


def test_a_folder_of_this_user_that_others_may_read_is_closed_to_them(shared):
    (shared / "kv").mkdir(0o755)
    private_folder(shared / "kv", "dram_dir")
    assert mode(shared / "kv") == 0o700


@pytest.mark.parametrize(("found", "words"), [(0o777, "world-writable"), (0o770, "for its group")])
def test_a_folder_in_which_others_may_have_put_files_is_refused(shared, found, words):
    (shared / "kv").mkdir(found)
    with pytest.raises(ConfigError, match=rf"dram_dir .* {words} .*remove it, or give a folder"):
        private_folder(shared / "kv", "dram_dir")
    assert mode(shared / "kv") == found


@as_root
def test_a_folder_of_another_user_is_refused(shared):
    (shared / "kv").mkdir(0o755)
    os.chown(shared / "kv", STRANGER, STRANGER)
    for check in (private_folder, log_folder):
        with pytest.raises(ConfigError, match="belongs to user 65534, and this process runs as"):
            check(shared / "kv", "dram_dir")


@pytest.mark.parametrize("target", ["folder", "nothing", "file"])
def test_a_link_is_refused(shared, target):
    if target == "folder":
        (shared / "elsewhere").mkdir(0o700)
    elif target == "file":
        (shared / "elsewhere").touch()
    (shared / "kv").symlink_to(shared / "elsewhere")
    for check in (private_folder, log_folder):
        with pytest.raises(ConfigError, match=r"is a link; give a folder of this user"):
            check(shared / "kv", "dram_dir")


@pytest.mark.parametrize("ending", ["/", "/.", "/x/..", "//"])
def test_a_link_is_refused_however_its_path_ends(shared, ending):
    (shared / "elsewhere").mkdir(0o700)
    (shared / "elsewhere" / "x").mkdir()
    (shared / "kv").symlink_to(shared / "elsewhere")
    for use in (private_folder, log_folder):
        with pytest.raises(ConfigError, match="is a link"):
            use(f"{shared}/kv{ending}", "dram_dir")
    with pytest.raises(ConfigError, match="is a link"):
        NodeDram(f"{shared}/kv{ending}", NAMESPACE, 1 << 20)


def test_what_is_no_folder_is_refused(shared):
    (shared / "kv").touch()
    os.mkfifo(shared / "pipe")
    for name in ("kv", "pipe"):
        with pytest.raises(ConfigError, match=r"cannot be opened \(Not a directory\)"):
            private_folder(shared / name, "dram_dir")


@as_root
def test_a_folder_on_the_way_that_another_user_made_is_refused(shared):
    (shared / "theirs").mkdir(0o755)
    os.chown(shared / "theirs", STRANGER, STRANGER)
    (shared / "link").symlink_to(shared / "theirs")
    for way in ("theirs", "theirs/deep", "link"):
        with pytest.raises(ConfigError, match=r"theirs' belongs to user 65534, who may replace"):
            private_folder(shared / way / "kv", "dram_dir")


def test_a_folder_on_the_way_whose_names_everybody_may_replace_is_refused(shared):
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="world-writable without the sticky bit"):
        private_folder(shared / "kv", "dram_dir")


def test_a_folder_that_cannot_be_created_is_an_error_with_a_remedy():
    with pytest.raises(ConfigError, match=r"cannot be created .*; give a folder that this user"):
        private_folder("/proc/kv", "dram_dir")


# ---------------------------------------------------------------------- shared DRAM


@as_root
@pytest.mark.parametrize("linked", [False, True])
def test_an_engine_reads_no_kv_from_a_folder_that_a_stranger_made_first(shared, linked):
    theirs = shared / ("elsewhere" if linked else "kv")
    theirs.mkdir(0o755)
    os.chown(theirs, STRANGER, STRANGER)
    if linked:
        (shared / "kv").symlink_to(theirs)
        os.chown(shared / "kv", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(ConfigError, match="dram_dir"):
        NodeDram(shared / "kv", NAMESPACE, 1 << 20)
    assert list(theirs.iterdir()) == []


def test_shared_dram_is_for_its_user_alone(shared):
    NodeDram(shared / "kv", NAMESPACE, 1 << 20).close()
    assert mode(shared / "kv") == 0o700


def test_shared_dram_on_a_disk_is_reported(tmp_path, caplog):
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"

    def kind(*rows: str) -> str:
        return file_system(tmp_path, "\n".join(rows))

    assert kind(f"36 35 {number} / / rw,noatime shared:1 - ext4 /dev/root rw") == "ext4"
    assert kind("36 35 0:0 / / rw - ext4 x rw", f"37 35 {number} / /s rw - tmpfs shm rw") == "tmpfs"
    assert kind("36 35 0:0 / / rw - ext4 x rw") == kind("odd", "") == ""
    assert file_system(tmp_path / "nothing") == ""
    warn_if_on_disk("/proc", "dram_dir")
    assert "dram_dir /proc is on a file system of type proc, which is not in memory" in caplog.text
    caplog.clear()
    warn_if_on_disk("/dev/shm", "dram_dir")
    assert caplog.text == "" or file_system("/dev/shm") != "tmpfs"


# ---------------------------------------------------------------------- caches, logs, locks


@as_root
def test_a_cache_of_another_user_is_not_trusted(shared, monkeypatch):
    monkeypatch.setenv("DUALPATH_CACHE", str(shared / "cache"))
    assert private_cache_directory() == shared / "cache"
    assert mode(shared / "cache") == 0o700
    os.chown(shared / "cache", STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=r"DUALPATH_CACHE.* belongs to user 65534"):
        private_cache_directory()


def test_logs_are_readable_by_this_user_only(shared):
    folder = shared / "logs"
    log_folder(folder, "log_dir")
    process = SpawnedProcess("hello", ["echo", "hello"], folder / "hello.log")
    assert process.wait(60) == 0
    assert (mode(folder), mode(folder / "hello.log")) == (0o700, 0o600)
    assert process.output() == "hello\n"
    (folder / "old.log").touch(0o644)
    os.close(open_log(folder / "old.log"))
    assert mode(folder / "old.log") == 0o600
    writer = EventLogWriter(shared / "events")
    writer.close()
    assert mode(shared / "events") == 0o600


def test_a_folder_of_logs_that_exists_keeps_its_mode(shared):
    (shared / "logs").mkdir(0o755)
    log_folder(shared / "logs", "log_dir")
    assert mode(shared / "logs") == 0o755
    (shared / "open").mkdir(0o777)
    with pytest.raises(ConfigError, match=r"log_dir .* is world-writable \(mode 777\)"):
        log_folder(shared / "open", "log_dir")


def test_a_log_is_not_appended_to_what_a_link_points_to(shared):
    victim = shared / "profile"
    victim.write_text("mine\n")
    (shared / "pe-0.log").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"cannot be opened .*; remove what has its name"):
        SpawnedProcess("pe-0", ["echo", "evil"], shared / "pe-0.log")
    assert victim.read_text() == "mine\n"
    os.mkfifo(shared / "pipe.log")
    with pytest.raises(ConfigError):
        open_log(shared / "pipe.log")


@as_root
def test_a_log_or_lock_of_another_user_is_refused(shared):
    for name in ("pe-0.log", "router.lock"):
        (shared / name).touch()
        os.chown(shared / name, STRANGER, STRANGER)
    with pytest.raises(ConfigError):
        open_log(shared / "pe-0.log")
    with pytest.raises(ConfigError):
        FileLeadership(str(shared / "router.lock"))
