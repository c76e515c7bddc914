"""Files at paths that users give: replaced when complete, and written into where they are no files.

Every writer does it in the same place, so each of them is tried on a link, a pipe and a device.
"""

import os
import re
import stat
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.guard import GUARD_S

import dualpath
import dualpath_lab
import dualpath_sim
from dualpath.core.modes import Mode
from dualpath.core.request import Round, Trajectory
from dualpath.engine.trace import TraceRecorder
from dualpath.node.output_files import OutputFile, not_creatable, not_writable, write_whole
from dualpath.policy.events import SchedulerSettings
from dualpath.report.files import write_file
from dualpath.router.scheduler.event_recorder import EventLogWriter
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.formats import write_trace


def _write_trace_events(path: Path) -> None:
    trace = TraceRecorder(str(path), "pe-0")
    trace.record("prefill", "compute", 0, 1000)
    trace.write()


def _write_event_log(path: Path) -> None:
    log = EventLogWriter(path)
    log.begin(SchedulerSettings(Mode.DUALPATH, 1000, 5000))
    log.close()


def _write_sessions(path: Path) -> None:
    write_trace([TokenSession(Trajectory("a", (Round(4, 2),)))], path, "rounds")


WRITERS: dict[str, tuple[Callable[[Path], None], bytes]] = {
    "report": (lambda path: write_file(path, b"numbers"), b"numbers"),
    "trace": (_write_trace_events, b'{"traceEvents": ['),
    "event log": (_write_event_log, b"{"),
    "sessions": (_write_sessions, b"{"),
}


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> tuple[Callable[[Path], None], bytes]:
    return WRITERS[request.param]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path, writer) -> None:
    write, begin = writer
    (tmp_path / "real").mkdir()
    link = tmp_path / "out"
    link.symlink_to(Path("real") / "file")
    write(link)
    assert link.is_symlink()
    assert (tmp_path / "real" / "file").read_bytes().startswith(begin)
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["file"]


def test_a_pipe_stays_and_its_reader_gets_the_content(tmp_path: Path, writer) -> None:
    write, begin = writer
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Opened for both ends, so that neither side waits for the other.
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        write(pipe)
        assert os.read(reader, 1 << 16).startswith(begin)
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_stays_and_gets_the_content(writer) -> None:
    write, begin = writer
    master, slave = os.openpty()
    try:
        tty.setraw(slave)
        device = Path(os.ttyname(slave))
        write(device)
        assert os.read(master, 1 << 16).startswith(begin)
        assert stat.S_ISCHR(device.stat().st_mode)
    finally:
        os.close(master)
        os.close(slave)


def test_a_descriptor_is_written_where_it_stands(tmp_path: Path) -> None:
    with (tmp_path / "shell.txt").open("w+b") as file:
        file.write(b"first ")
        file.flush()
        write_whole(f"/dev/fd/{file.fileno()}", b"second")
        file.seek(0)
        assert file.read() == b"first second"


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"earlier")
    path.chmod(0o600)

    def fail_half_way() -> None:
        with OutputFile(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert path.read_bytes() == b"earlier"
    write_whole(path, b"later")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"later", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_in_a_folder_that_takes_no_new_files_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"a longer earlier content")
    real = os.open

    def refuses_new_files(name: str, flags: int, *more: int) -> int:
        if flags & os.O_EXCL:
            raise PermissionError(13, "Permission denied", name)
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", refuses_new_files)
    write_whole(path, b"later")
    assert path.read_bytes() == b"later"


def test_a_file_of_another_user_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"earlier")
    inode = path.stat().st_ino
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    write_whole(path, b"later")
    assert (path.read_bytes(), path.stat().st_ino) == (b"later", inode)


def test_a_mounted_file_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"earlier")

    def busy(source: str, target: str) -> None:
        raise OSError(16, "Device or resource busy", target)

    monkeypatch.setattr(os, "replace", busy)
    write_whole(path, b"later")
    assert path.read_bytes() == b"later"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_into_a_pipe_without_a_reader_ends_and_does_not_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=_write_trace_events, args=(pipe,), daemon=True)
    thread.start()
    thread.join(GUARD_S)
    assert not thread.is_alive()
    assert "no process reads this pipe" in caplog.text


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda at: at / ("a" * 300), "File name too long"),
        (lambda at: at, "Is a directory"),
        (lambda at: at / "file" / "below", "Not a directory"),
        (lambda at: at / "loop", "Too many levels of symbolic links"),
        (lambda at: at / "none" / "file", "No such file or directory"),
        (lambda at: at / "a\0b", "embedded null byte"),
        (lambda at: at / "file", None),
        (lambda at: at / "new", None),
        (lambda at: Path("/dev/null"), None),
    ],
)
def test_a_check_names_the_reason_and_creates_nothing(tmp_path: Path, made, reason) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    assert not_writable(made(tmp_path)) == reason
    if reason is None:
        return
    with pytest.raises(OSError, match=re.escape(reason)):
        write_whole(made(tmp_path), b"")
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_can_be_created_below_an_existing_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not_creatable(tmp_path / "a" / "b") is None
    assert not_creatable(tmp_path / "file" / "b") == "Not a directory"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


#: Opens a file for writing, or puts one in the place of another.
_WRITES = re.compile(
    r"\.write_(?:bytes|text)\(|open\([^)\n]*[\"'](?:w|x|a|r\+|w\+)b?\+?[\"']"
    r"|\bos\.(?:replace|rename)\(|\.rename\("
)
#: Modules that write files which are not at a path that a user gave, or append to logs.
_OWN_FILES = {
    "dualpath/node/output_files.py": "the one place",
    "dualpath/cli/main.py": "/dev/null",
    "dualpath/launch/process.py": "appends to logs",
    "dualpath/launch/ray_executor.py": "appends to logs",
    "dualpath/launch/scaled_router.py": "a new folder",
    "dualpath/storage/posix.py": "blocks",
    "dualpath/storage/objects.py": "blocks",
    "dualpath_lab/emulated/words.py": "a new folder",
    "dualpath_lab/models/prepared.py": "a new folder",
    "dualpath_lab/models/smollm2.py": "a new folder",
    "dualpath_lab/models/random_models.py": "a new folder",
    "dualpath_lab/nodes/cluster.py": "a new record",
    "dualpath_lab/nodes/runner.py": "files of the kernel",
}


def _sources() -> Iterator[tuple[str, str]]:
    for package in (dualpath, dualpath_sim, dualpath_lab):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root.parent).as_posix()
            own = ("/benchmarks/", "/faults/", "/gpu/")  # these write into folders that they made
            if not any(part in name for part in own):
                yield name, path.read_text(encoding="utf-8")


def test_no_other_module_writes_files_at_paths_of_users() -> None:
    found = {name for name, text in _sources() if _WRITES.search(text)}
    assert found <= set(_OWN_FILES), sorted(found - set(_OWN_FILES))
