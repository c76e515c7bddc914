"""Processes forked from a fork server that has already imported their modules.

Importing vLLM takes seconds of CPU; with a fork server it happens once, not per process.
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

from dualpath.launch.commands import ENGINE_ENTRY, engine_environment
from dualpath.launch.forked_engine import prepare_engine, run_entry
from dualpath.launch.process import LocalProcess, die_with_parent
from dualpath.node.private_folder import open_log

VLLM_MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "dualpath.vllm.engine_config",
    "vllm.v1.engine.core",
    "dualpath.vllm.connector",
    "dualpath.vllm.quota_scheduler",
    "dualpath.vllm.router_process",
)

_FROZEN_HEAP = "dualpath.launch.frozen_heap"
#: Modules that this process's fork server has imported.
_preloaded: set[str] = set()


class ForkedProcess(LocalProcess):
    """A command of this installation, run in a process forked from the server."""

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

        ``environment`` is added to the process's own and is not visible in ``ps`` and ``/proc``.
        The server imports the modules ``preload`` first, unless it is already running processes.
        """
        super().__init__(name, log)
        os.close(open_log(log))  # Raises here what the new process could not report.
        self._process = _context(preload).Process(
            target=_main, args=(entry, list(command), str(log), dict(environment or {})), name=name
        )
        with _environment(engine_environment()):
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


def preload_modules() -> None:
    """Let the server import the modules of engines and router in the background."""
    _context(VLLM_MODULES)


def _context(preload: Sequence[str]) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Stopping a server ends its processes: restart it with more modules only if it has none.
    if not _preloaded.issuperset(preload) and not multiprocessing.active_children():
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        _preloaded.update(preload)
        context.set_forkserver_preload([*sorted(_preloaded), _FROZEN_HEAP])
    with _environment(engine_environment()):
        forkserver.ensure_running()
    return context


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set variables that the user has not set, during the ``with`` block."""
    added = [name for name in changes if name not in os.environ]
    os.environ.update({name: changes[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _main(entry: str, command: list[str], log: str, environment: dict[str, str]) -> None:
    """Entry point of the new process; behaves like the command typed in a shell."""
    os.setsid()
    die_with_parent(signal.SIGTERM, os.getppid())
    descriptor = open_log(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for name, value in engine_environment().items():
        os.environ.setdefault(name, value)
    os.environ.update(environment)
    if entry == ENGINE_ENTRY:
        prepare_engine()
    run_entry(entry, command)
