"""Processes of a local cluster, forked from one server that has imported vLLM once.

Importing vLLM takes seconds of CPU; with a fork server that is paid once and not per process.
Every process leads a session of its own, so that a Ctrl-C at the terminal reaches only the
supervisor, which then ends the others in order; and it dies with its parent.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from dualpath.ops.launch.commands import ENGINE_ENTRY, ENGINE_ENVIRONMENT
from dualpath.ops.launch.forked_engine import prepare_engine, run_entry

_PRELOADED = [
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.core",
    "dualpath.vllm.connector",
    "dualpath.vllm.quota_scheduler",
    "dualpath.vllm.router_process",
]
_PR_SET_PDEATHSIG = 1
#: Opened once: between fork and exec nothing may be loaded.
_libc = ctypes.CDLL(None)
_LOG_TAIL_LINES = 15
_POLL_S = 0.02


class ManagedProcess:
    """A named process with a log file."""

    def __init__(
        self,
        name: str,
        entry: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Run the command ``entry`` ("module:function") with the arguments ``command``.

        ``environment`` is added to the process's own, unseen by ``ps`` and ``/proc``.
        """
        self.name = name
        self.log = log
        self._process = _context().Process(
            target=_main, args=(entry, list(command), str(log), dict(environment or {})), name=name
        )
        with _environment(ENGINE_ENVIRONMENT):
            self._process.start()

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask it to end; an engine's API server ends its engine core itself."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything it has started: the whole process group, at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False after the timeout."""
        self._process.join(timeout_s)
        return not self._process.is_alive()

    def end(self, timeout_s: float) -> None:
        """Wait for an orderly end of its whole group, then kill what is left of it."""
        deadline_s = time.monotonic() + timeout_s
        self.join(timeout_s)
        while self._group_lives() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self.kill()
        self.join(timeout_s)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _environment(ENGINE_ENVIRONMENT):
        forkserver.ensure_running()
    return context


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set variables that the user has not set, for the duration of a block."""
    added = [name for name in changes if name not in os.environ]
    os.environ.update({name: changes[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def die_with_parent(number: int) -> None:
    """Let this process get a signal when the one that started it ends, however it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def _main(entry: str, command: list[str], log: str, environment: dict[str, str]) -> None:
    """Entry point in the new process; behaves as if the command had been typed."""
    os.setsid()
    die_with_parent(signal.SIGTERM)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for name, value in ENGINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(environment)
    if entry == ENGINE_ENTRY:
        prepare_engine()
    run_entry(entry, command)
