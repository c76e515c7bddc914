"""Executes the steps of a lab; all changes of the machine are made here."""

import errno
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dualpath.core.errors import ConfigError, DeadlineError, EngineLostError
from dualpath.launch.process import SpawnedProcess
from dualpath_lab.nodes.machine import NAMESPACE_FOLDER, backing_file
from dualpath_lab.nodes.s3_server import READY
from dualpath_lab.nodes.steps import (
    AttachLoop,
    DetachLoop,
    EndProcesses,
    MakeFolder,
    MakeImage,
    RemoveFile,
    RemoveFolder,
    Run,
    StartAnchor,
    StartServer,
    Step,
    WriteValue,
)

_DEADLINE_S = 60.0
_RETRY_S = 0.02

#: Holds a user namespace with a folder for named network namespaces.  The shell waits on a FIFO
#: that has no writer, and has the argument by which it is found.
_ANCHOR = (
    "mount -t tmpfs none /run && mkdir /run/netns && mkfifo /run/hold && echo ready "
    "&& exec >&- && read held < /run/hold"
)


class Runner:
    """Executes steps; ``anchor`` is the process that holds the user namespace, or 0."""

    def __init__(self, anchor: int = 0) -> None:
        self.anchor = anchor

    def do(self, step: Step) -> None:
        """Execute one step.

        Raises ``ConfigError`` with the message of the kernel or the tool.
        """
        try:
            self._do(step)
        except (OSError, subprocess.SubprocessError, EngineLostError, DeadlineError) as error:
            raise ConfigError(f"lab: {describe(step)} failed ({error})") from error

    def _do(self, step: Step) -> None:
        match step:
            case Run():
                self._run(step)
            case StartAnchor():
                self._start_anchor(step)
            case MakeFolder():
                Path(step.path).mkdir(parents=True, exist_ok=True)
            case MakeImage():
                _make_image(step)
            case WriteValue():
                # One write, without creating a file: these files are the kernel's.
                with open(step.path, "r+", encoding="utf-8") as file:
                    file.write(step.value)
            case StartServer():
                self._start_server(step)
            case EndProcesses():
                _end(step.process_ids)
            case AttachLoop():
                self._attach(step)
            case DetachLoop():
                self._detach(step)
            case RemoveFolder():
                _remove_folder(step)
            case RemoveFile():
                Path(step.path).unlink(missing_ok=True)

    def _run(self, step: Run) -> None:
        argv = (*enter_user_namespace(self.anchor), *step.argv) if step.inside else step.argv
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_DEADLINE_S, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            output = " ".join((done.stderr or done.stdout).split())
            reason = output or f"exit code {done.returncode}"
            raise ConfigError(f"lab: `{' '.join(step.argv)}` failed ({reason})")

    def _attach(self, step: AttachLoop) -> None:
        # The kernel may report a device as busy for a moment after its last image was detached.  If
        # another image is attached, another lab was faster.
        _while_busy(
            lambda: self._run(Run(("losetup", step.device, step.image))),
            lambda error: "busy" in str(error) and not backing_file(step.device).exists(),
        )

    def _detach(self, step: DetachLoop) -> None:
        self._run(Run(("losetup", "--detach", step.device)))
        backing = backing_file(step.device)
        deadline_s = time.monotonic() + _DEADLINE_S
        # The kernel detaches it when the last user of the device, such as udev, has closed it.
        while backing.exists():
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"lab: {step.device} still has its image after {_DEADLINE_S:g} s; end what "
                    "uses it and repeat"
                )
            time.sleep(_RETRY_S)

    def _start_anchor(self, step: StartAnchor) -> None:
        with tempfile.TemporaryDirectory() as folder:
            argv = ("unshare", "-Urnm", "sh", "-c", _ANCHOR, step.marker)
            self.anchor = _start(argv, Path(folder) / "log", os.environ, "ready").pid

    def _start_server(self, step: StartServer) -> None:
        # Enter only the network: the lab's folder may be invisible in the user namespace.
        user = ("--preserve-credentials", "--user", "--target", str(self.anchor))
        names = f"/proc/{self.anchor}/root{NAMESPACE_FOLDER}" if self.anchor else NAMESPACE_FOLDER
        enter = (*(user if self.anchor else ()), f"--net={names}/{step.namespace}", "--")
        _start(("nsenter", *enter, *step.argv), Path(step.log), step.environment, READY)


def enter_user_namespace(anchor: int) -> tuple[str, ...]:
    """Return the prefix of a command that runs in the user namespace, empty if there is none."""
    if not anchor:
        return ()
    where = ("--user", "--net", "--mount", "--target", str(anchor))
    return ("nsenter", "--preserve-credentials", *where, "--")


def describe(step: Step) -> str:
    """Describe a step, as a line of shell if possible."""
    match step:
        case Run():
            return " ".join(step.argv)
        case StartAnchor():
            return f"start {step.marker}, which holds a user namespace"
        case MakeFolder():
            return f"mkdir -p {step.path}"
        case MakeImage():
            return f"truncate --size {step.size_bytes} {step.path}"
        case WriteValue():
            return f"echo {step.value} > {step.path}"
        case StartServer():
            return f"nsenter --net={NAMESPACE_FOLDER / step.namespace} -- {shlex.join(step.argv)}"
        case EndProcesses():
            return f"kill -KILL {' '.join(map(str, step.process_ids))}"
        case AttachLoop():
            return f"losetup {step.device} {step.image}"
        case DetachLoop():
            return f"losetup --detach {step.device}"
        case RemoveFolder():
            return f"{'rmdir' if step.cgroup else 'rm -r'} {step.path}"
        case RemoveFile():
            return f"rm {step.path}"


def _start(
    argv: tuple[str, ...], log: Path, environment: Mapping[str, str], ready: str
) -> SpawnedProcess:
    """Start a process that runs as long as the lab, and wait for the ``ready`` line in its log."""
    process = SpawnedProcess(
        Path(argv[0]).name, argv, log, environment, folder=Path("/"), ends_with_parent=None
    )
    try:
        process.wait_for_line(ready, _DEADLINE_S)
    except BaseException:
        process.kill()
        process.wait(_DEADLINE_S)
        raise
    return process


def _make_image(step: MakeImage) -> None:
    # Exclusive and private: in a world-writable folder another user may have placed a link.
    descriptor = os.open(step.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, step.size_bytes)
    finally:
        os.close(descriptor)


def _end(process_ids: tuple[int, ...]) -> None:
    waiting = {}
    for process_id in process_ids:
        try:
            waiting[os.pidfd_open(process_id)] = process_id
        except ProcessLookupError:
            continue
    try:
        for descriptor in waiting:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for descriptor, process_id in waiting.items():
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if not poller.poll(_DEADLINE_S * 1000):
                raise ConfigError(
                    f"lab: process {process_id} has not ended {_DEADLINE_S:g} s after SIGKILL; it "
                    "probably waits for a device, see /proc/PID/stack, and repeat"
                )
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def _remove_folder(step: RemoveFolder) -> None:
    if not step.cgroup:
        shutil.rmtree(step.path)
        return
    # An ended process is removed from its cgroup a moment later.
    _while_busy(
        lambda: os.rmdir(step.path),
        lambda error: isinstance(error, OSError) and error.errno == errno.EBUSY,
    )


def _while_busy(do: Callable[[], None], busy: Callable[[Exception], bool]) -> None:
    """Retry while the kernel reports the object as busy, until the deadline."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while True:
        try:
            return do()
        except (ConfigError, OSError) as error:
            if not busy(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(_RETRY_S)
