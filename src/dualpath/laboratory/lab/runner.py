"""Carries out the steps of a lab; all of the lab's doing on the machine is here."""

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
from dualpath.laboratory.lab.leftovers import backing_file
from dualpath.laboratory.lab.machine import NAMESPACE_FOLDER
from dualpath.laboratory.lab.s3_server import READY
from dualpath.laboratory.lab.steps import (
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
from dualpath.ops.launch.process import SpawnedProcess

_DEADLINE_S = 60.0
_RETRY_S = 0.02

#: Holds a user namespace with room for named network namespaces.  The shell opens a pipe nobody
#: writes to, which costs nothing, and so keeps the argument by which it is found.
_ANCHOR = (
    "mount -t tmpfs none /run && mkdir /run/netns && mkfifo /run/hold && echo ready "
    "&& exec >&- && read held < /run/hold"
)


class Runner:
    """Carries steps out one by one; ``anchor`` is the process that holds a user namespace, or 0."""

    def __init__(self, anchor: int = 0) -> None:
        self.anchor = anchor

    def do(self, step: Step) -> None:
        """Carry out one step.

        Raises ``ConfigError`` with what the kernel or the tool said.
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
                # One write, and no creation of files: the kernel's are there or not.
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
            said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
            raise ConfigError(f"lab: `{' '.join(step.argv)}` failed ({said})")

    def _attach(self, step: AttachLoop) -> None:
        # The kernel may call a device busy for a moment after its last image is out.  With another
        # image in it, another lab was faster.
        _while_busy(
            lambda: self._run(Run(("losetup", step.device, step.image))),
            lambda error: "busy" in str(error) and not backing_file(step.device).exists(),
        )

    def _detach(self, step: DetachLoop) -> None:
        self._run(Run(("losetup", "--detach", step.device)))
        backing = backing_file(step.device)
        deadline_s = time.monotonic() + _DEADLINE_S
        # The kernel does it when the last who looks at the device, such as udev, has closed it.
        while backing.exists():
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"lab: {step.device} still holds its image after {_DEADLINE_S:g} s; end who "
                    "uses it and repeat"
                )
            time.sleep(_RETRY_S)

    def _start_anchor(self, step: StartAnchor) -> None:
        with tempfile.TemporaryDirectory() as folder:
            argv = ("unshare", "-Urnm", "sh", "-c", _ANCHOR, step.marker)
            self.anchor = _start(argv, Path(folder) / "log", os.environ, "ready").pid

    def _start_server(self, step: StartServer) -> None:
        # Into the network alone: the lab's folder may be out of sight in the user namespace.
        user = ("--preserve-credentials", "--user", "--target", str(self.anchor))
        names = f"/proc/{self.anchor}/root{NAMESPACE_FOLDER}" if self.anchor else NAMESPACE_FOLDER
        enter = (*(user if self.anchor else ()), f"--net={names}/{step.namespace}", "--")
        _start(("nsenter", *enter, *step.argv), Path(step.log), step.environment, READY)


def enter_user_namespace(anchor: int) -> tuple[str, ...]:
    """Return the words before a command that is to run in the user namespace, if there is one."""
    if not anchor:
        return ()
    where = ("--user", "--net", "--mount", "--target", str(anchor))
    return ("nsenter", "--preserve-credentials", *where, "--")


def describe(step: Step) -> str:
    """Say what a step does, as a line of shell where there is one."""
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
    """Start what stays as long as the lab, and wait for the line that says it can be used."""
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
    # Exclusive and private: the folder is everybody's, and so could be a link of that name.
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
                    f"lab: process {process_id} does not end within {_DEADLINE_S:g} s of being "
                    "killed; it waits for a device, see its stack and repeat"
                )
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def _remove_folder(step: RemoveFolder) -> None:
    if not step.cgroup:
        shutil.rmtree(step.path)
        return
    # A process that has just ended leaves its cgroup a moment later.
    _while_busy(
        lambda: os.rmdir(step.path),
        lambda error: isinstance(error, OSError) and error.errno == errno.EBUSY,
    )


def _while_busy(do: Callable[[], None], busy: Callable[[Exception], bool]) -> None:
    """Do something as soon as the kernel lets it be done, within the deadline."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while True:
        try:
            return do()
        except (ConfigError, OSError) as error:
            if not busy(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(_RETRY_S)
