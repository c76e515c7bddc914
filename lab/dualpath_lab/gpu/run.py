"""Runs the phases one after another, each in a process with a time limit.

A phase that fails, hangs or crashes leaves its findings so far, and the next one runs.
"""

import contextlib
import os
import secrets
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.launch.process import POLL_S, SpawnedProcess, all_processes
from dualpath.node.host_process import process_stat
from dualpath.report.files import as_json
from dualpath_lab.gpu.page import write_page
from dualpath_lab.gpu.phase import SETTINGS_FILE
from dualpath_lab.gpu.results import PhaseResult, read_result, result_file, write_result
from dualpath_lab.gpu.settings import PHASES, GpuCheckSettings, PhaseName

NO_GPU = "no NVIDIA GPU was found on this machine"
#: How long a phase may take to stop its processes after its time limit.
STOP_S = 30.0
#: How long the kernel may take to end killed processes, which free memory of the GPU first.
KILL_S = 20.0
#: Environment variable of all processes of a phase, with a value of its own.  It is no setting of
#: dualpath, which refuses unknown variables that begin with its name.
MARK = "GPU_CHECK_PHASE"

Command = Callable[[str, Path], Sequence[str]]


def phase_command(name: str, out: Path) -> Sequence[str]:
    """Return the command line of a phase's process."""
    return (sys.executable, "-m", "dualpath_lab.gpu.phase", name, str(out))


def run_phases(
    settings: GpuCheckSettings,
    out: Path,
    gpus: Sequence[str],
    progress: Callable[[str], None],
    command: Command = phase_command,
    stop_s: float = STOP_S,
) -> list[PhaseResult]:
    """Run the phases of the settings and return their results, which are also files in ``out``.

    Results of earlier runs in this folder remain, except those of the same phases.
    Raises ``ConfigError`` for a folder that cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / SETTINGS_FILE).write_bytes(as_json(settings))
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror})") from error
    for name in settings.phases:
        result_file(out, name).unlink(missing_ok=True)
    results = []
    for name in settings.phases:
        if PHASES[name].needs_gpu and not gpus and not settings.rehearse:
            result = PhaseResult(phase=name, state="skipped", reason=NO_GPU)
        else:
            progress(f"{name}, at most {settings.limit(name):g} s")
            result = _run(name, settings.limit(name), out, command, stop_s)
        write_result(out, result)
        progress(f"{name}: {line_of(result)}")
        results.append(result)
        write_page(out)
    return results


def line_of(result: PhaseResult) -> str:
    """Return a result in one line."""
    took = f" after {result.seconds:.0f} s" if result.seconds else ""
    return f"{result.state}{took}" + (f": {result.reason}" if result.reason else "")


def _run(
    name: PhaseName, limit_s: float, out: Path, command: Command, stop_s: float
) -> PhaseResult:
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{name}.log"
    log.unlink(missing_ok=True)
    started_s = time.monotonic()
    mark = f"{MARK}={secrets.token_hex(8)}"
    environment = {**os.environ, **dict([mark.split("=")])}
    process = SpawnedProcess(
        name, command(name, out), log, environment, ends_with_parent=signal.SIGTERM
    )
    try:
        exit_code = process.wait(limit_s)
    finally:
        _end(process, mark, stop_s)
    found = read_result(out, name)
    result = PhaseResult(
        phase=name,
        state="ok",
        seconds=time.monotonic() - started_s,
        limit_s=limit_s,
        found=found.found if found else {},
    )
    if exit_code == 0:
        return result
    tail = tuple(process.log_tail().splitlines())
    if exit_code is None:
        return msgspec.structs.replace(
            result,
            state="timed out",
            reason=f"it ran for more than {limit_s:g} s; --limit-s gives it longer",
            log_tail=tail,
        )
    reason = next((line for line in reversed(tail) if line.strip()), "it has written no log")
    return msgspec.structs.replace(
        result, state="failed", reason=f"exit code {exit_code}: {reason.strip()}", log_tail=tail
    )


def _end(process: SpawnedProcess, mark: str, stop_s: float) -> None:
    """Stop a phase, then kill what is left of the processes that it has started.

    Engines have process groups of their own.
    """
    started = set(_started(mark))
    process.terminate()
    process.end(stop_s)
    deadline_s = time.monotonic() + KILL_S
    while time.monotonic() < deadline_s:
        started |= set(_started(mark))
        left = [one for one in started if _runs(one)]
        if not left:
            return
        for one in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        time.sleep(POLL_S)


class _Started(NamedTuple):
    """A process by its id and its start, which another process with this id does not have."""

    pid: int
    start_ticks: int


def _started(mark: str) -> Iterator[_Started]:
    """Yield the processes with ``mark`` in their environment, and their descendants.

    vLLM's processes change their titles, which overwrites the environment that /proc shows.
    """
    found = dict(all_processes())
    children = defaultdict(list)
    for pid, stat in found.items():
        children[stat.parent].append(pid)
    todo = [pid for pid in found if _has_mark(pid, mark)]
    seen: set[int] = set()
    while todo:
        if (pid := todo.pop()) not in seen:
            seen.add(pid)
            todo += children[pid]
            yield _Started(pid, found[pid].start_ticks)


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _runs(one: _Started) -> bool:
    now = process_stat(one.pid)
    return now is not None and now.start_ticks == one.start_ticks and not now.is_zombie
