"""Processes forked from one server that has imported what they need once.

Importing vLLM takes seconds of CPU; with a fork server that is paid once and not per process.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from dualpath.ops.launch.commands import ENGINE_ENTRY, ENGINE_ENVIRONMENT
from dualpath.ops.launch.forked_engine import prepare_engine, run_entry
from dualpath.ops.launch.process import LocalProcess, die_with_parent

VLLM_MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "dualpath.vllm.serve_parser",
    "vllm.v1.engine.core",
    "dualpath.vllm.connector",
    "dualpath.vllm.quota_scheduler",
    "dualpath.vllm.router_process",
)

_FROZEN_HEAP = "dualpath.ops.launch.frozen_heap"
#: What the server of this process has imported.
_preloaded: set[str] = set()


class ForkedProcess(LocalProcess):
    """A command of this installation, run in a fork of the server."""

    def __init__(
        self,
        name: str,
        entry: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        preload: Sequence[str] = VLLM_MODULES,
    ) -> None:
        """Run the command ``entry`` ("module:function") with the arguments ``command``.

        ``environment`` is added to the process's own, unseen by ``ps`` and ``/proc``.  The server
        has imported the modules ``preload``, unless one that has not still has processes to run.
        """
        super().__init__(name, log)
        self._process = _context(preload).Process(
            target=_main, args=(entry, list(command), str(log), dict(environment or {})), name=name
        )
        with _environment(ENGINE_ENVIRONMENT):
            self._process.start()

    @property
    def pid(self) -> int:
        """See the base class."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """See the base class."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int | None:
        """See the base class."""
        self._process.join(timeout_s)
        return self._process.exitcode


def import_ahead() -> None:
    """Let the server import what engines and router need while this process does something else."""
    _context(VLLM_MODULES)


def _context(preload: Sequence[str]) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Its processes end with a server, so that one that lacks a module gives way when it has none.
    if not _preloaded.issuperset(preload) and not multiprocessing.active_children():
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        _preloaded.update(preload)
        context.set_forkserver_preload([*sorted(_preloaded), _FROZEN_HEAP])
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


def _main(entry: str, command: list[str], log: str, environment: dict[str, str]) -> None:
    """Entry point in the new process; behaves as if the command had been typed."""
    os.setsid()
    die_with_parent(signal.SIGTERM, os.getppid())
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for name, value in ENGINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(environment)
    if entry == ENGINE_ENTRY:
        prepare_engine()
    run_entry(entry, command)
